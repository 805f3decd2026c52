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

from spectrain.decoding import DraftTree, KVCache, Source, TargetModel
from spectrain.decoding.budget import ForwardCost, Roofline
from spectrain.decoding.errors import UserError, check_whole
from spectrain.decoding.memory import is_out_of_memory
from spectrain.stores.folder import read_json, write_json

BREAKPOINTS = 64  # places tried for each of the roofline's two corners before the best is refined


@dataclass(frozen=True)
class Grid:
    """The sizes of the timed forwards. Raises UserError where a list is empty or a number is out of range."""

    nodes: tuple[int, ...]  # of a row's tree
    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]  # committed tokens of the longest row
    repeats: int  # timed rounds; one more warms up

    def __post_init__(self) -> None:
        for name in ("nodes", "batch_sizes", "contexts"):
            if not getattr(self, name):
                raise UserError(f"{name}=[] is empty; give at least one number")
            for value in getattr(self, name):
                check_whole(name, value, 1)
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))
        check_whole("repeats", self.repeats, 1)

    def check(self, target: TargetModel) -> None:
        """Raise UserError where a context leaves the target no position."""
        if self.contexts[-1] >= target.max_positions:
            raise UserError(
                f"contexts={self.contexts[-1]} leaves no position for a draft: the target's context holds "
                f"{target.max_positions}; lower contexts"
            )


def forward_cost(target: TargetModel, grid: Grid, file: Path, seed: int = 0) -> ForwardCost:
    """Time forwards of 1 and the grid's nodes and add the fit. The file keeps raw medians for an interrupted run."""
    if file.is_file():
        return steadied(ForwardCost.from_json(read_json(file)), grid.repeats)
    cost = measure_forward(target, replace(grid, nodes=(1, *grid.nodes)), seed)
    write_json(file, cost)
    return steadied(cost, grid.repeats)


@torch.inference_mode()
def measure_forward(target: TargetModel, grid: Grid, seed: int = 0) -> ForwardCost:
    """Time `TargetModel.score` on every cell of the grid; each round visits all cells in another order.

    Trees are binary, of random tokens. The rows of a batch differ in length by one token, as in a real batch: equal
    lengths would take a faster way through the cache.

    Returns:
        Medians with their spread, without a roofline.

    Raises:
        UserError: memory is too small for the grid.
    """
    sizes = grid.nodes, grid.batch_sizes, grid.contexts
    generator = torch.Generator().manual_seed(seed)
    cells = list(product(*sizes))
    seconds: dict[tuple[int, int, int], list[float]] = {cell: [] for cell in cells}
    order = Random(seed)
    try:
        caches = {b: _filled_cache(target, b, grid.contexts[-1], generator) for b in grid.batch_sizes}
        trees = {(n, b): _random_tree(target, n, b, generator) for n, b in product(*sizes[:2])}
        for i in track(range(grid.repeats + 1), "forwards", console=Console(stderr=True)):
            for n, b, c in order.sample(cells, len(cells)):
                elapsed_s = _timed(target, trees[n, b], caches[b], [max(1, c - row) for row in range(b)])
                if i:
                    seconds[n, b, c].append(elapsed_s)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"memory is too small for {grid.batch_sizes[-1]} rows of {grid.contexts[-1]} tokens; lower batch_sizes or "
            "contexts"
        ) from error
    shape = [len(values) for values in sizes]
    low, median, high = np.quantile(list(seconds.values()), [0.25, 0.5, 0.75], axis=1).reshape(3, *shape)
    return ForwardCost(*sizes, _as_tuples(median), _as_tuples((high - low) / median))


def _as_tuples(grid: np.ndarray) -> tuple:
    return tuple(tuple(map(tuple, plane)) for plane in grid.tolist())


def _timed(target: TargetModel, tree: DraftTree, cache: KVCache, lengths: list[int]) -> float:
    """Seconds of one forward. Nothing is committed, so the cache may be set to any length again."""
    cache.lengths = lengths
    wait = torch.cuda.synchronize if target.device.type == "cuda" else lambda device: None
    wait(target.device)
    start = time.perf_counter()
    target.score(tree, cache)
    wait(target.device)
    return time.perf_counter() - start


def _filled_cache(target: TargetModel, n_rows: int, n_tokens: int, generator: torch.Generator) -> KVCache:
    cache = KVCache(n_rows)
    tokens = torch.randint(target.vocab_size, (n_rows, n_tokens), generator=generator)
    target.prefill(tokens.to(target.device), [n_tokens] * n_rows, cache, range(n_rows))
    return cache


def _random_tree(target: TargetModel, n_nodes: int, n_rows: int, generator: torch.Generator) -> DraftTree:
    """A binary tree per row: not a chain, which would take a faster mask."""
    tokens = torch.randint(target.vocab_size, (n_rows, n_nodes), generator=generator).to(target.device)
    if n_nodes == 1:
        return DraftTree.root_only(tokens[:, 0])
    parents = (torch.arange(n_nodes, device=target.device) - 1).div(2, rounding_mode="floor")  # -1 at the root
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
