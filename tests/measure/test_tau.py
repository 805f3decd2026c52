"""tau of drafters, alone and in pairs: pooled, and resampled by rows."""

from __future__ import annotations

import json

import numpy as np
import pytest

from spectrain.measure.statistics import Estimate
from spectrain.measure.tables import speed_table
from spectrain.measure.tau import (
    Setting,
    TauSettings,
    compare,
    continue_rows,
    counts_of,
    expected_and_measured,
    measure_speed,
    measure_tau,
    tau_estimate,
    tau_of,
    with_pools,
)
from spectrain.methods import magicdec
from spectrain.methods.autoregressive import Autoregressive
from tests.conftest import random_prompts

SHORT, LONG, SAMPLED = Setting(256, 0.0), Setting(512, 0.0), Setting(256, 1.0)
OURS = np.array([[6.0, 2.0], [3.0, 3.0]])  # tau 3 and 1; 9 / 5 pooled
THEIRS = np.array([[4.0, 2.0], [3.0, 3.0]])  # tau 2 and 1; 7 / 5 pooled


def test_tau_is_pooled_and_its_interval_is_that_of_redrawn_rows():
    """Two rows are drawn as (1, 1), (2, 2) or one of each: tau 3, 1, 1.8; each of the first two in a quarter of all."""
    assert tau_estimate(OURS) == Estimate(pytest.approx(1.8), 1.0, 3.0)


def test_a_difference_draws_the_rows_of_both_drafters_together():
    """3 - 2, 1 - 1, 1.8 - 1.4. Drawn apart the ends would be 1 - 2 and 3 - 1."""
    found = tau_estimate(OURS, THEIRS)
    assert found == Estimate(pytest.approx(0.4), pytest.approx(0.0), pytest.approx(1.0))
    assert tau_estimate(THEIRS, OURS).value == pytest.approx(-0.4)


def test_in_pairs_a_difference_is_told_that_would_be_lost_otherwise():
    """Rows differ much, drafters little but everywhere."""
    generator = np.random.default_rng(1)
    tokens = generator.integers(16, 80, 60).astype(float)
    theirs = np.stack([tokens, np.full(60, 16.0)], axis=1)
    ours = theirs + np.array([2.0, 0.0])
    paired, apart = tau_estimate(ours, theirs), tau_estimate(ours, theirs[generator.permutation(60)])
    assert paired.resolved
    assert not apart.resolved
    assert paired.value == pytest.approx(apart.value) == pytest.approx(2 / 16)


@pytest.mark.parametrize(
    ("low", "high", "said"), [(0.1, 0.3, True), (-0.3, -0.1, True), (-0.1, 0.3, False), (0.0, 0.3, False)]
)
def test_a_difference_is_resolved_where_its_interval_leaves_0_out(low, high, said):
    assert Estimate(0.0, low, high).resolved is said


def test_a_difference_without_an_interval_is_not_resolved():
    assert not tau_estimate(OURS[:1], THEIRS[:1]).resolved


def test_pools_add_up_lengths_of_equal_sampling_row_by_row():
    counts = {SHORT: OURS, LONG: THEIRS, SAMPLED: np.ones((2, 2))}
    found = {setting.name: counts for setting, counts in with_pools(counts).items()}
    assert list(found) == ["256 tokens, greedy", "512 tokens, greedy", "256 tokens, T=1", *POOLS]
    assert found["all, greedy"].tolist() == [[10, 4], [6, 6]]
    assert found["all, T=1"].tolist() == [[1, 1], [1, 1]]
    assert found["all"].tolist() == [[11, 5], [7, 7]]


POOLS = ["all, greedy", "all, T=1", "all"]


