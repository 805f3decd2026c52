"""Merge the guesses of each row into one tree under a node budget.

A lookup method adds its guesses best first; those that exceed the budget are left out. Probes, which the target scores
but never accepts, have the same shape in every row and follow the root, so that their logits are at the same nodes in
every row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spectrain.target.tree import ROOT_PARENT, Source


@dataclass(frozen=True)
class ProbeShape:
    """The shape of the probes, nodes 1..P of every row's tree."""

    parents: tuple[int, ...] = ()  # of each probe: 0 the root, i the i-th probe (from 1); parents come before children
    n_silent: int = 0  # the first of them, whose logits nobody reads

    @property
    def n_probes(self) -> int:
        return len(self.parents)

    @cached_property
    def depth(self) -> int:
        """Edges from the root to the deepest probe."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return max(depths)


NO_PROBES = ProbeShape()


class CandidateTree:
    """One row's guesses as a tree that shares equal prefixes. Node 0 is the root; parents come before children.

    Args:
        root: the row's last token.
        max_nodes: maximum number of nodes, root and probes included.
        max_depth: maximum number of edges from the root; longer guesses are cut.
        probes: P tokens, in the order of `shape`. Guesses never share a node with them.
        shape: of the probes.
    """

    def __init__(
        self, root: int, max_nodes: int, max_depth: int, probes: Sequence[int] = (), shape: ProbeShape = NO_PROBES
    ):
        self.max_nodes, self.max_depth, self.shape = max_nodes, max_depth, shape
        self.tokens, self.parents = [root, *probes], [ROOT_PARENT, *shape.parents]
        self.sources = [int(Source.ROOT)] * len(self.tokens)
        self.kinds = [0] * len(self.tokens)  # how each was found, as its method numbers the ways
        self.depth = shape.depth  # of the deepest node
        self._children: dict[tuple[int, int], int] = {}  # (parent, token) -> node

    @property
    def n_free(self) -> int:
        """Nodes that may still be added."""
        return self.max_nodes - len(self.tokens) if self.max_depth > 0 else 0

    def add(self, guess: Iterable[int], source: Source, node: int = 0, reserve: int = 0, kind: int = 0) -> int:
        """Add a sequence of tokens below `node`, sharing the nodes that already spell its beginning.

        A shared node keeps its first source and kind. `reserve` nodes of the budget are left for later guesses. Returns
        the last node of the sequence that is in the tree.
        """
        children, tokens, source = self._children, self.tokens, int(source)  # NumPy is slow on enums
        max_nodes = self.max_nodes - reserve
        depth, above = 0, node
        while above > 0:
            above, depth = self.parents[above], depth + 1
        for token in guess:
            depth += 1
            if depth > self.max_depth:
                break
            child = children.get((node, token))
            if child is None:
                if len(tokens) >= max_nodes:
                    break
                child = self._append(token, node, depth, source, kind)
            node = child
        return node

    def add_tree(
        self, tokens: Sequence[int], parents: Sequence[int], kinds: Sequence[int], source: Source, first_kind: int = 0
    ) -> None:
        """Add another tree below the root, given as its nodes in order, root first, parents before children.

        Its kinds are numbered from `first_kind` on.
        """
        depths, places = [0], [0]  # of its nodes: depth, and index in this tree (-1: left out)
        children = self._children
        for token, parent, kind in zip(tokens[1:], parents[1:], kinds[1:], strict=True):
            node, depth = places[parent], depths[parent] + 1
            depths.append(depth)
            if node < 0 or depth > self.max_depth:
                places.append(-1)
                continue
            child = children.get((node, token))
            if child is None:
                child = -1
                if len(self.tokens) < self.max_nodes:
                    child = self._append(token, node, depth, int(source), first_kind + kind)
            places.append(child)

    def _append(self, token: int, node: int, depth: int, source: int, kind: int) -> int:
        """Add a node below `node` at this depth. Return its index."""
        child = len(self.tokens)
        self._children[node, token] = child
        self.tokens.append(token)
        self.parents.append(node)
        self.sources.append(source)
        self.kinds.append(kind)
        if depth > self.depth:
            self.depth = depth
        return child


def as_drafts(rows: Sequence[CandidateTree]) -> tuple[np.ndarray, np.ndarray]:
    """The trees of a batch as tokens, parents, sources and kinds [B, 4, N] int64; and their nodes and depth, [B, 2]."""
    sizes = np.array([(len(row.tokens), row.depth) for row in rows])
    drafts = np.zeros((len(rows), 4, int(sizes[:, 0].max())), dtype=np.int64)
    for draft, row in zip(drafts, rows, strict=True):
        draft[:, : len(row.tokens)] = row.tokens, row.parents, row.sources, row.kinds
    return drafts, sizes
