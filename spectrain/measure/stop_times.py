"""Time speculative decoding and explain its seconds as a sum over forwards (SpecDec++, equation 3.1 and section 5.2).

    T = t_target N_target + t_draft N_draft

is fitted by least squares, without intercept, to real runs: one row per question and setting, prefill left out.
Families of settings share t_target. Each has its own t_draft, which holds the price of its stop rule per token and of
one more token in the target's forward.

Letters: K families, Q questions, B bootstrap resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pandas import DataFrame
from rich.console import Console
from rich.progress import track

from spectrain.decoding import Drafter, Generation
from spectrain.measure.simulation import Text
from spectrain.measure.statistics import Estimate
from spectrain.methods.stopping import StopRule
from spectrain.stores.lines import RowFile

WARM_TOKENS = 4


@dataclass(frozen=True)
class TimedRow:
    """One question answered under one setting, without prefill and the token it draws: a line of `timed.jsonl`."""

    stage: str  # "regression" | "best"
    question: int  # number of the prompt
    setting: str
    family: str
    tokens: int
    discarded: int
    target_calls: int
    draft_forwards: int
    seconds: float


def time_drafters(
    decode: Callable[..., list[Generation]],
    texts: Sequence[Text],
    max_new_tokens: int,
    file: Path,
    stage: str,
    drafters: Mapping[tuple[str, str], Drafter],
) -> DataFrame:
    """Decode the prompts with every drafter, question by question, each time beginning with another drafter.

    `decode` is `generate` of a target, sampling and seed; the drafters stand by name and family of their setting. Rows
    that the file holds are not measured again. Returns the rows of this stage, with the fields of `TimedRow`.
    """
    rows, keys = RowFile(file, TimedRow), list(drafters)
    done = {(row.stage, row.question, row.setting) for row in rows.rows}
    asked = [(i, keys[(i + turn) % len(keys)]) for i in range(len(texts)) for turn in range(len(keys))]
    todo = [(question, key) for question, key in asked if (stage, question, key[0]) not in done]
    for drafter in drafters.values() if todo else ():
        decode(drafter, [texts[0].prompt], WARM_TOKENS, prompt_numbers=[0])
    for question, key in track(todo, f"seconds, {stage}", console=Console(stderr=True)):
        stop = getattr(drafters[key], "stop", StopRule())
        stop.draft_forwards = 0
        (generation,) = decode(drafters[key], [texts[question].prompt], max_new_tokens, prompt_numbers=[question])
        row = TimedRow(
            *(stage, question, *key),
            tokens=len(generation.tokens) - 1,
            discarded=sum(generation.drafted) - sum(generation.accepted),
            target_calls=generation.target_forwards,
            draft_forwards=stop.draft_forwards,
            seconds=sum(generation.time_s.values()),
        )
        rows.append(row)
    names = {name for name, _ in drafters}
    return DataFrame([row for row in rows.rows if row.stage == stage and row.setting in names])


@dataclass(frozen=True)
class Times:
    """Seconds of a forward."""

    target_s: float
    draft_s: dict[str, float]  # by family
    r2: float  # 1 - residual / centred sum of squares; nan where all rows took equally many forwards
    r2_uncentred: float  # 1 - residual / sum of squares, as regressions without intercept often have it
    samples: np.ndarray  # [B, 1 + K] the same of resampled questions: target, then the families in order

    def intervals(self) -> dict[str, tuple[float, float]]:
        """The 95 % interval of each time: "target" and the families."""
        low, high = np.quantile(self.samples, [0.025, 0.975], axis=0).tolist()
        return dict(zip(("target", *self.draft_s), zip(low, high, strict=True), strict=True))

    def predicted_rate(
        self, family: str, tokens: np.ndarray, draft_forwards: np.ndarray, target_calls: np.ndarray, seed: int = 0
    ) -> Estimate:
        """Tokens per second of texts with these counts, [Q] each.

        The interval is a bootstrap over texts and, independently, over the questions of the regression.
        """
        counts = np.stack([tokens, draft_forwards, target_calls], axis=1).astype(float)
        whole = counts.sum(axis=0)
        value = whole[0] / (self.target_s * whole[2] + self.draft_s[family] * whole[1])
        picks = np.random.default_rng(seed + 1).integers(len(counts), size=(len(self.samples), len(counts)))
        sums = counts[picks].sum(axis=1)  # [B, 3]
        draft_s = self.samples[:, 1 + list(self.draft_s).index(family)]
        rates = sums[:, 0] / (self.samples[:, 0] * sums[:, 2] + draft_s * sums[:, 1])
        return Estimate(float(value), *np.quantile(rates, [0.025, 0.975]).tolist())


def fit_times(rows: DataFrame, seed: int = 0, n_resamples: int = 2000) -> Times:
    """Fit the regression and its bootstrap over questions. A family that never drafted has a t_draft of nan."""
    families = rows.family.unique().tolist()
    drafts = [rows.draft_forwards.where(rows.family == family, 0) for family in families]
    facts = np.stack([rows.target_calls, *drafts], axis=1).astype(float)  # [rows, 1 + K]
    seconds, questions = rows.seconds.to_numpy(), rows.question.to_numpy()
    # The normal equations of each question: a resample adds up those that it drew.
    own = [questions == q for q in np.unique(questions)]
    squares = np.stack([facts[rows_of].T @ facts[rows_of] for rows_of in own])
    products = np.stack([facts[rows_of].T @ seconds[rows_of] for rows_of in own])
    picks = np.random.default_rng(seed).integers(len(own), size=(n_resamples, len(own)))
    found = _solve(squares.sum(0), products.sum(0))
    samples = np.array([_solve(squares[p].sum(0), products[p].sum(0)) for p in picks])
    residual = float(((seconds - facts @ np.nan_to_num(found)) ** 2).sum())
    spread = float(((seconds - seconds.mean()) ** 2).sum()) if np.ptp(facts, axis=0).any() else 0.0
    r2 = [1 - residual / whole if whole else math.nan for whole in (spread, float((seconds**2).sum()))]
    return Times(float(found[0]), dict(zip(families, found[1:].tolist(), strict=True)), *r2, samples)


def _solve(squares: np.ndarray, products: np.ndarray) -> np.ndarray:
    """Least squares; a column that is all zero has no coefficient."""
    used = np.diag(squares) > 0
    found = np.full(len(products), math.nan)
    found[used] = np.linalg.lstsq(squares[np.ix_(used, used)], products[used], rcond=None)[0]
    return found
