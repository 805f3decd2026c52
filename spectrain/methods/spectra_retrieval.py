"""SPECTRA's retrieval module alone (section 3.2 of its paper): guesses from a datastore.

Up to G guesses of N tokens: what most often followed the longest known suffix of the text. The corpus is filtered: only
the texts that the target predicts best are kept (`data_prep.datastore`).
"""

from __future__ import annotations

from spectrain.config.values import Nodes, Whole
from spectrain.methods.rest import Rest
from spectrain.retrieval.datastore import open_datastore
from spectrain.retrieval.fusion import RetrievalOptions
from spectrain.target import TargetModel

TOKENS_ONLY = True  # a serving engine can run it; see registry.py


def build(
    target: TargetModel,
    datastore: str,
    max_guesses: Whole = 15,
    ngram_tokens: Whole = 5,
    max_nodes: Nodes | None = None,
    max_suffix: Whole = 16,
    min_suffix: Whole = 1,
    max_matches: Whole = 100,
    min_matches: Whole = 1,
) -> Rest:
    """Build the method over the datastore of a folder; conf/method/spectra_retrieval.yaml explains the options."""
    options = RetrievalOptions(min_suffix, max_suffix, ngram_tokens, max_matches, min_matches)
    return Rest(open_datastore(datastore, target), options, max_nodes or 1 + max_guesses * ngram_tokens, max_guesses)
