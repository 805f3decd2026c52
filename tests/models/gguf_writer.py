"""Tiny GGUF files with a tokenizer of 61 entries, and a package that holds one."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from spectrain.decoding import TargetModel
from spectrain.measure.llama_cpp import write_gguf
from spectrain.models.packages import Package
from spectrain.stores.folder import sha256
from tests.conftest import VOCAB_SIZE

gguf = pytest.importorskip("gguf", reason="GGUF files are written with the package gguf: pip install -e '.[test]'")
pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate: pip install -e '.[test]'")

LETTERS = [chr(code) for code in range(ord("A"), ord("A") + VOCAB_SIZE - 5)]  # 4 special tokens and one merge
TOKENS = ["<pad>", "<s>", "<unk>", "</s>", *LETTERS, "AB"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


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
