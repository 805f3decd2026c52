"""The throughput model: the paper's printed numbers, an independent slow version, and a step by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MistralConfig, MixtralConfig

from spectrain.config import groups
from spectrain.errors import UserError
from spectrain.planning.peaks import hardware_named, read_peaks
from spectrain.target.modules import find_blocks
from tests.conftest import FAMILIES, tiny_model
from tests.support.scripts import load_script

FIGURE_4 = json.loads((Path(__file__).parent / "spire_figure4.json").read_text())  # as the paper prints it
paper = load_script("spire_throughput")
from spire_throughput import Acceptance, CostModel, Hardware, Method, Shape, SparseCache, shape_of_model  # noqa: E402

LLAMA_70B = Shape(n_layer=80, hidden_size=8192, n_head=64, n_kv_head=8, head_dim=128, intermediate_size=28672)
TINY = Shape(n_layer=1, hidden_size=2, n_head=1, n_kv_head=1, head_dim=2, intermediate_size=3)


@pytest.mark.parametrize("name", FIGURE_4)
def test_figure_4_to_the_printed_decimals(name):
    """72 cells of each method, 216 in all."""
    values = paper.MODEL.multiplier(paper.METHODS[name], 4, paper.BATCH, paper.CONTEXT_TOKENS)
    assert [[f"{cell:.2f}" for cell in row] for row in values] == FIGURE_4[name]


def test_figure_5_without_a_sparse_cache_and_figure_6_of_llama_3():
    model, methods = paper.MODEL, paper.METHODS
    dense = replace(methods["spire"], cache=None)
    np.testing.assert_allclose(model.multiplier(dense, 4, [1, 64], paper.CONTEXT_TOKENS), 3.401 / 2)
    llama = replace(model, target=LLAMA_70B)
    shapes = {"magicdec": LLAMA_70B, "spire": LLAMA_70B.with_layers(20)}
    cells = {n: llama.multiplier(replace(methods[n], shape=s), 4, [64], [65536]).item() for n, s in shapes.items()}
    assert {name: f"{cell:.2f}" for name, cell in cells.items()} == {"magicdec": "2.14", "spire": "2.82"}


def test_a_step_worked_out_by_hand():
    """One layer of width 2, one head of 2, MLP of 3: 4 + 8 + 8 + 18 = 38 parameters, 4 KV values per token.

    At 10 FLOPs per byte, batch 2, context 5 and one byte per value: 38 + 40 bytes cost 780, more than 152 FLOPs. A
    draft step reads 38 + 2 * 3 * 4 = 62 bytes with a sink and a window of two: 620. Verification costs 780 again.
    """
    model = CostModel(TINY, Hardware(10))
    method = Method(TINY, Acceptance(2.5, k=2), SparseCache(sink_tokens=1, window_tokens=2))
    assert model.draft(method, [2], [5]).item() == 620
    assert model.verify([2], [5]).item() == model.verify([2], [5], n_tokens=3).item() == 780
    assert model.multiplier(method, 2, [2], [5]).item() == pytest.approx(2.5 * 780 / (2 * 620 + 780))
    slow_arithmetic = CostModel(replace(TINY, vocab_size=10), Hardware(1e-6), count_unembedding=True)
    assert slow_arithmetic.verify([1], [1], n_tokens=4).item() == 4 * 2 * (38 + 20)
    fed_back = Method(TINY, Acceptance(2.0, 2), feedback=True)
    assert CostModel(TINY, Hardware(1e-6)).draft(fed_back, [3], [5]).item() == 3 * 2 * (38 + 8)


def test_other_draft_lengths_have_the_same_acceptance_rate():
    """tau = 1 + 1/2 + 1/4 at k = 2, so alpha is 1/2 and tau at k = 3 is 1.875."""
    acceptance = Acceptance(1.75, k=2)
    assert acceptance.rate == pytest.approx(0.5)
    assert (acceptance.at(2), acceptance.at(3)) == (1.75, pytest.approx(1.875))
    assert Acceptance(1.0, k=2).at(9) == pytest.approx(1.0)


def test_the_best_draft_length_is_that_of_an_exhaustive_search_and_rises_with_acceptance():
    model, methods = paper.MODEL, paper.METHODS
    lengths = []
    for tau in (1.2, 2.0, 3.0, 4.5):
        method = replace(methods["spire"], acceptance=Acceptance(tau))
        multiplier, k = model.best(method, [8], [2048])
        each = [model.multiplier(method, n, [8], [2048]).item() for n in range(1, 17)]
        assert (multiplier.item(), k.item()) == (max(each), 1 + each.index(max(each)))
        lengths.append(k.item())
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


sizes = st.integers(1, 6)
shapes = st.builds(
    lambda n_layer, width, kv, group, dim, mlp: Shape(n_layer, 8 * width, kv * group, kv, 4 * dim, 16 * mlp),
    *[sizes] * 6,
)
caches = st.none() | st.builds(SparseCache, st.integers(0, 4), st.none() | st.integers(1, 64))


@given(shapes, shapes, caches, st.booleans(), st.integers(1, 8), st.floats(0.1, 1000), *[st.integers(1, 3000)] * 2)
@settings(max_examples=100, deadline=None)
def test_every_cell_is_that_of_a_slow_version(target, drafter, cache, feedback, k, intensity, batch, context):
    """From the paper's words: parameters are added up matrix by matrix, and the costs compared one by one."""

    def parameters(shape: Shape) -> int:
        heads = shape.hidden_size * shape.head_dim
        matrices = [heads * shape.n_head] * 2 + [heads * shape.n_kv_head] * 2
        matrices += [shape.hidden_size * shape.intermediate_size] * 3 + [shape.hidden_size] * 2
        return shape.n_layer * sum(matrices)

    def cost(shape: Shape, tokens: int, cached: int, projections: int = 0) -> float:
        cache_bytes = batch * cached * shape.n_layer * 2 * shape.n_kv_head * shape.head_dim
        return max(
            2 * batch * (parameters(shape) * tokens + projections), (parameters(shape) + cache_bytes) * intensity
        )

    cached = context
    if cache is not None:
        window = context // 8 if cache.window_tokens is None else cache.window_tokens
        cached = cache.sink_tokens + window if cache.window_tokens is None else min(context, cache.sink_tokens + window)
    again = drafter.n_layer * 2 * drafter.hidden_size * drafter.n_kv_head * drafter.head_dim if feedback else 0
    step = k * cost(drafter, 1, cached, again) + cost(target, k + 1, context)
    method = Method(drafter, Acceptance((k + 2) / 2, k), cache, feedback)
    found = CostModel(target, Hardware(intensity)).multiplier(method, k, [batch], [context]).item()
    assert found == pytest.approx((k + 2) / 2 * cost(target, 1, context) / step, rel=1e-9)


