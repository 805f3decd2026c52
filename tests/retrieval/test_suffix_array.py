"""Suffix arrays and searches in them against brute force, on random and on highly repetitive texts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain.retrieval.suffix_array import (
    build_suffix_array,
    find_range,
    first_token_bounds,
    longest_suffix,
    next_pairs,
    nth_match,
    token_dtype,
)
from tests.retrieval.reference import index_in_memory, longest, places

VOCAB_SIZE = 4
TOKEN = st.integers(0, VOCAB_SIZE - 1)
DOCUMENTS = st.lists(st.lists(TOKEN, max_size=14), min_size=1, max_size=8)
REPETITIVE = st.builds(
    lambda unit, times, tail: [unit * times + tail, unit * (times // 2)],
    st.lists(TOKEN, min_size=1, max_size=3),
    st.integers(1, 30),
    st.lists(TOKEN, max_size=3),
)
CONTEXT = st.lists(TOKEN, min_size=1, max_size=10)
SHARDS = st.sampled_from([1, 3])  # for each number of them all is compiled anew


def found_suffix(store, context: list[int], least: int, most: int) -> tuple[int, np.ndarray]:
    """The length of the longest known suffix, and its places as ranges [n_shards, 2] of the suffix arrays."""
    ranges = np.zeros((len(store.tokens), 2), dtype=np.int64)
    length, _ = longest_suffix(store.index, np.array(context), least, most, ranges)
    return length, ranges if length else np.zeros_like(ranges)


def indexed(tokens: list[int], vocab_size: int = VOCAB_SIZE):
    text = np.array(tokens, dtype=token_dtype(vocab_size))
    suffixes = build_suffix_array(text)
    return text, suffixes, first_token_bounds(text, vocab_size), next_pairs(text, suffixes)


@settings(deadline=None)
@given(st.lists(st.integers(0, 70000), max_size=60))
def test_suffixes_are_in_order(tokens):
    text, suffixes, _, _ = indexed(tokens, 70001)
    assert suffixes.dtype == np.int32
    assert suffixes.tolist() == sorted(range(len(tokens)), key=lambda i: tokens[i:])
    assert text.tolist() == tokens


def test_more_different_tokens_than_two_bytes_hold():
    tokens = list(range(70000, -1, -1))
    _, suffixes, bounds, _ = indexed(tokens, 70001)
    assert suffixes.tolist() == list(range(70000, -1, -1))
    assert bounds.tolist() == [*range(70002), 70001]


@settings(deadline=None)  # the first call compiles
@given(st.lists(st.integers(0, VOCAB_SIZE), max_size=60), CONTEXT)
def test_ranges_are_those_of_a_scan(tokens, context):
    tokens = [*tokens, VOCAB_SIZE]  # as every document ends
    text, suffixes, *tables = indexed(tokens)
    low, high = find_range(text, suffixes, *tables, np.array(context), 0, len(context))
    expected = [i for i in range(len(tokens)) if tokens[i : i + len(context)] == context]
    assert sorted(suffixes[low:high].tolist()) == expected


@pytest.mark.parametrize("foreign", [-1, VOCAB_SIZE, VOCAB_SIZE + 1, 2**40])
def test_what_is_no_token_is_found_nowhere(foreign):
    store = index_in_memory([[0, 1], [1]], VOCAB_SIZE)
    for context, known in (([foreign], 0), ([0, foreign], 0), ([1, foreign, 1], 1), ([foreign, 0, 1], 2)):
        assert found_suffix(store, context, 1, 8)[0] == known, context


@settings(max_examples=100, deadline=None)
@given(
    documents=st.one_of(DOCUMENTS, REPETITIVE),
    context=CONTEXT,
    limits=st.tuples(st.integers(1, 4), st.integers(1, 12)),
    n_shards=SHARDS,
)
def test_longest_suffix_equals_brute_force_over_all_shards(documents, context, limits, n_shards):
    store = index_in_memory(documents, VOCAB_SIZE, n_shards)
    length, ranges = found_suffix(store, context, *limits)
    assert (length, (ranges[:, 1] - ranges[:, 0]).sum()) == longest(documents, context, *limits)
    found = []
    for i in range((ranges[:, 1] - ranges[:, 0]).sum()):
        shard, position = nth_match(store.index, ranges, i)
        found.append((int(shard), int(position)))
    assert len(set(found)) == len(found)
    for shard, position in found:
        assert store.tokens[shard][position : position + length].tolist() == context[len(context) - length :]


def test_no_match_crosses_the_end_of_a_document():
    store = index_in_memory([[0, 1], [2, 3]], VOCAB_SIZE)
    assert found_suffix(store, [1, 2], 1, 8)[0] == 1
    assert places([[0, 1], [2, 3]], [1, 2]) == []
