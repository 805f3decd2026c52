"""The throughput model against the paper's numbers, an independent slow version, and its limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain.errors import UserError
from spectrain.measure.cost import CostModel, Hardware, Method, Shape, SparseBudget
from tests.measure.cost_reference import (
    BATCH,
    CONTEXT_TOKENS,
    H100_FP8,
    LLAMA_8B,
    LLAMA_20,
    LLAMA_70B,
    SHARE,
    SPIRE,
    TARGET,
    VANILLA,
    figure_4,
    paper_methods,
    paper_model,
    slow_multiplier,
)


def test_body_parameters_are_those_of_the_paper():
    assert TARGET.body == 67_117_056
    assert SPIRE.body == 16_779_264
    assert VANILLA.body == 8_390_656
    assert LLAMA_70B.body == 68_452_352_000
    assert LLAMA_8B.body == 6_979_584_000


@pytest.mark.parametrize("name", ["vanilla", "magicdec", "spire"])
def test_figure_4_to_the_printed_decimals(name):
    """72 cells a method, 216 in all."""
    printed = figure_4(name)
    values = paper_model().multiplier(paper_methods()[name], BATCH, CONTEXT_TOKENS)
    assert [[f"{cell:.2f}" for cell in row] for row in values] == printed
    assert (len(printed), {len(row) for row in printed}) == (8, {9})


def test_figure_1_is_the_row_of_batch_64():
    methods = paper_methods()
    cells = {name: paper_model().multiplier(methods[name], [64], [512])[0, 0] for name in methods}
    assert {name: f"{cell:.2f}" for name, cell in cells.items()} == {
        "vanilla": "1.36",
        "magicdec": "2.05",
        "spire": "2.78",
        "spire_dense": "1.70",  # Figure 5
    }


def test_figure_6_at_the_highlighted_cell():
    methods = paper_methods(LLAMA_8B, LLAMA_70B, LLAMA_20)
    model = CostModel(LLAMA_70B, H100_FP8)
    cells = {name: model.multiplier(methods[name], [64], [65536])[0, 0] for name in ("magicdec", "spire")}
    assert {name: f"{cell:.2f}" for name, cell in cells.items()} == {"magicdec": "2.14", "spire": "2.82"}


def test_a_dense_cache_makes_spire_independent_of_the_context():
    """Section 4.2: k = 4 and N_target = 4 N_draft, so with k N_draft = N_target the step costs two target forwards."""
    values = paper_model().multiplier(paper_methods()["spire_dense"], [1, 64], CONTEXT_TOKENS)
    np.testing.assert_allclose(values, 3.401 / 2, rtol=1e-12)


def powers_of_two_below(tokens: float) -> int:
    return 2 ** math.floor(math.log2(tokens))


def test_figure_3_the_longest_context_that_is_ever_compute_bound():
    """Section 4: 512 is four powers of two above L_crit = 32; 64K is four above Llama 3 70B's."""
    assert powers_of_two_below(paper_model().critical_context(4)) == 32
    assert powers_of_two_below(CostModel(LLAMA_70B, H100_FP8).critical_context(4)) == 65536 // 2**4
    # with k + 1 it would be 64
    assert powers_of_two_below(paper_model().critical_context(5)) == 64


def test_intensity_rises_to_its_limit_and_meets_the_hardware_at_the_critical_batch():
    model = paper_model()
    batch, limit = model.critical_batch([32], 4)[0], model.intensity_limit([32], 4)[0]
    assert model.intensity([batch], [32], 4)[0, 0] == pytest.approx(600)
    assert model.intensity([1e9], [32], 4)[0, 0] == pytest.approx(limit, rel=1e-4)
    assert model.intensity([1, 2, 64], [32, 512], 4)[:, 0] == pytest.approx([7.938, 15.754, 341.35], rel=1e-4)
    assert math.isinf(model.critical_batch([64], 4)[0])


