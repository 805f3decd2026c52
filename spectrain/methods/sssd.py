"""SSSD (section 3 of its paper): what followed the last tokens in the row's own text and in a datastore, fused.

Three sources give trees of continuations with a pseudo-probability for each node: prompt and output, one tree for each
prefix of 1..P tokens; the datastore, from the longest suffix that it holds; and, in no paper, the candidates of the
last logits (LogitSpec's idea), each followed by what followed it in the text. One queue fills the draft tree with the
likeliest nodes of all. Rows are looked up in parallel on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from spectrain.config.values import Count, Nodes, NonNegative, Whole
from spectrain.decoding import Context
from spectrain.drafting.lookup import LookupDrafter
from spectrain.errors import UserError
from spectrain.retrieval.calibration import read_calibration
from spectrain.retrieval.continuation_tree import ContinuationTrie
from spectrain.retrieval.datastore import Datastore, open_datastore
from spectrain.retrieval.fusion import (
    LOGITS_PRIORS,
    NO_STORE,
    NO_TOKENS,
    RetrievalOptions,
    Retriever,
    fuse,
    input_priors,
    store_priors,
)
from spectrain.target import DraftTree, TargetModel

TOKENS_ONLY = True  # a serving engine can run it; see registry.py
DISCOUNTS = (
    "input_scale",
    "input_prefix_decay",
    "input_depth_decay",
    "datastore_prefix_decay",
    "datastore_depth_decay",
)
ROWS_A_THREAD = 4  # fewer are done before a thread has woken up


def build(
    target: TargetModel,
    datastore: str | None,
    max_nodes: Nodes = 64,
    calibration: Literal["auto"] | None = None,
    **options: SssdOptions,
) -> Sssd:
    """Build the method over the datastore of a folder; conf/method/sssd.yaml explains the options.

    With calibration="auto", the factors that the datastore was calibrated with take the place of the discounts.
    """
    chosen = SssdOptions(**options)
    store = open_datastore(datastore, target) if chosen.datastore_source else None
    if calibration is not None and store is not None and (factors := read_calibration(store.folder)) is not None:
        chosen = replace(chosen, **dict.fromkeys(DISCOUNTS, 1.0), calibration=factors)
    return Sssd(store, chosen, max_nodes)


@dataclass(frozen=True)
class SssdOptions:
    """Sources, and what each one's pseudo-probabilities are multiplied with.

    The discount of a node is scale x prefix_decay ^ (longest prefix - its prefix) x depth_decay ^ (depth - 1), and its
    calibration where there is one. The datastore's scale is 1.

    Raises:
        UserError: nothing is left to propose.
    """

    max_prefix: Whole = 4  # P (paper, section 3.1.1)
    datastore_prefix: Whole = 8  # S
    min_matches: Count = 50  # fewer matches of a suffix in the datastore, and shorter ones are added
    max_matches: Whole = 100  # M (section 3.1.2)
    branch_tokens: Whole | None = None  # E; None: shrinks with the budget, see `branch_of`
    input_source: bool = True
    datastore_source: bool = True
    last_logits: bool = False
    input_scale: NonNegative = 1.0
    input_prefix_decay: NonNegative = 0.5
    input_depth_decay: NonNegative = 0.95
    datastore_prefix_decay: NonNegative = 0.8
    datastore_depth_decay: NonNegative = 0.7
    logits_candidates: Whole = 32
    logits_scale: NonNegative = 0.03  # pseudo-probability of the likeliest candidate
    logits_rank_decay: NonNegative = 0.5  # the one of rank r has scale / (r + 1) ^ decay
    calibration: Mapping[str, Sequence] | None = None  # by source, input or datastore: [prefix - 1][depth - 1]

    def __post_init__(self) -> None:
        if not (self.input_source or self.datastore_source or self.last_logits):
            raise UserError(
                "input_source, datastore_source and last_logits are all false, which leaves nothing to propose; set "
                "one of them to true"
            )


def branch_of(max_nodes: int) -> int:
    """Tokens of the longest branch in a tree of so many nodes: breadth before depth where nodes are few (section 4.3).

    The paper gives no numbers; 2 log2(N) has 2, 4, 6, 8, 10, 12, 14 for 2, 4, .., 128 nodes.
    """
    return max(2, round(2 * math.log2(max_nodes)))


class Sssd(LookupDrafter):
    """One tree of the likeliest nodes per step, N = max_nodes with the root. `store`: None where it is no source."""

    def __init__(self, store: Datastore | None, options: SssdOptions, max_nodes: int | str = 64):
        factors = options.calibration or {}
        # What a node's first token claims is what its acceptance is learnt from.
        longest = {"datastore": options.datastore_prefix, "input": options.max_prefix}
        first = {source: _factors(table, longest[source], 1)[1:, 1] for source, table in factors.items()}
        of_input = input_priors(options.max_prefix, first.get("input"))
        self.priors = [*store_priors(first.get("datastore")), *of_input, *LOGITS_PRIORS]
        super().__init__(max_nodes)
        self.options = options
        self.describe(store=store)
        self.branch_tokens = options.branch_tokens or branch_of(self.max_nodes)
        self.n_ranked = options.logits_candidates + 1 if options.last_logits else 0  # the root may be among them
        self.discounts = Discounts.of(options, self.branch_tokens)
        self.retrievers = [self._new_retriever()]  # one per thread
        self._pool: ThreadPoolExecutor | None = None

    def _new_retriever(self) -> Retriever | None:
        if self.method.store is None:
            return None
        options, limits = self.options, (self.options.max_matches, self.options.min_matches)
        return Retriever(self.method.store, RetrievalOptions(1, options.datastore_prefix, self.branch_tokens, *limits))

    def new_row(self, tokens: list[int]) -> ContinuationTrie:
        reads_text = self.options.input_source or self.options.last_logits
        return ContinuationTrie(tokens, *((self.options.max_prefix, self.branch_tokens) if reads_text else (0, 0)))

    def propose(self, context: Context) -> DraftTree:
        return self.drafted(context, *self.candidates(context, self.nodes_of_step))

    def candidates(self, context: Context, n_nodes: int) -> tuple[np.ndarray, np.ndarray]:
        """The likeliest candidates of each row, up to n_nodes with the root, as `drafted` takes them."""
        n_rows, options, discounts = context.n_rows, self.options, self.discounts
        tokens, guesses = context.tokens.numpy(), self._guesses(context)
        drafts = np.zeros((n_rows, 4, n_nodes), dtype=np.int64)  # tokens, parents, sources, kinds
        sizes = np.zeros((n_rows, 2), dtype=np.int64)  # nodes and depth of each draft
        branch_tokens = min(self.branch_tokens, options.branch_tokens or branch_of(n_nodes))

        def draft(rows: range, retriever: Retriever | None) -> None:
            for row in rows:
                stop = context.n_tokens[row]
                text = tokens[row, max(0, stop - options.datastore_prefix) : stop]
                store_tree, longest = NO_STORE, 0
                if retriever is not None:
                    store_tree, longest = retriever.tree, retriever.gather(text, branch_tokens)
                store = store_tree, discounts.datastore[longest], longest
                own = (*self.rows[row].arrays, discounts.input)
                logits = guesses[row], discounts.ranks[: len(guesses[row])], discounts.logits
                limits = n_nodes, min(context.room[row] - 1, branch_tokens), n_nodes
                sizes[row] = fuse(store, own, logits, limits, text[-1], drafts[row])

        n_threads = min(torch.get_num_threads(), n_rows // ROWS_A_THREAD)
        if n_threads < 2:
            draft(range(n_rows), self.retrievers[0])
            return drafts, sizes
        self._pool = self._pool or ThreadPoolExecutor(torch.get_num_threads() - 1, "sssd")
        self.retrievers += [self._new_retriever() for _ in range(n_threads - len(self.retrievers))]
        parts = [range(i, n_rows, n_threads) for i in range(n_threads)]
        others = self._pool.map(draft, parts[1:], self.retrievers[1:])  # they start at once
        draft(parts[0], self.retrievers[0])
        list(others)
        return drafts, sizes

    def _guesses(self, context: Context) -> list[np.ndarray]:
        """The likeliest tokens of each row's last logits, best first, without the root."""
        if not self.n_ranked:
            return [NO_TOKENS] * context.n_rows
        best, roots = np.array(self.ranked, dtype=np.int64), context.tail(1)
        return [tokens[tokens != root][: self.n_ranked - 1] for tokens, root in zip(best, roots, strict=True)]


