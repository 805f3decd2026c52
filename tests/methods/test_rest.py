"""REST: first hit wins, the likeliest nodes by prefix count, the reference's biased sample."""

from __future__ import annotations

from spectrain.methods.rest import Rest
from spectrain.retrieval.candidate_tree import CandidateTree
from spectrain.retrieval.fusion import RetrievalOptions
from spectrain.target import Source
from tests.retrieval.reference import make_store

V = 200


def drafted(method: Rest, text: list[int], max_nodes: int = 65, max_depth: int = 50) -> CandidateTree:
    tree = CandidateTree(text[-1], max_nodes, max_depth)
    method.propose_row(method.new_row(text), tree, 0)
    return tree


def rest(store, max_nodes: int = 65, **options) -> Rest:
    defaults = {"min_suffix": 2, "max_suffix": 16, "branch_tokens": 10, "max_matches": 5000, "first_matches": True}
    return Rest(store, RetrievalOptions(**defaults | options), max_nodes)


def test_the_likeliest_nodes_are_kept(tmp_path):
    store = make_store(tmp_path, [[0, 1, 5, 6], [0, 1, 5, 7], [0, 1, 4], [0, 1, 4, 8]], V)
    tree = drafted(rest(store), [0, 1], max_nodes=4)
    assert tree.tokens == [1, 4, 5, 6]  # 4 and 5 twice each, then one of those seen once
    assert tree.parents == [-1, 0, 0, 2]
    assert set(tree.sources[1:]) == {Source.DATASTORE}


def test_only_the_first_matches_in_sorted_order_are_read(tmp_path):
    store = make_store(tmp_path, [[0, 1, token] for token in range(100, 150)], V)
    tree = drafted(rest(store, max_matches=5), [0, 1])
    assert tree.tokens == [1, 100, 101, 102, 103, 104]


def test_every_shard_gives_its_share_of_the_matches(tmp_path):
    others = [[9]] * 40  # so that shards have 30 documents each, 30, 15 and 5 of them matches
    matches = [[0, 1, token] for token in [*range(100, 130), *range(130, 145), *range(150, 155)]]
    documents = [*matches[:45], *others[:15], *matches[45:], *others[15:]]
    store = make_store(tmp_path, documents, V, n_shards=3)
    tree = drafted(rest(store, max_matches=10), [0, 1])
    assert tree.tokens == [1, *range(100, 106), *range(130, 133), 150]
    assert drafted(rest(store), [0, 1]).tokens == [1, *sorted(token for _, _, token in matches)]
