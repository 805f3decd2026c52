"""Cost analysis, break-even lines and free budgets against the papers' numbers and brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spectrain.measure.cost_analysis import (
    CostGrid,
    best_methods,
    free_attention_tokens,
    free_tokens,
    investment,
    roofline,
    spans_where,
    where_faster,
)

from spectrain.measure.cost import CostModel, Hardware, Shape
from tests.measure.cost_reference import BATCH, CONTEXT_TOKENS, paper_methods, paper_model

ASCEND = Hardware("Ascend 910B4", 280e12 / 0.8e12, weight_bytes=2, kv_bytes=2)
LLAMA_2_7B = Shape(n_layer=32, hidden_size=4096, n_head=32, n_kv_head=32, head_dim=128, intermediate_size=11008)


@pytest.mark.parametrize(
    ("multiplier", "training", "saved", "net"),
    [(2.78, 0.25, "6.40", "6.15"), (2.05, 0, "5.12", "5.12"), (2.82, 0.25, "6.45", "6.20"), (2.14, 0, "5.33", "5.33")],
)
def test_section_5(multiplier, training, saved, net):
    one = investment(multiplier, training, decoding=10)
    assert (f"{one['saved']:.2f}", f"{one['net']:.2f}") == (saved, net)


def test_training_is_paid_where_saving_equals_it():
    assert investment(2.0, 0.25, decoding=10)["break_even_decoding"] == 0.5
    assert investment(2.0, 0.25, decoding=0.5)["net"] == 0
    assert investment(2.0, 0, 10)["break_even_decoding"] == 0
    assert math.isinf(investment(0.9, 0.1, 10)["break_even_decoding"])
    assert investment(0.9, 0.1, 10)["net"] < 0


def test_runs_of_contexts_are_found_to_the_token():
    assert spans_where(lambda c: c >= 777, 32, 8192) == [(777, 8192)]
    assert spans_where(lambda c: c < 777, 32, 8192) == [(32, 776)]
    assert spans_where(lambda c: (c > 100) & (c <= 5000), 32, 8192) == [(101, 5000)]
    assert spans_where(lambda c: (c < 100) | (c > 5000), 32, 8192) == [(32, 99), (5001, 8192)]
    assert spans_where(lambda c: c > 0, 32, 8192) == [(32, 8192)]
    assert spans_where(lambda c: c < 0, 32, 8192) == []
    assert spans_where(lambda c: c > 0, 64, 64) == [(64, 64)]


def test_runs_that_nearly_touch_are_one():
    def holds(c: np.ndarray) -> np.ndarray:
        return (c >= 60) & ~((c >= 64) & (c < 66))

    assert spans_where(holds, 32, 128) == [(60, 63), (66, 128)]
    assert spans_where(holds, 32, 128, gap=8) == [(60, 128)]


def test_magicdec_pays_from_where_figure_4_says():
    """Row 8 of the heat map passes from 0.90x at 128 to 1.01x at 256."""
    model, method = paper_model(), paper_methods()["magicdec"]
    ((first, last),) = where_faster(model, method, None, 8, 32, 8192)
    assert (first, last) == (238, 8192)
    before, at = model.multiplier(method, [8], [first - 1, first])[0]
    assert before <= 1 < at


def test_one_method_overtakes_another_where_their_curves_cross():
    model, methods = paper_model(), paper_methods()
    ((first, last),) = where_faster(model, methods["magicdec"], methods["vanilla"], 64, 32, 8192)
    assert 64 < first <= 128 < last  # Figure 1: 1.19 against 1.51 at 64, 1.45 against 1.44 at 128
    assert where_faster(model, methods["vanilla"], methods["magicdec"], 64, 32, 8192)[0][0] == 32


def test_the_fastest_method_is_the_largest_cell():
    model, methods = paper_model(), paper_methods()
    three = [methods[name] for name in ("vanilla", "magicdec", "spire")]
    best = best_methods(model, three, BATCH, CONTEXT_TOKENS)
    assert (best[0, :3] == 1).all()  # vanilla at batch 1 and short contexts
    assert (best[-1] == 3).all()
    found = CostGrid("Figure 4", model, tuple(three), BATCH, CONTEXT_TOKENS, (64, 512))
    assert list(found.faster(1)) == [
        *(f"{name} > autoregressive" for name in ("vanilla", "magicdec", "spire")),
        *("magicdec > vanilla", "spire > vanilla", "spire > magicdec"),
    ]


def test_nothing_is_faster_than_plain_decoding_where_all_multipliers_are_below_1():
    model, methods = paper_model(), paper_methods()
    assert (best_methods(model, [methods["magicdec"]], [1], [32, 64]) == 0).all()


def test_sssd_prints_435_where_its_equation_solves_to_422():
    tokens = free_tokens(ASCEND, 4096, 4096)
    assert f"{tokens:.0f}" == "422"
    # The printed equation: 1 / (2 (1/h + 1/(2 x))) = 280 / 0.8
    assert 1 / (2 * (1 / 4096 + 1 / (2 * tokens))) == pytest.approx(350)


@given(st.integers(1, 5000), st.integers(1, 5000), st.floats(1, 2000), st.sampled_from([0.5, 1, 2, 4]))
@settings(max_examples=100, deadline=None)
def test_at_the_free_budget_arithmetic_and_memory_take_equal_time(inputs, outputs, hoi, size):
    hardware = Hardware("any", hoi, weight_bytes=size, kv_bytes=size)
    tokens = free_tokens(hardware, inputs, outputs)

    def ratio(x: float) -> float:
        flops = 2.0 * x * inputs * outputs
        return flops / (size * (x * inputs + inputs * outputs + x * outputs)) / hoi

    if math.isinf(tokens):
        assert ratio(1e12) <= 1 + 1e-6
    else:
        assert tokens > 0
        assert ratio(tokens) == pytest.approx(1, rel=1e-6)


def products_of(shape: Shape) -> dict[str, dict]:
    found = roofline(CostGrid("any", CostModel(shape, ASCEND), (), (1,), (128,), (1, 128)), None)
    return {one["operation"]: one for one in found["products"]}


def test_each_product_of_a_block_has_a_budget():
    products = products_of(LLAMA_2_7B)
    assert list(products) == ["queries", "keys, values", "output", "MLP in", "MLP out"]
    assert products["MLP in"]["tokens"] < products["queries"]["tokens"]
    grouped = Shape(n_layer=1, hidden_size=4096, n_head=32, n_kv_head=8, head_dim=128, intermediate_size=11008)
    keys = products_of(grouped)["keys, values"]
    assert (keys["inputs"], keys["outputs"]) == (4096, 1024)


@pytest.mark.parametrize("group", [1, 4])
def test_attention_is_compute_bound_at_its_budget(group):
    """FLOPs and bytes of one head counted one by one, as in SSSD's Table 1."""
    shape = Shape(n_layer=1, hidden_size=64, n_head=2 * group, n_kv_head=2, head_dim=16, intermediate_size=64)
    for context, s_q in zip((100, 4000), free_attention_tokens(ASCEND, shape, [100, 4000]), strict=True):
        flops = 4 * s_q * (s_q + context) * shape.n_head * 16
        read = 2 * (context + s_q) * 2 * 16 + s_q * shape.n_head * 16
        written = s_q * shape.n_head * 16
        assert flops / (2 * (read + written)) == pytest.approx(350)
