"""Weighted trees of continuations equal counts made by brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain.retrieval.continuation_tree import COUNT, ContinuationTrie
from spectrain.retrieval.fusion import RetrievalOptions, Retriever
from tests.retrieval.reference import continuations, counts_of, index_in_memory, longest, prefix_counts, text_counts
from tests.retrieval.test_suffix_array import CONTEXT, DOCUMENTS, REPETITIVE, SHARDS, TOKEN, VOCAB_SIZE

BRANCH = 4


def retriever(store, **options) -> Retriever:
    return Retriever(store, RetrievalOptions(**{"min_suffix": 1, "max_suffix": 5, "branch_tokens": BRANCH} | options))


@settings(max_examples=100, deadline=None)
@given(documents=st.one_of(DOCUMENTS, REPETITIVE), context=CONTEXT, n_shards=SHARDS)
def test_all_continuations_are_counted(documents, context, n_shards):
    store = index_in_memory(documents, VOCAB_SIZE, n_shards)
    found = retriever(store, max_matches=10**4)
    length = found.gather(np.array(context))
    assert length == longest(documents, context, 1, 5)[0]
    expected = continuations(documents, context[len(context) - length :], BRANCH) if length else []
    assert found.tree[0, COUNT] == len(expected)
    assert counts_of(found.tree) == prefix_counts(expected)


@settings(max_examples=100, deadline=None)
@given(documents=st.one_of(DOCUMENTS, REPETITIVE), context=CONTEXT, enough=st.integers(1, 9))
def test_few_matches_are_added_to_those_of_shorter_suffixes(documents, context, enough):
    store = index_in_memory(documents, VOCAB_SIZE)
    found = retriever(store, max_matches=10**4, min_matches=enough)
    length = found.gather(np.array(context))
    expected = []
    for shorter in range(length, 0, -1):
        one = continuations(documents, context[len(context) - shorter :], BRANCH)
        expected += one
        if len(one) >= enough:
            break
    assert counts_of(found.tree) == prefix_counts(expected)


def test_a_sample_is_taken_at_regular_intervals_of_the_sorted_range():
    documents = [[0, i, 99] for i in range(60)]
    store = index_in_memory(documents, 100)
    found = retriever(store, max_matches=6)
    found.gather(np.array([0]))
    # Halves of sixths of 60 sorted continuations (0, 0), (0, 1), ..; 0 itself follows 0 in the first one only.
    assert sorted(path[0] for path in counts_of(found.tree) if len(path) == 1) == [5, 15, 25, 35, 45, 55]
    first = retriever(store, max_matches=6, first_matches=True)
    first.gather(np.array([0]))
    assert sorted(path[0] for path in counts_of(first.tree) if len(path) == 1) == [0, 1, 2, 3, 4, 5]


def test_the_limit_on_matches_holds_over_all_suffixes():
    store = index_in_memory([[1, 0, 2], *[[0, 3]] * 50], VOCAB_SIZE)
    found = retriever(store, max_matches=10, min_matches=20)
    assert found.gather(np.array([1, 0])) == 2
    assert found.tree[0, COUNT] == 10
    assert counts_of(found.tree) == {(2,): 1, (3,): 9}


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@settings(max_examples=60, deadline=None)
@given(
    text=st.one_of(st.lists(TOKEN, min_size=1, max_size=60), st.builds(lambda u: u * 20, st.lists(TOKEN, min_size=1)))
)
def test_the_trie_counts_what_followed_the_last_tokens(chunk, text):
    trie = ContinuationTrie(text[:1], 3, BRANCH)
    for start in range(1, len(text), chunk):
        trie.extend(text[start : start + chunk])
    assert trie.n_prefixes == min(3, len(text))
    for prefix in range(1, trie.n_prefixes + 1):
        node = trie.cursors[prefix]
        below = counts_of(np.concatenate([trie.nodes[node][None], trie.nodes[1:]])) if node else {}
        assert (trie.nodes[node, COUNT] - 1, below_depth(below, BRANCH)) == text_counts(text, prefix, BRANCH)


def below_depth(counts: dict, depth: int) -> dict:
    """The trie goes deeper below short prefixes."""
    return {path: count for path, count in counts.items() if len(path) <= depth}
