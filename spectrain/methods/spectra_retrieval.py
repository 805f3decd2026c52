"""SPECTRA's retrieval module alone (section 3.2 of its paper): guesses from a datastore.

Up to G guesses of N tokens: what most often followed the longest known suffix of the text. The corpus is filtered: only
the texts that the target predicts best are kept (`data_prep.datastore`).
"""

from __future__ import annotations

from spectrain.decoding import TargetModel
from spectrain.methods.lookup import StoreDrafter
from spectrain.retrieval.datastore import open_datastore
from spectrain.retrieval.fusion import RetrievalOptions

TOKENS_ONLY = True  # a serving engine can run it; see loading.py


def build(
    target: TargetModel,
    datastore: str,
    max_guesses: int = 15,
    ngram_tokens: int = 5,
    max_nodes: int | str | None = None,
    **retrieval,
) -> StoreDrafter:
    """The method over the datastore of this folder.

    Args:
        target: whose tokens the store must hold.
        datastore: folder.
        max_guesses: G, branches of a tree.
        ngram_tokens: N, tokens of a branch.
        max_nodes: of a tree, the root included; None: all, 1 + G N.
        retrieval: options of `retrieval_options`.
    """
    options = retrieval_options(ngram_tokens, **retrieval)
    all_nodes = 1 + max_guesses * ngram_tokens
    store = open_datastore(datastore, target)
    return StoreDrafter(store, options, all_nodes if max_nodes is None else max_nodes, max_guesses)


def retrieval_options(
    ngram_tokens: int, max_suffix: int = 16, min_suffix: int = 1, max_matches: int = 100, min_matches: int = 1
) -> RetrievalOptions:
    """Options of a lookup, guesses of N tokens. The first suffix that is found wins, unless min_matches is raised."""
    return RetrievalOptions(min_suffix, max_suffix, ngram_tokens, max_matches, min_matches)
