"""The operations of programs, compiled by numba, and how threads share them.

Each operation is cut into pieces. A thread that comes by takes the next piece that nobody has taken, until none is
left, and goes on as soon as all pieces are done: it waits for pieces, not for threads. So a thread that has lost its
core to another process delays nobody, unless it holds a piece. If that piece is of a product, which is where nearly
all time goes, who waits for it computes it as well. So a machine that is busy costs what the missing cores would do.

Everything is computed in float32. Addresses and sizes are those that `program.py` writes down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from numba import cfunc, types
from numba.core.ccallback import CFunc

from spectrain.compiled import end, folder, say
from spectrain.kernels.cpu.accept import all_ended, bend, count, judge, judge_states
from spectrain.kernels.cpu.attention import attend, combine, rotate
from spectrain.kernels.cpu.intrinsics import (
    atomic_add,
    atomic_or,
    atomic_read,
    call,
    exp,
    fast,
    flags,
    floats,
    give_up_core,
    halves,
    inverse_norm,
    pause,
    thread_number,
    wholes,
    widened,
)
from spectrain.kernels.cpu.tiles import split
from spectrain.kernels.cpu.warping import BLOCK, draw, largest, warp

FIELDS = 22  # of an operation: its kind, addresses and sizes, how many pieces it has, and whether the next may begin
PIECES, GOES_ON = FIELDS - 2, FIELDS - 1
TAKEN, DONE, PUBLISHED, STATE_BYTES = 0, 8, 16, 64  # of an operation that runs
LINE_BYTES = 64  # that processors move at a time
MOST_PIECES = 64  # of a product, whose finished pieces are bits of a number
PATIENCE = 2000  # rounds of waiting for a thread, some twenty microseconds; then it has lost its core


@fast
def norm(op, thread, n_threads):
    x, added, weight, y, eps, size, n_rows = op[1], op[2], floats(op[3]), op[4], floats(op[5])[0], op[6], op[7]
    for row in range(thread, n_rows, n_threads):
        states, normed = floats(x + 4 * row * op[8]), floats(y + 4 * row * op[9])
        if added != 0:
            more = floats(added + 4 * row * size)
            for d in range(size):
                states[d] += more[d]
        scale = inverse_norm(states, size, eps)
        for d in range(size):
            normed[d] = states[d] * scale * weight[d]


@fast
def angles(op, thread, n_threads):
    positions, frequencies, cos, sin = wholes(op[1]), floats(op[2]), floats(op[3]), floats(op[4])
    scaling, half, n_rows = floats(op[5])[0], op[6], op[7]
    for i in range(thread, n_rows * half, n_threads):
        angle = types.float32(positions[i // half]) * frequencies[i % half]
        cos[i], sin[i] = scaling * math.cos(angle), scaling * math.sin(angle)


@fast
def silu(op, thread, n_threads):
    """silu(gate) * up from the joined projection [M, 2 F]."""
    joined, y, size, n_rows = op[1], op[2], op[3], op[4]
    first, stop = size * thread // n_threads, size * (thread + 1) // n_threads
    for row in range(n_rows):
        gate, up = floats(joined + 8 * row * size), floats(joined + 8 * row * size + 4 * size)
        out = floats(y + 4 * row * size)
        for f in range(first, stop):
            out[f] = gate[f] / (types.float32(1.0) + exp(-gate[f])) * up[f]


@fast
def copy(op, thread, n_threads):
    x, y, size = floats(op[1]), floats(op[2]), op[3] * op[4]
    for d in range(size * thread // n_threads, size * (thread + 1) // n_threads):
        y[d] = x[d]


@fast
def mix(op, thread, n_threads):
    """Weighted sum [M D] of states [L, M D]."""
    states, weights, y, n_states, size = op[1], floats(op[2]), floats(op[3]), op[4], op[5]
    first, stop = size * thread // n_threads, size * (thread + 1) // n_threads
    for d in range(first, stop):
        y[d] = 0
    for i in range(n_states):
        x, weight = floats(states + 4 * i * size), weights[i]
        for d in range(first, stop):
            y[d] += weight * x[d]


@fast
def _slot(t, n_sinks, n_ring):
    """The slot of position t in a ring behind sinks."""
    return t if t < n_sinks else n_sinks + t % n_ring


@fast
def window(op, thread, n_threads):
    """Where rows write the K/V of position t in a ring behind sinks, and which of its slots they see; see `Spire`."""
    stored, now, slots, seen = op[1], wholes(op[2]), wholes(op[3]), op[4]
    window, n_sinks, n_ring, n_slots, n_rows, own_key = op[5], op[6], op[7], op[8], op[9], op[10]
    for row in range(thread, n_rows, n_threads):
        t, positions, flag = now[row], wholes(stored + 8 * row * n_slots), flags(seen + row * n_slots)
        slots[row] = _slot(t, n_sinks, n_ring)
        positions[slots[row]] = t
        sees_itself = True
        for slot in range(n_slots):
            p = positions[slot]
            flag[slot] = 0 <= p < t and (p > t - window or p < n_sinks)
            sees_itself = sees_itself and (own_key != 0 or not flag[slot])
        flag[slots[row]] = sees_itself


@fast
def embed(op, thread, n_threads):
    tokens, table, bits, x, size, n_rows, n_lines = wholes(op[1]), op[2], op[3], op[4], op[5], op[6], op[7]
    first, stop = size * thread // n_threads, size * (thread + 1) // n_threads
    for row in range(n_rows):
        token = min(max(tokens[row], 0), n_lines - 1)  # a table may be smaller than another model's vocabulary
        y, line = floats(x + 4 * row * size), table + bits // 8 * token * size
        if bits == 32:
            full = floats(line)
            for d in range(first, stop):
                y[d] = full[d]
        else:
            upper = halves(line)
            for d in range(first, stop):
                y[d] = widened(upper[d])


@fast
def argmax(op, thread, n_threads):
    """Each thread finds the largest of its share of each row's logits."""
    logits, values, places, size, n_rows = op[1], floats(op[2]), wholes(op[3]), op[4], op[5]
    for row in range(n_rows):
        here, first, stop = logits + 4 * row * size, size * thread // n_threads, size * (thread + 1) // n_threads
        most, block = largest(here, first, min(first + BLOCK, stop)), first
        for start in range(first + BLOCK, stop, BLOCK):
            found = largest(here, start, min(start + BLOCK, stop))
            if found > most:
                most, block = found, start
        x, best = floats(here), block
        while best + 1 < stop and x[best] < most:
            best += 1
        if first == stop:  # there are more threads than logits
            most = types.float32(-math.inf)
        values[row * n_threads + thread], places[row * n_threads + thread] = most, best