def test_a_step_worked_out_by_hand():
    """One layer of width 2, one head of 2, MLP of 3: 4 + 8 + 8 + 18 = 38 parameters, 4 KV values a token.

    At 10 FLOPs a byte, batch 2, context 5, two bytes a weight and one a KV value: 76 + 40 bytes cost 1160, a token's
    152 FLOPs less. The draft reads 76 + 2 * 3 * 4 = 100 bytes with a sink and a window of two: 1000. Verifying three
    tokens takes 456 FLOPs: 1160 again.
    """
    shape = Shape(n_layer=1, hidden_size=2, n_head=1, n_kv_head=1, head_dim=2, intermediate_size=3)
    model = CostModel(shape, Hardware("by hand", 10, weight_bytes=2, kv_bytes=1, flops_per_s=1e6))
    method = Method("magicdec", shape, k=2, tau=2.5, budget=SparseBudget(sink_tokens=1, window_tokens=2))
    step = model.step(method, [2], [5])
    assert (step.draft.item(), step.verify.item(), step.target.item()) == (1000, 1160, 1160)
    assert model.multiplier(method, [2], [5]).item() == pytest.approx(2.5 * 1160 / (2 * 1000 + 1160))
    assert model.hardware.milliseconds(step.step).item() == pytest.approx(3.16)


def test_verification_counts_the_root_and_arithmetic_can_bind_it():
    shape = Shape(n_layer=1, hidden_size=2, n_head=1, n_kv_head=1, head_dim=2, intermediate_size=3)
    model = CostModel(shape, Hardware("slow arithmetic", 0.001))
    step = model.step(Method("vanilla", shape, k=3, tau=2), [1], [1])
    assert step.verify.item() == 4 * step.target.item() == 4 * 2 * 38


def test_the_unembedding_is_read_by_target_and_drafter_where_it_is_counted():
    with_vocabulary = [Shape(**{**vars(shape), "vocab_size": 1000}) for shape in (TARGET, VANILLA)]
    model = CostModel(with_vocabulary[0], H100_FP8, count_unembedding=True)
    assert [model.parameters(s) for s in with_vocabulary] == [67_117_056 + 512_000, 8_390_656 + 256_000]
    assert CostModel(with_vocabulary[0], H100_FP8).parameters(with_vocabulary[0]) == 67_117_056


def test_spire_pays_one_more_projection_to_keys_and_values():
    """2 B * 2 * n_layer * n_kv * D * d_head FLOPs (methods.md section 4), where arithmetic binds."""
    model = CostModel(TARGET, Hardware("slow arithmetic", 1e-6))
    methods = paper_methods()
    plain = Method("plain", SPIRE, k=4, tau=3.401, budget=SHARE)
    difference = model.step(methods["spire"], [3], [512]).draft - model.step(plain, [3], [512]).draft
    assert difference.item() == 2 * 3 * 2 * 2 * 8 * 512 * 128


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (SparseBudget(1, None, 8), [5, 9, 65]),
        (SparseBudget(1, 64), [32, 65, 65]),  # no more than there is
        (SparseBudget(0, 16), [16, 16, 16]),
    ],
)
def test_what_a_sparse_cache_holds(budget, expected):
    assert budget.tokens(np.array([32, 65 if budget.window_tokens else 64, 512])).tolist() == expected


numbers = st.integers(1, 6)


@st.composite
def shapes(draw) -> Shape:
    n_kv_head = draw(numbers)
    return Shape(
        n_layer=draw(numbers),
        hidden_size=8 * draw(numbers),
        n_head=n_kv_head * draw(numbers),
        n_kv_head=n_kv_head,
        head_dim=4 * draw(numbers),
        intermediate_size=16 * draw(numbers),
    )


