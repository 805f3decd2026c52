"""Prompt lookup: what it copies, against a slow search and Hugging Face's own, and that it changes no text."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from spectrain.decoding import generate
from spectrain.methods.pld import PromptLookup
from spectrain.retrieval.ngram_table import PositionTable
from spectrain.target import Source
from tests.conftest import random_prompts
from tests.methods.drafts import proposed

TEXTS = st.lists(st.integers(0, 4), min_size=2, max_size=80)


def test_copies_what_followed_the_longest_suffix():
    tree = proposed(PromptLookup(draft_tokens=4), [[1, 2, 3, 4, 5, 6, 7, 2, 3, 9, 1, 2, 3]])
    assert tree.tokens.tolist() == [[3, 4, 5, 6, 7]]  # behind 1 2 3, although 2 3 stood again later
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3]]
    assert tree.source.tolist() == [[Source.ROOT] + [Source.INPUT] * 4]
    assert tree.is_chain


def test_a_copy_goes_on_past_the_end_of_the_text():
    text = [[3, 5, 6, 3, 7, 8, 3]]
    assert proposed(PromptLookup(draft_tokens=7), text).tokens.tolist() == [[3, 7, 8, 3, 7, 8, 3, 7]]
    table = PositionTable([1, 2, 3, 4, 5], past_end=True)
    assert table.continuation(7, (2,))[0] == [3, 4, 5, 2, 3, 4, 5]  # a guessed token behind the text is copied, too
    assert table.continuation(3, (2,))[0] == [3, 4, 5]
    assert table.continuation(3, (9,))[0] == []


def test_guesses_end_with_the_room_and_the_budget():
    text = [[1, *range(20, 60), 1]]
    assert proposed(PromptLookup(), text).shape == (1, 11)
    assert proposed(PromptLookup(max_nodes=6), text).shape == (1, 6)
    assert proposed(PromptLookup(), text, room=4).shape == (1, 4)  # three guesses and the bonus
    assert proposed(PromptLookup(), text, room=1).shape == (1, 1)


def slow_lookup(text: list[int], match: str, past_end: bool) -> list[int]:
    """The sequence is searched from its end (latest) or its beginning, suffix by suffix, and copied token by token."""
    for n in (3, 2, 1):
        places = range(len(text) - n)  # the token behind the occurrence is text[place + n]
        for place in reversed(places) if match == "latest" else places:
            if text[place : place + n] == text[len(text) - n :] and n < len(text):
                longer = list(text)
                for i in range(10 if past_end else min(10, len(text) - place - n)):
                    longer.append(longer[place + n + i])
                return longer[len(text) :]
    return []


@given(text=TEXTS, match=st.sampled_from(["latest", "earliest"]), past_end=st.booleans())
def test_equals_a_slow_search(text, match, past_end):
    found = proposed(PromptLookup(match=match, past_end=past_end), [text]).tokens
    assert found.tolist() == [[text[-1], *slow_lookup(text, match, past_end)]]


@given(text=TEXTS)
def test_earliest_equals_hugging_face(text):
    theirs = PromptLookupCandidateGenerator(num_output_tokens=10, max_matching_ngram_size=3, max_length=1000)
    candidates, _ = theirs.get_candidates(torch.tensor([text]))
    ours = proposed(PromptLookup(match="earliest", past_end=False), [text]).tokens
    assert ours.tolist() == [[text[-1], *candidates[0, len(text) :].tolist()]]


def test_rows_that_join_and_leave_teach_what_they_teach_alone(llama_target):
    """How often candidates were right is counted for the row that drafted them, whatever its place in the batch."""
    texts = [row[:6] * 3 + row for row in random_prompts([9, 20, 7, 13, 11], seed=2)]

    def learnt(batch_size: int) -> list[list[float]]:
        drafter = PromptLookup(max_nodes=4)
        drafter.rank()
        generate(llama_target, drafter, texts, 30, batch_size=batch_size)
        hits, trials, _ = drafter.ranking.learnt
        assert 0 < hits.sum() < trials.sum()
        return np.stack([hits, trials]).tolist()

    alone = learnt(1)
    assert learnt(2) == learnt(3) == alone
