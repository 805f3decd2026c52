"""What a step reads, by hand and of small models, and the steps of a batch."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from spectrain.measure.bandwidth import loop_steps, step_costs, weight_bytes
from spectrain.measure.results import QuestionRow
from spectrain.methods.auto import Auto
from spectrain.methods.pld import PromptLookup
from spectrain.methods.speculative import Speculative
from spectrain.planning.peaks import hardware_named
from spectrain.target import TargetModel
from spectrain.target.weights import Int8Linear
from tests.conftest import tiny_model


@pytest.mark.parametrize(
    ("forwards", "rows", "steps"),
    [([5], 1, 5), ([5, 3], 1, 8), ([5, 3], 4, 5), ([5, 3, 4, 1], 2, 7), ([0, 0, 2], 2, 2), ([], 2, 0)],
)
def test_steps_of_a_batch_in_which_the_next_row_joins_where_one_ended(forwards, rows, steps):
    assert loop_steps(forwards, rows) == steps


ROW = QuestionRow(
    *("a", "maths", "spire"),
    prompt_tokens=[100],
    replies=[[0] * 20],
    target_forwards=10,
    steps=10.0,
    steps_by_depth=[10, 10],
    drafted_by_source={"draft": 20},
    time_s={"forward": 0.03, "draft": 0.01, "verify": 0.01},
)


def test_costs_of_a_step_by_hand():
    found = step_costs([ROW], of_target=1000, of_drafter=50, of_token=2, bytes_per_s=1e6)
    assert found["outside_forward_ms"] == pytest.approx(2.0)  # 20 ms of 10 steps
    assert found["bytes_per_step"] == pytest.approx(1000 + 2 * 50 + 110 * 2)  # two levels; 100 and half of 20 tokens
    assert found["bandwidth_share"] == pytest.approx(1320 / 0.005 / 1e6)
    two = [replace(ROW, steps=5.0, time_s={name: s / 2 for name, s in ROW.time_s.items()})] * 2  # share their steps
    assert step_costs(two, 1000, 50, 2, 1e6)["bytes_per_step"] == pytest.approx(1000 + 2 * 50 + 2 * 110 * 2)
    looked_up = replace(ROW, drafted_by_source={"input": 20})
    assert step_costs([looked_up], 1000, 50, 2, None) == {
        **{"outside_forward_ms": pytest.approx(2.0), "bytes_per_step": pytest.approx(1220)},
        "bandwidth_share": None,
    }
    assert set(step_costs([], 1, 1, 1, 1.0).values()) == {None}


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_of_models_are_those_that_a_forward_reads(tied):
    model = tiny_model("llama", tie_word_embeddings=tied)
    table = model.get_input_embeddings().weight
    bytes_of_all = sum(p.nbytes for p in model.parameters())
    target = TargetModel(model)
    buffers = sum(one.nbytes for one in model.buffers())  # frequencies of the rotation
    assert weight_bytes(target) == bytes_of_all + buffers - (0 if tied else table.nbytes)
    cache = target.caches.new(1, 64, 64)
    target.prefill(torch.ones(1, 3, dtype=torch.int64), [3], cache, range(1))
    assert target.token_bytes == cache.bytes / cache.capacity
    speculative = Speculative(TargetModel(tiny_model("llama", num_hidden_layers=1)), gamma=3)
    assert weight_bytes(speculative) == weight_bytes(speculative.draft_model) > 0
    in_8_bits = nn.Sequential(Int8Linear(nn.Linear(3, 5, bias=False)))
    in_8_bits.unembedding = torch.zeros(7, 3)
    assert weight_bytes(in_8_bits) == 3 * 5 + 4 * 5 + 4 * 21  # weights, scales
    assert weight_bytes(Auto({"pld": PromptLookup(), "speculative": speculative})) == weight_bytes(speculative)
    assert weight_bytes(PromptLookup()) == 0


def test_the_bandwidth_of_a_card_is_found_by_its_name():
    assert hardware_named("NVIDIA H100 80GB HBM3").bytes_per_s == 3.35e12
    assert hardware_named("NVIDIA A100-SXM4-80GB").name == "A100"
    assert hardware_named("Some GPU") is None
