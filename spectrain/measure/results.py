"""From the rows of a benchmark, one a question and method, to its results (methods.md section 10).

Everything is computed from `questions.jsonl`, so that a resumed run and an uninterrupted one give the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from spectrain.decoding import Generation
from spectrain.decoding.generation import STAGES
from spectrain.decoding.tree import Source
from spectrain.measure.statistics import Estimate, decode_s, ratio_of_sums
from spectrain.methods.registry import BASELINE


@dataclass(frozen=True)
class QuestionRow:
    """One question answered by one method, all turns together: a line of `questions.jsonl`."""

    question_id: str
    category: str
    method: str
    error: str | None = None  # why there is no answer; the numbers are then empty
    turns: int = 0
    prompt_tokens: list[int] = field(default_factory=list)  # of each turn
    replies: list[list[int]] = field(default_factory=list)  # token ids of each turn
    text: list[str] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    target_forwards: int = 0  # after prefill
    accepted: list[int] = field(default_factory=list)  # drafted tokens accepted in each step
    drafted: list[int] = field(default_factory=list)  # nodes drafted in each step
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    steps_by_depth: list[int] = field(default_factory=list)  # [d - 1]: steps that drafted at depth d
    retrieval_hits: int = 0
    prefill_s: float = 0.0
    time_s: dict[str, float] = field(default_factory=dict)  # by stage
    seconds: float = 0.0  # all of it
    peak_memory_bytes: int = 0

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.replies))


def question_row(
    question_id: str,
    category: str,
    method: str,
    generations: Sequence[Generation],
    prompt_tokens: Sequence[int],
    text: Sequence[str],
    peak_memory_bytes: int,
) -> QuestionRow:
    """The row of a question answered in one or more turns."""
    depths = max((len(g.steps_by_depth) for g in generations), default=0)
    padded = [g.steps_by_depth + [0] * (depths - len(g.steps_by_depth)) for g in generations]
    by_source = np.sum([g.drafted_by_source for g in generations], axis=0)
    return QuestionRow(
        question_id=question_id,
        category=category,
        method=method,
        turns=len(generations),
        prompt_tokens=list(prompt_tokens),
        replies=[g.tokens for g in generations],
        text=list(text),
        finish_reasons=[g.finish_reason for g in generations],
        target_forwards=sum(g.target_forwards for g in generations),
        accepted=[a for g in generations for a in g.accepted],
        drafted=[d for g in generations for d in g.drafted],
        drafted_by_source={s.name.lower(): int(by_source[s]) for s in Source if by_source[s]},
        accepted_by_source={
            s.name.lower(): n
            for s in Source
            if s is not Source.ROOT and (n := sum(g.sources.count(int(s)) for g in generations))
        },
        steps_by_depth=[sum(counts) for counts in zip(*padded, strict=True)],
        retrieval_hits=sum(g.retrieval_hits for g in generations),
        prefill_s=sum(g.prefill_s for g in generations),
        time_s={stage: sum(g.time_s[stage] for g in generations) for stage in STAGES},
        seconds=sum(decode_s(g) for g in generations),
        peak_memory_bytes=peak_memory_bytes,
    )


def summarise(
    rows: Sequence[QuestionRow],
    kinds: dict[str, str],
    greedy: bool,
    float32: bool,
    looking_up: Collection[str] = (),
) -> dict[str, dict]:
    """The `methods` of `results.json`.

    Args:
        rows: every question and method, in any order.
        kinds: "method" or "peer" of each contender; also the order of the result.
        greedy: sampling was greedy, so that texts can be compared with the baseline's.
        float32: the target ran in float32; only then is a mismatch more than a rounded tie.
        looking_up: the methods that draft from a table or store, of which a hit rate can be told.
    """
    answered = {name: {r.question_id: r for r in rows if r.method == name and r.error is None} for name in kinds}
    baseline = answered.get(BASELINE, {})
    summary = {}
    for name, kind in kinds.items():
        own = list(answered[name].values())
        one = _measures(own, baseline) | {"kind": kind} | (_steps(own) if kind == "method" else _NO_STEPS)
        if name not in looking_up:
            one["retrieval_hit_rate"] = None
        one["errors"] = sum(r.method == name and r.error is not None for r in rows)
        compared = [r for r in own if r.question_id in baseline]
        mismatches = sum(r.replies != baseline[r.question_id].replies for r in compared)
        one["greedy_mismatches"] = mismatches if greedy else None
        one["lossless"] = mismatches == 0 if greedy and float32 and own and len(compared) == len(own) else None
        categories = dict.fromkeys(r.category for r in own)
        one["by_category"] = {c: _measures([r for r in own if r.category == c], baseline) for c in categories}
        summary[name] = one
    return summary


def _measures(rows: Sequence[QuestionRow], baseline: dict[str, QuestionRow]) -> dict:
    """What every contender has, over the questions it answered."""
    stepping = [r for r in rows if r.target_forwards]
    tau = ratio_of_sums([r.n_tokens - r.turns for r in stepping], [r.target_forwards for r in stepping])
    rate = ratio_of_sums([r.n_tokens for r in rows], [r.seconds for r in rows])
    speedup = _speedup([(r, baseline[r.question_id]) for r in rows if r.question_id in baseline])
    return {
        "questions": len(rows),
        "tokens": sum(r.n_tokens for r in rows),
        "target_forwards": sum(r.target_forwards for r in rows),
        "mean_accepted": _number(tau.value),
        "mean_accepted_ci95": _interval(tau),
        "tokens_per_s_micro": _number(rate.value),
        "tokens_per_s_micro_ci95": _interval(rate),
        "tokens_per_s_macro": _number(np.mean([r.n_tokens / r.seconds for r in rows])) if rows else None,
        "speedup": _number(speedup.value),
        "speedup_ci95": _interval(speedup),
        "peak_memory_bytes": max((r.peak_memory_bytes for r in rows), default=0),
    }


def _speedup(pairs: Sequence[tuple[QuestionRow, QuestionRow]], n_resamples: int = 2000, seed: int = 0) -> Estimate:
    """Ratio of micro rates on the same questions; the bootstrap draws questions, both methods together."""
    if not pairs:
        return Estimate(math.nan, math.nan, math.nan)
    counts = np.array([[a.n_tokens, a.seconds, b.n_tokens, b.seconds] for a, b in pairs])

    def ratio(sums: np.ndarray) -> np.ndarray:
        return (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])

    value = float(ratio(counts.sum(axis=0)))
    if len(pairs) == 1:
        return Estimate(value, math.nan, math.nan)
    picks = np.random.default_rng(seed).integers(len(pairs), size=(n_resamples, len(pairs)))
    low, high = np.quantile(ratio(counts[picks].sum(axis=1)), [0.025, 0.975])
    return Estimate(value, float(low), float(high))


_NO_STEPS = {
    "time_share": None,
    "acceptance_by_position": None,
    "acceptance_by_source": None,
    "drafted": None,
    "accepted": None,
    "discard_rate": None,
    "verification_rate": None,
    "retrieval_hit_rate": None,
}


def _steps(rows: Sequence[QuestionRow]) -> dict:
    """What only our own loop can tell: it looks into its steps."""
    tokens, forwards = sum(r.n_tokens for r in rows), sum(r.target_forwards for r in rows)
    drafted, accepted = sum(sum(r.drafted) for r in rows), sum(sum(r.accepted) for r in rows)
    times = {stage: sum(r.time_s[stage] for r in rows) for stage in STAGES}
    whole = sum(times.values())
    by_source = {}
    for source in (s.name.lower() for s in Source):
        counts = {
            "drafted": sum(r.drafted_by_source.get(source, 0) for r in rows),
            "accepted": sum(r.accepted_by_source.get(source, 0) for r in rows),
        }
        if counts["drafted"]:
            by_source[source] = counts
    return {
        "time_share": {stage: seconds / whole for stage, seconds in times.items()} if whole else None,
        "acceptance_by_position": _by_position(rows),
        "acceptance_by_source": by_source,
        "drafted": drafted,
        "accepted": accepted,
        "discard_rate": (drafted - accepted) / tokens if tokens else None,
        "verification_rate": forwards / tokens if tokens else None,
        "retrieval_hit_rate": sum(r.retrieval_hits for r in rows) / forwards if forwards else None,
    }


def _by_position(rows: Sequence[QuestionRow]) -> list[float]:
    """[d - 1]: of the steps that drafted at depth d, the share that accepted there."""
    depths = max((len(r.steps_by_depth) for r in rows), default=0)
    accepted = np.concatenate([r.accepted for r in rows]) if rows else np.zeros(0)
    shares = []
    for depth in range(1, depths + 1):
        tried = sum(r.steps_by_depth[depth - 1] for r in rows if len(r.steps_by_depth) >= depth)
        shares.append(float((accepted >= depth).sum() / tried) if tried else 0.0)
    return shares


def _number(value: float) -> float | None:
    """JSON has no nan."""
    return float(value) if math.isfinite(value) else None


def _interval(estimate: Estimate) -> list[float] | None:
    return [estimate.low, estimate.high] if math.isfinite(estimate.low) else None


def as_json(row: QuestionRow) -> dict:
    return asdict(row)
