"""Measure the gain (tau) of every method at several node budgets, and its cost outside the target's forward."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from scipy.optimize import nnls

from spectrain.decoding import Drafter, Sampling, TargetModel, generate
from spectrain.decoding.budget import MethodCurve
from spectrain.decoding.errors import UserError
from spectrain.methods.registry import build_method
from spectrain.stores.budget_table import NO_OPTIONS, CurveEntry
from spectrain.stores.folder import RowFile

log = logging.getLogger(__name__)

SINGLE_PROMPTS = 4  # decoded one by one as well, for the seconds of a step at batch 1


def build_sizes(
    target: TargetModel,
    methods: Mapping[str, Mapping],
    artifacts: Mapping[str, str],
    nodes: Collection[int],
    skip_unbuilt: bool,
) -> dict[str, dict[int, Drafter]]:
    """Build each method under each node budget that has room for it.

    Args:
        target: what is decoded.
        methods: their yamls, by name.
        artifacts: folders that the user gave, by kind.
        nodes: the budgets, ascending.
        skip_unbuilt: leave out methods that cannot be built.

    Raises:
        UserError: a method, or all of them, cannot be built.
    """
    found: dict[str, dict[int, Drafter]] = {}
    for name, options in methods.items():
        found[name] = {}
        for size in nodes:
            try:
                found[name][size] = build_method({**options, "max_nodes": size}, target, artifacts)
            except UserError as error:
                refused = error
        if not found[name]:
            if not skip_unbuilt:
                raise UserError(f"{name}: {refused}") from refused
            log.warning("%s is left out: %s", name, refused)
            del found[name]
    if not found:
        raise UserError("no method could be built; see the warnings")
    return found


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

    def __post_init__(self) -> None:
        # JSON has only strings for keys.
        object.__setattr__(self, "widths", {int(width): count for width, count in self.widths.items()})


def measure_groups(
    target: TargetModel,
    drafters: Mapping[str, Mapping[int, Drafter]],
    prompts: Sequence[Sequence[int]],
    batch_size: int,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    file: Path,
) -> list[GroupRow]:
    """Decode batches of all prompts, and the first few one by one, with every method under every budget.

    Lookup methods write the text that autoregressive decoding writes, so budgets are compared on equal text, sampled or
    not. Rows that the file holds are not measured again.
    """
    rows, warmed = RowFile(file, GroupRow), set()
    done = {(row.method, row.nodes, row.group) for row in rows.rows}
    n_single = SINGLE_PROMPTS if batch_size > 1 else len(prompts)
    groups = {f"single {i}": range(i, i + 1) for i in range(min(n_single, len(prompts)))}
    for start in range(0, len(prompts) if batch_size > 1 else 0, batch_size):
        groups[f"batch {start}"] = range(start, min(start + batch_size, len(prompts)))
    asked = [(group, name, nodes) for group in groups for name, budgets in drafters.items() for nodes in budgets]
    todo = [(group, name, nodes) for group, name, nodes in asked if (name, nodes, group) not in done]
    for group, name, nodes in track(todo, "acceptance", console=Console(stderr=True)):
        work = (target, drafters[name][nodes], [prompts[i] for i in groups[group]], groups[group], sampling, seed)
        if name not in warmed:
            measure_group(*work, max_new_tokens=2)
            warmed.add(name)
        rows.append(GroupRow(name, nodes, group, **measure_group(*work, max_new_tokens)))
    return rows.rows


def measure_group(
    target: TargetModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    numbers: Sequence[int],
    sampling: Sampling,
    seed: int,
    max_new_tokens: int,
) -> dict:
    """Decode prompts as one batch and count: the fields of a `GroupRow`. `numbers` seed the prompts' samples.

    The batch has taken as many steps as its longest row. A row's share of a step's time is 1 / the rows then active, so
    shares add up to the time of the batch.
    """
    found = generate(
        target, drafter, prompts, max_new_tokens, sampling, seed=seed, prompt_numbers=numbers, batch_size=len(prompts)
    )
    shape = getattr(drafter, "probe_shape", None)
    n_always = 1 + (shape.n_probes if shape is not None else 0)
    contexts = [len(prompt) + len(g.tokens) // 2 for prompt, g in zip(prompts, found, strict=True)]
    return {
        "tokens": sum(len(g.tokens) - 1 for g in found),
        "forwards": sum(g.target_forwards for g in found),
        "steps": max(g.target_forwards for g in found),
        "context_tokens": sum(context * g.target_forwards for context, g in zip(contexts, found, strict=True)),
        "outside_s": sum(sum(g.time_s.values()) - g.time_s["forward"] for g in found),
        "widths": dict(sorted(Counter(n_always + drafted for g in found for drafted in g.drafted).items())),
    }


def curve_entries(
    drafters: Mapping[str, Mapping[int, Drafter]],
    options: Mapping[str, dict],
    rows: Sequence[GroupRow],
    sampling: Sampling,
) -> tuple[CurveEntry, ...]:
    """The curve of each method, with the yaml and the sampling that it was measured with."""
    entries = []
    for name, budgets in drafters.items():
        probes = any(getattr(drafter, "probe_shape", None) for drafter in budgets.values())
        curve = curve_of([row for row in rows if row.method == name], min(budgets) if probes else 1)
        own = {key: value for key, value in options[name].items() if key not in NO_OPTIONS}
        entries.append(CurveEntry(name, own, sampling, curve))
    return tuple(entries)


def curve_of(rows: Sequence[GroupRow], least: int) -> MethodCurve:
    """The curve of one method.

    Args:
        rows: of one method; every budget on the same groups.
        least: nodes that the method needs.

    Raises:
        UserError: every text ended with its first token.
    """
    method, rows = rows[0].method, [row for row in rows if row.forwards]
    if not rows:
        raise UserError(f"{method}: every text ended with its first token; give other prompts")
    budgets = sorted({row.nodes for row in rows})
    points = []
    for nodes in budgets:
        own = [row for row in rows if row.nodes == nodes]
        forwards = sum(row.forwards for row in own)
        counts = sum((Counter(row.widths) for row in own), Counter())
        widths = tuple((width, counts[width] / forwards) for width in sorted(counts))
        points.append((sum(row.tokens for row in own) / forwards, *_outside(own), widths))
    forwards = sum(row.forwards for row in rows)
    context_tokens = round(sum(row.context_tokens for row in rows) / forwards)
    return MethodCurve(tuple(budgets), *zip(*points, strict=True), context_tokens, least)


def _outside(rows: Sequence[GroupRow]) -> tuple[float, float]:
    """Seconds per step, and further seconds per row, that explain the groups' time outside the forward."""
    rows_per_step = np.array([row.forwards / row.steps for row in rows])
    seconds = np.array([row.outside_s / row.steps for row in rows])
    columns = np.stack([np.ones_like(rows_per_step), rows_per_step], axis=1)
    (step_s, row_s), _ = nnls(columns / seconds[:, None], np.ones_like(seconds))
    return float(step_s), float(row_s)
