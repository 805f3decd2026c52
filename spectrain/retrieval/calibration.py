"""How far pseudo-probabilities of continuations can be believed, from texts that are known (SSSD, section 3.1.3).

For every place of a text and every source, the source's tree says how much probability it gives to continuations of
each depth, all nodes together, and the text says whether its own continuation was among them. Their ratio, over all
places, is the factor by which that source over- or understates, for a prefix of that length, at that depth.

Letters: P longest prefix of the input, S longest of the datastore, E longest branch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numba import njit

from spectrain.retrieval.continuation_tree import CHILD, COUNT, SIBLING, TOKEN, ContinuationTrie
from spectrain.retrieval.fusion import Retriever

FEW_PLACES = 20.0  # places that say nothing yet: a factor from few places is drawn towards 1


@njit(nogil=True, cache=True)
def _tally(tree, node, seen, coming, claimed, kept):
    """Adds what the tree below `node` claims at each depth that the text reaches, and whether `coming` kept to it."""
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


@dataclass
class Tally:
    """Sums over places, by prefix length and depth."""

    longest: int
    branch_tokens: int
    claimed: np.ndarray = field(init=False)  # [longest, E] probability given to nodes
    kept: np.ndarray = field(init=False)  # [longest, E] places where the text's own continuation was a node

    def __post_init__(self) -> None:
        self.claimed = np.zeros((self.longest, self.branch_tokens))
        self.kept = np.zeros((self.longest, self.branch_tokens))

    def add(self, prefix: int, tree: np.ndarray, node: int, seen: int, coming: np.ndarray) -> None:
        _tally(tree, node, float(seen), coming, self.claimed[prefix - 1], self.kept[prefix - 1])

    def factors(self) -> list[list[float]]:
        """[prefix - 1][depth - 1]; 1 where nothing was claimed."""
        values = (self.kept + FEW_PLACES) / (self.claimed + FEW_PLACES)
        return [[round(float(value), 4) for value in row] for row in values]


def calibrate(
    texts: Iterable[tuple[list[int], list[int]]], retriever: Retriever | None, max_prefix: int, branch_tokens: int
) -> dict[str, list[list[float]]]:
    """Factors for the sources `input` and `datastore` (where there is one), as `SssdOptions.calibration` takes them.

    Args:
        texts: (prompt, response) token ids; places are those of the responses.
        retriever: over the datastore.
        max_prefix: P.
        branch_tokens: E.
    """
    own = Tally(max_prefix, branch_tokens)
    store = Tally(retriever.options.max_suffix, branch_tokens) if retriever is not None else None
    for prompt, response in texts:
        text = np.array(prompt + response, dtype=np.int64)
        trie = ContinuationTrie(prompt, max_prefix, branch_tokens)
        for place in range(len(prompt) + 1, len(text)):
            trie.extend(text[place - 1 : place].tolist())
            coming = text[place : place + branch_tokens]
            for prefix in range(1, trie.n_prefixes + 1):
                node = trie.cursors[prefix]
                seen = int(trie.nodes[node, COUNT]) - 1
                if seen > 0:
                    own.add(prefix, trie.nodes, node, seen, coming)
            if store is not None:
                found = retriever.gather(text[max(0, place - retriever.options.max_suffix) : place], branch_tokens)
                if found:
                    store.add(found, retriever.tree, 0, int(retriever.tree[0, COUNT]), coming)
    return {"input": own.factors()} | ({"datastore": store.factors()} if store is not None else {})
