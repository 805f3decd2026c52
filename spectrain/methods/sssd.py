"""SSSD (section 3 of its paper): what followed the last tokens in the row's own text and in a datastore, fused.

Three sources give trees of continuations with a pseudo-probability for each node: prompt and output, one tree for each
prefix of 1..P tokens; the datastore, from the longest suffix that it holds; and, in no paper, the candidates of the
last logits (LogitSpec's idea), each followed by what followed it in the text. One queue fills the draft tree with the
likeliest nodes of all. Rows are looked up in parallel on the CPU.

Letters: n active rows, P longest prefix of the input, S longest of the datastore, E longest branch, N nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from spectrain.decoding import Context, DraftTree, TargetModel
from spectrain.decoding.errors import UserError, check_whole
from spectrain.decoding.tree import PADDING_PARENT
from spectrain.methods.lookup import LookupDrafter
from spectrain.retrieval.continuation_tree import ContinuationTrie
from spectrain.retrieval.datastore import Datastore, open_datastore
from spectrain.retrieval.fusion import NO_TEXT, NO_TOKENS, Queue, RetrievalOptions, Retriever, fuse
from spectrain.stores.budget_table import NodeBudget

TOKENS_ONLY = True  # a serving engine can run it; see loading.py
ROWS_A_THREAD = 4  # fewer are done before a thread has woken up


def build(target: TargetModel, datastore: str | None, max_nodes: int | NodeBudget = 64, **options) -> Sssd:
    """The method over the datastore of this folder; further options are those of `SssdOptions`.

    Raises:
        UserError: the store is missing or damaged, or an option is out of range.
    """
    chosen = SssdOptions(**options)
    store = open_datastore(datastore, target) if chosen.datastore_source else None
    return Sssd(store, chosen, max_nodes)


@dataclass(frozen=True)
class SssdOptions:
    """Sources, and what each one's pseudo-probabilities are multiplied with.

    The discount of a node is scale x prefix_decay ^ (longest prefix - its prefix) x depth_decay ^ (depth - 1), and its
    calibration where there is one. The datastore's scale is 1.

    Raises:
        UserError: an option is out of range, or nothing is left to propose.
    """

    max_prefix: int = 4  # P (paper, section 3.1.1)
    datastore_prefix: int = 8  # S
    min_matches: int = 50  # fewer matches of a suffix in the datastore, and shorter ones are added
    max_matches: int = 100  # M (section 3.1.2)
    branch_tokens: int | None = None  # E; None: shrinks with the budget, see `branch_of`
    input_source: bool = True
    datastore_source: bool = True
    last_logits: bool = False
    input_scale: float = 1.0
    input_prefix_decay: float = 0.5
    input_depth_decay: float = 0.95
    datastore_prefix_decay: float = 0.8
    datastore_depth_decay: float = 0.7
    logits_candidates: int = 32
    logits_scale: float = 0.03  # pseudo-probability of the likeliest candidate
    logits_rank_decay: float = 0.5  # the one of rank r has scale / (r + 1) ^ decay
    calibration: Mapping[str, Sequence] | None = None  # input, datastore: [prefix - 1][depth - 1]; logits: [depth - 1]

    def __post_init__(self) -> None:
        for name in ("max_prefix", "datastore_prefix", "min_matches", "max_matches", "logits_candidates"):
            check_whole(name, getattr(self, name), 1)
        if self.branch_tokens is not None:
            check_whole("branch_tokens", self.branch_tokens, 1)
        for name in DECAYS:
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 10:
                raise UserError(f"{name}={value} must be a number above 0, at most 10")
        if not (self.input_source or self.datastore_source or self.last_logits):
            raise UserError(
                "input_source, datastore_source and last_logits are all false, which leaves nothing to propose; set "
                "one of them to true"
            )
        if self.calibration is not None and not isinstance(self.calibration, Mapping):
            raise UserError(f"calibration={self.calibration} must hold tables for input, datastore and logits")
        for source in self.calibration or {}:
            if source not in ("input", "datastore", "logits"):
                raise UserError(f"calibration.{source} is unknown; it takes input, datastore and logits")


DECAYS = (
    *("input_scale", "input_prefix_decay", "input_depth_decay", "datastore_prefix_decay", "datastore_depth_decay"),
    *("logits_scale", "logits_rank_decay"),
)


def branch_of(max_nodes: int) -> int:
    """Tokens of the longest branch in a tree of so many nodes: breadth before depth where nodes are few (section 4.3).

    The paper gives no numbers; 2 log2(N) has 2, 4, 6, 8, 10, 12, 14 for 2, 4, .., 128 nodes.
    """
    return max(2, round(2 * math.log2(max_nodes)))


class Sssd(LookupDrafter):
    """One tree of the likeliest nodes per step.

    Args:
        store: the datastore; None where it is no source.
        options: see there.
        max_nodes: N, the root included.
    """

    def __init__(self, store: Datastore | None, options: SssdOptions, max_nodes: int | NodeBudget = 64):
        super().__init__(max_nodes)
        self.store, self.options = store, options
        self.branch_tokens = options.branch_tokens or branch_of(self.max_nodes)
        self.discounts = Discounts.of(options, self.branch_tokens)
        self.workers = [self._worker()]
        self._pool: ThreadPoolExecutor | None = None

    def _worker(self) -> _Worker:
        options = self.options
        retriever = None
        if self.store is not None:
            lookup = RetrievalOptions(
                1, options.datastore_prefix, self.branch_tokens, options.max_matches, options.min_matches
            )
            retriever = Retriever(self.store, lookup)
        return _Worker(retriever, self.discounts)

    def new_row(self, tokens: list[int]) -> ContinuationTrie | _NoInput:
        if not (self.options.input_source or self.options.last_logits):
            return _NoInput()
        return ContinuationTrie(tokens, self.options.max_prefix, self.branch_tokens)

    def propose(self, context: Context) -> DraftTree:
        n_nodes = self.nodes_of_step(context)
        if n_nodes < 2:
            return DraftTree.root_only(context.roots)
        step = _Step(self, context, n_nodes)
        n_rows = context.n_rows
        n_threads = min(torch.get_num_threads(), n_rows // ROWS_A_THREAD)
        if n_threads < 2:
            step.draft_rows(range(n_rows), self.workers[0])
            return step.tree()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(torch.get_num_threads() - 1, "sssd")
        self.workers += [self._worker() for _ in range(n_threads - len(self.workers))]
        parts = [range(i, n_rows, n_threads) for i in range(n_threads)]
        others = [
            self._pool.submit(step.draft_rows, part, worker)
            for part, worker in zip(parts[1:], self.workers[1:], strict=False)
        ]
        step.draft_rows(parts[0], self.workers[0])
        for other in others:
            other.result()
        return step.tree()


class _NoInput:
    """The state of a row whose text is no source."""

    arrays = NO_TEXT

    def extend(self, tokens: list[int]) -> None:
        """Nothing to remember."""


@dataclass(frozen=True)
class Discounts:
    """Tables of `fuse`: entry [p, d] is for a prefix of p tokens and depth d; those of 0 are never read."""

    datastore: np.ndarray  # [S + 1, E + 1] float64
    input: np.ndarray  # [P + 1, E + 1] float64
    logits: np.ndarray  # [E + 1] float64
    ranks: np.ndarray  # [K] float64: pseudo-probability of each candidate of the last logits

    @classmethod
    def of(cls, options: SssdOptions, branch_tokens: int) -> Discounts:
        calibration = options.calibration or {}

        def table(scale: float, prefix_decay: float, depth_decay: float, longest: int, source: str) -> np.ndarray:
            decays = prefix_decay ** np.arange(longest, -1, -1.0)[:, None]
            return (
                scale
                * decays
                * depth_decay ** np.arange(-1.0, branch_tokens)
                * _calibration(calibration.get(source), longest, branch_tokens)
            )

        own, store = options.input_depth_decay, options.datastore_depth_decay
        ranks = options.logits_scale / np.arange(1.0, options.logits_candidates + 1) ** options.logits_rank_decay
        logits = calibration.get("logits")
        return cls(
            datastore=table(1.0, options.datastore_prefix_decay, store, options.datastore_prefix, "datastore"),
            input=table(
                options.input_scale if options.input_source else 0.0,
                options.input_prefix_decay,
                own,
                options.max_prefix,
                "input",
            ),
            logits=own ** np.arange(-1.0, branch_tokens)
            * _calibration([logits] if logits is not None else None, 1, branch_tokens)[1],
            ranks=ranks,
        )


def _calibration(factors: Sequence[Sequence[float]] | None, longest: int, branch_tokens: int) -> np.ndarray:
    """[longest + 1, E + 1]: factors by prefix and depth; what lies beyond the table takes its last entry."""
    if factors is None:
        return np.ones((longest + 1, branch_tokens + 1))
    try:
        table = np.asarray(factors, dtype=np.float64)
        fits = table.ndim == 2 and table.size > 0 and bool((table >= 0).all()) and bool(np.isfinite(table).all())
    except (ValueError, TypeError):  # rows of unequal length, words
        fits = False
    if not fits:
        raise UserError("calibration must hold a row of numbers of at least 0 for each prefix length; tune it again")
    prefixes = np.clip(np.arange(longest + 1) - 1, 0, len(table) - 1)
    depths = np.clip(np.arange(branch_tokens + 1) - 1, 0, table.shape[1] - 1)
    return table[prefixes][:, depths]


class _Worker:
    """What one thread needs to draft a row."""

    def __init__(self, retriever: Retriever | None, discounts: Discounts):
        self.retriever, self.discounts = retriever, discounts
        self.queue = Queue()
        self.store_tree = retriever.tree if retriever is not None else np.zeros((1, 4), dtype=np.int32)

    def draft(
        self,
        text: np.ndarray,
        state: ContinuationTrie | _NoInput,
        logit_tokens: np.ndarray,
        branch_tokens: int,
        max_depth: int,
        draft: np.ndarray,
    ) -> tuple[int, int]:
        """Fills draft [3, N] int64 with one row's tree: tokens, parents, sources. Returns its nodes and its depth.

        Args:
            text: [S or fewer] int64, the end of the row's text, the root last.
            state: of the row.
            logit_tokens: [K or fewer] int64 candidates of the last logits, the likeliest first.
            branch_tokens: longest branch.
            max_depth: that can still be emitted.
        """
        discounts = self.discounts
        longest = self.retriever.gather(text, branch_tokens) if self.retriever is not None else 0
        store = self.store_tree, discounts.datastore[longest]
        own = (*state.arrays, discounts.input)
        logits = logit_tokens, discounts.ranks[: len(logit_tokens)], discounts.logits
        max_nodes = draft.shape[1]
        limits = max_nodes, min(max_depth, branch_tokens), max_nodes
        return fuse(self.queue.arrays, store, own, logits, limits, text[-1], draft)


class _Step:
    """The trees of one step, row by row, in any order and by any thread."""

    def __init__(self, method: Sssd, context: Context, n_nodes: int):
        options = method.options
        self.method, self.context = method, context
        self.branch_tokens = min(method.branch_tokens, options.branch_tokens or branch_of(n_nodes))
        self.tokens = context.tokens.numpy()
        self.draft = np.zeros((context.n_rows, 3, n_nodes), dtype=np.int64)
        self.sizes, self.depths = [1] * context.n_rows, [0] * context.n_rows
        self.candidates = None
        if options.last_logits:
            # The root may be among them: one more.
            k = min(options.logits_candidates + 1, context.last_logits.shape[1])
            self.candidates = context.last_logits.topk(k).indices.cpu().numpy()

    def draft_rows(self, rows: Sequence[int], worker: _Worker) -> None:
        method, context = self.method, self.context
        for row in rows:
            stop = context.n_tokens[row]
            text = self.tokens[row, max(0, stop - method.options.datastore_prefix) : stop]
            logit_tokens = NO_TOKENS
            if self.candidates is not None:
                found = self.candidates[row]
                logit_tokens = found[found != text[-1]][: method.options.logits_candidates]
            self.sizes[row], self.depths[row] = worker.draft(
                text, method.rows[row], logit_tokens, self.branch_tokens, context.room[row] - 1, self.draft[row]
            )

    def tree(self) -> DraftTree:
        """All rows, padded to the largest."""
        width = max(self.sizes)
        nodes = np.arange(width)
        draft = self.draft[:, :, :width].transpose(1, 0, 2).copy()  # [3, n, width]
        padding = nodes >= np.array(self.sizes)[:, None]
        draft[:, padding] = 0
        draft[1, padding] = PADDING_PARENT
        is_chain = bool(((draft[1] == nodes - 1) | padding).all())
        packed = torch.from_numpy(draft).to(self.context.device)
        return DraftTree(packed[0], packed[1], packed[2], is_chain=is_chain, max_depth=max(*self.depths, 1))
