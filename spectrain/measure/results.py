"""The rows of a benchmark, one per question and method, and the results that are computed from them alone.

So a resumed run and an uninterrupted one give the same results. docs/measuring.md explains every key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from spectrain.decoding import Drafter, Generation
from spectrain.decoding.tree import Source
from spectrain.measure.statistics import Estimate, acceptance_length, decode_s, ratio_of_sums, speedup, time_share
from spectrain.methods.registry import AUTO, BASELINE


@dataclass
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

    def add_turn(self, prompt_tokens: int, generation: Generation, text: str) -> None:
        """Add the answer to one more turn of the question."""
        accepted = Counter(source for source in generation.sources if source != Source.ROOT)
        depths = zip_longest(self.steps_by_depth, generation.steps_by_depth, fillvalue=0)
        self.turns += 1
        self.prompt_tokens.append(prompt_tokens)
        self.replies.append(generation.tokens)
        self.text.append(text)
        self.finish_reasons.append(generation.finish_reason)
        self.target_forwards += generation.target_forwards
        self.accepted += generation.accepted
        self.drafted += generation.drafted
        self.drafted_by_source = _added(self.drafted_by_source, dict(enumerate(generation.drafted_by_source)))
        self.accepted_by_source = _added(self.accepted_by_source, accepted)
        self.steps_by_depth = [sum(counts) for counts in depths]
        self.retrieval_hits += generation.retrieval_hits
        self.prefill_s += generation.prefill_s
        self.time_s = {stage: self.time_s.get(stage, 0.0) + s for stage, s in generation.time_s.items()}
        self.seconds += decode_s(generation)


def _added(before: Mapping[str, int], counts: Mapping[int, int]) -> dict[str, int]:
    """Counts by the name of their source, with those of one more turn by its number; zeros are left out."""
    sums = {s.name.lower(): before.get(s.name.lower(), 0) + counts.get(int(s), 0) for s in Source}
    return {name: count for name, count in sums.items() if count}


def summarise(
    rows: Sequence[QuestionRow],
    kinds: Mapping[str, str],
    greedy: bool,
    float32: bool,
    looking_up: Collection[str] = (),
) -> dict[str, dict]:
    """Compute the `methods` of `results.json` from rows in any order.

    Args:
        rows: of every question and method.
        kinds: "method" or "peer" (a baseline) by name, in the order of the result.
        greedy: sampling was greedy, so that texts can be compared with those of autoregressive decoding.
        float32: the target ran in float32; only then is a mismatch more than a rounded tie.
        looking_up: the methods that draft from a table or store, and so have a hit rate.
    """
    answered = {name: {r.question_id: r for r in rows if r.method == name and r.error is None} for name in kinds}
    plain = answered.get(BASELINE, {})
    summary = {}
    for name, kind in kinds.items():
        own = list(answered[name].values())
        one = _measures(own, plain) | {"kind": kind} | (_steps(own) if kind == "method" else dict.fromkeys(_steps([])))
        if name not in looking_up:
            one["retrieval_hit_rate"] = None
        one["errors"] = sum(r.method == name and r.error is not None for r in rows)
        compared = [r for r in own if r.question_id in plain]
        mismatches = sum(r.replies != plain[r.question_id].replies for r in compared)
        one["greedy_mismatches"] = mismatches if greedy else None
        one["lossless"] = mismatches == 0 if greedy and float32 and own and len(compared) == len(own) else None
        categories = dict.fromkeys(r.category for r in own)
        one["by_category"] = {c: _measures([r for r in own if r.category == c], plain) for c in categories}
        summary[name] = one
    return summary


def _measures(rows: Sequence[QuestionRow], plain: Mapping[str, QuestionRow]) -> dict:
    """What methods and baselines have in common, over the questions that they answered."""
    pairs = [(r, plain[r.question_id]) for r in rows if r.question_id in plain]
    counts = [(r.n_tokens, r.seconds, p.n_tokens, p.seconds) for r, p in pairs]
    gain = speedup(*np.array(counts, dtype=np.float64).reshape(-1, 4).T)
    tau = acceptance_length([r.n_tokens - r.turns for r in rows], [r.target_forwards for r in rows])
    rate = ratio_of_sums([r.n_tokens for r in rows], [r.seconds for r in rows])
    return {
        "questions": len(rows),
        "tokens": sum(r.n_tokens for r in rows),
        "target_forwards": sum(r.target_forwards for r in rows),
        **_with_interval("mean_accepted", tau),
        **_with_interval("tokens_per_s_micro", rate),
        "tokens_per_s_macro": float(np.mean([r.n_tokens / r.seconds for r in rows])) if rows else None,
        **_with_interval("speedup", gain),
        "peak_memory_bytes": max((r.peak_memory_bytes for r in rows), default=0),
    }


def _with_interval(name: str, estimate: Estimate) -> dict:
    """An estimate as two keys of `results.json`; null for nan."""
    value, low, high = estimate.as_json().values()
    return {name: value, f"{name}_ci95": None if low is None else [low, high]}


def _steps(rows: Sequence[QuestionRow]) -> dict:
    """What only our own loop can tell, because it sees its steps."""
    tokens, forwards = sum(r.n_tokens for r in rows), sum(r.target_forwards for r in rows)
    drafted, accepted = sum(sum(r.drafted) for r in rows), sum(sum(r.accepted) for r in rows)
    shares = time_share([r.time_s for r in rows])
    by_source = {
        source: {
            "drafted": sum(r.drafted_by_source.get(source, 0) for r in rows),
            "accepted": sum(r.accepted_by_source.get(source, 0) for r in rows),
        }
        for source in (s.name.lower() for s in Source)
    }
    return {
        "time_share": shares if any(shares.values()) else None,
        "acceptance_by_position": _by_position(rows),
        "acceptance_by_source": {source: counts for source, counts in by_source.items() if counts["drafted"]},
        "drafted": drafted,
        "accepted": accepted,
        "discard_rate": (drafted - accepted) / tokens if tokens else None,
        "verification_rate": forwards / tokens if tokens else None,
        "retrieval_hit_rate": sum(r.retrieval_hits for r in rows) / forwards if forwards else None,
    }


def _by_position(rows: Sequence[QuestionRow]) -> list[float]:
    """[d - 1]: of the steps that drafted at depth d, the share that accepted there."""
    tried = [sum(counts) for counts in zip_longest(*(r.steps_by_depth for r in rows), fillvalue=0)]
    accepted = np.concatenate([r.accepted for r in rows]) if rows else np.zeros(0)
    return [float((accepted >= d).sum() / n) if n else 0.0 for d, n in enumerate(tried, start=1)]


def nodes_of(drafter: Drafter, batch_size: int) -> int | dict | None:
    """Nodes per step, as `max_nodes` of `results.json`.

    That is a number, or for `auto` what it chose at the typical context for 1, 2, 4, .. rows.
    """
    budget = getattr(drafter, "budget", None)
    if budget is None:
        return drafter.gamma + 1 if hasattr(drafter, "gamma") else None
    if budget.fixed is not None:
        return budget.fixed
    rows = sorted({batch_size} | {2**i for i in range(batch_size.bit_length())})
    return {AUTO: {str(n): budget.nodes(n) for n in rows}}
