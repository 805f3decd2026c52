"""Measures worked out by hand."""

import math

import numpy as np
import pytest

from spectrain.measure import statistics as metrics


def test_acceptance_length_pools_steps():
    assert metrics.acceptance_length([10, 20], [10, 5]).value == 30 / 15


def test_autoregressive_has_one_and_no_spread():
    estimate = metrics.acceptance_length([3, 8, 20], [3, 8, 20])
    assert (estimate.value, estimate.low, estimate.high) == (1.0, 1.0, 1.0)


def test_question_that_ended_at_once_does_not_count():
    estimate = metrics.acceptance_length([0, 8], [0, 4])
    assert estimate.value == 2.0
    assert math.isnan(estimate.low)


def test_nothing_measured_is_nan():
    assert math.isnan(metrics.acceptance_length([], []).value)
    assert math.isnan(metrics.acceptance_length([0], [0]).value)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        emitted = [round(20 * rate) for rate in rng.normal(3.0, 0.5, size=40)]
        estimate = metrics.acceptance_length(emitted, [20] * 40, n_resamples=300, seed=trial)
        covered += estimate.low <= 3.0 <= estimate.high
    assert 0.88 <= covered / 200 <= 0.99


def test_median_of_equal_measurements_has_no_spread_and_of_others_lies_within_them():
    assert metrics.median([2.0] * 5) == metrics.Estimate(2.0, 2.0, 2.0)
    estimate = metrics.median([1.0, 5.0, 2.0, 4.0, 3.0])
    assert estimate.value == 3.0
    assert 1.0 <= estimate.low < 3.0 < estimate.high <= 5.0


def test_bootstrap_draws_as_numpy_does_and_pairs_its_samples():
    rng = np.random.default_rng(3)
    a, b, c, d = rng.integers(1, 50, (4, 60)).astype(float)
    picks = np.random.default_rng(7).integers(60, size=(500, 60))
    sums = [one[picks].sum(axis=1) for one in (a, b, c, d)]
    options = {"n_resamples": 500, "seed": 7}
    for estimate, drawn, value in (
        (metrics.ratio_of_sums(a, b, **options), sums[0] / sums[1], a.sum() / b.sum()),
        (
            metrics.speedup(a, b, c, d, **options),
            (sums[0] / sums[1]) / (sums[2] / sums[3]),
            (a.sum() / b.sum()) / (c.sum() / d.sum()),
        ),
        (metrics.median(a, **options), np.median(a[picks], axis=1), np.median(a)),
    ):
        assert estimate.value == pytest.approx(value)
        assert [estimate.low, estimate.high] == pytest.approx(np.quantile(drawn, [0.025, 0.975]))


def test_resamples_without_a_denominator_do_not_count():
    estimate = metrics.ratio_of_sums([2.0, 0.0], [1.0, 0.0])
    assert (estimate.value, estimate.low, estimate.high) == (2.0, 2.0, 2.0)
    assert math.isnan(metrics.ratio_of_sums([0.0, 0.0], [0.0, 0.0]).value)


def test_an_estimate_without_an_interval_is_strict_json():
    assert metrics.Estimate(1.5).as_json() == {"value": 1.5, "low": None, "high": None}
