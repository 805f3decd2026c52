"""What all lookup methods share: one state per row, fed with the row's tokens.

A lookup method is deterministic: given a row's text it always guesses the same. It takes nothing from the row's
generator, so at equal seeds its sampled text is, token by token, what autoregressive decoding samples.

Letters: n active rows, N nodes, P probes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from spectrain.decoding import Context, Drafter, DraftTree, TargetOutput, Verified
from spectrain.decoding.errors import check_whole
from spectrain.retrieval.candidate_tree import NO_PROBES, CandidateTree, ProbeShape, draft_tree
from spectrain.retrieval.datastore import Datastore
from spectrain.retrieval.fusion import RetrievalOptions, Retriever
from spectrain.stores.budget_table import NodeBudget


class RowState(Protocol):
    """What a method keeps of one row."""

    def extend(self, tokens: list[int]) -> None:
        """The row's text went on by these tokens, the last of which is the new root."""


class LookupDrafter(Drafter):
    """A method that keeps a state per row. It defines `new_row` and `propose`.

    Args:
        max_nodes: nodes of a tree: root, guesses and probes. A NodeBudget is asked in every step, so trees follow the
            rows and the context; `self.max_nodes` is then its largest answer.

    Raises:
        UserError: max_nodes has no room for a guess.
    """

    store: Datastore | None = None  # that it drafts from
    n_ranked = 0  # tokens of each row's last logits that it wants to know
    probe_shape: ProbeShape = NO_PROBES  # of the probes, which stand at nodes 1..P of every row

    def __init__(self, max_nodes: int | NodeBudget):
        if not isinstance(max_nodes, NodeBudget):
            check_whole("max_nodes", max_nodes, 2)
            max_nodes = NodeBudget(fixed=max_nodes)
        self.budget, self.max_nodes = max_nodes, max_nodes.largest
        self.rows: list[RowState] = []
        self.ranked: list[list[int]] = []  # by row: the likeliest tokens of its last logits, best first

    def nodes_of_step(self, context: Context) -> int:
        """Nodes of each row's tree in this step, root, guesses and probes; 1: nothing is worth proposing."""
        if self.budget.fixed is not None:
            return self.max_nodes
        return self.budget.nodes(context.n_rows, max(context.n_tokens))

    @abstractmethod
    def new_row(self, tokens: list[int]) -> RowState:
        """The state of a row that joined; tokens: its prompt and its first token, the root."""

    def start(self, target, cache) -> None:
        self.rows, self.ranked = [], []

    def prefill(self, context: Context, output: TargetOutput, rows: range) -> None:
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

    def free(self, row: int) -> None:
        for values in (self.rows, self.ranked):
            if values:
                values[row] = values[-1]
                values.pop()

    def _likeliest(self, context: Context) -> Tensor:
        logits = context.last_logits
        return logits.topk(min(self.n_ranked, logits.shape[1])).indices


class CandidateDrafter(LookupDrafter):
    """A lookup method that adds its guesses to one candidate tree per row. It defines `new_row` and `propose_row`."""

    @abstractmethod
    def propose_row(self, state: RowState, tree: CandidateTree, row: int) -> None:
        """Add the guesses of one row to its tree, best first. `row` is its index in the batch."""

    def probes(self, state: RowState) -> list[int]:
        """The P probe tokens of a row, in the order of `probe_shape`."""
        return []

    def propose(self, context: Context) -> DraftTree:
        trees, tokens = [], context.tokens.numpy()  # a NumPy scalar costs a tenth of a torch one
        n_nodes = self.nodes_of_step(context)
        for row, (state, room) in enumerate(zip(self.rows, context.room, strict=True)):
            root = int(tokens[row, context.n_tokens[row] - 1])
            tree = CandidateTree(root, n_nodes, room - 1, self.probes(state), self.probe_shape)
            if tree.n_free:
                self.propose_row(state, tree, row)
            trees.append(tree)
        return draft_tree(trees, context.device)


class StoreDrafter(CandidateDrafter):
    """A tree per step of what followed the last tokens in a datastore.

    Args:
        store: the datastore.
        options: of the lookup.
        max_nodes: of a tree, the root included.
        max_guesses: branches; None: no limit.
    """

    def __init__(
        self, store: Datastore, options: RetrievalOptions, max_nodes: int | NodeBudget, max_guesses: int | None = None
    ):
        super().__init__(max_nodes)
        self.store, self.retriever, self.max_guesses = store, Retriever(store, options), max_guesses

    def new_row(self, tokens: list[int]) -> deque[int]:
        return deque(tokens, maxlen=self.retriever.options.max_suffix)

    def propose_row(self, state: deque[int], tree: CandidateTree, row: int) -> None:
        self.retriever.add_to(tree, list(state), self.max_guesses)