def test_all_are_held_to_the_first():
    found = compare({"ours": {SHORT: OURS}, "theirs": {SHORT: THEIRS}})
    assert "difference" not in found["ours"]
    assert found["theirs"]["difference"]["256 tokens, greedy"]["value"] == pytest.approx(-0.4)
    assert found["theirs"]["tau"]["all, greedy"]["value"] == pytest.approx(1.4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parts_of_the_rows_count_as_the_whole(llama_target, temperature):
    rows, setting = random_prompts([14] * 5), Setting(12, temperature)
    drafter = magicdec.build(llama_target, gamma=3, window_tokens=4)
    whole = counts_of(continue_rows(llama_target, drafter, rows, setting, 10, 2))
    parts = [
        counts_of(continue_rows(llama_target, drafter, rows[a:b], setting, 10, 2, first_number=a))
        for a, b in ((0, 2), (2, 5))
    ]
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert whole[:, 0].tolist() == [9] * 5  # tokens behind the first, whatever was accepted
    assert (whole[:, 1] >= 3).all()  # at most 3 + 1 a forward
    assert (whole[:, 1] <= 9).all()


def test_one_row_has_no_interval_and_is_strict_json():
    found = json.loads(json.dumps(compare({"ours": {SHORT: OURS[:1]}, "theirs": {SHORT: THEIRS[:1]}}), allow_nan=False))
    assert found["theirs"]["difference"][SHORT.name] == {"value": -1.0, "low": None, "high": None}


def test_settings_are_known_by_their_names():
    for setting in (SHORT, LONG, SAMPLED, Setting(16, 0.7)):
        assert Setting.named(setting.name) == setting
    for name in ("all, greedy", "256 words", "256 tokens, T=x"):
        with pytest.raises(ValueError, match="setting"):
            Setting.named(name)


def test_a_table_of_tau_is_strict_json_and_agrees_with_tau_of_one_drafter(llama_target):
    settings = TauSettings((12, 8), 3, 8, (0.0, 1.0), 2, 1)
    rows = random_prompts([14] * 4)
    drafter = magicdec.build(llama_target, gamma=3, window_tokens=4)
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
    alone = tau_of(llama_target, drafter, rows, settings)
    assert content["tau"]["magicdec"]["12 tokens, greedy"] == alone.as_json()


def test_every_draft_length_is_measured_on_the_same_contexts_and_the_fastest_is_named(llama_target):
    settings = TauSettings((12,), 3, 8, (0.0, 1.0), 2, 2)
    drafter = magicdec.build(llama_target, gamma=3, window_tokens=4)
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
    rates = {gamma: row["tokens_per_s"]["value"] for gamma, row in content["gammas"]["greedy"].items()}
    assert str(content["fastest_gamma"]) == max(rates, key=rates.get)
    assert content["tokens_per_s"]["magicdec"] == content["gammas"]["greedy"]["3"]["tokens_per_s"]  # one number
    assert content["speeds"]["greedy"]["autoregressive"]["speedup"]["value"] == 1.0
    title, table = speed_table(content | {"settings": {"gamma": {"magicdec": 3}, "timed_contexts": 2}})
    assert title.endswith(f": {content['fastest_gamma']}")
    assert len(table) == 2 * (1 + 3)


def test_without_a_timed_context_no_draft_length_is_the_fastest(llama_target):
    drafter = magicdec.build(llama_target, gamma=2, window_tokens=4)
    drafters, settings = {"plain": Autoregressive(), "magicdec": drafter}, TauSettings((12,), 1, 8, (0.0,), 1, 1)
    found = measure_speed(llama_target, drafters, "magicdec", random_prompts([14]), settings)
    json.dumps(found, allow_nan=False)
    assert found["fastest_gamma"] is None
    assert speed_table(found | {"settings": {"gamma": {"magicdec": 2}, "timed_contexts": 1}})[0].endswith("None")


def test_a_training_says_what_it_expected_beside_what_was_measured():
    tau = {"256 tokens, greedy": {"value": 3.5}, "256 tokens, T=1": {"value": 2.684}, "512 tokens, T=1": {"value": 2.5}}
    assert expected_and_measured({"eval/tau_expected": 2.71}, tau) == (
        "expected tau 2.71 (teacher forced on held-out rows, T=1), "
        "measured tau 2.68 (256 tokens, T=1), 2.50 (512 tokens, T=1)"
    )
    assert expected_and_measured({}, tau) is None
    assert expected_and_measured({"eval/tau_expected": 2.71}, {"256 tokens, greedy": {"value": 3.5}}) is None
