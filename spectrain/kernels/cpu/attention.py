"""Attention of a few tokens to a cache, as operations of a program, and moving of accepted nodes in the cache.

Letters: K key/value heads, G = H / K, E width of a head, q queries of a key/value head.
"""

from __future__ import annotations

from numba import types

from spectrain.compiled import compiled
from spectrain.kernels.cpu.intrinsics import call, exp, fast, flags, floats, inverse_norm, wholes, words
from spectrain.kernels.cpu.products import MOST_QUERIES
from spectrain.kernels.cpu.warping import largest

CHUNK = 512  # slots that a thread attends to at a time
# Smaller ones have an exp that changes no sum, and whose products may be subnormal, which take a hundred cycles each.
LEAST = types.float32(-60.0)


@fast
def rotate(op, thread, n_threads):
    """Queries [b, K, n G, E] and, in the cache, keys and values, from the joined projection [M, (H + 2 K) E]."""
    joined, queries, keys, values = op[1], op[2], op[3], op[4]
    cos, sin, slots, bias = op[5], op[6], wholes(op[7]), op[8]
    query_norm, key_norm, eps, n = op[9], op[10], floats(op[11])[0], op[12]
    n_query, n_kv, size, row_stride, head_stride, n_rows = op[13], op[14], op[15], op[16], op[17], op[18]
    n_heads, n_groups, half = n_query + 2 * n_kv, n_query // n_kv, size // 2
    for unit in range(thread, n_rows * n_heads, n_threads):
        row, head = unit // n_heads, unit % n_heads
        b, i = row // n, row % n
        x = floats(joined + 4 * unit * size)
        if bias != 0:
            more = floats(bias + 4 * head * size)
            for e in range(size):
                x[e] += more[e]
        kv_head, norm = head - n_query, key_norm
        if head < n_query:
            kv_head, norm = head // n_groups, query_norm
            place = queries + 4 * size * (((b * n_kv + kv_head) * n + i) * n_groups + head % n_groups)
        elif head < n_query + n_kv:
            place = keys + 4 * (b * row_stride + kv_head * head_stride + slots[row] * size)
        else:
            place = values + 4 * (b * row_stride + (kv_head - n_kv) * head_stride + slots[row] * size)
        y = floats(place)
        if head >= n_query + n_kv:
            for e in range(size):
                y[e] = x[e]
            continue
        if norm != 0:
            weight, scale = floats(norm), inverse_norm(x, size, eps)
            for e in range(size):
                x[e] = x[e] * scale * weight[e]
        c, s = floats(cos + 4 * row * half), floats(sin + 4 * row * half)
        for e in range(half):
            y[e] = x[e] * c[e] - x[e + half] * s[e]
            y[e + half] = x[e + half] * c[e] + x[e] * s[e]


