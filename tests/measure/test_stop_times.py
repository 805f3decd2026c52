"""The regression of seconds, and rates that follow from it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from pandas import DataFrame

from spectrain.measure.stop_results import measured_speedup
from spectrain.measure.stop_times import TimedRow, fit_times

DRAFT_S = {"fixed gamma": 0.002, "specdecpp": 0.0025}


def row(question: int, family: str, calls: int, drafts: int, noise: float = 0.0, setting: str = "x") -> TimedRow:
    seconds = 0.01 * calls + DRAFT_S.get(family, 0.0) * drafts + noise
    return TimedRow("regression", question, setting, family, 60, 5, calls, drafts, seconds)


def rows(noise: float) -> DataFrame:
    rng = np.random.default_rng(0)
    return DataFrame(
        row(q, family, int(rng.integers(10, 60)), int(rng.integers(20, 200)), noise * rng.normal())
        for q in range(12)
        for family in DRAFT_S
        for _ in range(3)
    )


def test_the_regression_recovers_known_times():
    times = fit_times(rows(0.0))
    assert times.target_s == pytest.approx(0.01)
    assert times.draft_s == pytest.approx(DRAFT_S)
    assert (times.r2, times.r2_uncentred) == pytest.approx((1, 1))


def test_noise_widens_the_intervals_which_cover_the_truth():
    times = fit_times(rows(0.02))
    assert 0.9 < times.r2 < times.r2_uncentred < 1
    for name, (low, high) in times.intervals().items():
        assert low < {"target": 0.01, **DRAFT_S}[name] < high


def test_plain_decoding_has_a_time_of_the_target_alone():
    times = fit_times(DataFrame(row(q, "autoregressive", 63, 0, 0.001 * q) for q in range(4)))
    assert times.target_s == pytest.approx(0.01 + 0.0015 / 63)
    assert math.isnan(times.draft_s["autoregressive"])
    assert math.isnan(times.r2)  # all alike: there is nothing to explain
    assert times.r2_uncentred > 0.99


def test_predicted_rates_are_tokens_over_seconds_and_speedups_are_on_the_same_questions():
    times = fit_times(rows(0.0))
    predicted = times.predicted_rate("specdecpp", np.array([60, 60]), np.array([80, 120]), np.array([10, 10]))
    assert predicted.value == pytest.approx(120 / (0.0025 * 200 + 0.01 * 20))
    assert predicted.low <= predicted.value <= predicted.high
    fast, slow = (DataFrame(row(q, "fixed gamma", calls * (q + 1), 0) for q in range(3)) for calls in (10, 20))
    ratio = measured_speedup(fast, slow)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2, 2, 2))  # on the same questions
    assert math.isnan(measured_speedup(fast[:1], slow).low)
