"""A simulated method takes the steps that it takes in the real loop."""

from __future__ import annotations

import pytest

from spectrain.decoding import TargetModel, generate
from spectrain.measure.simulation import Text, simulate
from spectrain.methods.pld import PromptLookup
from spectrain.methods.sssd import Sssd, SssdOptions
from tests.conftest import random_prompts, tiny_model
from tests.decoding.reference import greedy_by_full_forwards
from tests.retrieval.reference import make_store


@pytest.mark.parametrize("name", ["pld", "sssd"])
def test_steps_are_those_of_greedy_decoding(name, tmp_path):
    model = tiny_model("llama")
    prompts = random_prompts([30, 7, 19])
    texts = [greedy_by_full_forwards(model, prompt, 40) for prompt in prompts]
    store = make_store(tmp_path, texts[:2], 61)
    method = {"pld": PromptLookup(), "sssd": Sssd(store, SssdOptions(), 24)}[name]
    found = generate(TargetModel(model), method, prompts, 40)
    steps = [simulate(method, Text(p, g.tokens)) for p, g in zip(prompts, found, strict=True)]
    assert [g.tokens for g in found] == texts
    # In the loop the last step's bonus is cut where an accepted token ends the text.
    assert [[a + 1 for a in g.accepted[:-1]] for g in found] == [s[:-1] for s in steps]
    assert [len(text) - 1 for text in texts] == [sum(s) for s in steps]


def test_what_is_never_right_takes_a_step_a_token():
    assert simulate(PromptLookup(), Text([1, 2, 3], [4, 5, 6, 7])) == [1, 1, 1]
