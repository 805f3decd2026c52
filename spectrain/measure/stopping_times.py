"""Seconds of speculative decoding as a sum over forwards (SpecDec++, equation 3.1 and section 5.2).

    T = t_target N_target + t_draft N_draft

is fitted by least squares, without intercept, to real runs: a row a question and setting, prefill left out. Families of
settings share t_target and have a t_draft of their own, which holds what a stop rule costs a token, and what a token
more makes the target's forward dearer.

Letters: K families, Q questions, B bootstrap resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from spectrain.measure.statistics import Estimate

N_RESAMPLES = 2000


@dataclass(frozen=True)
class TimedRow:
    """One question answered under one setting, prefill and the token it draws left out."""

    stage: str  # "regression" | "best"
    question: int  # number of the prompt
    setting: str
    family: str
    tokens: int
    discarded: int
    target_calls: int
    draft_forwards: int
    seconds: float


@dataclass(frozen=True)
class Times:
    """Seconds of a forward."""

    target_s: float
    draft_s: dict[str, float]  # by family
    r2: float  # 1 - residual / centred sum of squares; nan where all rows took equally many forwards
    r2_uncentred: float  # 1 - residual / sum of squares, as regressions without intercept often have it
    samples: np.ndarray  # [B, 1 + K] the same of resampled questions: target, then the families in order

    def seconds(self, family: str, draft_forwards: float, target_calls: float) -> float:
        return self.target_s * target_calls + self.draft_s[family] * draft_forwards

    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % of each time, "target" and the families."""
        low, high = np.quantile(self.samples, [0.025, 0.975], axis=0)
        return {name: (float(a), float(b)) for name, a, b in zip(("target", *self.draft_s), low, high, strict=True)}


def fit_times(rows: Sequence[TimedRow], seed: int = 0) -> Times:
    """The regression, with its bootstrap over questions. A family of which no row drafted has a t_draft of nan."""
    families = list(dict.fromkeys(row.family for row in rows))
    facts = np.zeros((len(rows), 1 + len(families)))
    for i, row in enumerate(rows):
        facts[i, 0], facts[i, 1 + families.index(row.family)] = row.target_calls, row.draft_forwards
    seconds = np.array([row.seconds for row in rows])
    questions = sorted({row.question for row in rows})
    places = [np.array([i for i, row in enumerate(rows) if row.question == q]) for q in questions]
    # Normal equations of each question: a resample adds up those it drew.
    squares = np.stack([facts[i].T @ facts[i] for i in places])
    products = np.stack([facts[i].T @ seconds[i] for i in places])
    picks = np.random.default_rng(seed).integers(len(questions), size=(N_RESAMPLES, len(questions)))
    found = _solve(squares.sum(0), products.sum(0))
    samples = np.stack([_solve(squares[p].sum(0), products[p].sum(0)) for p in picks])
    residual = float(((seconds - facts @ np.nan_to_num(found)) ** 2).sum())
    spread = float(((seconds - seconds.mean()) ** 2).sum()) if np.ptp(facts, axis=0).any() else 0.0
    shares = [1 - residual / whole if whole else math.nan for whole in (spread, float((seconds**2).sum()))]
    return Times(float(found[0]), dict(zip(families, found[1:].tolist(), strict=True)), *shares, samples)


def _solve(squares: np.ndarray, products: np.ndarray) -> np.ndarray:
    """Least squares; a column that is all zero has no coefficient."""
    used = np.diag(squares) > 0
    found = np.full(len(products), math.nan)
    found[used] = np.linalg.lstsq(squares[np.ix_(used, used)], products[used], rcond=None)[0]
    return found


def predicted_rate(
    times: Times, family: str, tokens: np.ndarray, draft_forwards: np.ndarray, target_calls: np.ndarray, seed: int = 0
) -> Estimate:
    """Tokens a second of texts with these counts, [Q] each.

    The interval is a bootstrap over texts and, independently, over the questions of the regression.
    """
    counts = np.stack([tokens, draft_forwards, target_calls], axis=1).astype(float)
    value = counts[:, 0].sum() / times.seconds(family, counts[:, 1].sum(), counts[:, 2].sum())
    picks = np.random.default_rng(seed + 1).integers(len(counts), size=(len(times.samples), len(counts)))
    sums = counts[picks].sum(axis=1)  # [B, 3]
    column = 1 + list(times.draft_s).index(family)
    rates = sums[:, 0] / (times.samples[:, 0] * sums[:, 2] + times.samples[:, column] * sums[:, 1])
    low, high = np.quantile(rates, [0.025, 0.975])
    return Estimate(float(value), float(low), float(high))


def measured_rate(rows: Sequence[TimedRow], seed: int = 0) -> Estimate:
    """Tokens a second of measured rows, with a bootstrap over questions."""
    return _bootstrap([rows], lambda sums: sums[0, ..., 0] / sums[0, ..., 1], seed)


def speedup(rows: Sequence[TimedRow], baseline: Sequence[TimedRow], seed: int = 0) -> Estimate:
    """Ratio of rates on the same questions; the bootstrap draws questions, both settings together."""
    return _bootstrap([rows, baseline], lambda s: (s[0, ..., 0] / s[0, ..., 1]) / (s[1, ..., 0] / s[1, ..., 1]), seed)


def _bootstrap(groups: Sequence[Sequence[TimedRow]], of: Callable[[np.ndarray], np.ndarray], seed: int) -> Estimate:
    """of(sums [G, ..., 2] of tokens and seconds), groups matched by question."""
    by_question = [{row.question: row for row in rows} for rows in groups]
    questions = sorted(set.intersection(*(set(found) for found in by_question)))
    facts = np.array([[(found[q].tokens, found[q].seconds) for q in questions] for found in by_question])  # [G, Q, 2]
    value = float(of(facts.sum(axis=1)))
    if len(questions) < 2:
        return Estimate(value, math.nan, math.nan)
    picks = np.random.default_rng(seed).integers(len(questions), size=(N_RESAMPLES, len(questions)))
    low, high = np.quantile(of(facts[:, picks].sum(axis=2)), [0.025, 0.975])
    return Estimate(value, float(low), float(high))
