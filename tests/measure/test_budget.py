"""Timed forwards and the roofline fitted to them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from spectrain.decoding.errors import UserError
from spectrain.measure.budget import Grid, fit_roofline, grid_of, measure_forward, steadied
from spectrain.stores.budget_table import ForwardCost, Roofline

NODES, BATCHES, CONTEXTS = (1, 2, 4, 8, 16, 32, 64, 128), (1, 2, 4, 8), (64, 512, 2048)
TRUE = Roofline(1e-3, 5e-3, 1e-4, 4e-7, 1e-8, 0.0)  # free up to b n = 50


def made_up(roofline: Roofline, noise: float = 0.0) -> ForwardCost:
    cells = list(product(NODES, BATCHES, CONTEXTS))
    factors = 1 + noise * np.random.default_rng(0).standard_normal(len(cells))
    seconds = np.array([roofline.seconds(*cell) for cell in cells]) * factors
    grid = tuple(tuple(map(tuple, plane)) for plane in seconds.reshape(len(NODES), len(BATCHES), -1).tolist())
    return ForwardCost(NODES, BATCHES, CONTEXTS, grid, grid)


def test_the_fit_recovers_what_the_times_were_made_of():
    found = fit_roofline(made_up(TRUE))
    for name in ("overhead_s", "weights_s", "node_s", "read_s", "attend_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.02), name
    assert found.free_nodes == pytest.approx(50, rel=0.02)
    assert found.error < 1e-3


def test_noise_moves_the_free_budget_little():
    found = fit_roofline(made_up(TRUE, noise=0.03))
    assert found.free_nodes == pytest.approx(50, rel=0.2)
    assert 0.005 < found.error < 0.05


def test_times_that_only_grow_leave_nothing_free():
    found = fit_roofline(made_up(Roofline(1e-3, 0.0, 1e-4, 0.0, 1e-8, 0.0)))
    assert found.free_nodes <= 1.05
    assert min(found.overhead_s, found.weights_s, found.node_s, found.read_s, found.attend_s) >= 0


def test_every_cell_is_timed(llama_target):
    cost = measure_forward(llama_target, Grid((1, 4), (1, 2), (8, 40), repeats=3))
    assert (cost.nodes, cost.batch_sizes, cost.contexts) == ((1, 4), (1, 2), (8, 40))
    assert np.array(cost.seconds).shape == np.array(cost.spread).shape == (2, 2, 2)
    assert (np.array(cost.seconds) > 0).all()
    assert cost.roofline is None


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"contexts": ()}, "contexts=[] is empty"),
        ({"contexts": (256,)}, "contexts=256 leaves no position"),
    ],
)
def test_a_wrong_grid_is_refused(llama_target, wrong, says):
    grid = {"nodes": (2, 4), "batch_sizes": (1,), "contexts": (8,), "repeats": 1} | wrong
    with pytest.raises(UserError) as error:
        grid_of(llama_target, **grid)
    assert says in str(error.value)


def test_certain_cells_stay_and_uncertain_ones_go_to_the_fit():
    noisy = made_up(TRUE, noise=0.1)
    flat = np.zeros_like(noisy.seconds)
    calm = steadied(replace(noisy, spread=tuple(tuple(map(tuple, plane)) for plane in flat.tolist())), 5)
    assert np.allclose(calm.seconds, noisy.seconds)
    wild = steadied(replace(noisy, spread=tuple(tuple(map(tuple, plane)) for plane in (flat + 10).tolist())), 5)
    truth = np.array(made_up(TRUE).seconds)
    assert np.abs(wild.seconds / truth - 1).max() < np.abs(noisy.seconds / truth - 1).max() / 2