@fast
def pick(op, thread, n_threads):
    """The token of each row is the largest of all threads'; it may become the next input, at the next position."""
    values, places, tokens, chosen = floats(op[1]), wholes(op[2]), wholes(op[3]), wholes(op[4])
    positions, stride, n_rows = wholes(op[5]), op[6], op[7]
    for row in range(thread, n_rows, n_threads):
        best = row * n_threads
        for t in range(row * n_threads + 1, (row + 1) * n_threads):
            if values[t] > values[best]:
                best = t
        token = places[best] if op[8] == 0 else wholes(op[8])[places[best]]
        chosen[row * stride] = token
        if op[3] != 0:
            tokens[row] = token
            positions[row] += 1


@fast
def keep(op, thread, n_threads):
    """Where the memories of a chain's accepted nodes are written: see `window`; the others go to the last slot."""
    stored, positions, accepted, slots = op[1], wholes(op[2]), wholes(op[3]), wholes(op[4])
    n, n_sinks, n_ring, n_slots, n_rows = op[5], op[6], op[7], op[8], op[9]
    for row in range(thread, n_rows, n_threads):
        kept = wholes(stored + 8 * row * n_slots)
        for i in range(n):
            t = positions[row * n + i]
            slot = _slot(t, n_sinks, n_ring)
            if i > accepted[row]:
                slot = n_slots - 1
            else:
                kept[slot] = t
            slots[row * n + i] = slot


