"""What a forward of the target costs on this machine, and the roofline that explains it (SSSD, section 3.2).

    cost = measure_forward(target, nodes=(1, 8, 64), batch_sizes=(1, 8), contexts=(64, 512), repeats=5)
    roofline = fit_roofline(cost)

Letters: n nodes of a tree, b rows, c committed tokens of each row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import torch
from scipy.optimize import minimize, nnls

from spectrain.decoding import DraftTree, KVCache, Source, TargetModel
from spectrain.decoding.budget import ForwardCost, Roofline
from spectrain.decoding.errors import UserError, check_whole
from spectrain.decoding.memory import is_out_of_memory

BREAKPOINTS = 64  # of the roofline's two corners, tried on a grid before one is refined

Cell = tuple[int, int, int]  # n, b, c


def check_grid(target: TargetModel, nodes: Sequence[int], batch_sizes: Sequence[int], contexts: Sequence[int]) -> None:
    """Raises UserError where a size is no whole number of at least 1, or a context leaves the target no position."""
    for name, values in (("nodes", nodes), ("batch_sizes", batch_sizes), ("contexts", contexts)):
        if not values:
            raise UserError(f"{name}=[] is empty; give at least one number")
        for value in values:
            check_whole(name, value, 1)
    if max(contexts) >= target.max_positions:
        raise UserError(
            f"contexts={max(contexts)} leaves no position for a draft: the target's context holds "
            f"{target.max_positions}; lower contexts"
        )


@torch.inference_mode()
def measure_forward(
    target: TargetModel,
    nodes: Sequence[int],
    batch_sizes: Sequence[int],
    contexts: Sequence[int],
    repeats: int,
    seed: int = 0,
    on_round: Callable[[int], None] = lambda done: None,
) -> ForwardCost:
    """Times `TargetModel.score` on every cell of the grid; a round goes over all cells in another order.

    Trees are binary, of random tokens. The rows of a batch differ in length by a token, as those of a real batch do:
    equal lengths would take a faster way through the cache.

    Args:
        target: what is timed.
        nodes: of a row's tree.
        batch_sizes: rows.
        contexts: committed tokens of the longest row.
        repeats: timed rounds; one more warms up.
        seed: of tokens and order.
        on_round: called with the rounds done.

    Returns:
        Medians with their spread, without a roofline.

    Raises:
        UserError: the grid is out of range, or memory is too small for it.
    """
    check_grid(target, nodes, batch_sizes, contexts)
    check_whole("repeats", repeats, 1)
    nodes, batch_sizes, contexts = (tuple(sorted(set(values))) for values in (nodes, batch_sizes, contexts))
    generator = torch.Generator().manual_seed(seed)
    try:
        caches = {b: _filled_cache(target, b, contexts[-1], generator) for b in batch_sizes}
        trees = {(n, b): _random_tree(target, n, b, generator) for n, b in product(nodes, batch_sizes)}
        cells = list(product(nodes, batch_sizes, contexts))
        seconds: dict[Cell, list[float]] = {cell: [] for cell in cells}
        order = Random(seed)
        for i in range(repeats + 1):
            for n, b, c in order.sample(cells, len(cells)):
                elapsed_s = _timed(target, trees[n, b], caches[b], [max(1, c - row) for row in range(b)])
                if i:
                    seconds[n, b, c].append(elapsed_s)
            on_round(i)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"memory is too small for {batch_sizes[-1]} rows of {contexts[-1]} tokens; lower batch_sizes or contexts"
        ) from error
    median = {cell: float(np.median(values)) for cell, values in seconds.items()}
    spread = {
        cell: float(np.subtract(*np.quantile(values, [0.75, 0.25]))) / median[cell] for cell, values in seconds.items()
    }
    grid = [
        tuple(tuple(tuple(f[n, b, c] for c in contexts) for b in batch_sizes) for n in nodes) for f in (median, spread)
    ]
    return ForwardCost(nodes, batch_sizes, contexts, *grid)


def _timed(target: TargetModel, tree: DraftTree, cache: KVCache, lengths: list[int]) -> float:
    """Seconds of one forward. Nothing is committed, so the cache may be set to any length again."""
    cache.lengths = lengths
    _wait(target.device)
    start = time.perf_counter()
    target.score(tree, cache)
    _wait(target.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _filled_cache(target: TargetModel, n_rows: int, n_tokens: int, generator: torch.Generator) -> KVCache:
    cache = KVCache(n_rows)
    tokens = torch.randint(target.vocab_size, (n_rows, n_tokens), generator=generator)
    target.prefill(tokens.to(target.device), [n_tokens] * n_rows, cache, range(n_rows))
    return cache


def _random_tree(target: TargetModel, n_nodes: int, n_rows: int, generator: torch.Generator) -> DraftTree:
    """A binary tree a row: no chain, which would take a faster mask."""
    tokens = torch.randint(target.vocab_size, (n_rows, n_nodes), generator=generator).to(target.device)
    if n_nodes == 1:
        return DraftTree.root_only(tokens[:, 0])
    parents = (torch.arange(n_nodes, device=target.device) - 1).div(2, rounding_mode="floor")  # -1 at the root
    source = torch.full_like(tokens, int(Source.INPUT))
    tree = DraftTree(tokens, parents.expand(n_rows, -1), source, max_depth=n_nodes.bit_length() - 1)
    _ = tree.depth, tree.ancestors  # lazily made; they are the draft's cost
    return tree


def fit_roofline(cost: ForwardCost) -> Roofline:
    """Fits SSSD's form to a grid by least relative squares, all parameters >= 0.

    With the two corners x = weights / node and y = read / attend fixed the form is linear in what is left,

        t = t0 + node max(x, b n) + attend b c max(y, n),

    so a non-negative least-squares fit is exact for each pair of corners, and only they are searched for.
    """
    cells = np.array(list(product(cost.nodes, cost.batch_sizes, cost.contexts)), dtype=np.float64)
    n, b, c = cells.T
    seconds = np.array(cost.seconds).ravel()

    def fitted(corners: Sequence[float]) -> tuple[np.ndarray, float]:
        x, y = np.exp(corners)
        columns = np.stack([np.ones_like(n), np.maximum(x, b * n), b * c * np.maximum(y, n)], axis=1)
        scaled = columns / seconds[:, None]
        scale = scaled.max(axis=0)
        parameters, residual = nnls(scaled / scale, np.ones_like(seconds))
        return parameters / scale, residual

    # Past the largest b n (n) a corner changes nothing that was measured.
    x_grid = np.linspace(np.log((b * n).min()), np.log((b * n).max()), BREAKPOINTS)
    y_grid = np.linspace(0, np.log(n.max()), BREAKPOINTS // 2)
    best = min(product(x_grid, y_grid), key=lambda corners: fitted(corners)[1])
    limits = [(grid[0], grid[-1]) for grid in (x_grid, y_grid)]
    refined = minimize(lambda v: fitted(v)[1], best, method="Nelder-Mead", bounds=limits, options={"xatol": 1e-4})
    corners = refined.x if refined.fun <= fitted(best)[1] else np.array(best)
    (t0, node_s, attend_s), _ = fitted(corners)
    x, y = np.exp(corners)
    found = Roofline(float(t0), float(node_s * x), float(node_s), float(attend_s * y), float(attend_s), 0.0)
    errors = [abs(found.seconds(*cell) / t - 1) for cell, t in zip(cells, seconds, strict=True)]
    return Roofline(
        found.overhead_s, found.weights_s, found.node_s, found.read_s, found.attend_s, float(np.median(errors))
    )


def steadied(cost: ForwardCost, repeats: int) -> ForwardCost:
    """The grid with its fit, each cell drawn towards the fit by as much as its own median is uncertain.

    On a quiet machine the medians stay; where other work disturbed it, a lucky cell would else win every comparison.
    The weights are those of two independent estimates: the median's standard error, from the spread, and the fit's.
    """
    roofline = fit_roofline(cost)
    seconds = np.array(cost.seconds)
    fitted = np.reshape(
        [roofline.seconds(*cell) for cell in product(cost.nodes, cost.batch_sizes, cost.contexts)], seconds.shape
    )
    of_median = 0.93 * np.array(cost.spread) / np.sqrt(repeats)  # 1.25 sigma / sqrt(R), sigma = IQR / 1.35
    of_fit = 1.48 * roofline.error  # a normal's sigma from its median deviation
    trust = of_fit**2 / np.maximum(of_fit**2 + of_median**2, 1e-12)
    drawn = np.exp(trust * np.log(seconds) + (1 - trust) * np.log(fitted)) if of_fit > 0 else seconds
    return replace(cost, seconds=tuple(tuple(map(tuple, plane)) for plane in drawn.tolist()), roofline=roofline)