@st.composite
def cells(draw) -> tuple[CostModel, Method]:
    k = draw(st.integers(1, 8))
    budget = draw(
        st.one_of(
            st.none(),
            st.builds(SparseBudget, st.integers(0, 4), st.none(), st.integers(1, 16)),
            st.builds(SparseBudget, st.integers(0, 4), st.integers(1, 64)),
        )
    )
    size = draw(st.sampled_from([0.5, 1, 2, 4]))
    model = CostModel(draw(shapes()), Hardware("any", draw(st.floats(0.1, 1000)), size, size))
    tau = draw(st.floats(1, k + 1))
    return model, Method("any", draw(shapes()), k, tau, budget, draw(st.booleans()))


@given(cells(), st.integers(1, 300), st.integers(1, 3000))
@settings(max_examples=150, deadline=None)
def test_every_cell_is_that_of_the_slow_version(cell, batch, context):
    model, method = cell
    hardware = model.hardware
    slow = slow_multiplier(model.target, method, hardware.operational_intensity, hardware.kv_bytes, batch, context)
    assert model.multiplier(method, [batch], [context])[0, 0] == pytest.approx(slow, rel=1e-9)


@given(cells())
@settings(max_examples=60, deadline=None)
def test_costs_rise_with_batch_and_context_and_throughput_with_tau(cell):
    model, method = cell
    step = model.step(method, BATCH, CONTEXT_TOKENS)
    for cost in (step.draft, step.verify, step.target):
        assert (np.diff(cost, axis=0) >= 0).all()
        assert (np.diff(cost, axis=1) >= 0).all()
    assert (step.verify >= step.target).all()  # so no method is faster than tau
    assert (step.iteration_time_multiplier >= 1).all()
    better = Method(method.name, method.shape, method.k, min(2 * method.tau, method.k + 1), method.budget)
    plain = Method(method.name, method.shape, method.k, method.tau, method.budget)
    ratio = model.multiplier(better, BATCH, CONTEXT_TOKENS) / model.multiplier(plain, BATCH, CONTEXT_TOKENS)
    np.testing.assert_allclose(ratio, better.tau / plain.tau)


@given(cells(), st.integers(1, 3000))
@settings(max_examples=60, deadline=None)
def test_a_large_batch_leaves_the_ratio_of_costs_a_row(cell, context):
    """Weights vanish: a row costs the larger of its FLOPs and its cache."""
    model, method = cell
    hoi, size = model.hardware.operational_intensity, model.hardware.kv_bytes

    def row(shape: Shape, tokens: int, cached: int, extra: int = 0) -> float:
        return max(2.0 * tokens * shape.body + 2.0 * extra, cached * shape.kv_values * size * hoi)

    cached = context if method.budget is None else int(method.budget.tokens(np.array([context]))[0])
    draft = row(method.shape, 1, cached, method.shape.memory_projections if method.feedback else 0)
    verify, target = row(model.target, method.k + 1, context), row(model.target, 1, context)
    expected = method.tau * target / (method.k * draft + verify)
    assert model.multiplier(method, [10**13], [context])[0, 0] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Shape(2, 8, 3, 2, 4, 8), "n_head=3 must be a multiple of n_kv_head=2"),
        (lambda: Shape(0, 8, 2, 2, 4, 8), "n_layer=0"),
        (lambda: Shape(2, 8, 2, 2, 4.5, 8), "head_dim=4.5"),
        (lambda: Hardware("x", 0), "operational_intensity=0"),
        (lambda: Hardware("x", float("nan")), "operational_intensity=nan"),
        (lambda: Hardware("x", 1, weight_bytes=-1), "weight_bytes=-1"),
        (lambda: Method("spire", SPIRE, 4, 5.01), "tau.spire=5.01 must be a number in"),
        (lambda: Method("spire", SPIRE, 4, 0.99), "tau.spire=0.99"),
        (lambda: SparseBudget(-1), "sink_tokens=-1"),
        (lambda: SparseBudget(1, 0), "window_tokens=0"),
        (lambda: SparseBudget(1, None, 0), "window_share=0"),
    ],
)
def test_impossible_numbers_are_refused(make, words):
    with pytest.raises(UserError, match=words.replace(".", r"\.").replace("+", r"\+")):
        make()
