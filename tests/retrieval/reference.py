"""Slow versions of what the datastore does, over lists of documents; and a store of them in a folder."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from spectrain.retrieval.datastore import Datastore, Manifest, write_manifest, write_shard
from spectrain.retrieval.suffix_array import build_suffix_array, first_token_bounds, next_pairs, token_dtype


def make_store(
    folder: Path, documents: Sequence[Sequence[int]], vocab_size: int, n_shards: int = 1, tokenizer: str = "tok"
) -> Datastore:
    """A datastore of these documents, cut into shards in order."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = [np.asarray(document, dtype=np.int64) for document in documents]
    cuts = [len(arrays) * i // n_shards for i in range(n_shards + 1)]
    shards = [write_shard(folder, i, arrays[cuts[i] : cuts[i + 1]], vocab_size) for i in range(n_shards)]
    n_tokens = sum(map(len, arrays))
    write_manifest(folder, Manifest("a target", "fp", tokenizer, vocab_size, len(arrays), n_tokens, shards))
    return Datastore(folder)


def index_in_memory(documents: Sequence[Sequence[int]], vocab_size: int, n_shards: int = 1) -> SimpleNamespace:
    """What searches read of such a store, without its files."""
    cuts, shards = [len(documents) * i // n_shards for i in range(n_shards + 1)], []
    for start, stop in pairwise(cuts):
        closed = [token for document in documents[start:stop] for token in (*document, vocab_size)]
        tokens = np.array(closed, dtype=token_dtype(vocab_size))
        suffixes = build_suffix_array(tokens)
        shards.append((tokens, suffixes, first_token_bounds(tokens, vocab_size), next_pairs(tokens, suffixes)))
    index = tuple(zip(*map(read_only, shards), strict=True))
    return SimpleNamespace(tokens=index[0], suffixes=index[1], index=index)


def read_only(arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """As those of an open store are; for others numba would compile everything once more."""
    for array in arrays:
        array.flags.writeable = False
    return arrays


def places(documents: Sequence[Sequence[int]], context: Sequence[int]) -> list[tuple[int, int]]:
    """(document, index behind the match) of every place where the context stands."""
    n = len(context)
    return [
        (d, i + n)
        for d, document in enumerate(documents)
        for i in range(len(document) - n + 1)
        if list(document[i : i + n]) == list(context)
    ]


def longest(documents, context, min_length: int, max_length: int) -> tuple[int, int]:
    """Length of the longest known suffix, and in how many places it stands."""
    for length in range(min(max_length, len(context)), min_length - 1, -1):
        found = places(documents, context[len(context) - length :])
        if found:
            return length, len(found)
    return 0, 0


def continuations(documents, context, branch: int) -> list[tuple[int, ...]]:
    """What follows the context in each place, up to `branch` tokens of that document, sorted."""
    end = (10**9,)  # a document's end sorts behind every token, as the separator does

    def key(place: tuple[int, int]) -> tuple[int, ...]:
        d, i = place
        return tuple(documents[d][i:]) + end

    ordered = sorted(places(documents, context), key=key)
    return [tuple(documents[d][i : i + branch]) for d, i in ordered]


def prefix_counts(sequences: Sequence[tuple[int, ...]]) -> Counter:
    """How many sequences begin with each prefix, the empty one left out."""
    return Counter(sequence[:n] for sequence in sequences for n in range(1, len(sequence) + 1))


def counts_of(tree: np.ndarray) -> dict[tuple[int, ...], int]:
    """{path: count} of a weighted tree [.., 4]."""
    found, waiting = {}, [(0, ())]
    while waiting:
        node, path = waiting.pop()
        child = tree[node, 2]
        while child:
            below = (*path, int(tree[child, 0]))
            found[below] = int(tree[child, 1])
            waiting.append((child, below))
            child = tree[child, 3]
    return found


def text_counts(text: Sequence[int], prefix: int, branch: int) -> tuple[int, dict[tuple[int, ...], int]]:
    """In how many places before the end the last `prefix` tokens stand, and how often each continuation followed."""
    context = text[len(text) - prefix :]
    ends = [i for _, i in places([text], context) if i < len(text)]
    return len(ends), dict(prefix_counts([tuple(text[i : i + branch]) for i in ends]))


def fused(sources: Sequence[dict], root: int, max_nodes: int, max_depth: int, max_leaves: int = 10**9):
    """SSSD's Algorithm 1 with `child.prob` at every level, over dictionaries.

    Args:
        sources: in the order of ties, each {"name", "probs": {path: pseudo-probability x discount}}.

    Returns:
        [(token, parent, source name)], the root first.
    """
    nodes, children = [(root, -1, "root")], {}
    n_leaves = 1
    queue: list = []

    def push(number: int, path: tuple[int, ...], parent: int) -> None:
        prob = sources[number]["probs"][path]
        if prob > 0:
            heapq.heappush(queue, (-prob, len(path), number, path[-1], parent, path))

    for number, source in enumerate(sources):
        for path in source["probs"]:
            if len(path) == 1 <= max_depth:
                push(number, path, 0)
    while queue and len(nodes) < max_nodes:
        _, depth, number, token, parent, path = heapq.heappop(queue)
        if (parent, token) not in children:
            if any(p == parent for p, _ in children):
                if n_leaves == max_leaves:
                    continue
                n_leaves += 1
            name = sources[number]["name"]
            children[parent, token] = len(nodes)
            nodes.append((token, parent, name[len(path) - 1] if isinstance(name, list) else name))
        node = children[parent, token]
        if depth < max_depth:
            for below in sources[number]["probs"]:
                if len(below) == depth + 1 and below[:-1] == path:
                    push(number, below, node)
    return nodes
