"""Products of a few rows with weights of any dtype, and what runs on them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

from spectrain.decoding import generate
from spectrain.errors import UserError
from spectrain.kernels import fits, product, works
from spectrain.kernels.cpu import processor, products, running, tiles
from spectrain.measure.baselines import own_model
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.speculative import Speculative
from spectrain.target import TargetModel, fingerprint, weights
from spectrain.target.loading import load_target
from spectrain.target.weights import Int8Linear, RowsLinear, draft_dtype_of, for_drafting
from tests.conftest import noisy_copy, random_prompts, tiny_model
from tests.decoding.test_loop import word_tokenizer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16, torch.int8]


def matrix(n_out: int, n_in: int, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.randn(n_out, n_in, generator=torch.Generator().manual_seed(n_out))
    return (20 * drawn).round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else drawn.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_products_of_every_number_of_rows_are_those_of_torch(dtype, n_threads):
    assert works(dtype), "this machine has no kernels"
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        for n_rows in (*range(1, 19), 33):
            for n_out, n_in in ((8, 16), (61, 48), (300, 512)):
                x, weight = torch.randn(n_rows, n_in), matrix(n_out, n_in, dtype)
                scale = torch.rand(n_out) if dtype == torch.int8 else None
                expected = x.double() @ weight.double().T * (1 if scale is None else scale)
                room = rounding(x, weight, scale) if dtype == torch.int8 else 0
                found = product(x, weight, scale).double()
                assert ((found - expected).abs() <= room + 1e-3 + 1e-4 * expected.abs()).all()
    finally:
        torch.set_num_threads(before)


def test_by_tiles_more_rows_are_computed_than_are_packed_together(use_processor):
    """As exactly as in float32: with two parts of each number they are wrong by 2e-6, with one by 6e-4."""
    use_processor("AMX")
    if not tiles.available():
        pytest.skip("this processor has no tiles")
    for n_rows, n_out, n_in in (
        (tiles.LEAST_ROWS, 16, 32),
        (17, 61, 96),
        (tiles.MOST_ROWS + 1, 300, 512),
        (33, 300, 512),
    ):
        x, weight = torch.randn(n_rows, n_in), matrix(n_out, n_in, torch.bfloat16)
        x[1] *= 1e-30
        x[2] *= 1e30
        assert tiles.takes(x, weight)
        size = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
        for _ in range(3):  # threads share the packing
            wrong = (product(x, weight).double() - x.double() @ weight.double().T).abs() / size
            assert wrong.max() < 3e-7
        x[3, 5] = torch.inf
        found = product(x, weight)
        assert not found[3].isfinite().any()
        assert found[:3].isfinite().all()
    assert not tiles.takes(x[:, :80], weight[:, :80])  # no whole number of tiles
    assert not tiles.takes(x, weight.float())


@pytest.mark.parametrize("width", [4, 8, 16])
def test_kernels_for_vectors_of_every_width_compute_what_torch_does_on_any_machine(width, use_processor):
    use_processor({4: "SSE", 8: "AVX2", 16: "AVX-512"}[width])
    assert processor.width() == width
    assert all(works(dtype) for dtype in DTYPES)


def test_a_switch_that_cannot_be_read_is_refused(monkeypatch):
    monkeypatch.setenv(processor.SWITCH, "avx2")
    with pytest.raises(ValueError, match="SPECTRAIN_CPU: avx2 has no sign"):
        processor.cpu_features.__wrapped__()


def rounding(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The most [M, N] by which products with weights of 8 bits may be wrong: x is rounded to 16 bits, row by row."""
    unit = x.double().abs().amax(1) / min(2**15 - 1, processor.width() * products.LANE // x.shape[1])
    return 0.51 * unit[:, None] * weight.double().abs().sum(1) * scale


@pytest.mark.parametrize("n_in", [16, 48, 8208, 16384, products.MOST_ROUNDED])
def test_sums_of_8_bit_products_do_not_overflow(n_in):
    x, weight, scale = torch.randn(40, n_in), matrix(21, n_in, torch.int8), torch.rand(21) + 0.1
    x[3], weight[5], weight[7] = -1e20, 127, -128
    x[4] = 0
    x[5], weight[6] = 1e-30, -127
    x[6] = 1e34  # whose sum is no float32 any more, though each is
    expected = x.double() @ weight.double().T * scale
    found = product(x, weight, scale).double()
    fits_float = expected.abs() < 3e38
    assert ((found - expected).abs() <= rounding(x, weight, scale) + 1e-5 * expected.abs())[fits_float].all()
    assert (found[4] == 0).all()
    assert not found.isnan().any()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_stay_so_beside_8_bits(number):
    x, weight = torch.randn(3, 64), matrix(40, 64, torch.int8)
    x[1, 7] = number
    found = product(x, weight, torch.ones(40))
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


def test_matrices_that_the_kernel_does_not_take_go_through_torch():
    assert not fits(torch.randn(40, 18))  # no whole number of vectors of any machine
    assert not fits(torch.randn(7, 32))
    assert not fits(torch.randn(32, 40).T)
    assert not fits(torch.randn(40, 32, dtype=torch.float64))
    assert not fits(torch.zeros(8, 2 * products.MOST_ROUNDED, dtype=torch.int8))  # its rows need a larger stack
    for n_out, n_in, bias in ((40, 18, True), (7, 32, False), (40, 32, True)):
        linear, x = nn.Linear(n_in, n_out, bias=bias).requires_grad_(False), torch.randn(2, 70, n_in)
        for rows in (x, x[:, :3], x[:1, :1]):
            torch.testing.assert_close(RowsLinear(linear)(rows), linear(rows), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            RowsLinear(linear)(x[:, :2], first=n_out - 2), linear(x[:, :2])[..., n_out - 2 :], rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(
            RowsLinear(linear)(x[:, :2], first=5), linear(x[:, :2])[..., 5:], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    ("layer", "name"), [(RowsLinear, "Zen 5"), (weights.TextLinear, "Zen 5"), (weights.TextLinear, "AMX")]
)
def test_where_the_kernel_is_always_faster_no_state_of_a_text_depends_on_its_neighbours(layer, name, use_processor):
    use_processor(name)
    if name == "AMX" and not tiles.available():
        pytest.skip("this processor has no tiles")
    linear, x = nn.Linear(32, 40).requires_grad_(False), torch.randn(90, 32)
    if name == "AMX":
        linear.weight.data = linear.weight.data.bfloat16()
    whole = layer(linear)(x)
    torch.testing.assert_close(whole, F.linear(x, linear.weight.float(), linear.bias), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(layer(linear)(x[n : n + 7]), whole[n : n + 7]) for n in range(0, 80, 9))


def test_gradients_of_inputs_pass():
    linear = nn.Linear(32, 40).requires_grad_(False)
    x = torch.randn(3, 32, requires_grad=True)
    RowsLinear(linear)(x).sum().backward()
    torch.testing.assert_close(x.grad, linear.weight.sum(0).expand(3, -1))


@pytest.mark.parametrize("exact", [True, False])
def test_a_loaded_model_is_shortened_only_where_nothing_is_lost(exact, tmp_path):
    model = tiny_model(tie_word_embeddings=True)
    if exact:
        model = model.to(torch.bfloat16).float()
    model.save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    target = load_target(tmp_path, device="cpu")
    assert (target.dtype, target.model.dtype) == (torch.float32, torch.bfloat16 if exact else torch.float32)
    assert load_target(tmp_path, device="cpu", engine="transformers").model.dtype == torch.float32
    assert target.model.get_output_embeddings().weight is target.model.get_input_embeddings().weight
    assert fingerprint(target.model, None) == fingerprint(saved, None)
    tokens, theirs = torch.tensor(random_prompts([12])), own_model(target)
    torch.testing.assert_close(theirs(tokens).logits, saved(tokens).logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(target.forward(tokens).logits, saved(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fault", ["no OpenMP", "wrong"])
def test_kernels_that_a_machine_lacks_are_a_line_in_the_log(fault, monkeypatch, caplog):
    def noopenmp():
        raise OSError("libgomp.so.1: cannot open shared object file")

    if fault == "wrong":
        monkeypatch.setattr(running, "product", lambda x, weight, scale=None: x.new_zeros(len(x), len(weight)))
    else:
        monkeypatch.setattr(running, "openmp", noopenmp)
        running.runner.cache_clear()
    works.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            model, prompts = tiny_model(), random_prompts([9])
            found = generate(TargetModel(model), Autoregressive(), prompts, 8)[0].tokens
            assert draft_dtype_of("auto", CPU, torch.float32) == torch.float32
    finally:
        works.cache_clear()
        monkeypatch.undo()
        running.runner.cache_clear()
    assert found == generate(TargetModel(model, engine="transformers"), Autoregressive(), prompts, 8)[0].tokens
    lines = [record.message for record in caplog.records if "torch's own" in record.message]
    assert len(lines) == (2 if fault == "wrong" else 1)  # products are checked for each dtype that was asked for


def test_drafters_in_8_bits_follow_the_weights_that_they_were_made_of():
    model, prompts = tiny_model(), random_prompts([9])
    trained = noisy_copy(model)
    drafter = Speculative(TargetModel(trained), draft_dtype="int8")
    first = generate(TargetModel(model), drafter, prompts, 20)[0]
    assert isinstance(drafter.draft_model._engine.decoder.lm_head, Int8Linear)
    with torch.no_grad():
        for parameter, own in zip(trained.parameters(), model.parameters(), strict=True):
            parameter.copy_(own)
    second = generate(TargetModel(model), drafter, prompts, 20)[0]
    assert second.tokens == first.tokens
    assert second.target_forwards < first.target_forwards


def test_draft_dtype_chooses_the_weights_of_drafting(monkeypatch):
    module, x = nn.Linear(16, 16), torch.randn(2, 16)
    assert draft_dtype_of("auto", CPU, torch.float32) == torch.int8
    assert draft_dtype_of("auto", CUDA, torch.bfloat16) == torch.bfloat16
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("int8", torch.int8)):
        drafting = for_drafting(module, name, CPU, torch.float32)
        assert drafting.weight.dtype == dtype
        assert module.weight.dtype == torch.float32
        with torch.inference_mode():
            torch.testing.assert_close(drafting(x), F.linear(x, module.weight, module.bias), atol=0.05, rtol=0.05)
    with pytest.raises(UserError, match="draft_dtype=int4 must be one of auto, float32, bfloat16, int8"):
        draft_dtype_of("int4", CPU, torch.float32)
    with pytest.raises(UserError, match="draft_dtype=int8 has no kernels on this machine's cuda; give draft_dtype="):
        draft_dtype_of("int8", CUDA, torch.bfloat16)
    monkeypatch.setattr(weights, "works", lambda dtype: False)
    assert draft_dtype_of("auto", CPU, torch.float32) == torch.float32


def test_threads_are_those_of_torch_whatever_else_is_loaded():
    import pydivsufsort  # noqa: F401  which brings an OpenMP library of its own

    running.openmp.cache_clear()
    bundled = [str(file) for file in Path(torch.__file__).parent.glob("lib/libgomp*")]
    assert running.openmp()._name in (bundled or [running.openmp()._name])
