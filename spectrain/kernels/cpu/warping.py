"""How logits become probabilities, and a draw from them, as operations of a program: see `operations.py`.

What `reference.warp` and `reference.draw` compute, without sorting: tokens are kept from a least weight on, and that
weight is found bit by bit. The weight of a token is w = e ** ((x - max x) / temperature), in 0 .. 1.
"""

from __future__ import annotations

import math

from numba import types

from spectrain.kernels.cpu.intrinsics import bits_of, doubles, exp, fast, float_of, floats, wholes, words
from spectrain.kernels.reference import FIRST, GAMMA, SECOND

TEMPERATURE, TOP_P, MIN_P, TOP_K, N_OPTIONS = range(5)  # of a row's sampling, float64
BUCKETS = 2048  # of 64 bits that a thread sorts weights into
BLOCK = 64  # weights that are added up together
LEVELS = ((20, 11), (10, 10), (0, 10))  # bits of a weight that are looked at together: from which on, and how many
LEAST_EXPONENT = -87.0  # smaller weights become 0
STEP, FIRST_MIXER, SECOND_MIXER = (number % 2**64 for number in (GAMMA, FIRST, SECOND))


def warping_bytes(size: int) -> int:
    """Return the bytes that a thread needs to warp a row of `size` logits, and to judge by it.

    They hold BUCKETS sums, then the weights that may be kept, and at the end the probabilities that `judge` compares;
    behind these it has 8 bytes more for each node.
    """
    return 8 * BUCKETS + 2 * 64 * -(-4 * size // 64)


@fast
def _ordered(bits):
    """Bits of a float32 so that whole numbers are in the order of the floats; its own inverse."""
    return bits ^ ((bits >> types.int32(31)) & types.int32(0x7FFFFFFF))


@fast
def largest(address, first, stop):
    """The largest of the float32 first .. stop - 1 at an address, by whole numbers, which go into vectors."""
    bits = words(address)
    best = types.int32(-0x80000000)
    for v in range(first, stop):
        best = max(best, _ordered(bits[v]))
    return float_of(_ordered(best))


@fast
def _least_kept(w, size, limit, counts_tokens, sums):
    """The largest weight t such that the weights from t on sum up to `limit`; if `counts_tokens`, such that as many
    tokens have them.

    Where the limit is not reached, all that are not 0 are kept.
    """
    prefix, total = types.int32(0), 0.0
    for level in range(len(LEVELS)):
        shift, n_bits = LEVELS[level]
        above, mask = types.int32(shift + n_bits), types.int32((1 << n_bits) - 1)
        for i in range(mask + 1):
            sums[i] = 0.0
        for v in range(size):
            bits = bits_of(w[v])
            if level == 0 or bits >> above == prefix:
                one = 1.0 if counts_tokens and bits > 0 else w[v]
                sums[(bits >> types.int32(shift)) & mask] += one
        bucket, reached = types.int32(0), False
        for i in range(mask, -1, -1):
            if sums[i] > 0.0:
                bucket = types.int32(i)
                reached = total + sums[i] >= limit
                if reached:
                    break
                total += sums[i]
        if not reached:
            total -= sums[bucket]
        prefix = (prefix << types.int32(n_bits)) | bucket
    return float_of(prefix)


@fast
def _at_least(w, size, least, candidates):
    """Copy the weights that are at least `least`. Return how many there are."""
    n = 0
    for v in range(size):
        candidates[n] = w[v]
        n += 1 if w[v] >= least else 0
    return n


@fast
def _least_of_top(w, size, top_k, candidates, sums):
    """The top_k-th largest weight."""
    least, n_blocks, n_filled = types.float32(0.0), (size + BLOCK - 1) // BLOCK, 0
    for block in range(n_blocks):
        most = types.float32(0.0)
        for v in range(block * BLOCK, min(size, block * BLOCK + BLOCK)):
            most = max(most, w[v])
        candidates[block] = most
        n_filled += 1 if most > types.float32(0.0) else 0
    if top_k <= n_filled:
        # One token in each of top_k blocks has at least this weight, so the top_k-th of all tokens has it, too.
        least = _least_kept(candidates, n_blocks, float(top_k), True, sums)
    return _least_kept(candidates, _at_least(w, size, least, candidates), float(top_k), True, sums)


@fast
def _one_hot(x, most, w, size):
    """Greedy decoding: of equal logits the first has all weight."""
    is_first = True
    for v in range(size):
        w[v] = types.float32(1.0) if is_first and x[v] == most else types.float32(0.0)
        is_first = is_first and x[v] != most


@fast
def warp_row(given, w, size, options, work):
    """Write the probabilities w [V] of logits [V] at an address; see `reference.warp`.

    `options` are those of the row; `work` is the address of memory of the thread, see `warping_bytes`.
    """
    temperature, top_p = types.float32(options[TEMPERATURE]), options[TOP_P]
    min_p, top_k = types.float32(options[MIN_P]), types.int64(options[TOP_K])
    if temperature == types.float32(0.0):
        _one_hot(floats(given), largest(given, 0, size), w, size)
        return
    sums, candidates = doubles(work), floats(work + 8 * BUCKETS)
    x, most, total = floats(given), largest(given, 0, size), types.float32(0.0)
    for v in range(size):
        power = (x[v] - most) / temperature
        weight = exp(power)
        if power < types.float32(LEAST_EXPONENT):
            weight = types.float32(0.0)
        w[v] = weight
        total += weight
    if not total > types.float32(0.0):  # a logit that is no number makes all probabilities such
        for v in range(size):
            w[v] = total
        return
    least = types.float32(0.0)
    if 0 < top_k < size:
        least = _least_of_top(w, size, top_k, candidates, sums)
        total = _sum_from(w, size, least)
    if top_p < 1.0:
        # The tokens that are each rarer than this hold less than 1 - top_p together, so none of them is kept.
        rare = types.float32(0.5 * (1.0 - top_p) * total / size)
        n = _at_least(w, size, max(least, rare), candidates)
        least = max(least, _least_kept(candidates, n, top_p * total, False, sums))
    least = max(least, min_p)  # the likeliest token has weight 1
    if least > types.float32(0.0):
        total = _sum_from(w, size, least)
    scale = types.float32(1.0) / total
    for v in range(size):
        w[v] = w[v] * scale if w[v] >= least else types.float32(0.0)


@fast
def warp(op, thread, n_threads):
    """Probabilities [M, V] of logits [M, V], whose rows are apart as the strides say; several may share options."""
    n_rows, size, work, sharing = op[5], op[6], op[9] + thread * op[10], op[11]
    for row in range(thread, n_rows, n_threads):
        options = doubles(op[7] + 8 * op[8] * (row // sharing))
        warp_row(op[1] + 4 * op[2] * row, floats(op[3] + 4 * op[4] * row), size, options, work)


@fast
def _sum_from(w, size, least):
    total = types.float32(0.0)
    for v in range(size):
        total += w[v] if w[v] >= least else types.float32(0.0)
    return total


@fast
def _block(w, first, stop):
    """Sum of w[first:stop] as float64, always in the same order."""
    total = 0.0
    for v in range(first, stop):
        total += w[v]
    return total


@fast
def drawn(w, size, uniform):
    """The first token whose cumulative weight is above uniform * total; one of weight 0 never is. See `draw_token`."""
    total = 0.0
    for first in range(0, size, BLOCK):
        total += _block(w, first, min(first + BLOCK, size))
    threshold, before, last = uniform * total, 0.0, size - 1
    for first in range(0, size, BLOCK):
        stop = min(first + BLOCK, size)
        after = before + _block(w, first, stop)
        if after > threshold:
            for v in range(first, stop):
                before += w[v]
                if w[v] > types.float32(0.0):
                    last = v
                if before > threshold:
                    break
            return last
        before = after
    return last


@fast
def uniform_of(key, token):
    """The number in (0, 1) whose -log is that of `noise.exponentials`."""
    x = types.uint64(key) + (types.uint64(token) + types.uint64(1)) * types.uint64(STEP)
    x = (x ^ (x >> types.uint64(30))) * types.uint64(FIRST_MIXER)
    x = (x ^ (x >> types.uint64(27))) * types.uint64(SECOND_MIXER)
    x = x ^ (x >> types.uint64(31))
    return (types.float64(x >> types.uint64(11)) + 0.5) * 2.0**-53


@fast
def _may_be_first(w, start, stop, names, key, least):
    """How many of the tokens may have a -log(uniform) below least x weight. It is at least 1 - uniform."""
    n = 0
    for v in range(start, stop):
        n += 1.0 - uniform_of(key, v if names == 0 else wholes(names)[v]) < least * w[v]
    return n


@fast
def noised(w, size, names, key):
    """The token for which -log(uniform) / weight is smallest. `names`: of the tokens that weights belong to, or 0."""
    least, chosen = math.inf, size - 1
    for start in range(0, size, BLOCK):
        stop = min(start + BLOCK, size)
        if _may_be_first(w, start, stop, names, key, least):
            for v in range(start, stop):
                if w[v] > types.float32(0.0):
                    late = -math.log(uniform_of(key, v if names == 0 else wholes(names)[v]))
                    if late < least * w[v]:
                        least, chosen = late / w[v], v
    return chosen


@fast
def drawn_by(w, size, numbers, i, by_noise, names):
    """Draw by the i-th number at an address: a float32 in [0, 1), or a key of `SharedNoise`."""
    if by_noise:
        return noised(w, size, names, wholes(numbers)[i])
    return drawn(w, size, float(floats(numbers)[i]))


@fast
def draw(op, thread, n_threads):
    """The token of each row of weights [M, V] is drawn by a number; it may become the next input, see `_pick`."""
    tokens, chosen, positions = wholes(op[5]), wholes(op[6]), wholes(op[7])
    n_rows, size = op[9], op[10]
    for row in range(thread, n_rows, n_threads):
        token = drawn_by(floats(op[1] + 4 * op[2] * row), size, op[3], row * op[4], op[12], op[11])
        token = token if op[11] == 0 else wholes(op[11])[token]
        chosen[row * op[8]] = token
        if op[5] != 0:
            tokens[row] = token
            positions[row] += 1
