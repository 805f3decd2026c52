"""LogitSpec: the last logits guess the token after next, the row's n-grams go on from there (section 3 of its paper).

The logits that the root was drawn from hold, in their first ranks, the token *behind* the root in more than half of all
steps (paper, Figure 2). So the draft has two parts, both from a table of the n-grams of prompt and output:

(a) what followed the longest suffix that ends in the root;
(b) for each token y of the first ranks: y, and what followed the longest suffix that ends in (root, y).

In no paper: a copy goes on past the end of the text, so that the latest occurrence always has as many tokens as the
tree has room for; and a datastore says what follows where the text knows nothing, or only what followed a single token.
"""

from __future__ import annotations

import numpy as np

from spectrain.config.values import Count, Nodes, Whole
from spectrain.drafting.lookup import LookupDrafter
from spectrain.errors import UserError
from spectrain.retrieval.candidate_tree import CandidateTree
from spectrain.retrieval.datastore import open_datastore
from spectrain.retrieval.fusion import RetrievalOptions, Retriever
from spectrain.retrieval.ngram_table import PositionTable
from spectrain.target import Source, TargetModel

# Ranks count from 0, and the root keeps its own, as in the reference implementation.
RANKS = (1, 2, 3, 4, 6, 10, 18, 34)  # of candidates of the last logits that are alike, where a new kind begins
RANK_PRIORS = (0.25, 0.25, 0.12, 0.08, 0.05, 0.03, 0.015, 0.008, 0.003)
# Paper, section 4.2: tokens that a branch of (b) keeps, y included: 4 up to rank 8, 3 up to rank 32, else y alone.
KEPT_BY_RANK = (4,) * 9 + (3,) * 24


def build(
    target: TargetModel,
    datastore: str | None = None,
    max_suffix: Whole = 16,
    min_suffix: Whole = 2,
    max_matches: Whole = 100,
    datastore_ranks: Count = 9,
    **options: LogitSpec,
) -> LogitSpec:
    """Build the method, with the datastore of a folder behind the row's own text, or without one.

    conf/method/logitspec.yaml explains the options.
    """
    method = LogitSpec(**options)
    if datastore is None:
        return method
    lookup = RetrievalOptions(min_suffix, max_suffix, max(method.input_tokens, method.kept[0]), max_matches)
    method.retriever, method.datastore_ranks = Retriever(open_datastore(datastore, target), lookup), datastore_ranks
    return method.describe(store=method.retriever.store)


class LogitSpec(LookupDrafter):
    """One tree per step: one unpruned branch of (a), then the branches of (b) by rank until K = max_nodes nodes stand.

    Args:
        max_nodes: see `LookupDrafter`.
        max_ngram: longest suffix that is looked for.
        continuation_tokens: tokens of a full continuation: the latest occurrence that has as many in the text wins
            (reference: 20). None: the latest occurrence wins, and its copy goes on with what it has copied where it
            reaches the end of the text.
        input_tokens: most nodes of (a). The paper does not limit it.
        last_logits: False leaves (b) out.
        retrieval: False leaves all continuations out (paper, Table 3).

    Raises:
        UserError: nothing is left to propose.
    """

    retriever: Retriever | None = None  # of the datastore, where there is one
    datastore_ranks = 0  # up to which guesses are looked up in it, too

    def __init__(
        self,
        max_nodes: Nodes = 64,
        max_ngram: Whole = 3,
        continuation_tokens: Whole | None = None,
        input_tokens: Count = 20,
        last_logits: bool = True,
        retrieval: bool = True,
    ):
        by_length = [min(0.85, 0.3 + 0.15 * length) for length in range(max_ngram + 1)]
        self.priors = [*RANK_PRIORS, *by_length, *by_length, 0.4]  # guesses, the text's continuations, the store's
        super().__init__(max_nodes)
        if not (last_logits or (retrieval and input_tokens)):
            raise UserError(
                f"last_logits={last_logits}, retrieval={retrieval} and input_tokens={input_tokens} leave nothing to "
                "propose; set last_logits=true, or retrieval=true with input_tokens of at least 1"
            )
        self.max_ngram, self.continuation_tokens = max_ngram, continuation_tokens
        self.input_tokens = min(input_tokens, continuation_tokens or input_tokens)
        self.last_logits, self.retrieval = last_logits, retrieval
        longest = 1 + (continuation_tokens or max(KEPT_BY_RANK)) if retrieval else 1
        self.kept = [min(kept, longest) for kept in KEPT_BY_RANK] + [1] * self.max_nodes  # by rank; more than are used
        # K - 1 tokens fill a tree, and the root may be among them: K are enough.
        self.n_ranked = self.max_nodes if last_logits else 0

    def new_row(self, tokens: list[int]) -> PositionTable:
        if self.continuation_tokens is None:
            return PositionTable(tokens, self.max_ngram, past_end=True)
        return PositionTable(tokens, self.max_ngram, "latest_full", self.continuation_tokens)

    def propose_row(self, state: PositionTable, tree: CandidateTree, row: int) -> None:
        if self.retrieval:
            # Where the likeliest candidates are scored, both kinds of them must be among these.
            room = tree.n_free // 2 if self.ranking and self.last_logits else tree.n_free
            limit = min(self.input_tokens, room)
            found, source, kind = self.continuation(state, limit, ask_store=self.retriever is not None)
            tree.add(found, source, kind=kind)
        if not self.last_logits:
            return
        root = tree.tokens[0]
        for rank, (token, kept) in enumerate(zip(self.ranked[row], self.kept, strict=False)):
            if not tree.n_free:
                return
            if token == root:
                continue
            node = tree.add((token,), Source.LOGITS, kind=int(np.searchsorted(RANKS, rank, side="right")))
            if kept > 1:
                found = self.continuation(state, kept - 1, (token,), ask_store=rank < self.datastore_ranks)
                tree.add(*found[:2], node, kind=found[2])

    def continuation(
        self, state: PositionTable, limit: int, extra: tuple[int, ...] = (), ask_store: bool = False
    ) -> tuple[list[int], Source, int]:
        """Return the tokens that followed the text and `extra`, the source that knows them, and their kind.

        That is the text for two tokens or more, the store, the text.
        """
        first = len(RANK_PRIORS) + (self.max_ngram + 1) * bool(extra)
        if ask_store:
            found, length = state.continuation(limit, extra, min_ngram=2)
            if found:
                return found, Source.INPUT, first + length
            found = self.retriever.chain([*state.tokens[-self.retriever.options.max_suffix :], *extra], limit)
            if found:
                return found, Source.DATASTORE, len(self.priors) - 1
        found, length = state.continuation(limit, extra)
        return found, Source.INPUT, first + length