@dataclass(frozen=True)
class Discounts:
    """Tables of `fuse`: entry [p, d] is for a prefix of p tokens and depth d; those of 0 are never read."""

    datastore: np.ndarray  # [longest prefix + 1, longest branch + 1] float64
    input: np.ndarray  # likewise
    logits: np.ndarray  # [longest branch + 1] float64
    ranks: np.ndarray  # [candidates] float64: pseudo-probability of each candidate of the last logits

    @classmethod
    def of(cls, options: SssdOptions, branch_tokens: int) -> Discounts:
        factors, depths = options.calibration or {}, np.arange(-1.0, branch_tokens)

        def table(source: str, scale: float, prefix_decay: float, depth_decay: float, longest: int) -> np.ndarray:
            by_prefix = prefix_decay ** np.arange(longest, -1, -1.0)[:, None]
            return scale * by_prefix * depth_decay**depths * _factors(factors.get(source), longest, branch_tokens)

        own, store = options.input_depth_decay, options.datastore_depth_decay
        scale = options.input_scale if options.input_source else 0.0
        return cls(
            table("datastore", 1.0, options.datastore_prefix_decay, store, options.datastore_prefix),
            table("input", scale, options.input_prefix_decay, own, options.max_prefix),
            own**depths,
            options.logits_scale / np.arange(1.0, options.logits_candidates + 1) ** options.logits_rank_decay,
        )


def _factors(factors: Sequence[Sequence[float]] | None, longest: int, branch_tokens: int) -> np.ndarray:
    """[longest + 1, E + 1]: factors by prefix and depth; what lies beyond the table takes its last entry."""
    if factors is None:
        return np.ones((longest + 1, branch_tokens + 1))
    table = np.asarray(factors, dtype=np.float64)
    prefixes = np.clip(np.arange(longest + 1) - 1, 0, len(table) - 1)
    depths = np.clip(np.arange(branch_tokens + 1) - 1, 0, table.shape[1] - 1)
    return table[prefixes][:, depths]