# The kind of an operation is its place here, after those of a product and of `leave`, which need more than the line.
OPERATIONS = (
    *(norm, rotate, attend, combine, silu, embed, angles, copy, argmax, pick, warp, draw, judge),
    *(mix, window, keep, count, bend, judge_states, split),
)
PRODUCT, LEAVE, FIRST = range(3)


def kind_of(operation: Callable) -> int:
    return FIRST + OPERATIONS.index(operation)


def _one_of(operations: Sequence[Callable]) -> Callable:
    """Return the function that performs a piece of the operation that a line names.

    It is one chain of ifs: numba would compile functions that call each other anew for each level of nesting.
    """
    names = {f"operation_{kind}": operation for kind, operation in enumerate(operations, start=FIRST)}
    lines = [f"    if op[0] == {name[10:]}: return {name}(op, piece, n_pieces)" for name in names]
    exec("\n".join(["def perform(op, piece, n_pieces):", *lines]), names)
    return fast(names["perform"])


_perform = _one_of(OPERATIONS)


@fast
def _product(op, state, piece, n_pieces, mine):
    """Rows of y = x @ weight.T: computed in the thread's own memory, and published by the first who has them.

    Whoever has lost its core in the middle may find that another thread has computed its piece meanwhile, and that its
    inputs have changed. Then it must not write.
    """
    n_out, n_in, n_rows, unit = op[6], op[7], op[8], op[9]
    units = n_out // unit
    first, end = units * piece // n_pieces * unit, units * (piece + 1) // n_pieces * unit
    if piece == n_pieces - 1:
        end = n_out
    size = end - first
    arguments, y = wholes(mine), mine + LINE_BYTES
    arguments[0], arguments[1], arguments[2] = op[2], op[3] + first * n_in * op[10], y
    arguments[3] = op[5] + 4 * first if op[5] != 0 else 0
    arguments[4], arguments[5], arguments[6] = size, n_in, n_rows
    call(op[1], mine, 0, 1)
    bit = types.int64(1) << piece
    if atomic_or(state + PUBLISHED, bit) & bit:
        return
    for row in range(n_rows):
        of, to = floats(y + 4 * row * size), floats(op[4] + 4 * (row * n_out + first))
        for v in range(size):
            to[v] = of[v]
    atomic_add(state + DONE, 1)


@fast
def _wait(at, state, mine):
    """Wait until all pieces of an operation are done. Those of a product that are late are computed here, too."""
    op, rounds = wholes(at), 0
    n_pieces = op[PIECES]
    while atomic_read(state + DONE) < n_pieces:
        pause()
        rounds += 1
        if rounds > PATIENCE:
            rounds = 0
            late = -1
            if op[0] == PRODUCT:
                published = atomic_read(state + PUBLISHED)
                for piece in range(n_pieces):
                    if late < 0 and (published >> piece) & 1 == 0:
                        late = piece
            if late >= 0:
                _product(op, state, late, n_pieces, mine)
            else:
                give_up_core()


@cache
def compiled() -> CFunc:
    """Compile `run`, or load what was compiled before."""

    def run(address):
        given = wholes(address)
        n_operations, table, states = given[0], given[1], given[2]
        mine = given[3] + given[4] * types.int64(thread_number())
        first_unknown = 0
        for i in range(n_operations):
            at, state = table + 8 * FIELDS * i, states + STATE_BYTES * i
            op = wholes(at)
            n_pieces = op[PIECES]
            if op[0] == LEAVE:
                if all_ended(op, state):
                    break
                first_unknown = i + 1  # it has no pieces to wait for
                continue
            while atomic_read(state + TAKEN) < n_pieces:
                piece = atomic_add(state + TAKEN, 1)
                if piece < n_pieces and op[0] == PRODUCT:
                    _product(op, state, piece, n_pieces, mine)
                elif piece < n_pieces:
                    _perform(op, piece, n_pieces)
                    atomic_add(state + DONE, 1)
            if op[GOES_ON] == 0:
                for j in range(first_unknown, i + 1):
                    _wait(table + 8 * FIELDS * j, states + STATE_BYTES * j, mine)
                first_unknown = i + 1

    end()
    if not any(folder().glob(f"{Path(__file__).stem}.*")):
        say()
    return cfunc(types.void(types.int64), cache=True, error_model="numpy")(run)
