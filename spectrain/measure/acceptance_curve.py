"""What a method gains (tau) and costs outside the forward at several node budgets, from the real loop.

A point is measured group by group, all budgets in turn on the same prompts. Lookup methods emit the text that
autoregressive decoding emits, so budgets are compared on equal text, sampled or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from scipy.optimize import nnls

from spectrain.decoding import Drafter, Sampling, TargetModel, generate
from spectrain.decoding.budget import MethodCurve


@dataclass(frozen=True)
class GroupRow:
    """One group of prompts decoded by one method under one node budget: a line of `groups.jsonl`."""

    method: str
    nodes: int
    group: str  # prompts and batch size, as a name
    tokens: int  # after prefill
    forwards: int  # steps, counted for each row
    steps: int  # of the batch
    context_tokens: int  # prompt and half of the output, summed over rows weighted by their steps
    outside_s: float  # drafting, verifying, committing
    widths: dict[int, int]  # nodes of a row's own tree -> steps

    @classmethod
    def from_json(cls, values: dict) -> GroupRow:
        return cls(**{**values, "widths": {int(width): count for width, count in values["widths"].items()}})

    def as_json(self) -> dict:
        return asdict(self)


def measure_group(
    target: TargetModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    method: str,
    nodes: int,
    group: str,
    seed: int = 0,
) -> GroupRow:
    """Decodes prompts, all at once, and counts. `numbers` seed their samples.

    The group is one batch, so the batch has taken as many steps as its longest row. A row's share of a step's time is
    1 / the rows then active, so shares add up to the time of the batch.
    """
    found = generate(
        target, drafter, prompts, max_new_tokens, sampling, seed=seed, prompt_numbers=numbers, batch_size=len(prompts)
    )
    shape = getattr(drafter, "probe_shape", None)
    n_always = 1 + (shape.n_probes if shape is not None else 0)
    return GroupRow(
        method=method,
        nodes=nodes,
        group=group,
        tokens=sum(len(g.tokens) - 1 for g in found),
        forwards=sum(g.target_forwards for g in found),
        steps=max(g.target_forwards for g in found),
        context_tokens=sum(
            (len(prompt) + len(g.tokens) // 2) * g.target_forwards for prompt, g in zip(prompts, found, strict=True)
        ),
        outside_s=sum(sum(g.time_s.values()) - g.time_s["forward"] for g in found),
        widths=dict(sorted(Counter(n_always + drafted for g in found for drafted in g.drafted).items())),
    )


def curve_of(rows: Sequence[GroupRow], least: int) -> MethodCurve:
    """The curve of one method from all its groups.

    Args:
        rows: of one method; every budget on the same groups.
        least: nodes that the method can do with.
    """
    budgets = sorted({row.nodes for row in rows})
    taus, steps_s, rows_s, widths = [], [], [], []
    for nodes in budgets:
        own = [row for row in rows if row.nodes == nodes and row.forwards]
        forwards = sum(row.forwards for row in own)
        taus.append(sum(row.tokens for row in own) / forwards)
        step_s, row_s = _outside(own)
        steps_s.append(step_s)
        rows_s.append(row_s)
        counts = sum((Counter(row.widths) for row in own), Counter())
        widths.append(tuple((width, counts[width] / forwards) for width in sorted(counts)))
    forwards = sum(row.forwards for row in rows)
    context_tokens = round(sum(row.context_tokens for row in rows) / forwards)
    return MethodCurve(tuple(budgets), tuple(taus), tuple(steps_s), tuple(rows_s), tuple(widths), context_tokens, least)


def _outside(rows: Sequence[GroupRow]) -> tuple[float, float]:
    """Seconds a step, and more for each row, that explain what the groups spent outside the forward."""
    rows_a_step = np.array([row.forwards / row.steps for row in rows])
    seconds = np.array([row.outside_s / row.steps for row in rows])
    columns = np.stack([np.ones_like(rows_a_step), rows_a_step], axis=1)
    (step_s, row_s), _ = nnls(columns / seconds[:, None], np.ones_like(seconds))
    return float(step_s), float(row_s)
