"""Trees of the continuations of a context, with counts of how often each was seen.

`gather` reads them from a datastore (REST, SPECTRA, SSSD). `ContinuationTrie` holds those of one growing text, prompt
and output (SSSD's input source).

A tree is an int32 array [capacity, 4] with the columns TOKEN, COUNT, CHILD (the newest one) and SIBLING (the next older
one). Node 0 is the root; 0 as a child or sibling means that there is none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spectrain.compiled import compiled, inner
from spectrain.retrieval.suffix_array import find_ranges, longest_suffix, nth_match, separator_of

TOKEN, COUNT, CHILD, SIBLING = range(4)
EMPTY = -1  # a free place of the trie's hash table
FIRST_CAPACITY = 1024  # nodes


@inner
def child_of(tree, n_nodes, node, token):
    """Find or add the child of `node` with this token. Return it (0: the tree is full) and the number of nodes."""
    child = tree[node, CHILD]
    while child != 0:
        if tree[child, TOKEN] == token:
            return child, n_nodes
        child = tree[child, SIBLING]
    if n_nodes == len(tree):
        return 0, n_nodes
    tree[n_nodes, TOKEN] = token
    tree[n_nodes, COUNT] = 0
    tree[n_nodes, CHILD] = 0
    tree[n_nodes, SIBLING] = tree[node, CHILD]
    tree[node, CHILD] = n_nodes
    return n_nodes, n_nodes + 1


@compiled
def gather(index, context, lengths, matches, branch, tree, ranges):
    """Write the continuations of the context's suffixes in a store to `tree`.

    It starts with the longest suffix found. If that has too few places, shorter ones are looked up, too, and their
    counts added.

    Args:
        index: of a `Datastore`.
        context: [n] int64.
        lengths: of the shortest and the longest suffix to look for.
        matches: maximum number of continuations in all (M of SSSD); number that is enough to stop before a shorter
            suffix (1: the first hit wins); whether to take the first of each shard's sorted range, as REST does, or an
            unbiased sample at regular intervals.
        branch: tokens of the longest continuation.
        tree: [capacity, 4] int32, overwritten. What does not fit is left out.
        ranges: [n_shards, 2] int64 scratch.

    Returns:
        The length of the longest suffix found, 0 for none. The tree's root counts the continuations taken.
    """
    most, enough, first_ones = matches
    separator = separator_of(index)
    tree[0] = 0
    n_nodes, taken = 1, 0
    longest, total = longest_suffix(index, context, lengths[0], lengths[1], ranges)
    length = longest
    while total > 0:
        take = min(total, most - taken)
        for i in range(take):
            n = _first_of_shards(ranges, i, take, total) if first_ones else ((2 * i + 1) * total) // (2 * take)
            shard, position = nth_match(index, ranges, n)
            n_nodes = _insert(tree, n_nodes, index[0][shard], position + length, branch, separator)
        taken += take
        length -= 1
        if total >= enough or taken >= most or length < lengths[0]:
            break
        total = find_ranges(index, context, length, ranges)
    tree[0, COUNT] = taken
    return longest


@inner
def _first_of_shards(ranges, i, take, total):
    """Return which match is the i-th of `take`, of all `total`: the first ones of each shard, by its share of them."""
    begin = 0
    for shard in range(len(ranges)):
        end = begin + ranges[shard, 1] - ranges[shard, 0]
        if i < end * take // total:
            break
        begin = end
    return begin + i - begin * take // total


@inner
def _insert(tree, n_nodes, text, position, branch, separator):
    """Count the continuation that begins at `position`."""
    node = 0
    for place in range(position, min(position + branch, len(text))):
        token = text[place]
        if token == separator:  # the end of the document
            break
        node, n_nodes = child_of(tree, n_nodes, node, token)
        if node == 0:
            break
        tree[node, COUNT] += 1
    return n_nodes


class ContinuationTrie:
    """All sequences of up to D = P + branch_tokens tokens of one text, with their counts.

    `cursors[p]` is the node of the text's last p tokens; below it are their earlier continuations. A new token costs D
    steps in a hash table of (node, token), whatever the length of the text.

    Args:
        tokens: the text so far.
        max_prefix: P.
        branch_tokens: tokens of the longest continuation.
    """

    def __init__(self, tokens: Sequence[int], max_prefix: int, branch_tokens: int):
        self.max_prefix, self.depth = max_prefix, max_prefix + branch_tokens
        self.n_tokens, self._n_nodes = 0, 1
        self.cursors = np.zeros(self.depth + 1, dtype=np.int32)  # by length; see `n_prefixes`
        self.nodes = np.zeros((FIRST_CAPACITY, 4), dtype=np.int32)
        self._places = _new_places(FIRST_CAPACITY)
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append these tokens to the text."""
        wanted = self._n_nodes + len(tokens) * self.depth
        if wanted > len(self.nodes):
            nodes = np.zeros((max(wanted, 2 * len(self.nodes)), 4), dtype=np.int32)
            nodes[: self._n_nodes] = self.nodes[: self._n_nodes]
            self.nodes, self._places = nodes, _new_places(len(nodes))
            _rehash(nodes, self._places)
        new = np.asarray(tokens, dtype=np.int32)
        self._n_nodes = _extend(self.nodes, self._places, self._n_nodes, self.cursors, self.n_tokens, new)
        self.n_tokens += len(tokens)

    @property
    def n_prefixes(self) -> int:
        """Length of the longest prefix that the text has; cursors 1..n_prefixes are valid."""
        return min(self.max_prefix, self.n_tokens)

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Nodes, hash table, and the cursors of the last 1..n_prefixes tokens (cursors[0] is the root), for `fuse`."""
        return self.nodes, self._places, self.cursors[: self.n_prefixes + 1]


def _new_places(capacity: int) -> np.ndarray:
    """Return an empty hash table [size, 2] int32 of parent and child; `capacity` nodes fill at most half of it."""
    return np.full((1 << (2 * capacity - 1).bit_length(), 2), EMPTY, dtype=np.int32)


@inner
def _hash(node, token, mask):
    mixed = np.uint64(node) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F)
    return np.int64((mixed ^ (mixed >> np.uint64(29))) & np.uint64(mask))


@inner
def find_child(nodes, places, node, token):
    """Return the child of `node` with this token, 0 if there is none."""
    mask = len(places) - 1
    place = _hash(node, token, mask)
    while places[place, 0] != EMPTY:
        child = places[place, 1]
        if places[place, 0] == node and nodes[child, TOKEN] == token:
            return child
        place = (place + 1) & mask
    return 0


@inner
def _enter(nodes, places, node, child):
    mask = len(places) - 1
    place = _hash(node, nodes[child, TOKEN], mask)
    while places[place, 0] != EMPTY:
        place = (place + 1) & mask
    places[place, 0] = node
    places[place, 1] = child


@compiled
def _rehash(nodes, places):
    """Enter every node of the tree in an empty table."""
    stack = [0]
    while len(stack) > 0:
        node = stack.pop()
        child = nodes[node, CHILD]
        while child != 0:
            _enter(nodes, places, node, child)
            stack.append(child)
            child = nodes[child, SIBLING]


@compiled
def _extend(nodes, places, n_nodes, cursors, n_tokens, new):
    """Count every sequence that ends in a new token. Return the new number of nodes."""
    longest = len(cursors) - 1
    for i in range(len(new)):
        token = new[i]
        # From the longest down: cursors[p] is read before it is overwritten.
        for length in range(min(longest, n_tokens + i + 1), 0, -1):
            node = cursors[length - 1]
            child = find_child(nodes, places, node, token)
            if child == 0:
                child = n_nodes
                nodes[child, TOKEN] = token
                nodes[child, SIBLING] = nodes[node, CHILD]
                nodes[node, CHILD] = child
                _enter(nodes, places, node, child)
                n_nodes += 1
            nodes[child, COUNT] += 1
            cursors[length] = child
    return n_nodes
