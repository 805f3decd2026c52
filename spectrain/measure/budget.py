"""Measure what max_nodes=auto goes by: the seconds of a target forward, and what each method gains from more nodes.

Seconds are measured on a grid, and the roofline behind them is fitted (SSSD, section 3.2). Gain is the acceptance
length (tau) of a method at several node budgets, beside its cost outside the target's forward.

Letters: n nodes of a tree, b rows, c committed tokens of each row.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from scipy.optimize import minimize, nnls
from torch import Tensor

from spectrain.decoding import Drafter, DraftTree, Generation, KVCache, Sampling, Source, TargetModel
from spectrain.decoding.errors import UserError
from spectrain.decoding.memory import is_out_of_memory
from spectrain.methods.registry import build_method
from spectrain.stores.budget_table import NO_OPTIONS, CurveEntry, ForwardCost, MethodCurve, Roofline
from spectrain.stores.folder import read_object, write_json
from spectrain.stores.lines import RowFile

log = logging.getLogger(__name__)

CONTEXTS = (64, 256, 1024, 4096)  # tokens
BREAKPOINTS = 64  # places tried for each of the roofline's two corners before the best is refined
SINGLE_PROMPTS = 4  # decoded one by one as well, for the seconds of a step at batch 1

Drafters = Mapping[str, Mapping[int, Drafter]]  # by method and node budget


# Seconds of a target forward


@dataclass(frozen=True)
class Grid:
    """The sizes of the timed forwards, ascending."""

    nodes: Sequence[int]  # of a row's tree
    batch_sizes: Sequence[int]
    contexts: Sequence[int]  # committed tokens of the longest row
    repeats: int  # timed rounds; one more warms up


def grid_of(
    target: TargetModel, nodes: Sequence[int], batch_sizes: Sequence[int], contexts: Sequence[int] | None, repeats: int
) -> Grid:
    """Check the sizes that users give; contexts are by default the first three of CONTEXTS that fit the target."""
    if contexts is None:
        contexts = [c for c in CONTEXTS if c < target.max_positions][:3]
    sizes = {"nodes": nodes, "batch_sizes": batch_sizes, "contexts": contexts}
    if not contexts:
        raise UserError("contexts=[] is empty; give at least one number")
    if max(contexts) >= target.max_positions:
        raise UserError(
            f"contexts={max(contexts)} leaves no position for a draft: the target's context holds "
            f"{target.max_positions}; lower contexts"
        )
    return Grid(*(sorted(set(values)) for values in sizes.values()), repeats)


def forward_cost(target: TargetModel, grid: Grid, seed: int, file: Path) -> ForwardCost:
    """Time forwards of 1 and the grid's nodes and add the fit. The file keeps raw medians for an interrupted run."""
    if not file.is_file():
        write_json(file, measure_forward(target, replace(grid, nodes=[1, *grid.nodes]), seed))
    otherwise = "remove it, and the forwards are timed again"
    cost = read_object(file, ForwardCost, otherwise)
    try:
        return steadied(cost, grid.repeats)
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}); {otherwise}") from error


@torch.inference_mode()
def measure_forward(target: TargetModel, grid: Grid, seed: int = 0) -> ForwardCost:
    """Time `TargetModel.score` on every cell of the grid; each round visits all cells in another order.

    The rows of a batch differ in length by one token, as in a real batch: equal lengths would take a faster way through
    the cache. Returns medians with their spread, without a roofline. Raises UserError where memory is too small.
    """
    sizes = grid.nodes, grid.batch_sizes, grid.contexts
    cells, longest = list(product(*sizes)), grid.contexts[-1]
    seconds: dict[tuple[int, int, int], list[float]] = {cell: [] for cell in cells}
    generator, order = torch.Generator().manual_seed(seed), Random(seed)
    caches, trees = {}, {}
    try:
        for b in grid.batch_sizes:
            caches[b] = KVCache(b)
            tokens = torch.randint(target.vocab_size, (b, longest), generator=generator).to(target.device)
            target.prefill(tokens, [longest] * b, caches[b], range(b))
        for n, b in product(*sizes[:2]):
            tokens = torch.randint(target.vocab_size, (b, n), generator=generator)
            trees[n, b] = _binary_tree(tokens.to(target.device))
        for i in track(range(grid.repeats + 1), "forwards", console=Console(stderr=True)):
            for n, b, c in order.sample(cells, len(cells)):
                elapsed_s = _timed(target, trees[n, b], caches[b], [max(1, c - row) for row in range(b)])
                if i:
                    seconds[n, b, c].append(elapsed_s)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"memory is too small for {grid.batch_sizes[-1]} rows of {longest} tokens; lower batch_sizes or contexts"
        ) from error
    quartiles = np.quantile(list(seconds.values()), [0.25, 0.5, 0.75], axis=1)
    low, median, high = quartiles.reshape(3, *map(len, sizes))
    return ForwardCost(*sizes, median.tolist(), ((high - low) / median).tolist())


