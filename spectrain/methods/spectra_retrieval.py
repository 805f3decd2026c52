"""SPECTRA's retrieval module alone (section 3.2 of its paper): guesses from a datastore.

Up to G guesses of N tokens: what most often followed the longest known suffix of the text. The corpus is filtered: only
the texts that the target predicts best are kept (`data_prep.datastore`).
"""

from __future__ import annotations

from spectrain.decoding import Source, TargetModel
from spectrain.decoding.errors import check_whole
from spectrain.methods.lookup import CandidateDrafter
from spectrain.methods.rest import Tail
from spectrain.retrieval.candidate_tree import CandidateTree
from spectrain.retrieval.datastore import Datastore, open_datastore
from spectrain.retrieval.fusion import RetrievalOptions, Retriever
from spectrain.stores.budget_table import NodeBudget

TOKENS_ONLY = True  # a serving engine can run it; see loading.py


def build(
    target: TargetModel,
    datastore: str,
    max_guesses: int = 15,
    ngram_tokens: int = 5,
    max_nodes: int | NodeBudget | None = None,
    **retrieval,
) -> SpectraRetrieval:
    """The method over the datastore of this folder; further options are those of `retrieval_options`.

    Raises:
        UserError: the store is missing or damaged, or an option is out of range.
    """
    store = open_datastore(datastore, target)
    return SpectraRetrieval(store, retrieval_options(ngram_tokens, **retrieval), max_guesses, max_nodes)


def retrieval_options(
    ngram_tokens: int, max_suffix: int = 16, min_suffix: int = 1, max_matches: int = 100, min_matches: int = 1
) -> RetrievalOptions:
    """Options of a lookup, guesses of N tokens. The first suffix that is found wins, unless min_matches is raised."""
    check_whole("ngram_tokens", ngram_tokens, 1)
    return RetrievalOptions(min_suffix, max_suffix, ngram_tokens, max_matches, min_matches)


class SpectraRetrieval(CandidateDrafter):
    """A tree of up to G branches per step.

    Args:
        store: the datastore.
        options: of the lookup; its `branch_tokens` is N.
        max_guesses: G.
        max_nodes: of a tree, the root included; None: all, 1 + G N.
    """

    def __init__(
        self,
        store: Datastore,
        options: RetrievalOptions,
        max_guesses: int = 15,
        max_nodes: int | NodeBudget | None = None,
    ):
        check_whole("max_guesses", max_guesses, 1)
        super().__init__(1 + max_guesses * options.branch_tokens if max_nodes is None else max_nodes)
        self.store, self.retriever, self.max_guesses = store, Retriever(store, options), max_guesses

    def new_row(self, tokens: list[int]) -> Tail:
        return Tail(tokens, self.retriever.options.max_suffix)

    def propose_row(self, state: Tail, tree: CandidateTree, row: int) -> None:
        add_retrieved(self.retriever, state.tokens, tree, self.max_guesses)


def add_retrieved(retriever: Retriever, text: list[int], tree: CandidateTree, max_guesses: int) -> None:
    """Adds up to max_guesses branches from the store to a tree that may hold others already; text: its end."""
    if max_guesses < 1 or not tree.n_free:
        return
    tokens, parents = retriever.draft(text, tree.max_nodes, tree.max_depth, max_guesses)
    tree.add_tree(tokens, parents, Source.DATASTORE)
