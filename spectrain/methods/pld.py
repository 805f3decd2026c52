"""Prompt lookup decoding (Saxena 2023): copy what followed the last tokens where they stood before.

The longest suffix of 3, 2 or 1 tokens that occurred earlier in prompt and output gives a chain of the next 10 tokens.
Where none occurred, nothing is proposed.
"""

from __future__ import annotations

from typing import Literal

from spectrain.config.values import Nodes, Whole
from spectrain.decoding import Method
from spectrain.drafting.lookup import LookupDrafter
from spectrain.retrieval.candidate_tree import CandidateTree
from spectrain.retrieval.ngram_table import PositionTable
from spectrain.target import Source

TOKENS_ONLY = True  # a serving engine can run it; see registry.py


class PromptLookup(LookupDrafter):
    """One chain per step, copied from the row's own text.

    Args:
        max_ngram: longest suffix that is looked for.
        draft_tokens: most tokens of a guess.
        match: of several occurrences the "latest", or the "earliest", as Hugging Face takes.
        past_end: a copy that reaches the end of the text goes on with what it has copied; False: it ends there.
        max_nodes: the root included; fewer than draft_tokens + 1 shorten the guesses.
    """

    method = Method(drafts_chains=True)

    def __init__(
        self,
        max_ngram: Whole = 3,
        draft_tokens: Whole = 10,
        match: Literal["latest", "earliest"] = "latest",
        past_end: bool = True,
        max_nodes: Nodes = 11,
    ):
        self.priors = [min(0.9, 0.2 + 0.2 * length) for length in range(max_ngram + 1)]  # by the match's length
        super().__init__(max_nodes)
        self.max_ngram, self.draft_tokens, self.match, self.past_end = max_ngram, draft_tokens, match, past_end

    def new_row(self, tokens: list[int]) -> PositionTable:
        return PositionTable(tokens, self.max_ngram, self.match, past_end=self.past_end)

    def propose_row(self, state: PositionTable, tree: CandidateTree, row: int) -> None:
        found, length = state.continuation(min(self.draft_tokens, tree.n_free))
        tree.add(found, Source.INPUT, kind=length)
