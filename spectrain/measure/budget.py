"""Measure the gain (tau) of every method at several node budgets, and its cost outside the target's forward."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from scipy.optimize import nnls

from spectrain.decoding import Drafter, Generation, Sampling, TargetModel
from spectrain.decoding.budget import MethodCurve
from spectrain.decoding.errors import UserError
from spectrain.methods.registry import build_method
from spectrain.stores.budget_table import NO_OPTIONS, CurveEntry
from spectrain.stores.folder import RowFile

log = logging.getLogger(__name__)

SINGLE_PROMPTS = 4  # decoded one by one as well, for the seconds of a step at batch 1

Drafters = Mapping[str, Mapping[int, Drafter]]  # by method and node budget


def build_sizes(
    target: TargetModel,
    methods: Mapping[str, Mapping],
    artifacts: Mapping[str, str],
    nodes: Sequence[int],
    skip_unbuilt: bool,
) -> Drafters:
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
        sizes, refused = {}, None
        for size in nodes:
            try:
                sizes[size] = build_method({**options, "max_nodes": size}, target, artifacts)
            except UserError as error:
                refused = error
        if sizes:
            found[name] = sizes
        elif skip_unbuilt:
            log.warning("%s is left out: %s", name, refused)
        else:
            raise UserError(f"{name}: {refused}") from refused
    if not found:
        raise UserError("no method drafts trees and can be built; give methods=[logitspec,...] or all")
    return found


@dataclass(frozen=True)
class GroupRow:
    """One group of prompts decoded by one method under one node budget: a line of `groups.jsonl`."""

    method: str
    nodes: int
    group: str  # prompts and batch size, as a name
    tokens: int  # after prefill
    forwards: int  # steps, counted for each row
    steps: int  # of the batch: as many as its longest row took
    context_tokens: int  # prompt and half of the output, summed over rows weighted by their steps
    outside_s: float  # drafting, verifying, committing; a row's share of a step is 1 / the rows then active
    widths: dict[int, int]  # nodes of a row's own tree -> steps

    def __post_init__(self) -> None:
        # JSON has only strings for keys.
        object.__setattr__(self, "widths", {int(width): count for width, count in self.widths.items()})


def measure_groups(
    decode: Callable[..., list[Generation]],
    drafters: Drafters,
    prompts: Sequence[Sequence[int]],
    batch_size: int,
    max_new_tokens: int,
    file: Path,
) -> list[GroupRow]:
    """Decode batches of all prompts, and the first few one by one, with every method under every budget.

    Lookup methods write the text that autoregressive decoding writes, so budgets are compared on equal text, sampled or
    not. Rows that the file holds are not measured again. `decode` is `generate` of a target, sampling and seed.
    """
    rows, warmed = RowFile(file, GroupRow), set()
    done = {(row.group, row.method, row.nodes) for row in rows.rows}
    groups = {f"single {i}": [i] for i in range(len(prompts)) if batch_size == 1 or i < SINGLE_PROMPTS}
    for start in range(0, len(prompts), batch_size) if batch_size > 1 else ():
        groups[f"batch {start}"] = list(range(len(prompts)))[start : start + batch_size]
    asked = [(group, name, nodes) for group in groups for name, budgets in drafters.items() for nodes in budgets]
    todo = [one for one in asked if one not in done]
    for group, name, nodes in track(todo, "acceptance", console=Console(stderr=True)):
        drafter, own = drafters[name][nodes], [prompts[i] for i in groups[group]]
        options = {"prompt_numbers": groups[group], "batch_size": len(own)}
        if name not in warmed:
            decode(drafter, own, 2, **options)
            warmed.add(name)
        found = decode(drafter, own, max_new_tokens, **options)
        shape = getattr(drafter, "probe_shape", None)
        n_always = 1 + (shape.n_probes if shape is not None else 0)
        contexts = [len(prompt) + len(g.tokens) // 2 for prompt, g in zip(own, found, strict=True)]
        row = GroupRow(
            *(name, nodes, group),
            tokens=sum(len(g.tokens) - 1 for g in found),
            forwards=sum(g.target_forwards for g in found),
            steps=max(g.target_forwards for g in found),
            context_tokens=sum(context * g.target_forwards for context, g in zip(contexts, found, strict=True)),
            outside_s=sum(sum(g.time_s.values()) - g.time_s["forward"] for g in found),
            widths=dict(sorted(Counter(n_always + drafted for g in found for drafted in g.drafted).items())),
        )
        rows.append(row)
    return rows.rows


def curve_entries(
    drafters: Drafters, options: Mapping[str, Mapping], rows: Sequence[GroupRow], sampling: Sampling
) -> tuple[CurveEntry, ...]:
    """The curve of each method, with the yaml (`options`) and the sampling that it was measured with.

    Raises:
        UserError: every text of a method ended with its first token.
    """
    entries = []
    for name, budgets in drafters.items():
        probes = any(getattr(drafter, "probe_shape", None) for drafter in budgets.values())
        own = [row for row in rows if row.method == name and row.forwards]
        if not own:
            raise UserError(f"{name}: every text ended with its first token; give other prompts")
        described = {key: value for key, value in options[name].items() if key not in NO_OPTIONS}
        entries.append(CurveEntry(name, described, sampling, curve_of(own, min(budgets) if probes else 1)))
    return tuple(entries)


def curve_of(rows: Sequence[GroupRow], least: int) -> MethodCurve:
    """The curve of one method, from all its groups. `least`: nodes that the method needs."""
    budgets, points = sorted({row.nodes for row in rows}), []
    for nodes in budgets:
        own = [row for row in rows if row.nodes == nodes]
        forwards = sum(row.forwards for row in own)
        counts = sum((Counter(row.widths) for row in own), Counter())
        widths = tuple((width, counts[width] / forwards) for width in sorted(counts))
        # Seconds per step, and further seconds per row, that explain the groups' time outside the forward.
        rows_per_step = np.array([row.forwards / row.steps for row in own])
        seconds = np.array([row.outside_s / row.steps for row in own])
        columns = np.stack([np.ones_like(rows_per_step), rows_per_step], axis=1)
        outside, _ = nnls(columns / seconds[:, None], np.ones_like(seconds))
        points.append((sum(row.tokens for row in own) / forwards, *outside.tolist(), widths))
    context_tokens = round(sum(row.context_tokens for row in rows) / sum(row.forwards for row in rows))
    return MethodCurve(tuple(budgets), *zip(*points, strict=True), context_tokens, least)
