"""A GGUF file becomes a target with the logits of the model that it was written from; others are one sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spectrain.decoding import load_target
from spectrain.errors import UserError
from spectrain.models.gguf_files import Origin, TargetManifest, write_target
from spectrain.stores.folder import read_json
from tests.conftest import tiny_model
from tests.decoding.test_lean import LLAMA3, MODELS
from tests.models.gguf_writer import TEMPLATE, gguf, with_type, with_value, write_file

ORIGIN = Origin("gguf=a.gguf", "the file a.gguf", "f" * 64)
WRITTEN = [name for name in MODELS if name not in ("llama, gelu", "llama, yarn")]  # GGUF states neither so
PROMPT = torch.tensor([[5, 9, 33, 12, 7, 41, 20, 8] * 12])  # longer than what scaled RoPE was trained on


def made(file: Path, dtype: str | None = None) -> tuple[TargetManifest, Path]:
    folder = file.with_name("target")
    folder.mkdir()
    return write_target(folder, file, dtype, ORIGIN), folder


def logits(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(PROMPT).logits


@pytest.mark.parametrize("family", WRITTEN)
def test_the_logits_are_those_of_the_model(family, tmp_path, monkeypatch):
    model = MODELS[family]()
    manifest, folder = made(write_file(model, tmp_path / "tiny.gguf", monkeypatch))
    assert (manifest.dtype, manifest.quantization) == ("float32", "F32")
    assert manifest.weights == sum(parameter.numel() for parameter in model.parameters())
    torch.testing.assert_close(logits(folder), model(PROMPT).logits, atol=2e-4, rtol=1e-4)


def scaled(kind: str, factor: float, length: int | None = None):
    def more(writer) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(factor)
        if length:
            writer.add_rope_scaling_orig_ctx_len(length)

    return more


@pytest.mark.parametrize(
    ("family", "more"),
    [("llama, linear rope", scaled("linear", 2.0)), ("llama, yarn", scaled("yarn", 4.0, length=64))],
)
def test_scaled_rope_is_read_of_the_metadata(family, more, tmp_path, monkeypatch):
    model = MODELS[family]()
    _, folder = made(write_file(model, tmp_path / "tiny.gguf", monkeypatch, more=more))
    torch.testing.assert_close(logits(folder), model(PROMPT).logits, atol=2e-4, rtol=1e-4)


def test_the_rope_of_llama_3_is_found_from_its_divisors(tmp_path, monkeypatch):
    model = tiny_model(rope_parameters=LLAMA3, head_dim=16)  # so that frequencies are smoothed
    _, folder = made(write_file(model, tmp_path / "tiny.gguf", monkeypatch))
    assert read_json(folder / "config.json")["rope_parameters"] == LLAMA3


def test_tokenizer_template_and_ends_of_text_come_along(tmp_path, monkeypatch):
    manifest, folder = made(write_file(tiny_model(), tmp_path / "tiny.gguf", monkeypatch))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("ABBA<s>")["input_ids"] == [60, 5, 4, 1]
    assert (tokenizer.chat_template, manifest.chat) == (TEMPLATE, True)
    assert load_target(folder).eos_ids == (3,)


def test_the_folder_says_what_it_is(tmp_path, monkeypatch):
    manifest, folder = made(write_file(tiny_model(), tmp_path / "tiny.gguf", monkeypatch))
    kept = read_json(folder / "manifest.json")
    assert (kept["kind"], kept["sha256"], kept["licence"]) == ("target", ORIGIN.sha256, "mit")
    assert set(kept["files"]) == {file.name for file in folder.iterdir()} - {"manifest.json"}
    assert (manifest.name, manifest.context_tokens, manifest.vocab_size) == ("tiny", 256, 61)
    card = (folder / "README.md").read_text()
    assert all(words in card for words in ("the file a.gguf", ORIGIN.sha256, "| licence | mit |", "F32 in the file"))
    modes = {file.stat().st_mode for file in folder.iterdir()}
    assert len(modes) == 1


@pytest.mark.parametrize(
    ("options", "dtype", "expected"),
    [
        ({"tensor_type": "Q8_0"}, None, "bfloat16"),
        ({"tensor_type": "Q8_0"}, "float32", "float32"),
        ({}, "bfloat16", "bfloat16"),
    ],
)
def test_quantized_weights_are_kept_in_bfloat16_unless_asked(options, dtype, expected, tmp_path, monkeypatch):
    model = tiny_model(intermediate_size=64)
    manifest, folder = made(write_file(model, tmp_path / "tiny.gguf", monkeypatch, **options), dtype)
    assert manifest.dtype == expected
    weight = model.model.layers[1].mlp.up_proj.weight.numpy()
    if options:
        kind = gguf.GGMLQuantizationType.Q8_0
        weight = gguf.dequantize(gguf.quantize(weight, kind), kind)
    read = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").model.layers[1].mlp.up_proj.weight
    assert torch.equal(read, torch.tensor(weight).to(getattr(torch, expected)))


def test_weights_in_bfloat16_stay_as_they_are(tmp_path, monkeypatch):
    model = tiny_model().to(torch.bfloat16)
    manifest, folder = made(write_file(model, tmp_path / "tiny.gguf", monkeypatch))
    assert (manifest.dtype, manifest.quantization) == ("bfloat16", "BF16")
    read = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in model.state_dict().items())


def with_odd_divisors(writer) -> None:
    add = writer.add_tensor

    def odd(name, tensor, raw_dtype=None):
        if name == "rope_freqs.weight":
            tensor = np.array([1.0, 3.0, 2.0, 5.0], dtype=np.float32)
        add(name, tensor, raw_dtype=raw_dtype)

    writer.add_tensor = odd


def with_a_norm_of_queries(writer) -> None:
    writer.add_tensor("blk.1.attn_q_norm.weight", np.ones(8, dtype=np.float32))


@pytest.mark.parametrize(
    ("options", "damage", "sentence"),
    [
        ({}, lambda c: b"PK" + c[2:], r"gguf=a.gguf is no GGUF file; give a file of type \.gguf"),
        ({}, lambda c: c[:3], "gguf=a.gguf is no GGUF file"),
        ({}, lambda c: c.replace(b"gpt2", b"gp\xff2"), "gguf=a.gguf is truncated or damaged"),
        ({}, lambda c: c[:40], r"gguf=a.gguf is truncated or damaged \(.*\); fetch it again"),
        ({}, lambda c: c[:2000], "gguf=a.gguf is truncated or damaged"),
        ({}, lambda c: c[: len(c) // 2], "gguf=a.gguf is truncated or damaged"),
        ({}, lambda c: c[:-40], "gguf=a.gguf is truncated or damaged"),
        ({}, lambda c: c.replace(b"llama", b"lemma"), r"an architecture lemma that transformers cannot read \(.*lem"),
        ({}, lambda c: with_type(c, "output_norm.weight", 99), "tensors of a type that gguf does not know .*99.*; g"),
        ({"tensor_type": "I32"}, None, "tensors of the type I32, which gguf cannot read; give a file of another quant"),
        ({}, lambda c: c.replace(b"gpt2", b"gpt9"), r"has a tokenizer \(gpt9\) that transformers cannot read"),
        ({}, lambda c: c.replace(b"blk.2.attn_q.", b"blk.2.attn_z."), r"lacks weights \(model.layers.2.self_attn.q_"),
        ({"more": with_a_norm_of_queries}, None, "holds [0-9,]+ weights, but the LlamaForCausalLM of transformers has"),
        ({"more": with_odd_divisors}, None, "scales its RoPE in a way that is not known here"),
        ({}, lambda c: with_value(c, "llama.block_count", 2**30), r"num_hidden_layers=1073741824 must be a whole num"),
        ({"more": scaled("longrope", 2.0)}, None, "scales its RoPE in a way that is not known here"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_one_sentence(options, damage, sentence, tmp_path, monkeypatch):
    file = write_file(tiny_model(), tmp_path / "tiny.gguf", monkeypatch, **options)
    if damage is not None:
        file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError, match=sentence) as raised:
        made(file)
    assert "\n" not in str(raised.value)


def test_a_weight_that_is_no_number_makes_no_target(tmp_path, monkeypatch):
    model = tiny_model()
    model.model.norm.weight[3] = float("nan")
    with pytest.raises(UserError, match=r"gguf=a.gguf holds no target: target it \(llama\) has a weight that is no"):
        made(write_file(model, tmp_path / "tiny.gguf", monkeypatch))


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_is_one_sentence(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    with pytest.raises(UserError, match=rf"not installed \(.*{package}.*\); run pip install gguf accelerate"):
        write_target(tmp_path, tmp_path / "tiny.gguf", None, ORIGIN)
