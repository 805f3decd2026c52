"""Compare families of settings by verification rate against discard rate (SpecDec++, section 5.1 and Figure 3).

Both rates are per emitted token; lower is better. The first token of each text is left out, because prefill draws it.
A random choice between two settings, prompt by prompt, attains every point of the line between them. So the front of a
family is the lower convex hull of its points, and stays level behind the setting that discards least. Families are
compared by the area under their fronts over the verification rates that all of them reach.

A family with more settings finds a lower front by chance alone. So areas come in two kinds: in sample, and held out.
For the held-out area, the settings on the front are chosen on every other text and their rates are taken from the
rest, whether they form a front there or not; both ways round, averaged.

Letters: Q texts, S settings, F families, B bootstrap resamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pandas import DataFrame

from spectrain.measure.statistics import Estimate, bootstrap_samples
from spectrain.measure.stop_simulation import Counts

GRID = 1001  # places where fronts are compared point by point
ESTIMATES = ("mean_discard_rate", "held_out_mean_discard_rate", "difference", "held_out_difference")


def front(points: np.ndarray) -> list[int]:
    """Indices of the points [2, S] (verification, discard) on the front, in order of rising verification rates."""
    order = np.lexsort((points[1], points[0]))
    least = np.minimum.accumulate(points[1, order])
    better = np.append(True, points[1, order][1:] < least[:-1])  # points that no point to their left undercuts
    hull: list[int] = []
    for i in order[better].tolist():
        while len(hull) > 1 and _turn(*(points[:, j] for j in (*hull[-2:], i))) <= 0:
            hull.pop()
        hull.append(i)
    return hull


def _turn(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> float:
    """Above 0 where a, b, c turn left: b lies below the line from a to c."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


def area_below(corners: np.ndarray, low: float, high: float) -> float:
    """The area under straight lines between points [2, S], verification rising; `low` is at least the first."""
    verification, discard = corners
    places = np.array([low, *verification[(verification > low) & (verification < high)], high])
    return float(np.trapezoid(np.interp(places, verification, discard), places))


@dataclass(frozen=True)
class Fronts:
    """The fronts of some families, and the areas under them over the verification rates that all families reach."""

    low: float  # verification rates
    high: float
    lines: dict[str, np.ndarray]  # corners [2, S] of each front
    areas: dict[str, float]  # nan where no rates are common

    @classmethod
    def of(
        cls, families: Mapping[str, Sequence[int]], rates: np.ndarray, chosen_by: np.ndarray | None = None
    ) -> Fronts:
        """Find the fronts of families, given by the numbers of their settings.

        `rates` [2, S] are verification and discard rates; `chosen_by`, others by which settings are chosen.
        """
        lines, chosen = {}, rates if chosen_by is None else chosen_by
        for name, numbers in families.items():
            own = np.array(numbers)
            line = rates[:, own[front(chosen[:, own])]]
            lines[name] = line[:, np.argsort(line[0], kind="stable")]
        low = max(float(line[0, 0]) for line in lines.values())
        high = min(float(rates[0, np.array(numbers)].max()) for numbers in families.values())
        areas = {name: area_below(line, low, high) if low < high else math.nan for name, line in lines.items()}
        return cls(low, high, lines, areas)

    @property
    def heights(self) -> dict[str, float]:
        """The mean discard rate along each front: its area over the width."""
        width = self.high - self.low
        return {name: area / width if width > 0 else math.nan for name, area in self.areas.items()}

    def shares_below(self) -> dict[str, float]:
        """The share of the common rates at which each front is on or below the first one."""
        if not self.low < self.high:
            return dict.fromkeys(self.lines, math.nan)
        places = np.linspace(self.low, self.high, GRID)
        heights = {name: np.interp(places, *line) for name, line in self.lines.items()}
        first = next(iter(heights.values()))
        return {name: float(np.mean(own <= first + 1e-12)) for name, own in heights.items()}


@dataclass(frozen=True)
class FrontComparison:
    """Mean discard rates along fronts over their common verification rates, with 95 % intervals.

    One row per family, with its `area` and the Estimates that ESTIMATES names. Differences are from the first family,
    and below 0 where that is undercut.
    """

    fronts: Fronts  # of all texts
    families: DataFrame


def compare(
    counts: Counts, families: Mapping[str, Sequence[int]], n_resamples: int = 2000, seed: int = 0
) -> FrontComparison:
    """Compare the fronts of families, given by the numbers of their settings.

    The intervals are percentile bootstraps over texts, all families on the same resamples. In each resample fronts and
    common rates are found anew. With fewer than four texts the intervals, and what is held out, are nan.
    """
    n_texts = len(counts.tokens)
    even = np.arange(n_texts) % 2 == 0
    calls = np.stack([counts.target_calls, counts.discarded]).astype(float)  # [2, S, Q]

    def fronts(weights: np.ndarray, chosen_by: np.ndarray | None = None) -> Fronts:
        """Of the rates of texts weighted by [Q], and chosen by texts weighted otherwise."""
        rates, chosen = (None if own is None else calls @ own / (counts.tokens @ own) for own in (weights, chosen_by))
        return Fronts.of(families, rates, chosen)

    def heights(weights: np.ndarray) -> np.ndarray:
        """The ESTIMATES of each family, [4, F]."""
        halves = weights * even, weights * ~even
        crossed = np.full((1, len(families)), math.nan)
        if all(counts.tokens @ half for half in halves):
            crossed = [list(fronts(*pair).heights.values()) for pair in (halves[::-1], halves)]
        found = np.array([list(fronts(weights).heights.values()), np.mean(crossed, axis=0)])
        return np.concatenate([found, found - found[:, :1]])

    def of_resamples(picks: np.ndarray, axis: int) -> np.ndarray:
        return np.stack([heights(np.bincount(pick.astype(int), minlength=n_texts)) for pick in picks], axis=-1)

    values, samples = heights(np.ones(n_texts)), np.empty((4, len(families), 0))
    if n_texts >= 4:
        samples = bootstrap_samples(of_resamples, np.arange(n_texts), n_resamples=n_resamples, seed=seed)
    whole, columns = fronts(np.ones(n_texts)), zip(ESTIMATES, values, samples, strict=True)
    frame = DataFrame({"area": whole.areas})
    for name, *measure in columns:
        frame[name] = [Estimate.of_samples(*pair) for pair in zip(*measure, strict=True)]
    return FrontComparison(whole, frame)
