"""Simulated stop rules against the real loop: equal count by count when greedy, equal in law when sampled."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spectrain.decoding import Sampling, TargetModel, generate
from spectrain.measure.draft_paths import DraftPaths, draft_paths
from spectrain.measure.simulation import Text
from spectrain.measure.stop_simulation import Counts, Setting, simulate_oracle, simulate_stops
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.specdecpp import OpenDrafter
from spectrain.methods.stopping import OracleStop
from spectrain.models.draft_states import ModelStates, SpireStates
from spectrain.models.head import AcceptanceHead, DrafterFacts, HeadConfig
from tests.conftest import noisy_copy, random_prompts, tiny_model
from tests.models.test_spire import make

MAX_CANDIDATES = 7
SETTINGS = (
    *(Setting("fixed gamma", None, None, gamma) for gamma in (1, 3, 7)),
    *(Setting("confidence", None, None, threshold) for threshold in (0.3, 0.9)),
    *(Setting("entropy", None, None, threshold) for threshold in (0.3, 1.5)),
    *(Setting("specdecpp", "b", judge, h) for h in (0.3, 0.6, 0.9) for judge in ("current", "previous")),
)


SPIRE = {
    "spire": {},
    "spire_alone": {"target_activations": False, "feedback": False},
    "spire_previous": {"input": "projected", "head": "target", "previous_state": True},
}


def random_head(size: int, seed: int) -> AcceptanceHead:
    head = AcceptanceHead(HeadConfig(size, 1))
    torch.manual_seed(seed)
    torch.nn.init.normal_(head.blocks[0].weight, std=0.3)
    torch.nn.init.normal_(head.output.weight, std=0.4)
    torch.nn.init.constant_(head.output.bias, 1.5)
    return head


def opened(kind: str, scale: float = 0.03) -> tuple[TargetModel, OpenDrafter]:
    if kind.startswith("spire"):
        target, drafter = make(n_target_layers=2, **SPIRE[kind])
        states = SpireStates(drafter, 4)
    else:
        target = TargetModel(tiny_model(num_hidden_layers=1))
        states = ModelStates(TargetModel(noisy_copy(target.model, scale)), target.vocab_size)
    return target, OpenDrafter(DrafterFacts(kind, "tiny", "0"), states, draft_dtype="float32")


def real(target, method, prompt, max_new_tokens, stops) -> tuple[tuple[int, ...], list[int]]:
    """One prompt through the loop: its counts as `numbers` gives them, and its text."""
    method.stop.draft_forwards = 0
    (found,) = generate(target, method, [prompt], max_new_tokens, stop_token_ids=stops)
    discarded = sum(found.drafted) - sum(found.accepted)
    return (len(found.tokens) - 1, discarded, found.target_forwards, method.stop.draft_forwards), found.tokens


def paths_of(
    target, drafter, heads, prompt, text, max_new_tokens, sampling, seed=0, rows=5, gamma=MAX_CANDIDATES, stops=None
) -> DraftPaths:
    return draft_paths(
        *(target, drafter, heads, Text(prompt, text), gamma, max_new_tokens, sampling),
        *(np.random.default_rng(seed), rows, stops),
    )


def numbers(counts: Counts, i: int = 0) -> tuple[int, ...]:
    """Of one text under setting i."""
    return (
        int(counts.tokens[0]),
        *(int(one[i, 0]) for one in (counts.discarded, counts.target_calls, counts.draft_forwards)),
    )


def greedy_texts(target, stop_early: bool, n_tokens: int = 13) -> list[tuple[list[int], list[int], int, list[int]]]:
    """(prompt, text, max_new_tokens, stop ids): texts that a token ends, at different places, or their length."""
    found = []
    for number, prompt in enumerate(random_prompts([9, 14, 5, 21])):
        (whole,) = generate(target, Autoregressive(), [prompt], n_tokens + number, stop_token_ids=())
        stops = [whole.tokens[6 + 2 * number]] if stop_early else []
        (text,) = generate(target, Autoregressive(), [prompt], n_tokens + number, stop_token_ids=stops)
        if len(text.tokens) > 1:
            found.append((prompt, text.tokens, n_tokens + number, stops))
    assert len(found) > 2
    return found


@pytest.mark.parametrize("stop_early", [False, True], ids=["length", "eos"])
@pytest.mark.parametrize(
    ("kind", "min_candidates"),
    [("vanilla", 1), ("vanilla", 3), ("spire", 1), ("spire_alone", 3), ("spire_previous", 1)],
)
def test_greedy_counts_are_those_of_the_real_loop(kind, min_candidates, stop_early):
    target, drafter = opened(kind)
    heads = {name: random_head(drafter.states.hidden_size, seed) for seed, name in enumerate("ab")}
    seen = set()
    for prompt, text, max_new_tokens, stops in greedy_texts(target, stop_early):
        paths = paths_of(target, drafter, list(heads.values()), prompt, text, max_new_tokens, Sampling(), stops=stops)
        counts = simulate_stops([paths], SETTINGS, list(heads), MAX_CANDIDATES, min_candidates)
        for i, setting in enumerate(SETTINGS):
            method = setting.drafter(drafter, heads, MAX_CANDIDATES, min_candidates)
            expected, written = real(target, method, prompt, max_new_tokens, stops)
            assert written == text
            assert numbers(counts, i) == expected, str(setting)
            seen.add(numbers(counts, i))
    assert len(seen) > 15


@pytest.mark.parametrize("stop_early", [False, True], ids=["length", "eos"])
def test_the_oracle_discards_nothing_and_calls_the_target_as_often_as_theorem_4_1_says(stop_early):
    """|S| calls, one more where the last token is not in S; simulated, and in the real loop."""
    target, drafter = opened("vanilla", scale=0.02)
    missing_last = set()
    for prompt, text, max_new_tokens, stops in greedy_texts(target, stop_early, n_tokens=31):
        guesses = drafter.states.logits(drafter.states.hidden(torch.tensor([prompt + text]))[0]).argmax(-1).tolist()
        wrong = [i for i in range(1, len(text)) if guesses[len(prompt) + i - 1] != text[i]]
        in_s = bool(wrong) and wrong[-1] == len(text) - 1
        missing_last.add(in_s)
        paths = paths_of(target, drafter, [], prompt, text, max_new_tokens, Sampling())
        assert [i + 1 for i, accepted in enumerate(paths.accepted) if accepted == 0] == wrong
        method = drafter.with_stop(max_new_tokens, OracleStop([prompt + text]))
        expected, written = real(target, method, prompt, max_new_tokens, stops)
        assert written == text
        assert numbers(simulate_oracle([paths])) == expected
        _, discarded, target_calls, _ = expected
        assert discarded == 0
        assert target_calls == len(wrong) + (not in_s)
    assert stop_early or missing_last == {True, False}


def test_a_spire_oracle_is_simulated_within_its_longest_draft():
    target, drafter = opened("spire")
    for prompt, text, max_new_tokens, stops in greedy_texts(target, stop_early=False):
        paths = paths_of(target, drafter, [], prompt, text, max_new_tokens, Sampling())
        method = drafter.with_stop(MAX_CANDIDATES, OracleStop([prompt + text]))
        expected, _ = real(target, method, prompt, max_new_tokens, stops)
        assert numbers(simulate_oracle([paths], MAX_CANDIDATES)) == expected
        assert expected[1] == 0  # discarded


@pytest.mark.parametrize("kind", ["vanilla", "spire"])
def test_sampled_rates_are_those_of_the_real_loop(kind):
    """Means over many texts of one prompt, by the real loop and by simulation on texts of their own."""
    target, drafter = opened(kind, scale=0.1)
    sampling, max_new_tokens, n_texts, prompt = Sampling(temperature=1.0, top_k=20), 10, 160, random_prompts([6])[0]
    gamma = 4
    stops = [7, 11, 19, 23]
    heads = {"b": random_head(drafter.states.hidden_size, 1)}
    settings = [
        Setting("fixed gamma", None, None, 3),
        Setting("entropy", None, None, 1.5),
        Setting("specdecpp", "b", "current", 0.6),
    ]
    numbers_of = list(range(n_texts))
    options = {"stop_token_ids": stops, "batch_size": 40}
    texts = generate(target, Autoregressive(), [prompt] * n_texts, max_new_tokens, sampling, seed=1, **options)
    simulated = []
    for number, generation in zip(numbers_of, texts, strict=True):
        if len(generation.tokens) == 1:
            simulated.append(np.zeros((len(settings), 3)))
            continue
        work = (target, drafter, list(heads.values()), prompt, generation.tokens, max_new_tokens, sampling)
        paths = paths_of(*work, seed=number, rows=64, gamma=gamma, stops=stops)
        counts = simulate_stops([paths], settings, list(heads), gamma)
        tokens = np.full(len(settings), counts.tokens[0])
        simulated.append(np.stack([tokens, counts.discarded[:, 0], counts.target_calls[:, 0]], axis=1))
    for i, setting in enumerate(settings):
        method = setting.drafter(drafter, heads, gamma)
        run = generate(target, method, [prompt] * n_texts, max_new_tokens, sampling, seed=2, **options)
        measured = np.array([[len(g.tokens) - 1, sum(g.drafted) - sum(g.accepted), g.target_forwards] for g in run])
        ours = np.array(simulated)[:, i]
        spread = np.sqrt((ours.var(0) + measured.var(0)) / n_texts)
        assert np.all(np.abs(ours.mean(0) - measured.mean(0)) < 3.5 * spread), (str(setting), ours.mean(0), spread)
        assert ours[:, 1].sum() > n_texts / 4  # something was rejected
        assert (ours[:, 0] - ours[:, 2]).sum() > n_texts / 4  # and something accepted
