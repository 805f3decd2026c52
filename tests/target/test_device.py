"""Out of memory becomes one sentence of advice."""

import pytest
import torch

from spectrain.decoding import generate
from spectrain.errors import UserError
from spectrain.methods.autoregressive import Autoregressive
from spectrain.target import TargetModel
from tests.conftest import random_prompts, tiny_model

ADVICE = {
    6: "out of memory with batch_size=6 rows of up to 24 tokens on cpu; try batch_size=3",
    1: "one row of 24 tokens does not fit on cpu; shorten the prompt",
}


@pytest.mark.parametrize("batch_size", ADVICE)
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_running_out_of_memory_is_advice(monkeypatch, error, batch_size):
    def fail(*args, **kwargs):
        raise error

    target = TargetModel(tiny_model("llama"))
    monkeypatch.setattr(target, "score", fail)
    with pytest.raises(UserError, match=ADVICE[batch_size]):
        generate(target, Autoregressive(), random_prompts([4] * 6), 20, batch_size=batch_size)
