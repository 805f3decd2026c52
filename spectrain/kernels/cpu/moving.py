"""Move the keys and values of accepted nodes, compiled: torch would take two calls for each layer.

Letters: n rows, A nodes of a path, H key/value heads.
"""

from __future__ import annotations

from numba import njit

from spectrain.kernels.cpu.intrinsics import words


@njit(nogil=True, cache=True)
def move(addresses, n_heads, capacity, n_words, path, starts):
    """Move node path[b, j] of each row to place j, for all j.

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
