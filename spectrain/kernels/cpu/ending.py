"""How a program ends drafts before their full length, as operations: see `operations.py`, and `DraftEnds`.

Letters: B rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math

from numba import types

from spectrain.kernels.cpu.intrinsics import atomic_add, exp, fast, floats, wholes
from spectrain.kernels.cpu.layout import DUE, GOING, LENGTH, ROOM
from spectrain.kernels.cpu.warping import largest


@fast
def all_ended(op, shared):
    """Whether no row drafts on. Where one does, a step of the drafter is counted, if there is a place for it."""
    state, n_rows = wholes(op[1]), op[2]
    for row in range(n_rows):
        if state[GOING * n_rows + row] != 0:
            if op[3] != 0 and atomic_add(shared, 1) == 0:
                wholes(op[3])[0] += 1
            return False
    return True


@fast
def count(op, thread, n_threads):
    """Rows that draft on have one more token; it may be the last of its draft, as its room or an end of text says."""
    state, chosen, ends = wholes(op[1]), wholes(op[2]), wholes(op[4])
    stride, n_ends, least, n_rows = op[3], op[5], op[6], op[7]
    for row in range(thread, n_rows, n_threads):
        if state[GOING * n_rows + row] == 0:
            continue
        state[LENGTH * n_rows + row] += 1
        length = state[LENGTH * n_rows + row]
        is_last = length >= state[ROOM * n_rows + row] or (state[DUE * n_rows + row] != 0 and length >= least)
        for i in range(n_ends):
            is_last = is_last or chosen[row * stride] == ends[i]
        if is_last:
            state[GOING * n_rows + row] = 0


@fast
def bend(op, thread, n_threads):
    """x + silu(y + bias) of [B, D]: a residual block, of which y is the product with its weight."""
    x, y, bias, out, size, n_rows = op[1], op[2], floats(op[3]), op[4], op[5], op[6]
    first, stop = size * thread // n_threads, size * (thread + 1) // n_threads
    for row in range(n_rows):
        before, added, after = floats(x + 4 * row * size), floats(y + 4 * row * size), floats(out + 4 * row * size)
        for d in range(first, stop):
            gate = added[d] + bias[d]
            after[d] = before[d] + gate / (types.float32(1.0) + exp(-gate))


@fast
def judge_states(op, thread, n_threads):
    """The draft of a row ends once the product of its tokens' probabilities of acceptance is too small.

    A probability is the sigmoid of weight x + bias, of states x [B, D]. `is_due`: it ends with the next token instead.
    """
    states, weight, numbers, accepted, state = op[1], floats(op[2]), floats(op[3]), floats(op[4]), wholes(op[5])
    size, i, least, is_due, n_rows = op[6], op[7], op[8], op[9], op[10]
    for row in range(thread, n_rows, n_threads):
        x, odds = floats(states + 4 * row * size), types.float32(0.0)
        for d in range(size):
            odds += x[d] * weight[d]
        before = types.float32(1.0) if i == 1 else accepted[row]
        accepted[row] = before / (types.float32(1.0) + exp(-(odds + numbers[0])))
        if accepted[row] < numbers[1]:
            if is_due != 0:
                state[DUE * n_rows + row] = 1
            elif i >= least:
                state[GOING * n_rows + row] = 0


@fast
def judge_logits(op, thread, n_threads):
    """The draft of a row ends before a token of whose distribution, by logits [B, V], the drafter is unsure.

    That is where its entropy, in nats, is above a threshold, or its largest probability below one.
    """
    logits, size, by_entropy, threshold, state, n_rows = op[1], op[2], op[3], floats(op[4])[0], wholes(op[5]), op[6]
    for row in range(thread, n_rows, n_threads):
        x = floats(logits + 4 * row * size)
        most = largest(logits + 4 * row * size, 0, size)
        total, mean = types.float32(0.0), types.float32(0.0)
        for v in range(size):
            weight = exp(x[v] - most)
            total += weight
            mean += weight * (x[v] - most)
        if by_entropy != 0:
            is_unsure = types.float32(math.log(total)) - mean / total > threshold
        else:
            is_unsure = types.float32(1.0) / total < threshold
        if is_unsure:
            state[GOING * n_rows + row] = 0
