"""SPECTRA with its retrieval module: G guesses in all, the core's first."""

from __future__ import annotations

import pytest

from spectrain.methods import spectra_retrieval
from spectrain.methods.spectra_core import CoreOptions, SpectraCore
from spectrain.retrieval.candidate_tree import CandidateTree
from spectrain.retrieval.fusion import RetrievalOptions, Retriever
from spectrain.target import Source, TargetModel
from tests.conftest import tiny_model
from tests.retrieval.reference import make_store

V = 200
FAN = [[0, token, 50, 51] for token in range(100, 130)]  # 30 different tokens follow 0


def leaves(tree: CandidateTree) -> int:
    return len(set(range(1, len(tree.tokens))) - set(tree.parents))


def test_retrieval_alone_proposes_g_branches_of_n_tokens(tmp_path):
    make_store(tmp_path, FAN, V)
    method = spectra_retrieval.build(None, str(tmp_path), max_guesses=4, ngram_tokens=2)
    assert method.max_nodes == 1 + 4 * 2
    tree = CandidateTree(0, method.max_nodes, 50)
    method.propose_row(method.new_row([7, 0]), tree, 0)
    assert leaves(tree) == 4
    assert tree.depth == 2
    assert set(tree.sources[1:]) == {Source.DATASTORE}


@pytest.mark.parametrize(("core_guesses", "retrieved"), [(0, 5), (2, 3), (4, 1), (9, 1)])  # the core: G - 1
def test_retrieval_fills_what_the_core_leaves_of_g(tmp_path, core_guesses, retrieved):
    options = CoreOptions(ngram_tokens=3, pool_sequences=2, max_guesses=5, backward=False)
    retriever = Retriever(make_store(tmp_path, FAN, V), RetrievalOptions(1, 16, 3))
    method = SpectraCore(options, None, retriever)
    method.start(TargetModel(tiny_model("llama", vocab_size=V)), type("Cache", (), {"max_rows": 1})())
    row = method.new_row([3, 4, 0])
    for i in range(core_guesses):
        row.ngrams.enter((0, 10 + i, 20))
    tree = CandidateTree(0, method.max_nodes - method.probe_shape.n_probes, 50)
    method.propose_row(row, tree, 0)
    by_source = [s for s, p in zip(tree.sources, tree.parents, strict=True) if p == 0]
    assert by_source.count(int(Source.DATASTORE)) == retrieved
    assert by_source == sorted(by_source, key=lambda s: s == Source.DATASTORE)  # the core's come first


def test_the_retriever_reads_more_of_the_text_than_the_core_keeps(tmp_path):
    store = make_store(tmp_path, [[*range(1, 9), 99], *[[8, 77]] * 5], V)
    retriever = Retriever(store, RetrievalOptions(1, 8, 2))
    method = SpectraCore(CoreOptions(ngram_tokens=2, pool_sequences=1, max_guesses=3), None, retriever)
    method.start(TargetModel(tiny_model("llama", vocab_size=V)), type("Cache", (), {"max_rows": 1})())
    row = method.new_row([1, 2, 3, 4, 5, 6])
    row.extend([7, 8])
    tree = CandidateTree(8, 20, 50)
    method.propose_row(row, tree, 0)
    assert 99 in tree.tokens
    assert 77 not in tree.tokens
