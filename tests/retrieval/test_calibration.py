"""Factors equal claims and outcomes counted by hand."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain.retrieval.calibration import FEW_PLACES, calibrate
from spectrain.retrieval.fusion import RetrievalOptions, Retriever
from tests.retrieval.reference import continuations, index_in_memory, longest, prefix_counts, text_counts
from tests.retrieval.test_suffix_array import DOCUMENTS, TOKEN, VOCAB_SIZE

P, S, E = 2, 3, 3
TEXT = st.lists(TOKEN, min_size=2, max_size=14)


def slow(documents, texts) -> dict[str, list[list[float]]]:
    """Every place of the responses, by brute force."""
    claimed, kept = defaultdict(float), defaultdict(int)

    def add(source: str, prefix: int, total: int, counts: dict, coming: tuple[int, ...]) -> None:
        for path, count in counts.items():
            if len(path) <= len(coming):
                claimed[source, prefix, len(path)] += count / total
        for depth in range(1, len(coming) + 1):
            kept[source, prefix, depth] += coming[:depth] in counts

    for prompt, response in texts:
        text = prompt + response
        for place in range(len(prompt) + 1, len(text)):
            coming = tuple(text[place : place + E])
            for prefix in range(1, min(P, place) + 1):
                total, counts = text_counts(text[:place], prefix, E)
                if total:
                    add("input", prefix, total, counts, coming)
            found, total = longest(documents, text[:place], 1, S)
            if found:
                context = text[place - found : place]
                add("datastore", found, total, prefix_counts(continuations(documents, context, E)), coming)
    few = FEW_PLACES
    return {
        source: [
            [(kept[source, p, d] + few) / (claimed[source, p, d] + few) for d in range(1, E + 1)]
            for p in range(1, n + 1)
        ]
        for source, n in (("input", P), ("datastore", S))
    }


@settings(max_examples=80, deadline=None)
@given(documents=DOCUMENTS, texts=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
def test_factors_equal_brute_force(documents, texts):
    store = index_in_memory(documents, VOCAB_SIZE)
    retriever = Retriever(store, RetrievalOptions(1, S, E, max_matches=10**4))
    found = calibrate(texts, retriever, P, E)
    expected = slow(documents, texts)
    for source, values in expected.items():
        np.testing.assert_allclose(found[source], values, atol=1e-4)


def test_a_source_that_is_always_right_and_one_that_never_is():
    store = index_in_memory([[1, 3]] * 3, VOCAB_SIZE)
    retriever = Retriever(store, RetrievalOptions(1, 1, 1))
    text = ([0], [1, 2] * 400)  # 2 follows 1, never 3
    found = calibrate([text], retriever, 1, 1)
    assert found["input"][0][0] == pytest.approx(1, abs=0.01)
    assert found["datastore"][0][0] < 0.06
