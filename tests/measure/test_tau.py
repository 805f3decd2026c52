"""tau of drafters on the beginnings of rows, and the speed of every draft length."""

from __future__ import annotations

import json

import pytest

from spectrain.measure.tables import speed_table
from spectrain.measure.tau import (
    Setting,
    TauSettings,
    continue_rows,
    measure_speed,
    measure_tau,
    significantly_fastest,
    tau_estimate,
)
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.magicdec import MagicDec
from tests.conftest import random_prompts


def drafter_of(gamma: int) -> MagicDec:
    return MagicDec(gamma=gamma, window_tokens=4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parts_of_the_rows_count_as_the_whole(llama_target, temperature):
    rows, setting = random_prompts([14] * 5), Setting(12, temperature)
    drafter = drafter_of(3)
    whole = continue_rows(llama_target, drafter, rows, setting, 10, 2)
    parts = [
        one
        for a, b in ((0, 2), (2, 5))
        for one in continue_rows(llama_target, drafter, rows[a:b], setting, 10, 2, first_number=a)
    ]
    assert [(g.tokens, g.target_forwards) for g in parts] == [(g.tokens, g.target_forwards) for g in whole]
    assert [len(g.tokens) for g in whole] == [10] * 5  # whatever was accepted, and past any end of text
    assert all(3 <= g.target_forwards <= 9 for g in whole)  # at most 3 + 1 tokens per forward


def test_a_table_of_tau_is_strict_json_and_agrees_with_tau_of_one_drafter(llama_target):
    settings = TauSettings((12, 8), 3, 8, (0.0, 1.0), 2, 1)
    rows = random_prompts([14] * 4)
    drafter = drafter_of(3)
    found = measure_tau(llama_target, {"plain": Autoregressive(), "magicdec": drafter}, rows, settings)
    content = json.loads(json.dumps(found, allow_nan=False))
    assert list(content["tau"]["magicdec"]) == [
        "12 tokens, greedy",
        "12 tokens, T=1",
        "8 tokens, greedy",
        "8 tokens, T=1",
    ]
    assert content["tau"]["plain"]["12 tokens, greedy"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert content["settings"]["contexts"] == 3
    assert content["settings"]["gamma"] == {"magicdec": 3}
    alone = continue_rows(llama_target, drafter, rows[:3], Setting(12, 0.0), 8, 2)
    assert content["tau"]["magicdec"]["12 tokens, greedy"] == tau_estimate(alone).as_json()


def test_every_draft_length_is_measured_on_the_same_contexts_and_the_fastest_is_named(llama_target):
    settings = TauSettings((12,), 3, 8, (0.0, 1.0), 2, 2)
    drafter = drafter_of(3)
    drafters = {"autoregressive": Autoregressive(), "magicdec": drafter}
    found = measure_speed(llama_target, drafters, "magicdec", random_prompts([14] * 4), settings)
    content = json.loads(json.dumps(found, allow_nan=False))
    assert drafter.gamma == 3
    assert {name: list(rows) for name, rows in content["gammas"].items()} == {
        "greedy": ["1", "2", "3"],
        "T=1": ["1", "2", "3"],
    }
    for rows in content["gammas"].values():
        taus = [row["tau"]["value"] for row in rows.values()]
        assert all(1 <= tau <= 1 + gamma for gamma, tau in enumerate(taus, 1))
        assert all(0 <= row["acceptance"]["value"] <= 1 for row in rows.values())
    assert content["tokens_per_s"]["magicdec"] == content["gammas"]["greedy"]["3"]["tokens_per_s"]  # one number
    assert content["speeds"]["greedy"]["autoregressive"]["speedup"]["value"] == 1.0
    settings = {"gamma": {"magicdec": 3}, "timed_contexts": 2}
    assert speed_table(content | {"settings": settings, "fastest_gamma": 2})[0].endswith("exported as the default: 2")
    title, table = speed_table(content | {"settings": settings, "fastest_gamma": None})
    assert title.endswith("no gamma is significantly faster than the trained one")
    assert len(table) == 2 * (1 + 3)


def test_without_a_timed_context_no_draft_length_is_the_fastest(llama_target):
    drafter = drafter_of(2)
    drafters, settings = {"plain": Autoregressive(), "magicdec": drafter}, TauSettings((12,), 1, 8, (0.0,), 1, 1)
    found = measure_speed(llama_target, drafters, "magicdec", random_prompts([14]), settings)
    json.dumps(found, allow_nan=False)
    assert found["fastest_gamma"] is None


@pytest.mark.parametrize(("shorter", "exported"), [((9.0, 7.5, 11.0), None), ((9.0, 8.5, 11.0), 1)])
def test_a_draft_length_is_exported_only_where_its_interval_lies_above_that_of_the_longest(shorter, exported):
    rates = [dict(zip(("value", "low", "high"), numbers, strict=True)) for numbers in (shorter, (7.0, 6.0, 8.0))]
    assert significantly_fastest(dict(enumerate(rates, 1))) == exported


def test_a_time_that_is_over_leaves_one_batch_of_each_setting_and_one_context_of_each_method(llama_target):
    drafters = {"autoregressive": Autoregressive(), "magicdec": drafter_of(2)}
    rows, settings = random_prompts([14] * 5), TauSettings((12, 8), 5, 8, (0.0, 1.0), 2, 4)
    whole, past_s = measure_tau(llama_target, drafters, rows, settings), 0.0
    found = measure_tau(llama_target, drafters, rows, settings, ends_s=past_s)
    assert found["settings"]["contexts"] == settings.batch_size
    assert found == measure_tau(llama_target, drafters, rows[: settings.batch_size], settings)
    assert whole["settings"]["contexts"] == len(rows)
    timed = measure_speed(llama_target, drafters, "magicdec", rows, settings, ends_s=past_s)
    assert timed["timed_contexts"] == 1
    assert "on 1 contexts" in speed_table(found | timed)[0]
