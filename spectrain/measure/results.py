"""The rows of a benchmark, one per question and method, and the results that are computed from them alone.

So a resumed run and an uninterrupted one give the same results. docs/measuring.md explains every key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest

import numpy as np

from spectrain.data.prompts import Question
from spectrain.decoding import Drafter, Generation
from spectrain.decoding.generation import LOOKED_UP, STAGES, Choice
from spectrain.drafting.budget import AUTO
from spectrain.measure.statistics import acceptance_length, decode_s, ratio_of_sums, speedup
from spectrain.methods.auto import Auto
from spectrain.methods.registry import BASELINE
from spectrain.target.tree import Source

CONTEXTS = (256, 1024, 4096)  # tokens of a prompt up to which answers are grouped
LONGER = "longer"
NEVER_DRAFT = (BASELINE, "hf_generate")
LEAST_DRAFTED = 0.05  # of the steps; who drafts in fewer has another's speed
DID_NOT_DRAFT = "did not draft"


@dataclass(frozen=True)
class QuestionRow:
    """One question answered by one method, all turns together: a line of `questions.jsonl`."""

    question_id: str
    category: str
    method: str
    error: str | None = None  # why there is no answer; the numbers are then empty
    batch_size: int = 1
    turns: int = 0
    prompt_tokens: list[int] = field(default_factory=list)  # of each turn
    replies: list[list[int]] = field(default_factory=list)  # token ids of each turn
    text: list[str] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    target_forwards: int = 0  # after prefill
    steps: float = 0.0  # its share of the steps of its batch: the same at batch size 1
    accepted: list[int] = field(default_factory=list)  # drafted tokens accepted in each step
    drafted: list[int] = field(default_factory=list)  # nodes drafted in each step
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    steps_by_depth: list[int] = field(default_factory=list)  # [d - 1]: steps that drafted at depth d
    retrieval_hits: int = 0
    choices: list[Choice] = field(default_factory=list)  # where the method chooses among others, in order
    prefill_s: float = 0.0
    time_s: dict[str, float] = field(default_factory=dict)  # by stage
    seconds: float = 0.0  # all of it
    peak_memory_bytes: int = 0
    other_work: float | None = None  # share of the processor's time that other processes took meanwhile
    prepared: int = 0  # how often something was compiled or recorded during the answer

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.replies))

    @property
    def context(self) -> str:
        """The first of CONTEXTS that its longest prompt fits into."""
        longest = max(self.prompt_tokens, default=0)
        return next((str(tokens) for tokens in CONTEXTS if longest <= tokens), LONGER)


def failed_row(question: Question, method: str, error: str) -> QuestionRow:
    return QuestionRow(question.id, question.category, method, error)


def question_row(
    question: Question,
    method: str,
    prompts: Sequence[Sequence[int]],
    replies: Sequence[Generation],
    decode: Callable[[list[int]], str],
    peak_memory_bytes: int,
    steps: float = 0.0,
) -> QuestionRow:
    """Add up the replies of a method to the prompts of all turns of a question. `decode` makes text of tokens."""
    return QuestionRow(
        question.id,
        question.category,
        method,
        turns=len(replies),
        prompt_tokens=[len(prompt) for prompt in prompts],
        replies=[g.tokens for g in replies],
        text=[decode(g.tokens) for g in replies],
        finish_reasons=[g.finish_reason for g in replies],
        target_forwards=sum(g.target_forwards for g in replies),
        steps=steps,
        accepted=[n for g in replies for n in g.accepted],
        drafted=[n for g in replies for n in g.drafted],
        drafted_by_source=_by_source(_summed(g.drafted_by_source for g in replies)),
        accepted_by_source=_by_source(Counter(s for g in replies for s in g.sources if s != Source.ROOT)),
        steps_by_depth=_summed(g.steps_by_depth for g in replies),
        retrieval_hits=sum(g.retrieval_hits for g in replies),
        choices=[one for g in replies for one in g.choices],
        prefill_s=sum(g.prefill_s for g in replies),
        time_s={stage: sum(g.time_s[stage] for g in replies) for stage in STAGES},
        seconds=sum(map(decode_s, replies)),
        peak_memory_bytes=peak_memory_bytes,
    )


def _by_source(counts: Sequence[int] | Counter) -> dict[str, int]:
    """Name the sources of counts by Source; zeros are left out."""
    return {source.name.lower(): counts[source] for source in Source if counts[source]}


def _summed(counts: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def summarise(
    rows: Sequence[QuestionRow], kinds: Mapping[str, str], greedy: bool, float32: bool, shares_noise: bool = False
) -> dict[str, dict]:
    """Compute the `methods` of `results.json` from rows in any order.

    `kinds` has "method" or "peer" (a baseline) by name, in the order of the result. Texts are compared with those of
    autoregressive decoding if sampling was `greedy`, those of our own methods also if it `shares_noise`, and judged in
    float32 only: elsewhere a tie may be rounded.
    """
    answered = {name: {r.question_id: r for r in rows if r.method == name and r.error is None} for name in kinds}
    plain = answered.get(BASELINE, {})
    summary = {}
    for name, kind in kinds.items():
        own = list(answered[name].values())
        compared = [r for r in own if r.question_id in plain]
        mismatches = sum(r.replies != plain[r.question_id].replies for r in compared)
        alike = greedy or (shares_noise and kind == "method")
        judged = alike and float32 and own and len(compared) == len(own)
        measures = partial(_measures, plain=plain, drafts=name not in NEVER_DRAFT)
        ran = shares_of([one for r in own for one in r.choices])
        summary[name] = {
            **measures(own),
            "kind": kind,
            **(_steps(own) if kind == "method" else dict.fromkeys(_steps([]))),
            "ran": ran,
            "errors": sum(r.method == name and r.error is not None for r in rows),
            "greedy_mismatches": mismatches if alike else None,
            "lossless": mismatches == 0 if judged else None,
            **{
                f"by_{what}": {
                    value: measures([r for r in own if getattr(r, what) == value])
                    for value in dict.fromkeys(getattr(r, what) for r in own)
                }
                for what in ("category", "context")
            },
        }
    return summary


def _measures(rows: Sequence[QuestionRow], plain: Mapping[str, QuestionRow], drafts: bool) -> dict:
    """Compute what methods and baselines have in common, over the questions that they answered.

    One that should draft and hardly did has no speedup: it decoded plainly, and a difference would not be its own.
    """
    pairs = [(r, plain[r.question_id]) for r in rows if r.question_id in plain]
    counts = [(r.n_tokens, r.seconds, p.n_tokens, p.seconds) for r, p in pairs]
    tokens, seconds, forwards = [r.n_tokens for r in rows], [r.seconds for r in rows], [r.target_forwards for r in rows]
    found = {
        "questions": len(rows),
        "tokens": sum(tokens),
        "target_forwards": sum(forwards),
        "tokens_per_s_macro": float(np.mean(np.divide(tokens, seconds))) if rows else None,
        "peak_memory_bytes": max((r.peak_memory_bytes for r in rows), default=0),
        "other_work": _mean([r.other_work for r in rows], seconds),
    }
    estimates = {
        "mean_accepted": acceptance_length([r.n_tokens - r.turns for r in rows], forwards),
        "tokens_per_s_micro": ratio_of_sums(tokens, seconds),
        "speedup": speedup(*np.array(counts, dtype=np.float64).reshape(-1, 4).T),
    }
    for name, estimate in estimates.items():
        found[name], low, high = estimate.as_json().values()
        found[f"{name}_ci95"] = None if low is None else [low, high]
    steps = [n > 0 for r in rows for n in r.drafted]
    if drafts and sum(steps) < LEAST_DRAFTED * len(steps):
        return found | {"speedup": None, "speedup_ci95": None, "no_speedup": DID_NOT_DRAFT}
    return found | {"no_speedup": None}


def _mean(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Return the weighted mean of the values that are known; None: none is."""
    known = [(value, weight) for value, weight in zip(values, weights, strict=True) if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def _steps(rows: Sequence[QuestionRow]) -> dict:
    """Compute what only our own loop can tell, because it sees its steps."""
    tokens, forwards = sum(r.n_tokens for r in rows), sum(r.target_forwards for r in rows)
    accepted = np.array([n for r in rows for n in r.accepted])
    n_drafted, n_accepted = sum(sum(r.drafted) for r in rows), int(accepted.sum())
    tried = _summed(r.steps_by_depth for r in rows)
    by_stage = {stage: sum(r.time_s[stage] for r in rows) for stage in STAGES}
    whole_s = sum(by_stage.values())
    drafted_by, accepted_by = Counter(), Counter()
    for row in rows:
        drafted_by.update(row.drafted_by_source)
        accepted_by.update(row.accepted_by_source)
    names = [source.name.lower() for source in Source if drafted_by[source.name.lower()]]
    # Where nothing was drafted from a table or store there is nothing that could have been hit.
    looks_up = any(source.name.lower() in names for source in LOOKED_UP)
    return {
        "time_share": {stage: seconds / whole_s for stage, seconds in by_stage.items()} if whole_s else None,
        # Of the steps that drafted at depth d, the share that accepted there.
        "acceptance_by_position": [
            float((accepted >= d).sum() / n) if n else 0.0 for d, n in enumerate(tried, start=1)
        ],
        "acceptance_by_source": {name: {"drafted": drafted_by[name], "accepted": accepted_by[name]} for name in names},
        "drafted": n_drafted,
        "accepted": n_accepted,
        "discard_rate": (n_drafted - n_accepted) / tokens if tokens else None,
        "verification_rate": forwards / tokens if tokens else None,
        "retrieval_hit_rate": sum(r.retrieval_hits for r in rows) / forwards if forwards and looks_up else None,
    }


def shares_of(choices: Sequence[Choice]) -> dict[str, dict] | None:
    """Of each method that was chosen, most steps first: its share of all steps, and of these why they ran it.

    `speed` is the mean over its steps, where it was known. None: there was nothing to choose.
    """
    steps, why, timed = Counter(), Counter(), Counter()
    gained = Counter()
    for one in choices:
        steps[one.method] += one.steps
        why[one.method, one.why] += one.steps
        if one.speed is not None:
            timed[one.method] += one.steps
            gained[one.method] += one.steps * one.speed
    shares = {
        name: {
            "share": n / steps.total(),
            "why": {reason: count / n for (method, reason), count in why.items() if method == name},
            "speed": gained[name] / timed[name] if timed[name] else None,
        }
        for name, n in steps.most_common()
    }
    return shares or None


def nodes_of(drafter: Drafter) -> int | str | None:
    """Return the nodes per step, as `max_nodes` of `results.json`: a number, or auto; None: nothing is drafted."""
    if isinstance(drafter, Auto):
        return AUTO
    return drafter.gamma + 1 if hasattr(drafter, "gamma") else getattr(drafter, "max_nodes", None)
