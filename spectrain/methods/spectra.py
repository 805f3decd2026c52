"""SPECTRA (section 3 of its paper): the core's guesses come first, then retrieved ones fill what is left of G."""

from __future__ import annotations

from spectrain.decoding import TargetModel
from spectrain.methods.spectra_core import CoreOptions, SpectraCore
from spectrain.methods.spectra_retrieval import retrieval_options
from spectrain.retrieval.datastore import open_datastore
from spectrain.retrieval.fusion import Retriever

RETRIEVAL = ("max_suffix", "min_suffix", "max_matches", "min_matches")


def build(target: TargetModel, datastore: str, max_nodes: int | str | None = None, **options) -> SpectraCore:
    """The core with a retriever over the datastore of this folder.

    Args:
        target: whose tokens the store must hold.
        datastore: folder.
        max_nodes: see `SpectraCore`.
        options: those of `CoreOptions` and of `retrieval_options`.
    """
    retrieval = {name: options.pop(name) for name in RETRIEVAL if name in options}
    core = CoreOptions(**options)
    retriever = Retriever(open_datastore(datastore, target), retrieval_options(core.ngram_tokens, **retrieval))
    return SpectraCore(core, max_nodes, retriever)
