"""Measure what a forward of the target costs on this machine, and fit the roofline behind it (SSSD, section 3.2).

Letters: n nodes of a tree, b rows, c committed tokens of each row.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
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

from spectrain.decoding import DraftTree, KVCache, Source, TargetModel
from spectrain.decoding.budget import ForwardCost, Roofline
from spectrain.decoding.errors import UserError, check_whole
from spectrain.decoding.memory import is_out_of_memory
from spectrain.stores.folder import read_json, write_json

CONTEXTS = (64, 256, 1024, 4096)  # tokens
BREAKPOINTS = 64  # places tried for each of the roofline's two corners before the best is refined


@dataclass(frozen=True)
class Grid:
    """The sizes of the timed forwards, ascending."""

    nodes: Sequence[int]  # of a row's tree
    batch_sizes: Sequence[int]
    contexts: Sequence[int]  # committed tokens of the longest row
    repeats: int  # timed rounds; one more warms up


def grid_of(
    target: TargetModel,
    nodes: Sequence[int],
    batch_sizes: Sequence[int],
    contexts: Sequence[int] | None,
    repeats: int,
) -> Grid:
    """The sizes as users give them; contexts are by default the first three of CONTEXTS that fit the target.

    Raises:
        UserError: a list is empty, a number is out of range, or a context leaves the target no position.
    """
    check_whole("repeats", repeats, 1)
    if contexts is None:
        contexts = [c for c in CONTEXTS if c < target.max_positions][:3]
    sizes = {"nodes": nodes, "batch_sizes": batch_sizes, "contexts": contexts}
    for name, values in sizes.items():
        if not values:
            raise UserError(f"{name}=[] is empty; give at least one number")
        for value in values:
            check_whole(name, value, 2 if name == "nodes" else 1)
    if max(contexts) >= target.max_positions:
        raise UserError(
            f"contexts={max(contexts)} leaves no position for a draft: the target's context holds "
            f"{target.max_positions}; lower contexts"
        )
    return Grid(*(tuple(sorted(set(values))) for values in sizes.values()), repeats)


def forward_cost(target: TargetModel, grid: Grid, seed: int, file: Path) -> ForwardCost:
    """Time forwards of 1 and the grid's nodes and add the fit. The file keeps raw medians for an interrupted run."""
    if not file.is_file():
        write_json(file, measure_forward(target, replace(grid, nodes=(1, *grid.nodes)), seed))
    return steadied(ForwardCost.from_json(read_json(file)), grid.repeats)


@torch.inference_mode()
def measure_forward(target: TargetModel, grid: Grid, seed: int = 0) -> ForwardCost:
    """Time `TargetModel.score` on every cell of the grid; each round visits all cells in another order.

    The rows of a batch differ in length by one token, as in a real batch: equal lengths would take a faster way through
    the cache.

    Returns:
        Medians with their spread, without a roofline.

    Raises:
        UserError: memory is too small for the grid.
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
    shape = [len(values) for values in sizes]
    low, median, high = np.quantile(list(seconds.values()), [0.25, 0.5, 0.75], axis=1).reshape(3, *shape)
    return ForwardCost(*sizes, _as_tuples(median), _as_tuples((high - low) / median))


def _timed(target: TargetModel, tree: DraftTree, cache: KVCache, lengths: list[int]) -> float:
    """Seconds of one forward. Nothing is committed, so the cache may be set to any length again."""
    cache.lengths = lengths
    wait = torch.cuda.synchronize if target.device.type == "cuda" else lambda device: None
    wait(target.device)
    start = time.perf_counter()
    target.score(tree, cache)
    wait(target.device)
    return time.perf_counter() - start


def _binary_tree(tokens: Tensor) -> DraftTree:
    """A binary tree per row of tokens [b, n]: not a chain, which would take a faster mask."""
    n_rows, n_nodes = tokens.shape
    if n_nodes == 1:
        return DraftTree.root_only(tokens[:, 0])
    parents = (torch.arange(n_nodes, device=tokens.device) - 1).div(2, rounding_mode="floor")  # -1 at the root
    source = torch.full_like(tokens, int(Source.INPUT))
    tree = DraftTree(tokens, parents.expand(n_rows, -1), source, max_depth=n_nodes.bit_length() - 1)
    _ = tree.depth, tree.ancestors  # made on first use, and part of drafting
    return tree


def _as_tuples(grid: np.ndarray) -> tuple:
    return tuple(tuple(map(tuple, plane)) for plane in grid.tolist())


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
    return replace(found, error=float(np.median(abs(_fitted_seconds(cost, found).ravel() / seconds - 1))))


def _fitted_seconds(cost: ForwardCost, roofline: Roofline) -> np.ndarray:
    """The roofline's seconds of each cell, shaped as `cost.seconds`."""
    cells = product(cost.nodes, cost.batch_sizes, cost.contexts)
    return np.reshape([roofline.seconds(*cell) for cell in cells], np.shape(cost.seconds))


def steadied(cost: ForwardCost, repeats: int) -> ForwardCost:
    """Add the fit, and draw each cell towards it by as much as its own median is uncertain.

    On a quiet machine the medians stay. Where other work disturbed it, a lucky cell would otherwise win every
    comparison. Medians and fit are weighted as independent estimates, by their standard errors.
    """
    roofline = fit_roofline(cost)
    seconds, fitted = np.array(cost.seconds), _fitted_seconds(cost, roofline)
    of_median = 0.93 * np.array(cost.spread) / np.sqrt(repeats)  # 1.25 sigma / sqrt(R), sigma = IQR / 1.35
    of_fit = 1.48 * roofline.error  # a normal's sigma from its median deviation
    trust = of_fit**2 / np.maximum(of_fit**2 + of_median**2, 1e-12)
    drawn = np.exp(trust * np.log(seconds) + (1 - trust) * np.log(fitted)) if of_fit > 0 else seconds
    return replace(cost, seconds=_as_tuples(drawn), roofline=roofline)
