"""Measures of a decoding run (methods.md, section 10), from the loop's `Generation`s: one a question."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from spectrain.decoding.generation import Generation


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % confidence interval; the bounds are nan where there are fewer than two questions."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def as_json(self) -> dict[str, float | None]:
        """Plain values; nan, which JSON has not, becomes null."""
        return {name: None if math.isnan(value) else value for name, value in asdict(self).items()}


def mean_accepted(generations: Sequence[Generation], n_resamples: int = 2000, seed: int = 0) -> Estimate:
    """tau: tokens a target forward, the bonus included; autoregressive decoding has 1.

    (emitted tokens - 1) / target forwards after prefill, pooled over all steps: prefill draws the first token, and
    tokens cut by EOS or length were not emitted. The interval is a percentile bootstrap over questions, since the steps
    of one question depend on one another. Questions that ended with the first token have no step and do not count.
    """
    tokens = np.array([len(g.tokens) - 1 for g in generations if g.target_forwards], dtype=np.float64)
    forwards = np.array([g.target_forwards for g in generations if g.target_forwards], dtype=np.float64)
    return ratio_of_sums(tokens, forwards, n_resamples, seed)


def decode_s(generation: Generation) -> float:
    """Seconds of a question, prefill included: its share of the batch's time, so questions add up to the run."""
    return generation.prefill_s + sum(generation.time_s.values())


def tokens_per_s_micro(generations: Sequence[Generation], n_resamples: int = 2000, seed: int = 0) -> Estimate:
    """All tokens / all time, with a percentile bootstrap over questions."""
    tokens = np.array([len(g.tokens) for g in generations], dtype=np.float64)
    seconds = np.array([decode_s(g) for g in generations])
    return ratio_of_sums(tokens, seconds, n_resamples, seed)


def time_share(generations: Sequence[Generation]) -> dict[str, float]:
    """Share of draft, forward, verify, commit and other in the time after prefill; adds up to 1."""
    if not generations:
        return {}
    totals = {stage: sum(g.time_s[stage] for g in generations) for stage in generations[0].time_s}
    whole = sum(totals.values())
    return {stage: seconds / whole if whole else 0.0 for stage, seconds in totals.items()}


def median(values: Sequence[float], n_resamples: int = 2000, seed: int = 0) -> Estimate:
    """The median of repeated measurements, with a percentile bootstrap."""
    values = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(len(values), size=(n_resamples, len(values)))
    low, high = np.quantile(np.median(values[picks], axis=1), [0.025, 0.975])
    return Estimate(float(np.median(values)), float(low), float(high))


def ratio_of_sums(
    numerators: Sequence[float], denominators: Sequence[float], n_resamples: int = 2000, seed: int = 0
) -> Estimate:
    """sum / sum over questions, with a percentile bootstrap that resamples both together."""
    numerators, denominators = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    n_questions = len(numerators)
    if n_questions == 0:
        return Estimate(float("nan"), float("nan"), float("nan"))
    value = float(numerators.sum() / denominators.sum())
    if n_questions == 1:
        return Estimate(value, float("nan"), float("nan"))
    picks = np.random.default_rng(seed).integers(n_questions, size=(n_resamples, n_questions))
    ratios = numerators[picks].sum(axis=1) / denominators[picks].sum(axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Estimate(value, float(low), float(high))
