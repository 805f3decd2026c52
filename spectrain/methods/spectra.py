"""SPECTRA (section 3 of its paper): the core's guesses come first, then retrieved ones fill what is left of G."""

from __future__ import annotations

from spectrain.config.values import Nodes, Whole
from spectrain.methods.spectra_core import CoreOptions, SpectraCore
from spectrain.retrieval.datastore import open_datastore
from spectrain.retrieval.fusion import RetrievalOptions, Retriever
from spectrain.target import TargetModel


def build(
    target: TargetModel,
    datastore: str,
    max_nodes: Nodes | None = None,
    max_suffix: Whole = 16,
    min_suffix: Whole = 1,
    max_matches: Whole = 100,
    min_matches: Whole = 1,
    **options: CoreOptions,
) -> SpectraCore:
    """Build the core with a retriever over the datastore of a folder; conf/method/spectra.yaml explains the options."""
    core = CoreOptions(**options)
    lookup = RetrievalOptions(min_suffix, max_suffix, core.ngram_tokens, max_matches, min_matches)
    retriever = Retriever(open_datastore(datastore, target), lookup)
    return SpectraCore(core, max_nodes, retriever)
