"""What all lookup methods share: a state of each row, fed with its tokens, and one tree of candidates per row and step.

A lookup method is deterministic: given a row's text it always guesses the same. It takes nothing from the row's
generator, so at equal seeds its sampled text is, token by token, what autoregressive decoding samples.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from spectrain import kernels
from spectrain.decoding import Context, Method, Verified
from spectrain.decoding.graph_capture import any_tree
from spectrain.drafting.budget import AUTO, CountingDrafter, TreeBudget
from spectrain.drafting.ranking import Ranking
from spectrain.retrieval.candidate_tree import NO_PROBES, CandidateTree, ProbeShape, as_drafts
from spectrain.target import DraftTree, KVCache, TargetModel, TargetOutput
from spectrain.target.device import to_device
from spectrain.target.tree import PADDING_PARENT

MOST_NODES = 64  # of a tree under `auto`


class RowState(Protocol):
    """What a method keeps of one row."""

    def extend(self, tokens: list[int]) -> None:
        """The row's text went on by these tokens, the last of which is the new root."""


class LookupDrafter(CountingDrafter):
    """A method that looks its guesses up. It defines `new_row` and `propose_row`, or `propose`.

    Args:
        max_nodes: nodes of a tree: root, guesses and probes. "auto" chooses them step by step, by what acceptance has
            been so far and what steps cost here (`budget.py`); `self.max_nodes` is then the most. See `rank`, too.
    """

    method = Method(joins_late=True)
    n_ranked = 0  # tokens of each row's last logits that it wants to know
    probe_shape: ProbeShape = NO_PROBES  # of the probes, which stand at nodes 1..P of every row
    priors: Sequence[float] = (0.4,)  # of the kinds of its candidates, see `Ranking`

    def __init__(self, max_nodes: int | str):
        if max_nodes == AUTO:
            self.budget, max_nodes = TreeBudget(self.priors, MOST_NODES), MOST_NODES
        self.max_nodes, self.ranking = max_nodes, self.budget
        self.counts = self.ranking
        self.rows: list[RowState] = []
        self.ranked: list[list[int]] = []  # by row: the likeliest tokens of its last logits, best first

    def rank(self) -> None:
        """Score the likeliest candidates, by what has been accepted so far; not the first in the method's own order."""
        self.ranking = self.counts = self.ranking or Ranking(self.priors, self.max_nodes)

    @property
    def nodes_of_step(self) -> int:
        """Nodes of each row's tree in this step, root, guesses and probes; with a ranking, which will be cut."""
        if self.ranking is None:
            return self.max_nodes
        n_nodes = self.probe_shape.n_probes + 1 + self.ranking.n_candidates
        return n_nodes if self.budget is None else min(self.max_nodes, n_nodes)

    def rehearsals(self) -> Iterator[Callable[[Context], DraftTree]]:
        n_probes, n_silent = self.probe_shape.n_probes, self.probe_shape.n_silent

        def proposed(n_nodes: int, is_deep: bool, context: Context) -> DraftTree:
            tree = any_tree(context, n_nodes)
            tree = replace(tree, max_depth=None) if is_deep else tree
            return replace(tree, probe=self._probes(tree.parents), n_silent=n_silent) if n_probes else tree

        for n_nodes in dict.fromkeys(kernels.padded(n, kernels.NODES) for n in range(1 + n_probes, 1 + self.max_nodes)):
            yield from (partial(proposed, n_nodes, is_deep) for is_deep in ((False, True) if n_probes else (True,)))

    @abstractmethod
    def new_row(self, tokens: list[int]) -> RowState:
        """The state of a row that joined; tokens: its prompt and its first token, the root."""

    def propose_row(self, state: RowState, tree: CandidateTree, row: int) -> None:
        """Add the guesses of one row to its tree, best first. `row` is its index in the batch."""
        raise NotImplementedError

    def probes(self, state: RowState) -> list[int]:
        """The P probe tokens of a row, in the order of `probe_shape`."""
        return []

    def propose(self, context: Context) -> DraftTree:
        trees, tokens = [], context.tokens.numpy()  # a NumPy scalar costs a tenth of a torch one
        n_nodes = self.nodes_of_step
        for row, (state, room) in enumerate(zip(self.rows, context.room, strict=True)):
            root = int(tokens[row, context.n_tokens[row] - 1])
            tree = CandidateTree(root, n_nodes, room - 1, self.probes(state), self.probe_shape)
            if tree.n_free:
                self.propose_row(state, tree, row)
            trees.append(tree)
        return self.drafted(context, *as_drafts(trees))

    def start(self, target: TargetModel, cache: KVCache) -> None:
        super().start(target, cache)
        self.rows, self.ranked = [], []

    def prefill(self, context: Context, output: TargetOutput | None, rows: range) -> None:
        super().prefill(context, output, rows)
        for row in rows:
            self.rows.append(self.new_row(context.tokens[row, : context.n_tokens[row]].tolist()))
        if self.n_ranked:
            self.ranked += self._likeliest(context)[rows.start :].tolist()

    def observe(self, context: Context, tree: DraftTree, output: TargetOutput, verified: Verified) -> Tensor | None:
        return self._likeliest(context) if self.n_ranked else None

    def extend(self, context: Context, emitted: Sequence[list[int]], asked: Sequence[list[int]]) -> None:
        for state, tokens in zip(self.rows, emitted, strict=True):
            state.extend(tokens)
        if self.n_ranked:
            self.ranked = list(asked)
        if self.ranking is not None:
            self.ranking.end(emitted)

    def resume(self, context: Context, emitted: Sequence[list[int]]) -> None:
        for state, missed in zip(self.rows, emitted, strict=True):
            if missed:
                state.extend(missed)
        if self.n_ranked:
            self.ranked = self._likeliest(context).tolist()

    def free(self, row: int) -> None:
        super().free(row)
        for values in (self.rows, self.ranked):
            if values:
                values[row] = values[-1]
                values.pop()

    def drafted(self, context: Context, drafts: np.ndarray, sizes: np.ndarray) -> DraftTree:
        """The trees of a batch: all candidates, or those that pay, padded to the largest.

        Args:
            drafts: [n, 4, N] int64, tokens, parents, sources and kinds of the nodes: the root, the probes, then
                candidates, parents before children.
            sizes: [n, 2] int64, how many of a row's nodes there are, and its depth.
        """
        n_probes = self.probe_shape.n_probes
        if self.ranking is not None:
            kept, depth, is_chain = self.ranking.trees(drafts, sizes[:, 0], n_probes)
        else:
            kept, depth, is_chain = padded(drafts, sizes)
        if kept.shape[2] == 1:
            return DraftTree.root_only(to_device(torch.from_numpy(kept[:, 0, 0].copy()), context.device))
        depth, is_chain = max(depth, self.probe_shape.depth, 1), is_chain and not n_probes
        tokens, parents, sources = to_device(torch.from_numpy(kept), context.device).unbind(1)
        probe = self._probes(parents) if n_probes else None
        return DraftTree(*(tokens, parents, sources, None, probe), is_chain, depth, n_silent=self.probe_shape.n_silent)

    def _probes(self, parents: Tensor) -> Tensor:
        """Which nodes of trees with these parents [n, N] are probes, [n, N] bool."""
        probe = torch.zeros_like(parents, dtype=torch.bool)
        probe[:, 1 : self.probe_shape.n_probes + 1] = True
        return probe

    def _likeliest(self, context: Context) -> Tensor:
        logits = context.last_logits
        return logits.topk(min(self.n_ranked, logits.shape[1])).indices


def padded(drafts: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, int, bool]:
    """Return tokens, parents and sources [n, 3, w] of all nodes, the depth, and whether all trees are chains.

    Arguments are those of `LookupDrafter.drafted`.
    """
    width, depth = sizes.max(0).tolist()
    kept, nodes = drafts[:, :3, :width].copy(), np.arange(width)
    padding = nodes >= sizes[:, :1]
    kept[:, 0][padding] = kept[:, 2][padding] = 0
    kept[:, 1][padding] = PADDING_PARENT
    return kept, depth, bool(((kept[:, 1] == nodes - 1) | padding).all())
