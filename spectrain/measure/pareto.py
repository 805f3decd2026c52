"""Verification rate against discard rate (SpecDec++, section 5.1 and Figure 3): fronts, and the areas under them.

Both rates are a token that was emitted, the first of a text, which prefill draws, left out; lower is better. A random
choice between two settings, a prompt at a time, attains every point of the line between them: so the front of a family
of settings is the lower convex hull of their points, and stays level behind the setting that discards least. Families
are compared by the area under their fronts over the verification rates that all of them reach.

A family with more settings finds a lower front by chance alone. So areas come in two kinds: in sample, and held out:
the settings on the front are chosen on every other text and told on the rest, whether they lie on a front there or not,
both ways round, and averaged.

Letters: Q texts, S settings, F families, B bootstrap resamples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spectrain.measure.statistics import Estimate

GRID = 1001  # places where fronts are compared point by point


@dataclass(frozen=True)
class Table:
    """What each text cost under each setting."""

    tokens: np.ndarray  # [Q]
    discarded: np.ndarray  # [S, Q]
    target_calls: np.ndarray  # [S, Q]
    draft_forwards: np.ndarray  # [S, Q]

    def rates(self, weights: np.ndarray) -> np.ndarray:
        """[3, S] float64: target calls, discarded tokens and drafter's forwards a token, texts weighted by [Q]."""
        sums = np.stack([counts @ weights for counts in (self.target_calls, self.discarded, self.draft_forwards)])
        return sums / (self.tokens @ weights)

    def only(self, settings: Sequence[int]) -> Table:
        """The same of some settings."""
        rows = list(settings)
        return Table(self.tokens, self.discarded[rows], self.target_calls[rows], self.draft_forwards[rows])


@dataclass(frozen=True)
class Area:
    """The area under the fronts of some families, over the verification rates that all of them reach."""

    low: float  # verification rates
    high: float
    areas: dict[str, float]  # nan where there are no such rates

    def heights(self) -> dict[str, float]:
        """Mean discard rate along each front: its area over the width."""
        width = self.high - self.low
        return {name: area / width if width > 0 else math.nan for name, area in self.areas.items()}


def front(points: np.ndarray) -> list[int]:
    """Indices of the points [2, S] (verification, discard) on the front, verification rates rising."""
    order = np.lexsort((points[1], points[0]))
    least = np.minimum.accumulate(points[1, order])
    better = np.append(True, points[1, order][1:] < least[:-1])  # what no point to its left undercuts
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


def areas(families: Mapping[str, np.ndarray]) -> Area:
    """Areas under the fronts of families, each given by its points [2, S], over what all of them span."""
    spans = [(float(points[0].min()), float(points[0].max())) for points in families.values()]
    return _areas_below({name: points[:, front(points)] for name, points in families.items()}, spans)


def _areas_below(lines: Mapping[str, np.ndarray], spans: Sequence[tuple[float, float]]) -> Area:
    low, high = max(span[0] for span in spans), min(span[1] for span in spans)
    if not low < high:
        return Area(low, high, dict.fromkeys(lines, math.nan))
    return Area(low, high, {name: area_below(corners, low, high) for name, corners in lines.items()})


@dataclass(frozen=True)
class Comparison:
    """Mean discard rates along fronts over their common verification rates, with 95 % intervals."""

    low: float
    high: float
    areas: dict[str, float]
    heights: dict[str, Estimate]  # in sample
    held_out: dict[str, Estimate]
    differences: dict[str, Estimate]  # from the first family's height, in sample; below 0: it is undercut
    held_out_differences: dict[str, Estimate]
    share_below: dict[str, float]  # of those rates, where a family's front is on or below the first's, in sample


def compare(table: Table, families: Mapping[str, Sequence[int]], n_resamples: int = 2000, seed: int = 0) -> Comparison:
    """Compares the fronts of families, given by the numbers of their settings.

    The intervals are percentile bootstraps over texts, all families on the same resamples; in each resample fronts
    and common rates are found anew. With fewer than four texts they, and what is held out, are nan.
    """
    n_texts = len(table.tokens)
    even = np.arange(n_texts) % 2 == 0
    whole = np.ones(n_texts)
    plain = _areas(table, families, whole, whole)
    found = [_both(table, families, whole, even)]
    if n_texts >= 4:
        picks = np.random.default_rng(seed).integers(n_texts, size=(n_resamples, n_texts))
        found += [_both(table, families, np.bincount(p, minlength=n_texts).astype(float), even) for p in picks]
    values = np.array(found)  # [1 + B, 2, F]
    differences = values - values[:, :, :1]

    def estimates(samples: np.ndarray) -> dict[str, Estimate]:
        return {name: _estimate(samples[:, i]) for i, name in enumerate(families)}

    return Comparison(
        *(plain.low, plain.high, plain.areas),
        *(estimates(values[:, 0]), estimates(values[:, 1])),
        *(estimates(differences[:, 0]), estimates(differences[:, 1])),
        _shares_below(table.rates(whole)[:2], families, plain),
    )


def _shares_below(rates: np.ndarray, families: Mapping[str, Sequence[int]], plain: Area) -> dict[str, float]:
    if not plain.low < plain.high:
        return dict.fromkeys(families, math.nan)
    places = np.linspace(plain.low, plain.high, GRID)
    heights = {}
    for name, numbers in families.items():
        own = rates[:, list(numbers)]
        heights[name] = np.interp(places, *own[:, front(own)])
    first = next(iter(heights.values()))
    return {name: float(np.mean(own <= first + 1e-12)) for name, own in heights.items()}


def _both(table: Table, families: Mapping[str, Sequence[int]], weights: np.ndarray, even: np.ndarray) -> np.ndarray:
    """Heights in sample and held out, [2, F]."""
    plain = list(_areas(table, families, weights, weights).heights().values())
    halves = [weights * even, weights * ~even]
    if any(table.tokens @ half == 0 for half in halves):
        return np.array([plain, [math.nan] * len(plain)])
    crossed = [_areas(table, families, *pair).heights().values() for pair in (halves, halves[::-1])]
    return np.array([plain, np.mean([list(one) for one in crossed], axis=0)])


def _areas(table: Table, families: Mapping[str, Sequence[int]], choose: np.ndarray, tell: np.ndarray) -> Area:
    """Areas under the settings on the fronts of texts weighted by `choose`, as texts weighted by `tell` say."""
    told = table.rates(tell)[:2]
    if choose is tell:
        return areas({name: told[:, list(numbers)] for name, numbers in families.items()})
    chosen = table.rates(choose)[:2]
    lines, spans = {}, []
    for name, numbers in families.items():
        kept = told[:, np.array(numbers)[front(chosen[:, list(numbers)])]]
        lines[name] = kept[:, np.argsort(kept[0], kind="stable")]
        spans.append((float(kept[0].min()), float(told[0, list(numbers)].max())))
    return _areas_below(lines, spans)


def _estimate(samples: np.ndarray) -> Estimate:
    """The first sample is the value, the others its bootstrap."""
    rest = samples[1:][~np.isnan(samples[1:])]
    low, high = np.quantile(rest, [0.025, 0.975]) if len(rest) else (math.nan, math.nan)
    return Estimate(float(samples[0]), float(low), float(high))
