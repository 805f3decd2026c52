"""Estimates with their 95 % intervals from one bootstrap, and the measures of decoding runs that it serves."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from scipy.stats import DegenerateDataWarning
from scipy.stats import bootstrap as scipy_bootstrap

from spectrain.decoding.generation import Generation


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % confidence interval; the bounds are nan where fewer than two units were measured."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def as_json(self) -> dict[str, float | None]:
        """Return plain values, with null for nan, which JSON does not have."""
        return {name: None if math.isnan(value) else value for name, value in asdict(self).items()}


def bootstrap(
    statistic: Callable[..., np.ndarray], *samples: Sequence[float], n_resamples: int = 2000, seed: int = 0
) -> Estimate:
    """Estimate a single number with its percentile interval over units such as questions.

    Args:
        statistic: called as statistic(*samples, axis=-1) with arrays of units, or of resamples of units.
        samples: one or several measurements of the same units in the same order; they are drawn together.
        n_resamples: drawn with replacement. Where the statistic of one is nan, it does not count.
        seed: of the draws.
    """
    arrays = [np.asarray(one, dtype=np.float64) for one in samples]
    options = {"vectorized": True, "n_resamples": n_resamples, "method": "percentile", "paired": len(arrays) > 1}
    with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateDataWarning)  # a resample may have no step at all
        value = float(statistic(*arrays, axis=-1)) if len(arrays[0]) else math.nan
        if len(arrays[0]) < 2 or math.isnan(value):
            return Estimate(value)
        drawn = scipy_bootstrap(arrays, statistic, rng=np.random.default_rng(seed), **options).bootstrap_distribution
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return Estimate(value, float(low), float(high))


def median(values: Sequence[float], **options: float) -> Estimate:
    """Estimate the median of repeated measurements."""
    return bootstrap(np.median, values, **options)


def of_sums(function: Callable[..., np.ndarray], *samples: Sequence[float], **options: float) -> Estimate:
    """Estimate function(sum, ...) of the samples' sums over questions. `options` are those of `bootstrap`."""
    return bootstrap(lambda *drawn, axis: function(*(one.sum(axis) for one in drawn)), *samples, **options)


def ratio_of_sums(numerators: Sequence[float], denominators: Sequence[float], **options: float) -> Estimate:
    """Estimate sum / sum over questions, resampling both together."""
    return of_sums(lambda a, b: a / b, numerators, denominators, **options)


def speedup(*samples: Sequence[float], **options: float) -> Estimate:
    """Estimate tokens/s relative to a baseline's: tokens, seconds, and those of the baseline on the same questions."""
    return of_sums(lambda a, b, c, d: (a / b) / (c / d), *samples, **options)


def acceptance_length(emitted: Sequence[int], forwards: Sequence[int], **options: float) -> Estimate:
    """Estimate tau: tokens produced per target forward pass, the bonus included; autoregressive decoding has 1.

    Both are counted per question: tokens without the first of each text, which prefill draws, and forwards after
    prefill. Questions are resampled, since their steps depend on one another. A question without a step does not count.
    """
    steps = np.array([(e, f) for e, f in zip(emitted, forwards, strict=True) if f], dtype=np.float64).reshape(-1, 2)
    return ratio_of_sums(*steps.T, **options)


def decode_s(generation: Generation) -> float:
    """Return the seconds of a question, prefill included: its share of its batch's time."""
    return generation.prefill_s + sum(generation.time_s.values())