def _timed(target: TargetModel, tree: DraftTree, cache: KVCache, lengths: list[int]) -> float:
    """Time one forward. Nothing is committed, so the cache may be set to any length again."""
    cache.lengths = lengths
    wait = torch.cuda.synchronize if target.device.type == "cuda" else lambda device: None
    wait(target.device)
    start = time.perf_counter()
    target.score(tree, cache)
    wait(target.device)
    return time.perf_counter() - start


def _binary_tree(tokens: Tensor) -> DraftTree:
    """Make a binary tree per row of tokens [b, n]: not a chain, which would take a faster mask."""
    n_rows, n_nodes = tokens.shape
    if n_nodes == 1:
        return DraftTree.root_only(tokens[:, 0])
    parents = (torch.arange(n_nodes, device=tokens.device) - 1).div(2, rounding_mode="floor")  # -1 at the root
    source = torch.full_like(tokens, int(Source.INPUT))
    tree = DraftTree(tokens, parents.expand(n_rows, -1), source, max_depth=n_nodes.bit_length() - 1)
    _ = tree.depth, tree.ancestors  # made on first use, and part of drafting
    return tree


def fit_roofline(cost: ForwardCost) -> Roofline:
    """Fit SSSD's form to a grid by least relative squares, with all parameters >= 0.

    With the two corners x = weights / node and y = read / attend fixed, the form is linear in the other parameters,

        t = t0 + node max(x, b n) + attend b c max(y, n),

    so non-negative least squares is exact for each pair of corners, and only the corners are searched for.
    """
    n, b, c = np.array(list(product(cost.nodes, cost.batch_sizes, cost.contexts)), dtype=np.float64).T
    seconds = np.array(cost.seconds).ravel()

    def fitted(corners: Sequence[float]) -> tuple[np.ndarray, float]:
        x, y = np.exp(corners)
        columns = np.stack([np.ones_like(n), np.maximum(x, b * n), b * c * np.maximum(y, n)], axis=1)
        scaled = columns / seconds[:, None]
        scale = scaled.max(axis=0)
        parameters, residual = nnls(scaled / scale, np.ones_like(seconds))
        return parameters / scale, residual

    # Beyond the largest b n (n) a corner changes nothing that was measured.
    x_grid = np.linspace(np.log((b * n).min()), np.log((b * n).max()), BREAKPOINTS)
    y_grid = np.linspace(0, np.log(n.max()), BREAKPOINTS // 2)
    best = min(product(x_grid, y_grid), key=lambda corners: fitted(corners)[1])
    limits = [(grid[0], grid[-1]) for grid in (x_grid, y_grid)]
    refined = minimize(lambda v: fitted(v)[1], best, method="Nelder-Mead", bounds=limits, options={"xatol": 1e-4})
    corners = refined.x if refined.fun <= fitted(best)[1] else np.array(best)
    (t0, node_s, attend_s), _ = fitted(corners)
    x, y = np.exp(corners)
    found = Roofline(float(t0), float(node_s * x), float(node_s), float(attend_s * y), float(attend_s), 0.0)
    return replace(found, error=float(np.median(abs(found.seconds(n, b, c) / seconds - 1))))


def steadied(cost: ForwardCost, repeats: int) -> ForwardCost:
    """Add the fit, and draw each cell towards it by as much as its own median is uncertain.

    On a quiet machine the medians stay. Where other work disturbed it, a lucky cell would otherwise win every
    comparison. Medians and fit are weighted as independent estimates, by their standard errors.
    """
    roofline, seconds = fit_roofline(cost), np.array(cost.seconds)
    of_median = 0.93 * np.array(cost.spread) / np.sqrt(repeats)  # 1.25 sigma / sqrt(R), sigma = IQR / 1.35
    of_fit = 1.48 * roofline.error  # a normal's sigma from its median deviation
    if of_fit > 0:
        fitted = roofline.seconds(*np.ix_(cost.nodes, cost.batch_sizes, cost.contexts))
        trust = of_fit**2 / np.maximum(of_fit**2 + of_median**2, 1e-12)
        seconds = np.exp(trust * np.log(seconds) + (1 - trust) * np.log(fitted))
    return replace(cost, seconds=seconds.tolist(), roofline=roofline)


# Gain and cost of each method


def build_sizes(
    target: TargetModel,
    methods: Mapping[str, Mapping],
    artifacts: Mapping[str, str],
    nodes: Sequence[int],
    skip_unbuilt: bool,
) -> Drafters:
    """Build each method, given by its yaml, under each of the ascending node budgets that has room for it.

    Raises UserError where a method cannot be built, with `skip_unbuilt` only where none can. `artifacts` are the
    folders that the user gave, by kind.
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
    widths: dict[str, int]  # nodes of a row's own tree, which JSON wants as text -> steps


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
        n_always = 1 + drafter.probe_shape.n_probes
        widths = Counter(n_always + drafted for g in found for drafted in g.drafted)
        contexts = [len(prompt) + len(g.tokens) // 2 for prompt, g in zip(own, found, strict=True)]
        row = GroupRow(
            *(name, nodes, group),
            tokens=sum(len(g.tokens) - 1 for g in found),
            forwards=sum(g.target_forwards for g in found),
            steps=max(g.target_forwards for g in found),
            context_tokens=sum(context * g.target_forwards for context, g in zip(contexts, found, strict=True)),
            outside_s=sum(sum(g.time_s.values()) - g.time_s["forward"] for g in found),
            widths={str(width): widths[width] for width in sorted(widths)},
        )
        rows.append(row)
    return rows.rows


def curve_entries(
    drafters: Drafters, options: Mapping[str, Mapping], rows: Sequence[GroupRow], sampling: Sampling
) -> list[CurveEntry]:
    """Fit the curve of each method, with the yaml (`options`) and the sampling that it was measured with."""
    entries = []
    for name, budgets in drafters.items():
        probes = any(drafter.probe_shape.n_probes for drafter in budgets.values())
        own = [row for row in rows if row.method == name and row.forwards]
        if not own:
            raise UserError(f"{name}: every text ended with its first token; give other prompts")
        described = {key: value for key, value in options[name].items() if key not in NO_OPTIONS}
        entries.append(CurveEntry(name, described, sampling, curve_of(own, min(budgets) if probes else 1)))
    return entries


def curve_of(rows: Sequence[GroupRow], least: int) -> MethodCurve:
    """Fit the curve of one method to all its groups. `least`: nodes that the method needs."""
    budgets, points = sorted({row.nodes for row in rows}), []
    for nodes in budgets:
        own = [row for row in rows if row.nodes == nodes]
        forwards = sum(row.forwards for row in own)
        counts = sum((Counter(row.widths) for row in own), Counter())
        widths = [(int(width), counts[width] / forwards) for width in sorted(counts, key=int)]
        # Seconds per step, and further seconds per row, that explain the groups' time outside the forward.
        rows_per_step = np.array([row.forwards / row.steps for row in own])
        seconds = np.array([row.outside_s / row.steps for row in own])
        columns = np.stack([np.ones_like(rows_per_step), rows_per_step], axis=1)
        outside, _ = nnls(columns / seconds[:, None], np.ones_like(seconds))
        points.append((sum(row.tokens for row in own) / forwards, *outside.tolist(), widths))
    context_tokens = round(sum(row.context_tokens for row in rows) / sum(row.forwards for row in rows))
    return MethodCurve(budgets, *zip(*points, strict=True), context_tokens, least)
