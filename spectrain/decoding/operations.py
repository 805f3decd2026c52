"""The operations of programs, compiled by numba: each thread does its part, then waits for the others.

Everything is computed in float32. Addresses and sizes are those that `program.py` writes down.

Letters: M tokens, n tokens of a row, D hidden size, F width of the MLP, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from functools import cache
from pathlib import Path

from numba import cfunc, types
from numba.core.ccallback import CFunc

from spectrain.decoding.attention import attend, combine, rotate
from spectrain.decoding.ending import all_ended, bend, count, judge_logits, judge_states
from spectrain.decoding.intrinsics import (
    barrier,
    call,
    exp,
    fast,
    flags,
    floats,
    halves,
    inverse_norm,
    omp_get_num_threads,
    omp_get_thread_num,
    wholes,
    widened,
)
from spectrain.decoding.judge import judge
from spectrain.decoding.program import (
    ANGLES,
    ARGMAX,
    ATTEND,
    BEND,
    COMBINE,
    COPY,
    COUNT,
    DRAW,
    EMBED,
    FIELDS,
    JUDGE,
    JUDGE_LOGITS,
    JUDGE_STATES,
    KEEP,
    LEAVE,
    MIX,
    NORM,
    PICK,
    PRODUCT,
    ROTATE,
    SILU,
    WARP,
    WINDOW,
)
from spectrain.decoding.warping import BLOCK, draw, largest, warp

HERE = Path(__file__).parent
NAMES = ("operations", "attention", "ending", "intrinsics", "judge", "kernels", "noise", "program", "warping")
SOURCES = tuple(f"{name}.py" for name in NAMES)


@fast
def _norm(op, thread, n_threads):
    x, added, weight, y, eps, size, n_rows = op[1], op[2], floats(op[3]), op[4], floats(op[5])[0], op[6], op[7]
    for row in range(thread, n_rows, n_threads):
        states, normed = floats(x + 4 * row * size), floats(y + 4 * row * size)
        if added != 0:
            more = floats(added + 4 * row * size)
            for d in range(size):
                states[d] += more[d]
        scale = inverse_norm(states, size, eps)
        for d in range(size):
            normed[d] = states[d] * scale * weight[d]


@fast
def _angles(op, thread, n_threads):
    positions, frequencies, cos, sin = wholes(op[1]), floats(op[2]), floats(op[3]), floats(op[4])
    scaling, half, n_rows = floats(op[5])[0], op[6], op[7]
    for i in range(thread, n_rows * half, n_threads):
        angle = types.float32(positions[i // half]) * frequencies[i % half]
        cos[i], sin[i] = scaling * math.cos(angle), scaling * math.sin(angle)


@fast
def _silu(op, thread, n_threads):
    """silu(gate) * up from the joined projection [M, 2 F]."""
    joined, y, size, n_rows = op[1], op[2], op[3], op[4]
    first, stop = size * thread // n_threads, size * (thread + 1) // n_threads
    for row in range(n_rows):
        gate, up = floats(joined + 8 * row * size), floats(joined + 8 * row * size + 4 * size)
        out = floats(y + 4 * row * size)
        for f in range(first, stop):
            out[f] = gate[f] / (types.float32(1.0) + exp(-gate[f])) * up[f]


@fast
def _copy(op, thread, n_threads):
    x, y, size = floats(op[1]), floats(op[2]), op[3] * op[4]
    for d in range(size * thread // n_threads, size * (thread + 1) // n_threads):
        y[d] = x[d]


@fast
def _mix(op, thread, n_threads):
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
def _window(op, thread, n_threads):
    """Where rows write the K/V of position t in a ring behind sinks, and which of its slots they see; see `Spire`."""
    stored, now, slots, seen = op[1], wholes(op[2]), wholes(op[3]), op[4]
    window, n_sinks, n_ring, n_slots, n_rows = op[5], op[6], op[7], op[8], op[9]
    for row in range(thread, n_rows, n_threads):
        t, positions, flag = now[row], wholes(stored + 8 * row * n_slots), flags(seen + row * n_slots)
        slots[row] = _slot(t, n_sinks, n_ring)
        positions[slots[row]] = t
        for slot in range(n_slots):
            p = positions[slot]
            flag[slot] = 0 <= p <= t and (p > t - window or p < n_sinks)


@fast
def _embed(op, thread, n_threads):
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
def _argmax(op, thread, n_threads):
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
def _pick(op, thread, n_threads):
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
def _keep(op, thread, n_threads):
    """Where the memories of a chain's accepted nodes are written: see `_window`; the others go to the last slot."""
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


@cache
def compiled() -> CFunc:
    """Compile `run`, once for a machine and these sources, where numba can keep it."""

    def run(address):
        given = wholes(address)
        thread, n_threads = types.int64(omp_get_thread_num()), types.int64(omp_get_num_threads())
        for i in range(given[0]):
            at = given[1] + 8 * FIELDS * i
            op = wholes(at)
            kind = op[0]
            if kind == PRODUCT:
                call(op[1], at + 16)
            elif kind == NORM:
                _norm(op, thread, n_threads)
            elif kind == ANGLES:
                _angles(op, thread, n_threads)
            elif kind == ROTATE:
                rotate(op, thread, n_threads)
            elif kind == ATTEND:
                attend(op, thread, n_threads)
            elif kind == COMBINE:
                combine(op, thread, n_threads)
            elif kind == SILU:
                _silu(op, thread, n_threads)
            elif kind == COPY:
                _copy(op, thread, n_threads)
            elif kind == MIX:
                _mix(op, thread, n_threads)
            elif kind == WINDOW:
                _window(op, thread, n_threads)
            elif kind == EMBED:
                _embed(op, thread, n_threads)
            elif kind == ARGMAX:
                _argmax(op, thread, n_threads)
            elif kind == PICK:
                _pick(op, thread, n_threads)
            elif kind == KEEP:
                _keep(op, thread, n_threads)
            elif kind == WARP:
                warp(op, thread, n_threads)
            elif kind == DRAW:
                draw(op, thread, n_threads)
            elif kind == JUDGE:
                judge(op, thread, n_threads)
            elif kind == LEAVE:
                if all_ended(op, thread):
                    break
            elif kind == COUNT:
                count(op, thread, n_threads)
            elif kind == BEND:
                bend(op, thread, n_threads)
            elif kind == JUDGE_STATES:
                judge_states(op, thread, n_threads)
            elif kind == JUDGE_LOGITS:
                judge_logits(op, thread, n_threads)
            if op[FIELDS - 1] == 0:
                barrier()

    # numba compares only this file with what it has kept, so the others are in the name.
    digest = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in SOURCES)).hexdigest()[:16]
    run.__qualname__ = f"run_{digest}"
    try:
        return cfunc(types.void(types.int64), cache=True, error_model="numpy")(run)
    except RuntimeError:  # there is no folder that it may write to
        return cfunc(types.void(types.int64), error_model="numpy")(run)
