"""The Triton kernels without a GPU: what they compute, what is launched, whether it compiles, and who may ask for them.

What they compute is tested by `interpreted.py` in a process of its own, because Triton decides at import whether it
interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from spectrain.errors import UserError
from spectrain.kernels.cuda.available import why_no_kernels
from spectrain.target import TargetModel, lean
from spectrain.target.kv_cache import KVCache
from spectrain.target.masks import Nodes
from tests.conftest import tiny_model

SMALL_CARD_BYTES = 101_376  # of memory that a program can have on a multiprocessor of the RTX 30 and 40 series


@pytest.mark.slow
def test_what_they_compute_in_tritons_interpreter():
    pytest.importorskip("triton")
    cases = Path(__file__).with_name("interpreted.py")
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", "-x", "-n0", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


@pytest.fixture
def card(monkeypatch, tmp_path):
    """Makes calls of kernels compile them for a card of this capability; returns names and bytes of all in order."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        get_current_device = get_current_stream = staticmethod(lambda *_: 0)

        def __init__(self, capability: int) -> None:
            self.get_current_target = lambda: GPUTarget("cuda", capability, 32)

    launched = []

    def compiled(kernel, grid):
        def call(*inputs: object, **options: object) -> None:
            found = kernel.run(*inputs, grid=grid, warmup=True, **options)
            launched.append((kernel.__name__, found.metadata.shared))

        return call

    def make(capability: int) -> list[tuple[str, int]]:
        monkeypatch.setattr(driver, "_active" if hasattr(driver, "_active") else "active", Driver(capability))
        return launched

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "__getitem__", compiled)
    return make


def step(m: int, dtype: torch.dtype, family: str = "llama_gqa", capacity: int = 128) -> None:
    """Run a step of a root, or of a chain, through the kernels."""
    from spectrain.target import fused

    decoder = lean.lean_decoder(tiny_model(family, num_hidden_layers=1).to(dtype), dtype)
    cache = KVCache(1, n_tokens=capacity)
    cache.allocate(decoder.shape.n_kv_head, decoder.shape.head_dim, dtype, torch.device("cpu"))
    tokens, seen = torch.zeros(1, m, dtype=torch.int64), torch.ones(1, m, m, dtype=torch.bool).tril()
    fused.forward(decoder, tokens, tokens, Nodes(torch.tensor([3]), seen), cache)


@pytest.mark.parametrize(
    ("m", "products"), [(1, ["_few"] * 4), pytest.param(16, ["_few"] * 4, marks=pytest.mark.slow), (17, [])]
)
def test_a_block_is_a_handful_of_kernels_that_compile_for_a_card(m, products, card):
    launched = card(90)
    step(m, torch.bfloat16, "qwen3")
    names = [name for name, _ in launched]
    if products:  # with norms, activation and residuals inside
        assert names == ["_few", "_rotate", "_attend", "_combine", "_few", "_few", "_few", "_add_norm"]
    else:  # beside four products of torch
        assert names == ["_add_norm", "_rotate", "_attend", "_combine", "_add_norm", "_gate", "_add_norm"]


HALF_AS_MANY_BYTES = pytest.param(torch.bfloat16, marks=pytest.mark.slow)


@pytest.mark.parametrize("dtype", [torch.float32, HALF_AS_MANY_BYTES], ids=str)
def test_attention_fits_the_memory_of_small_cards(dtype, card):
    from spectrain.kernels.cuda import triton_kernels

    launched = card(80)
    for width, n_nodes in ((64, 64), (128, 64), (256, 1)):
        queries, kv = torch.zeros(n_nodes, 8, width, dtype=dtype), torch.zeros(1, 2, 64, width, dtype=dtype)
        seen = torch.ones(1, n_nodes, n_nodes, dtype=torch.bool)
        triton_kernels.attend(queries, kv, kv, torch.tensor([0]), seen)
    assert [name for name, _ in launched].count("_attend") == 3
    assert max(shared for _, shared in launched) <= SMALL_CARD_BYTES


def test_what_is_faster_is_timed_once_and_never_in_a_recording(monkeypatch):
    pytest.importorskip("triton")
    from spectrain.kernels.cuda import triton_kernels

    asked, recording = [], [True]
    monkeypatch.setattr(triton_kernels, "FASTEST", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording[0])
    times = {None: 3.0, triton_kernels.TILES[0]: 2.0, triton_kernels.TILES[1]: 1.0, triton_kernels.TILES[2]: 2.0}
    monkeypatch.setattr(triton_kernels._Product, "milliseconds", lambda _, tile: asked.append(tile) or times[tile])
    x, weight = (torch.zeros(*shape, device="meta") for shape in ((1, 32), (8, 32)))
    monkeypatch.setattr(Tensor, "device", torch.device("cuda"), raising=False)
    product = triton_kernels._Product(weight, None)
    assert product.fastest(x) is None
    assert not asked
    recording[0] = False
    assert [product.fastest(x) for _ in range(3)] == [triton_kernels.TILES[1]] * 3
    assert asked == [None, *triton_kernels.TILES]
    recording[0] = True
    assert product.fastest(x) == triton_kernels.TILES[1]
    assert product.fastest(torch.zeros(17, 32)) is None


def test_a_target_that_asks_for_the_kernels_where_they_cannot_run(monkeypatch):
    llama, neox = tiny_model("llama"), tiny_model("gpt_neox")
    assert not TargetModel(llama).fuses
    for model, why in ((llama, "not on a GPU|Triton is not installed"), (neox, "is for the lean decoder")):
        with pytest.raises(UserError, match=f"^target.compile=triton .*({why})"):
            TargetModel(model, compile="triton")
    with pytest.raises(UserError, match="target.compile"):
        TargetModel(llama, compile="inductor")
    monkeypatch.setattr(lean, "why_no_kernels", lambda _: None)
    with pytest.raises(UserError, match="activation relu"):
        TargetModel(tiny_model("llama", hidden_act="relu"), compile="triton")
    with pytest.raises(UserError, match="heads of odd width or wider than 256"):
        TargetModel(tiny_model("llama", head_dim=260), compile="triton")


def test_where_triton_is_missing_or_fails_the_kernels_are_not_used(monkeypatch, caplog):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert why_no_kernels.__wrapped__(torch.device("cuda")).startswith("Triton fails here (")
    assert caplog.messages[0].startswith("our own kernels are not used: Triton fails here (")
    monkeypatch.setattr("spectrain.kernels.cuda.available.find_spec", lambda _: None)
    assert why_no_kernels.__wrapped__(torch.device("cuda")) == "Triton is not installed"
