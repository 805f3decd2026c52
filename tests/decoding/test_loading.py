"""Loading from a folder, and one sentence for each thing that can be wrong with it."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM

from spectrain.decoding import load_target
from spectrain.errors import UserError
from tests.conftest import tiny_model
from tests.decoding.test_loop import word_tokenizer


@pytest.fixture
def folder(tmp_path):
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_loaded_target_is_frozen_and_ready(folder):
    target = load_target(folder, device="cpu", capture_layers=[1])
    assert target.dtype == torch.float32
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert target.tokenizer.decode([4, 5]) == "w4 w5"
    assert target.forward(torch.tensor([[4, 5]])).captured.shape == (1, 2, 1, 32)
    assert load_target(folder, dtype="bfloat16", device="cpu").dtype == torch.bfloat16


def test_loading_shows_no_progress_bar_and_leaves_the_users_setting(folder, capfd, monkeypatch):
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", True)
    load_target(folder, device="cpu")
    assert "Loading weights" not in capfd.readouterr().err
    AutoModelForCausalLM.from_pretrained(folder)
    assert "Loading weights" in capfd.readouterr().err


def no_config(folder):
    (folder / "config.json").unlink()


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def corrupt_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def encoder(folder):
    edit_config(folder, model_type="t5", architectures=["T5ForConditionalGeneration"])


def masked_language_model(folder):
    for path in folder.glob("*.json"):
        if not path.name.startswith("token"):
            path.unlink()
    config = BertConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    BertForMaskedLM(config).save_pretrained(folder)


def window(folder):
    edit_config(folder, model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=16)


def hybrid(folder):
    layers = ["full_attention", "linear_attention", "full_attention"]
    edit_config(folder, model_type="qwen3_next", architectures=["Qwen3NextForCausalLM"], layer_types=layers)


def broken_config(folder):
    (folder / "config.json").write_text("{")


def no_tokenizer(folder):
    for path in folder.glob("token*"):
        path.unlink()


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def lacking_weights(folder):
    edit_weights(folder, lambda weights: [weights.pop(name) for name in list(weights) if "layers.1.mlp" in name])


def no_number(folder):
    edit_weights(folder, lambda weights: weights["model.norm.weight"].fill_(torch.nan))


def fewer_layers(folder):
    edit_config(folder, num_hidden_layers=2)


def more_layers(folder):
    edit_config(folder, num_hidden_layers=4)


def other_shape(folder):
    edit_weights(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(7)}))


def broken_generation_config(folder):
    (folder / "generation_config.json").write_text("{")


def foreign_config(folder):
    edit_config(folder, model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")


def foreign_tokenizer(folder):
    no_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["own.Own", None]}}))
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lacking_weights, r"lacks weights \(model.layers.1.mlp.down_proj.weight, .*up_proj.weight\); export or fetch"),
        (fewer_layers, r"has weights that its config.json does not name \(model.layers.2.* \.\.\.\)"),
        (more_layers, r"lacks weights \(model.layers.3.input_layernorm.weight, .*, \.\.\.\)"),
        (other_shape, r"has weights of other shapes than its config.json says \(model.norm.weight\)"),
        (broken_generation_config, "generation_config.json"),
        (foreign_config, "needs code of its own folder, which is never run"),
        (foreign_tokenizer, "has no tokenizer that transformers can read"),
        (no_config, "no config.json"),
        (no_number, r"has a weight that is no number \(model.norm.weight\); export or fetch it again"),
        (masked_language_model, "is no causal language model"),
        (no_weights, "weight file|could not be loaded"),
        (corrupt_weights, "missing or corrupt weight file"),
        (encoder, "no causal language model"),
        (window, r"sliding_attention \(sliding_window=16\)"),
        (hybrid, "linear_attention"),
        (broken_config, "config.json that transformers cannot read"),
        (no_tokenizer, "no tokenizer"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_spoilt_folder_is_named_with_the_reason(folder, spoil, reason):
    spoil(folder)
    with pytest.raises(UserError, match=reason) as raised:
        load_target(folder, device="cpu")
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (folder / "ran").exists()  # code of the folder


@pytest.mark.parametrize("spoil", [no_number, broken_config, no_tokenizer, no_config, masked_language_model])
def test_a_draft_model_is_called_one(folder, spoil):
    spoil(folder)
    with pytest.raises(UserError) as raised:
        load_target(folder, device="cpu", role="draft model")
    assert str(raised.value).startswith("draft model ")
    assert "target" not in str(raised.value)


def test_tied_weights_are_complete(tmp_path):
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    assert load_target(tmp_path, device="cpu").vocab_size == 61


def test_missing_folder():
    with pytest.raises(UserError, match="does not exist"):
        load_target("./no/such/folder")


def test_hub_id_without_a_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="no network"):
        load_target("nobody/nothing")


@pytest.mark.parametrize("option", [{"dtype": "int3"}, {"parallel": "magic"}], ids=str)
def test_unknown_option_lists_the_known_ones(folder, option):
    with pytest.raises(UserError, match="must be one of"):
        load_target(folder, **option)
