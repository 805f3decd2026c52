"""Adaptive n-gram parallel decoding, ANPD (Ou 2024): the likeliest next token by the row's own n-grams, ten times.

n-grams of 2 to 5 tokens are counted on prompt and output. The longest known one decides each token of the chain.
"""

from __future__ import annotations

from spectrain.config.values import Nodes, Several, Whole
from spectrain.decoding import Method
from spectrain.drafting.lookup import LookupDrafter
from spectrain.retrieval.candidate_tree import CandidateTree
from spectrain.retrieval.ngram_table import CountTable
from spectrain.target import Source

TOKENS_ONLY = True  # a serving engine can run it; see registry.py


class AdaptiveNgram(LookupDrafter):
    """One chain per step, from counts that grow with the row's text.

    Args:
        max_order: longest n-gram counted, the predicted token included; the shortest has 2 tokens.
        draft_tokens: most tokens of a guess.
        max_nodes: the root included; fewer than draft_tokens + 1 shorten the guesses.
    """

    method = Method(drafts_chains=True)

    def __init__(self, max_order: Several = 5, draft_tokens: Whole = 10, max_nodes: Nodes = 11):
        self.priors = [min(0.9, 0.2 + 0.15 * length) for length in range(max_order)]  # by the context's length
        super().__init__(max_nodes)
        self.max_order, self.draft_tokens = max_order, draft_tokens

    def new_row(self, tokens: list[int]) -> CountTable:
        return CountTable(tokens, self.max_order)

    def propose_row(self, state: CountTable, tree: CandidateTree, row: int) -> None:
        node = 0
        for token, length in state.chain(min(self.draft_tokens, tree.n_free, tree.max_depth)):
            node = tree.add((token,), Source.INPUT, node, kind=length)
