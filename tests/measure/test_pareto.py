"""Fronts, areas and their comparison, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from spectrain.measure.pareto import Fronts, area_below, compare, front
from spectrain.measure.stop_simulation import Counts


def points(*pairs: tuple[float, float]) -> np.ndarray:
    return np.array(pairs, dtype=float).T


def test_the_front_is_the_lower_convex_hull_of_what_nothing_undercuts():
    found = points((0.2, 4.0), (0.4, 2.0), (0.4, 2.5), (0.3, 3.5), (0.6, 1.0), (0.5, 1.6), (0.7, 1.2), (0.2, 4.5))
    # (0.3, 3.5) lies above the line from (0.2, 4) to (0.4, 2), (0.5, 1.6) above that to (0.6, 1); (0.7, 1.2) is beaten.
    assert front(found) == [0, 1, 4]
    assert front(points((0.5, 1.0))) == [0]


def test_the_area_is_that_under_straight_lines_and_level_behind_the_last_point():
    found = points((0.2, 4.0), (0.4, 2.0), (0.6, 1.0))
    assert area_below(found, 0.2, 0.6) == pytest.approx(0.2 * 3 + 0.2 * 1.5)
    assert area_below(found, 0.3, 0.8) == pytest.approx(0.1 * 2.5 + 0.2 * 1.5 + 0.2 * 1)


def test_families_are_compared_over_the_rates_that_all_of_them_reach():
    families = {"a": range(2), "b": range(2, 4)}
    found = Fronts.of(families, points((0.2, 4.0), (0.6, 0.0), (0.4, 3.0), (0.8, 1.0)))
    assert (found.low, found.high) == (0.4, 0.6)
    assert found.areas == pytest.approx({"a": 0.2 * 1.0, "b": 0.2 * 2.5})
    assert found.heights == pytest.approx({"a": 1.0, "b": 2.5})
    apart = Fronts.of(families, points((0.2, 4.0), (0.3, 0.0), (0.4, 3.0), (0.8, 1.0)))
    assert all(map(math.isnan, apart.areas.values()))


def random_counts(n_texts: int, lower: int, seed: int = 0) -> Counts:
    """Three settings of a family, and the same again with `lower` of 100 discarded tokens fewer."""
    rng = np.random.default_rng(seed)
    noise = rng.integers(-5, 6, n_texts)
    calls = np.array([20, 40, 60])[:, None] + noise
    discarded = np.array([90, 50, 30])[:, None] + rng.integers(-10, 11, (3, n_texts))
    both = np.concatenate([discarded, discarded - lower])
    return Counts(np.full(n_texts, 100), np.concatenate([calls, calls]), both, np.zeros((6, n_texts)))


def test_a_family_that_is_better_by_a_constant_differs_by_it():
    found = compare(random_counts(30, 10), {"a": range(3), "b": range(3, 6)}, n_resamples=200)
    for estimate in found.families.loc["b", ["difference", "held_out_difference"]]:
        assert estimate.value == pytest.approx(-0.1)
        assert (estimate.low, estimate.high) == pytest.approx((-0.1, -0.1))  # paired: texts vary, the difference not
    height = found.families.mean_discard_rate["a"]
    assert height.low < height.value < height.high
    assert found.fronts.shares_below() == {"a": 1.0, "b": 1.0}
    worse = compare(random_counts(30, -10), {"a": range(3), "b": range(3, 6)}, n_resamples=2)
    assert worse.fronts.shares_below()["b"] == 0.0


def test_chance_lowers_a_front_of_many_settings_in_sample_but_not_held_out():
    """Forty copies of one setting, alike but for noise: nothing is to be gained."""
    rng = np.random.default_rng(1)
    n_texts, n_copies = 40, 40
    ends = np.array([[90.0] * n_texts, [10.0] * n_texts])
    middle = 50 + rng.normal(0, 20, (n_copies, n_texts))
    calls = np.repeat([[20.0], [60.0]], n_texts, axis=1), np.full((n_copies, n_texts), 40.0)
    discarded, nothing = np.concatenate([ends, middle]), np.zeros((42, n_texts))
    counts = Counts(np.full(n_texts, 100.0), np.concatenate(calls), discarded, nothing)
    found = compare(counts, {"ends": range(2), "many": range(42)}, n_resamples=2)
    assert found.families.difference["many"].value < -0.025
    assert abs(found.families.held_out_difference["many"].value) < 0.012


def test_few_texts_have_no_interval():
    found = compare(random_counts(3, 10), {"a": range(3), "b": range(3, 6)})
    assert found.families.difference["b"].value == pytest.approx(-0.1)
    assert math.isnan(found.families.difference["b"].low)
