"""tau of several drafters of one target on the same contexts, and in pairs what one has more than another.

tau is pooled, tokens / target forwards. Intervals are 95 % percentile bootstraps that draw rows of the corpus, with
every context cut from them and, for a difference, with both drafters: what both find hard alike then cancels out.

Letters: R rows, a context of each length a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spectrain.decoding import Drafter, Sampling, TargetModel, generate
from spectrain.measure.statistics import Estimate

N_RESAMPLES = 4000
POOLED = "all"


@dataclass(frozen=True)
class Setting:
    """Contexts of one length under one law."""

    context_tokens: int
    temperature: float  # 0: greedy

    @property
    def name(self) -> str:
        return f"{self.context_tokens} tokens, {'greedy' if self.temperature == 0 else f'T={self.temperature:g}'}"


Counts = Mapping[str, np.ndarray]  # setting -> [R, 2] float64: tokens behind the first, and target forwards


@dataclass(frozen=True)
class Compared:
    """One drafter beside the one that all are held to. Settings, and `POOLED` over those of equal sampling and all."""

    tau: dict[str, Estimate]
    difference: dict[str, Estimate] | None  # this less the first; None of the first itself

    def as_json(self) -> dict:
        found = {"tau": {name: e.as_json() for name, e in self.tau.items()}}
        if self.difference is not None:
            found["difference"] = {name: e.as_json() for name, e in self.difference.items()}
        return found


def count(
    target: TargetModel,
    drafter: Drafter,
    rows: Sequence[Sequence[int]],
    setting: Setting,
    new_tokens: int,
    batch_size: int,
    first_number: int = 0,
) -> np.ndarray:
    """Decodes the beginning of each row. Returns [R, 2]: tokens behind the first one, and target forwards.

    An end of text does not end a continuation, so that all weigh alike. `first_number` is the first row's, by which its
    sample is drawn: counts of parts of the rows are those of the whole.
    """
    found = generate(
        target,
        drafter,
        [list(row[: setting.context_tokens]) for row in rows],
        new_tokens,
        Sampling(temperature=setting.temperature),
        prompt_numbers=range(first_number, first_number + len(rows)),
        batch_size=batch_size,
        stop_token_ids=(),
    )
    return np.array([(len(one.tokens) - 1, one.target_forwards) for one in found], dtype=np.float64)


def compare(counts: Mapping[str, Counts], first: str) -> dict[str, Compared]:
    """All drafters, held to `first`.

    Args:
        counts: of each drafter, of the same rows in the same settings.
        first: one of them.
    """
    pooled = {name: with_pools(own) for name, own in counts.items()}
    return {
        name: Compared(
            {setting: estimate(c) for setting, c in own.items()},
            None if name == first else {s: estimate(c, pooled[first][s]) for s, c in own.items()},
        )
        for name, own in pooled.items()
    }


def with_pools(counts: Counts) -> dict[str, np.ndarray]:
    """The settings, and sums over all lengths of each sampling and over all settings, row by row."""
    laws = dict.fromkeys(name.split(", ")[1] for name in counts)
    pools = {f"{POOLED}, {law}": sum(c for name, c in counts.items() if name.endswith(f", {law}")) for law in laws}
    return {**counts, **pools, POOLED: sum(counts.values())}


def estimate(counts: np.ndarray, other: np.ndarray | None = None) -> Estimate:
    """tau of counts [R, 2], or how much more it is than that of another's counts of the same rows."""
    picks = np.random.default_rng(0).integers(len(counts), size=(N_RESAMPLES, len(counts)))
    value, drawn = _tau(counts.sum(0)), _tau(counts[picks].sum(1))
    if other is not None:
        value, drawn = value - _tau(other.sum(0)), drawn - _tau(other[picks].sum(1))
    if len(counts) < 2:
        return Estimate(float(value), float("nan"), float("nan"))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(float(value), float(low), float(high))


def resolved(difference: Estimate) -> bool:
    """Whether its interval leaves 0 out."""
    return difference.low > 0 or difference.high < 0


def _tau(sums: np.ndarray) -> np.ndarray:
    return sums[..., 0] / sums[..., 1]