@fast
def attend(op, thread, n_threads):
    """Each thread attends to its share of each row's slots: to all before `lengths`, then as the flags say.

    It leaves for each query the weighted sum of values, the largest score, and the sum of weights; see `combine`.
    """
    queries, keys, values, parts, lengths, seen = op[1], op[2], op[3], op[4], wholes(op[5]), op[6]
    seen_stride, n_seen, n, n_query, n_kv, size = op[7], op[8], op[9], op[10], op[11], op[12]
    row_stride, head_stride, n_rows, scores = op[13], op[14], op[15], op[16]
    scale, kernels = floats(op[17])[0], op[18]  # 0: heads of a width that the kernels do not take
    n_groups = n_query // n_kv
    n_queries = n * n_groups  # of a key/value head
    scores += thread * 4 * (n_queries * CHUNK + 16)
    given = scores + 4 * n_queries * CHUNK  # for the arguments of a kernel
    parts += thread * 4 * (n_rows * n_kv * n_queries) * (size + 2)
    for unit in range(n_rows * n_kv):
        b, head = unit // n_kv, unit % n_kv
        length = lengths[b]
        total = length + n_seen
        first, stop = total * thread // n_threads, total * (thread + 1) // n_threads
        base = 4 * (b * row_stride + head * head_stride)
        for query in range(n_queries):
            part = floats(parts + 4 * (unit * n_queries + query) * (size + 2))
            for e in range(size):
                part[e] = 0
            part[size], part[size + 1] = types.float32(-1e30), 0
        for start in range(first, stop, CHUNK):
            end = min(start + CHUNK, stop)
            count, those = end - start, queries + 4 * unit * n_queries * size
            usable = kernels if count >= 8 else 0
            _scores(those, keys + base + 4 * start * size, scores, n_queries, count, size, usable, given)
            for query in range(n_queries):
                score = floats(scores + 4 * query * count)
                for s in range(count):
                    score[s] *= scale
                if end > length:
                    own = flags(seen + b * seen_stride + (query // n_groups) * n_seen)
                    for s in range(max(start, length), end):
                        if own[s - length] == 0:
                            score[s - start] = types.float32(-1e30)
                best = largest(scores + 4 * query * count, 0, count)
                _weigh(floats(parts + 4 * (unit * n_queries + query) * (size + 2)), score, best, count, size)
            parts_here = parts + 4 * unit * n_queries * (size + 2)
            _add_values(parts_here, scores, values + base + 4 * start * size, n_queries, count, size, usable, given)


@fast
def _scores(queries, keys, scores, n_queries, count, size, kernels, given):
    """Scores [q, count] of queries [q, E] with keys [count, E]."""
    if kernels != 0:
        passes = (n_queries + MOST_QUERIES - 1) // MOST_QUERIES
        t = (n_queries + passes - 1) // passes
        arguments = wholes(given)
        arguments[0], arguments[1], arguments[2], arguments[3] = queries, keys, scores, 0
        arguments[4], arguments[5], arguments[6] = count, size, n_queries
        call(wholes(kernels)[t - 1 if passes == 1 else MOST_QUERIES + t - 1], given, 0, 1)
        return
    for query in range(n_queries):
        q, y = floats(queries + 4 * query * size), floats(scores + 4 * query * count)
        for s in range(count):
            key, total = floats(keys + 4 * s * size), types.float32(0.0)
            for e in range(size):
                total += q[e] * key[e]
            y[s] = total


@fast
def _weigh(part, score, best, count, size):
    """Turn scores into weights, `best` being the largest, and scale what the query has attended to so far likewise."""
    best = max(best, part[size])
    weight, total = exp(part[size] - best), types.float32(0.0)
    for s in range(count):
        less = score[s] - best
        score[s] = types.float32(0.0) if less < LEAST else exp(less)
        total += score[s]
    part[size], part[size + 1] = best, part[size + 1] * weight + total
    for e in range(size):
        part[e] *= weight


@fast
def _add_values(parts, weights, values, n_queries, count, size, kernels, given):
    """Add the weights [q, count] times the values [count, E] to parts [q, E + 2]."""
    query = 0
    while kernels != 0 and query < n_queries:
        t, arguments = min(MOST_QUERIES, n_queries - query), wholes(given)
        arguments[0], arguments[1] = weights + 4 * query * count, values
        arguments[2], arguments[3] = parts + 4 * query * (size + 2), size + 2
        arguments[4], arguments[5], arguments[6] = size, count, t
        call(wholes(kernels)[2 * MOST_QUERIES + t - 1], given, 0, 1)
        query += t
    for q in range(query, n_queries):
        part, weight = floats(parts + 4 * q * (size + 2)), floats(weights + 4 * q * count)
        for s in range(count):
            value, w = floats(values + 4 * s * size), weight[s]
            for e in range(size):
                part[e] += w * value[e]


@fast
def combine(op, thread, n_threads):
    """Attended values [M, H E] from what each thread has of them."""
    parts, y, n, n_query, n_kv, size, n_rows = op[1], op[2], op[3], op[4], op[5], op[6], op[7]
    n_groups = n_query // n_kv
    count = n_rows * n * n_query  # queries; parts are [threads, b, K, n, G, E + 2]
    for query in range(thread, count, n_threads):
        group, rest = query % n_groups, query // n_groups
        i, rest = rest % n, rest // n
        head, b = rest % n_kv, rest // n_kv
        best = types.float32(-1e30)
        for t in range(n_threads):
            best = max(best, floats(parts + 4 * (t * count + query) * (size + 2))[size])
        attended = floats(y + 4 * size * ((b * n + i) * n_query + head * n_groups + group))
        for e in range(size):
            attended[e] = 0
        total = types.float32(0.0)
        for t in range(n_threads):
            part = floats(parts + 4 * (t * count + query) * (size + 2))
            weight = exp(part[size] - best)
            total += weight * part[size + 1]
            for e in range(size):
                attended[e] += weight * part[e]
        for e in range(size):
            attended[e] /= total


@compiled
def move(addresses, n_heads, capacity, n_words, path, starts):
    """Move node path[b, j] of each row to place j, for all j: torch would take two calls for each layer.

    A node stands no further to the left than its place on the path, so nothing is overwritten before it is read.

    Args:
        addresses: [2 layers] int64 of buffers [rows, H, capacity, head_dim] that lie in one piece.
        n_heads: H.
        capacity: slots of a row.
        n_words: head_dim in words of 32 bits.
        path: [n, A] int64 nodes in order, then -1.
        starts: [n] int64 slot of each row's first node.
    """
    for row in range(len(path)):
        for place in range(path.shape[1]):
            node = path[row, place]
            if node > place:
                for address in addresses:
                    buffer = words(address)
                    for head in range(n_heads):
                        first = ((row * n_heads + head) * capacity + starts[row]) * n_words
                        for i in range(n_words):
                            buffer[first + place * n_words + i] = buffer[first + node * n_words + i]
