"""Out of memory becomes one sentence that names a batch that fits."""

import pytest
import torch

from spectrain.decoding import KVCache, TargetModel, generate
from spectrain.decoding.memory import free_bytes, is_out_of_memory, out_of_memory_advice, slot_bytes
from spectrain.errors import UserError
from spectrain.methods.autoregressive import Autoregressive
from tests.conftest import random_prompts, tiny_model

MIB = 2**20


def fails_with(error):
    def fail(*args, **kwargs):
        raise error

    return fail


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_running_out_of_memory_names_a_smaller_batch(monkeypatch, error):
    target = TargetModel(tiny_model("llama"))
    monkeypatch.setattr(target, "score", fails_with(error))
    with pytest.raises(UserError, match=r"batch_size=6 rows of up to 24 tokens on cpu; the .* about [1-5], lower"):
        generate(target, Autoregressive(), random_prompts([4] * 6), 20, batch_size=6)


def test_one_row_that_does_not_fit_is_told_to_shrink(monkeypatch):
    target = TargetModel(tiny_model("llama"))
    monkeypatch.setattr(target, "prefill", fails_with(MemoryError()))
    with pytest.raises(UserError, match="one row of 24 tokens does not fit on cpu; shorten the prompt"):
        generate(target, Autoregressive(), random_prompts([4]), 20)


def test_other_errors_pass_unchanged(monkeypatch):
    target = TargetModel(tiny_model("llama"))
    monkeypatch.setattr(target, "score", fails_with(RuntimeError("shape mismatch")))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        generate(target, Autoregressive(), random_prompts([4]), 20)
    assert not is_out_of_memory(ValueError("can't allocate memory"))


def test_the_batch_that_fits_follows_from_free_memory():
    target = TargetModel(tiny_model("llama_gqa"))
    # 3 blocks, K and V, 2 heads of 8 values, 4 bytes each.
    assert slot_bytes(target) == 3 * 2 * 2 * 8 * 4
    row_bytes = 256 * slot_bytes(target) + 200 * 8
    free = int(10 * row_bytes / 0.8) + 1
    assert "is about 10, lower" in out_of_memory_advice(target, KVCache(64), 64, 200, free)
    assert "is about 2, lower" in out_of_memory_advice(target, KVCache(4), 4, 200, free)  # 10 should have fitted
    assert "is about 32, lower" in out_of_memory_advice(target, KVCache(64), 64, 200, None)


def test_free_memory_of_the_cpu_is_known_here():
    assert free_bytes(torch.device("cpu")) > MIB
    assert free_bytes(torch.device("meta")) is None
