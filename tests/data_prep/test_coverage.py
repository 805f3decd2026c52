"""The order of `rank=acceptance`, against a slow count of what each document adds."""

from __future__ import annotations

import numpy as np
import pytest

from data_prep.coverage import NGRAMS, Samples, acceptance_places, ngram_keys


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.uint16)


def grams(tokens, n: int) -> list[tuple[int, ...]]:
    return [tuple(map(int, tokens[i : i + n])) for i in range(len(tokens) - n + 1)]


def slow_order(answers, documents) -> list[int]:
    """Try every document that is left, each time anew."""
    needed: dict[tuple, int] = {}
    for prompt, answer in answers:
        text = [*prompt, *answer]
        for n in NGRAMS:
            for place, gram in enumerate(grams(text, n)):
                if place + n > len(prompt) and gram not in grams(text, n)[:place]:
                    needed[gram] = needed.get(gram, 0) + 1
    offers = [{g for n in NGRAMS for g in grams(d, n) if g in needed} for d in documents]

    def worth(chosen) -> float:
        counts = [sum(gram in offers[i] for i in chosen) for gram in needed]
        return sum(w * m / (m + 1) for w, m in zip(needed.values(), counts, strict=True))

    order: list[int] = []
    while len(order) < len(documents):
        left = [i for i in range(len(documents)) if i not in order]
        added = [(worth([*order, i]) - worth(order)) / len(documents[i]) for i in left]
        order.append(left[int(np.argmax(np.round(added, 12)))])
    return order


@pytest.mark.parametrize("seed", range(4))
def test_the_order_is_that_of_a_slow_greedy_search(seed):
    rng = np.random.default_rng(seed)
    draw = lambda least: rng.integers(0, 9, size=rng.integers(least, 14)).astype(np.uint16)  # noqa: E731
    answers = [(draw(0), draw(1)) for _ in range(5)]
    documents = [draw(1) for _ in range(12)]
    places = acceptance_places(Samples.of(answers), documents)
    assert np.argsort(places).tolist() == slow_order(answers, documents)


def test_a_copy_comes_after_a_text_that_adds_something():
    samples = Samples.of([(ids(9), ids(1, 2, 3, 4)), (ids(9), ids(1, 2, 3)), (ids(8), ids(5, 6, 7))])
    copies, other, foreign = ids(1, 2, 3), ids(5, 6, 7), ids(7, 7, 7)
    assert acceptance_places(samples, [foreign, copies, copies, other]).tolist() == [3, 0, 2, 1]


def test_what_its_own_text_has_said_is_not_needed():
    said_before = Samples.of([(ids(1, 2, 3), ids(1, 2, 3)), (ids(4, 5), ids(6, 6, 6, 6))])
    wanted = [(3, 1), (3, 1, 2), (2, 3, 1), (5, 6), (4, 5, 6), (6, 6), (5, 6, 6), (6, 6, 6)]
    assert len(said_before.needed) == len(wanted)
    for gram in wanted:
        assert len(said_before.offered(ids(*gram))) == len({g for n in NGRAMS for g in grams(gram, n) if g in wanted})
    assert not len(said_before.offered(ids(1, 2, 3)))


def test_tokens_of_large_vocabularies_have_keys_of_their_own():
    most = 2**21 - 1
    tokens = np.array([0, most, 0, most, most], dtype=np.uint32)
    assert len(set(ngram_keys(tokens, 3).tolist())) == 3
    assert len(ngram_keys(tokens[:1], 2)) == 0


def test_answers_without_a_token_and_short_documents_are_no_trouble():
    assert acceptance_places(Samples.of([(ids(), ids(1))]), [ids(1), ids(2, 1)]).tolist() == [0, 1]