def config_only(folder: Path, config) -> str:
    """A folder with a config and nothing else: reading weights would fail."""
    folder.mkdir()
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_the_blocks_are_counted_without_weights(family, tmp_path):
    model = tiny_model(family)
    shape = shape_of_model(config_only(tmp_path / family, model.config))
    assert shape.body == sum(p.numel() for p in find_blocks(model).parameters())
    cache = model(input_ids=model.dummy_inputs["input_ids"][:1, :1], use_cache=True).past_key_values
    assert shape.kv_values == sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)


def test_models_that_cost_otherwise_are_refused(tmp_path):
    common = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    with pytest.raises(UserError, match="is not modelled; choose a dense model"):
        shape_of_model(config_only(tmp_path / "mixtral", MixtralConfig(**common, num_local_experts=4)))
    windowed = shape_of_model(config_only(tmp_path / "mistral", MistralConfig(**common, sliding_window=16)))
    assert windowed == shape_of_model(config_only(tmp_path / "full", MistralConfig(**common, sliding_window=None)))
    with pytest.raises(UserError, match="has no config"):
        shape_of_model(str(tmp_path))


def test_the_best_depth_is_that_of_what_costs_most():
    assert [round(paper.tau_of_depth(n), 2) for n in (1, 2, 4)] == [2.21, 2.55, 2.88]  # docs/results/depth.json
    target, best = Shape(8, 256, 4, 4, 64, 704, 4096), []
    for intensity in (1e-9, 1e9):  # no time to read, and none to compute: the target's cache of long texts costs most
        found = {
            n: gain.item() for n, gain, _ in paper.speedup_by_depth(target, Hardware(intensity), None, [64], [1024])
        }
        best.append(max(found, key=found.get))
    assert best == [1, 4]


def test_the_cpu_is_measured_in_both_rates():
    peaks = read_peaks(groups.Hardware(), "fp32")
    assert 0 < peaks.bytes_per_s < 100 * peaks.flops_per_s


def test_a_dtype_without_a_peak_is_one_sentence():
    with pytest.raises(UserError, match="has no peak for dtype=fp4; choose among "):
        read_peaks(hardware_named("NVIDIA H100"), "fp4")
