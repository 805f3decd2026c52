"""Loading from a folder, and one sentence for each thing that can be wrong with it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM

from spectrain import load_method
from spectrain.decoding import generate
from spectrain.errors import UserError
from spectrain.methods.autoregressive import Autoregressive
from spectrain.target import KVCache, load_target
from spectrain.target.loading import check_card
from tests.conftest import random_prompts, tiny_model
from tests.decoding.test_loop import word_tokenizer


@pytest.fixture
def folder(tmp_path) -> Path:
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_loaded_target_is_frozen_and_ready(folder):
    target = load_target(folder, device="cpu", capture_layers=[1])
    assert target.dtype == torch.float32
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert target.tokenizer.decode([4, 5]) == "w4 w5"
    assert target.forward(torch.tensor([[4, 5]])).captured.shape == (1, 2, 1, 32)


def test_a_target_in_bfloat16_has_short_weights_and_takes_exact_steps(folder):
    target = load_target(folder, dtype="bfloat16", device="cpu")
    assert (target.dtype, target.model.dtype) == (torch.float32, torch.bfloat16)
    assert target.forward(torch.tensor([[4, 5]])).logits.dtype == torch.bfloat16  # whole texts
    exact = load_target(folder, device="cpu")
    exact.model.load_state_dict({name: one.float() for name, one in target.model.state_dict().items()})
    tokens = torch.tensor([[4, 5, 6]])
    outputs = [one.prefill(tokens, [3], KVCache(1), range(1)).logits for one in (target, exact)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["pld", "logitspec", "lookahead"])
def test_greedy_text_of_a_target_in_bfloat16_depends_neither_on_drafts_nor_on_the_batch(name, folder):
    target, prompts = load_target(folder, dtype="bfloat16", device="cpu"), random_prompts([9, 4, 13])
    plain = [generate(target, Autoregressive(), [one], 24)[0].tokens for one in prompts]
    assert [one.tokens for one in generate(target, load_method(name, target), prompts, 24)] == plain


def test_loading_shows_no_progress_bar_and_leaves_the_users_setting(folder, capfd, monkeypatch):
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", True)
    load_target(folder, device="cpu")
    assert "Loading weights" not in capfd.readouterr().err
    AutoModelForCausalLM.from_pretrained(folder)
    assert "Loading weights" in capfd.readouterr().err


def config(**changes):
    """Changes config.json."""

    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def weights(change):
    """Changes the weights, a dict of tensors."""

    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        content = load_file(path)
        change(content)
        save_file(content, path, metadata={"format": "pt"})

    return edit


def file(name: str, text: str | None):
    """Writes a file, or removes those of a pattern."""

    def edit(folder: Path) -> None:
        for path in folder.glob(name):
            path.unlink()
        if text is not None:
            (folder / name).write_text(text)

    return edit


def masked_language_model(folder: Path) -> None:
    for path in folder.glob("*.json"):
        if not path.name.startswith("token"):
            path.unlink()
    shape = BertConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    BertForMaskedLM(shape).save_pretrained(folder)


def foreign_config(folder: Path) -> None:
    config(model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})(folder)
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")


def foreign_tokenizer(folder: Path) -> None:
    file("token*", None)(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["own.Own", None]}}))
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")


LACKING = ("model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.up_proj.weight")
CHUNKED = {"model_type": "llama4_text", "layer_types": ["full_attention", "chunked_attention", "full_attention"]}
HYBRID = {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
HYBRID["layer_types"] = ["full_attention", "linear_attention", "full_attention"]
SPOILT = {
    "no config": (file("config.json", None), "no config.json"),
    "broken config": (file("config.json", "{"), "config.json that transformers cannot read"),
    "broken generation config": (file("generation_config.json", "{"), "generation_config.json"),
    "no tokenizer": (file("token*", None), "no tokenizer"),
    "no weights": (file("*.safetensors", None), "weight file|could not be loaded"),
    "corrupt weights": (file("model.safetensors", "{" * 1000), "missing or corrupt weight file"),
    "lacking weights": (
        weights(lambda content: [content.pop(name) for name in LACKING]),
        rf"lacks weights \({', '.join(LACKING)}\); export or fetch",
    ),
    "fewer layers": (
        config(num_hidden_layers=2),
        r"has weights that its config.json does not name \(model.layers.2.* \.\.\.\)",
    ),
    "other shape": (
        weights(lambda content: content.update({"model.norm.weight": torch.ones(7)})),
        r"has weights of other shapes than its config.json says \(model.norm.weight\)",
    ),
    "no number": (
        weights(lambda content: content["model.norm.weight"].fill_(torch.nan)),
        r"has a weight that is no number \(model.norm.weight\); export or fetch it again",
    ),
    "masked language model": (masked_language_model, "is no causal language model"),
    "chunks": (config(**CHUNKED), "layers of type chunked_attention, in which no draft tree can be masked; choose"),
    "hybrid": (
        config(**HYBRID),
        "layers of type linear_attention, in which no rejected draft can be taken back; choose",
    ),
    "foreign config": (foreign_config, "needs code of its own folder, which is never run"),
    "foreign tokenizer": (foreign_tokenizer, "has no tokenizer that transformers can read"),
}


@pytest.mark.parametrize("fault", SPOILT)
def test_spoilt_folder_is_named_with_the_reason(folder, fault):
    spoil, reason = SPOILT[fault]
    spoil(folder)
    for role in ("target", "draft model"):
        with pytest.raises(UserError, match=reason) as raised:
            load_target(folder, device="cpu", role=role)
        assert str(raised.value).startswith(role)
        assert str(folder) in str(raised.value)
        assert "\n" not in str(raised.value)
    assert not (folder / "ran").exists()  # code of the folder


def test_hub_id_without_a_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="no network"):
        load_target("nobody/nothing")


@pytest.mark.parametrize("option", [{"dtype": "int3"}, {"parallel": "magic"}], ids=str)
def test_unknown_option_lists_the_known_ones(folder, option):
    with pytest.raises(UserError, match="must be one of"):
        load_target(folder, **option)


@pytest.mark.parametrize(
    ("dtype", "free", "has_bf16", "sentence"),
    [
        ("bfloat16", 2**40, False, "does not compute in bfloat16.*give target.dtype=float16"),
        (
            "float32",
            2**16,
            True,
            "0.0 GiB of the GPU are free; give target.parallel=device_map, a shorter target.dtype",
        ),
    ],
)
def test_what_a_card_cannot_hold_or_compute_is_said_before_loading(dtype, free, has_bf16, sentence):
    with pytest.raises(UserError, match=sentence):
        check_card(tiny_model("llama").config, "target t (llama)", dtype, free, has_bf16)


def test_a_model_that_just_fits_a_card_is_loaded():
    model = tiny_model("llama")
    n_bytes = sum(2 * weight.numel() for weight in model.parameters())
    check_card(model.config, "t", "bfloat16", n_bytes, has_bf16=True)
    with pytest.raises(UserError):
        check_card(model.config, "t", "bfloat16", n_bytes - 1, has_bf16=True)
