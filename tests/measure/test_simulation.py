"""A simulated method takes the steps that it takes in the real loop."""

from __future__ import annotations

import numpy as np
import pytest

from spectrain.decoding import Drafter, Sampling, TargetModel, generate
from spectrain.measure.simulation import Text, simulate
from spectrain.methods.pld import PromptLookup
from spectrain.methods.sssd import Sssd, SssdOptions
from tests.conftest import random_prompts, tiny_model
from tests.decoding.reference import greedy_by_full_forwards
from tests.retrieval.reference import make_store


def emitted(method: Drafter, text: Text) -> list[int]:
    """Tokens of each step."""
    return simulate(method, text, [64])[0][:, 0].tolist()


@pytest.mark.parametrize("name", ["pld", "sssd"])
def test_steps_are_those_of_greedy_decoding(name, tmp_path):
    model = tiny_model("llama")
    prompts = random_prompts([30, 7, 19])
    texts = [greedy_by_full_forwards(model, prompt, 40) for prompt in prompts]
    store = make_store(tmp_path, texts[:2], 61)
    method = {"pld": PromptLookup(), "sssd": Sssd(store, SssdOptions(), 24)}[name]
    found = generate(TargetModel(model), method, prompts, 40)
    steps = [emitted(method, Text(p, g.tokens)) for p, g in zip(prompts, found, strict=True)]
    assert [g.tokens for g in found] == texts
    # In the loop the last step's bonus is cut where an accepted token ends the text.
    assert [[a + 1 for a in g.accepted[:-1]] for g in found] == [s[:-1] for s in steps]
    assert [len(text) - 1 for text in texts] == [sum(s) for s in steps]


def test_steps_are_those_of_sampled_decoding(tmp_path):
    target, prompts = TargetModel(tiny_model("llama")), random_prompts([30, 7, 19])
    store = make_store(tmp_path, prompts, 61)
    method = Sssd(store, SssdOptions(), 24)
    found = generate(target, method, prompts, 40, Sampling(temperature=0.7), stop_token_ids=())
    steps = [emitted(method, Text(p, g.tokens)) for p, g in zip(prompts, found, strict=True)]
    assert [[a + 1 for a in g.accepted[:-1]] for g in found] == [s[:-1] for s in steps]
    assert max(map(max, steps)) > 1


@pytest.mark.parametrize("max_nodes", [2, 3, 8, 24])
def test_a_budget_takes_the_first_nodes_of_larger_trees(max_nodes, tmp_path):
    known = np.random.default_rng(0).integers(0, 4, size=160).tolist()
    text, store = Text(known[:40], known[40:]), make_store(tmp_path, [known[20:60], known[90:130]], 61)
    options = SssdOptions(branch_tokens=6)  # by default, small trees have short branches
    budgets = [2, 3, 8, 24]
    steps = simulate(Sssd(store, options, 24), text, budgets)[budgets.index(max_nodes)]
    alone = simulate(Sssd(store, options, max_nodes), text, [max_nodes])[0]
    assert steps.tolist() == alone.tolist()
    assert steps[:, 1].max() == max_nodes


def test_what_is_never_right_takes_a_step_a_token():
    assert simulate(PromptLookup(), Text([1, 2, 3], [4, 5, 6, 7]), [64])[0].tolist() == [[1, 1]] * 3
