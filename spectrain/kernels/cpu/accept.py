"""How sampled drafts are accepted, and how drafts end before their full length, as operations of a program.

Acceptance follows the rules of `verify.py`, row by row. A node's logits are warped when it is reached, so a row pays
for its path only; a block is judged by all of its nodes, which are warped before. The same step takes some thirty
operations of torch, and calling them costs more than the arithmetic.
"""

from __future__ import annotations

import math

from numba import types

from spectrain.kernels.cpu.intrinsics import atomic_add, doubles, exp, fast, flags, floats, wholes
from spectrain.kernels.cpu.warping import drawn, drawn_by, warp_row

ROOM, LENGTH, GOING, DUE = range(4)  # rows of `DraftEnds.state`


@fast
def judge(op, thread, n_threads):
    """Accept a path of each row's tree, and draw the token behind it; see `verify`.

    Writes the path [N], the number of its accepted nodes, the bonus, and how many numbers were read. `warping_bytes`
    says what the memory of a thread holds.
    """
    size, n, n_rows, work = op[1], op[2], op[3], op[6] + thread * op[7]
    frontier = work + op[7] - 8 * n
    weights = frontier - 4 * size
    n_accepted, bonus, used = wholes(op[16]), wholes(op[16] + 8 * n_rows), wholes(op[16] + 16 * n_rows)
    for row in range(thread, n_rows, n_threads):
        logits, rule = op[8] + 4 * row * n * size, (doubles(op[4] + 8 * op[5] * row), work)
        tokens, parents, path = wholes(op[11] + 8 * row * n), wholes(op[12] + 8 * row * n), wholes(op[15] + 8 * row * n)
        probe = 0 if op[13] == 0 else op[13] + row * n
        if op[14] != 0:
            q, numbers = op[14] + 4 * row * n * size, floats(op[9] + 4 * row * op[10])
            n_drafted = 0
            while n_drafted + 1 < n and parents[n_drafted + 1] >= 0:
                n_drafted += 1
            if op[18] != 0:
                p = op[18] + 4 * row * n * size
                last, bonus[row] = _block(p, q, size, n_drafted, tokens, numbers, doubles(frontier))
            else:
                last, bonus[row] = _chain(logits, q, size, n_drafted, tokens, numbers, weights, rule)
        else:
            numbers = op[9] + (8 if op[17] else 4) * row * op[10], op[17]
            last, bonus[row] = _tree(logits, size, n, tokens, parents, probe, frontier, numbers, weights, rule)
        count, node = 0, last
        while node > 0:
            node = parents[node]
            count += 1
        for i in range(n):
            path[i] = -1
        for i in range(count, -1, -1):
            path[i] = last
            last = parents[last]
        n_accepted[row], used[row] = count, 1 + (n_drafted if op[14] != 0 else count)


@fast
def _chain(logits, q, size, n_drafted, tokens, numbers, weights, rule):
    """Leviathan 2023, Algorithm 1: return the last accepted node and the token behind it.

    q [N, V] is given by its address. The last number that a row reads is its bonus's.
    """
    options, work = rule
    p, last = floats(weights), 0
    while True:
        warp_row(logits + 4 * last * size, p, size, options, work)
        if last == n_drafted:
            break
        drafted, token = floats(q + 4 * (last + 1) * size), tokens[last + 1]
        if not numbers[last] * drafted[token] < p[token]:  # u < p / q
            _leave_residual(p, drafted, size, types.float32(1.0))
            break
        last += 1
    return last, drawn(p, size, float(numbers[n_drafted]))


@fast
def _block(p, q, size, n_drafted, tokens, numbers, kept):
    """Sun et al. 2024, Algorithm 2, as `verify._accept_block` has it: return what `_chain` does.

    p and q [N, V] are given by their addresses. `kept` is where P_0, P_1, .. of the chain are written.
    """
    walk, highest = 0.0, 0.0
    kept[0] = 1.0
    for i in range(1, n_drafted + 1):
        before, drafted, token = floats(p + 4 * (i - 1) * size), floats(q + 4 * i * size), tokens[i]
        # A q of NaN must stay NaN, which accepts nothing.
        q_drafted = 1e-300 if drafted[token] < 1e-300 else float(drafted[token])
        walk += math.log(float(before[token])) - math.log(q_drafted)
        highest = walk if walk > highest else highest
        kept[i] = math.exp(walk - highest)
    last = n_drafted
    while last > 0:
        mass = kept[last]
        h = mass
        if last < n_drafted and mass < 1.0:
            left = _residual(floats(p + 4 * last * size), floats(q + 4 * (last + 1) * size), size, mass)
            h = left / (left + 1.0 - mass)
        if float(numbers[last - 1]) < h:
            break
        last -= 1
    behind = floats(p + 4 * last * size)
    if last < n_drafted:
        _leave_residual(behind, floats(q + 4 * (last + 1) * size), size, types.float32(kept[last]))
    return last, drawn(behind, size, float(numbers[n_drafted]))


@fast
def _residual(p, q, size, mass):
    """Return the sum of max(0, mass x p - q) over the vocabulary, float32."""
    total, mass = types.float32(0.0), types.float32(mass)
    for v in range(size):
        total += max(mass * p[v] - q[v], types.float32(0.0))
    return total


@fast
def _leave_residual(p, q, size, mass):
    """Make weights p those of max(0, mass x p - q), unless all of these are 0."""
    if _residual(p, q, size, mass) > types.float32(0.0):
        for v in range(size):
            p[v] = max(mass * p[v] - q[v], types.float32(0.0))


@fast
def _tree(logits, size, n, tokens, parents, probe, reached, numbers, weights, rule):
    """Draw a token from p at each node of the path, and follow the child that equals it; else it is the bonus.

    `numbers` are an address, and whether keys of `SharedNoise` stand there. `reached` is where N flags are kept of all
    nodes that spell the path so far: more than one where siblings are equal.
    """
    options, work = rule
    p, frontier, last, level = floats(weights), flags(reached), 0, 0
    for i in range(n):
        frontier[i] = i == 0
    while True:
        warp_row(logits + 4 * last * size, p, size, options, work)
        token, found = drawn_by(p, size, numbers[0], level, numbers[1], 0), -1
        for i in range(n - 1, 0, -1):  # parents stand before their children
            follows = parents[i] >= 0 and tokens[i] == token and frontier[parents[i]] != 0
            if follows and probe != 0:
                follows = flags(probe)[i] == 0
            frontier[i] = follows
            if follows:
                found = i
        frontier[0] = 0
        if found < 0:
            return last, token
        last, level = found, level + 1


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
