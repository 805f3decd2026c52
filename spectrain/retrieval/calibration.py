"""Measure how far pseudo-probabilities of continuations can be believed, on texts that are known (SSSD, section 3.1.3).

At every place of a text, the tree of each source says how much probability it gives to continuations of each depth, all
nodes together, and the text says whether its own continuation was among them. Their ratio over all places is the factor
by which that source over- or understates, for a prefix of that length, at that depth.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from spectrain.compiled import compiled
from spectrain.retrieval.continuation_tree import CHILD, COUNT, SIBLING, TOKEN, ContinuationTrie
from spectrain.retrieval.fusion import Retriever
from spectrain.stores.files import read_json, write_json

CALIBRATION = "calibration.json"  # in the folder of a datastore: {source: [[factor by depth] by prefix length]}
FEW_PLACES = 20.0  # places that say nothing yet: a factor from few places is drawn towards 1


@compiled
def _tally(tree, node, seen, coming, claimed, kept):
    """Add what the tree below `node` claims at each depth that the text reaches, and whether `coming` kept to it."""
    n_depths = min(len(claimed), len(coming))
    stack = [(tree[node, CHILD], 0)]
    while len(stack) > 0:
        child, depth = stack.pop()
        while child != 0:
            claimed[depth] += tree[child, COUNT] / seen
            if depth + 1 < n_depths and tree[child, CHILD] != 0:
                stack.append((tree[child, CHILD], depth + 1))
            child = tree[child, SIBLING]
    at = node
    for depth in range(n_depths):
        child = tree[at, CHILD]
        while child != 0 and tree[child, TOKEN] != coming[depth]:
            child = tree[child, SIBLING]
        if child == 0:
            break
        kept[depth] += 1
        at = child


def calibrate(
    texts: Iterable[tuple[list[int], list[int]]], retriever: Retriever | None, max_prefix: int, branch_tokens: int
) -> dict[str, list[list[float]]]:
    """Return factors [prefix - 1][depth - 1] for the sources `input` and `datastore`; 1 where nothing was claimed.

    Args:
        texts: (prompt, response) token ids; places are those of the responses.
        retriever: over the datastore; None: there is none.
        max_prefix: P.
        branch_tokens: E.
    """
    longest = {"input": max_prefix} | ({"datastore": retriever.options.max_suffix} if retriever is not None else {})
    # [claimed, kept][prefix - 1][depth - 1]: probability given to nodes, and places where the text was a node.
    counts = {source: np.zeros((2, n, branch_tokens)) for source, n in longest.items()}
    for prompt, response in texts:
        text = np.array(prompt + response, dtype=np.int64)
        trie = ContinuationTrie(prompt, max_prefix, branch_tokens)
        for place in range(len(prompt) + 1, len(text)):
            trie.extend(text[place - 1 : place].tolist())
            coming = text[place : place + branch_tokens]
            for prefix in range(1, trie.n_prefixes + 1):
                node = trie.cursors[prefix]
                seen = trie.nodes[node, COUNT] - 1
                if seen > 0:
                    _tally(trie.nodes, node, float(seen), coming, *counts["input"][:, prefix - 1])
            if retriever is not None:
                prefix = retriever.gather(text[max(0, place - retriever.options.max_suffix) : place], branch_tokens)
                if prefix:
                    tree = retriever.tree
                    _tally(tree, 0, float(tree[0, COUNT]), coming, *counts["datastore"][:, prefix - 1])
    factors = {source: (kept + FEW_PLACES) / (claimed + FEW_PLACES) for source, (claimed, kept) in counts.items()}
    return {name: [[round(value, 4) for value in row] for row in rows.tolist()] for name, rows in factors.items()}


def write_calibration(folder: Path, factors: dict[str, list[list[float]]]) -> Path:
    """Keep what `calibrate` found beside the datastore that it was found with, and return the file."""
    write_json(folder / CALIBRATION, factors)
    return folder / CALIBRATION


def read_calibration(folder: Path) -> dict[str, list[list[float]]] | None:
    """Read the factors that a datastore was calibrated with, None where it was not."""
    file = folder / CALIBRATION
    return read_json(file) if file.is_file() else None
