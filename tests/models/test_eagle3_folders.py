"""Folders of EAGLE-3 drafters: ours byte by byte, those of others as their writers meant them, and all else refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from spectrain.errors import UserError
from spectrain.methods.options import given_artifacts
from spectrain.methods.speculative import load_draft_model
from spectrain.models.artifacts import is_export, read_manifest, trained_artifact, write_manifest
from spectrain.models.eagle3 import Eagle3Config, Eagle3Drafter, default_layers, load, save, unrolled
from spectrain.models.eagle3_folders import SIZES
from spectrain.target import TargetModel, fingerprint
from spectrain.target.lean import shape_of
from tests.conftest import VOCAB_SIZE, tiny_model
from tests.models.test_artifacts import tiny_tokenizer

N_LAYER, KEPT = 8, 20
OURS = ("k", "window_tokens", "unembedding")  # keys of config.json that nobody else writes
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64, "rope_theta": 500000.0}
LAYERS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(tiny_model("llama", num_hidden_layers=N_LAYER), tiny_tokenizer())


def drafter_for(target: TargetModel, **options) -> Eagle3Drafter:
    """A drafter of random weights, whose draft vocabulary is in no order."""
    layers = options.pop("target_layers", default_layers(N_LAYER))
    generator = torch.Generator().manual_seed(0)
    drafter = Eagle3Drafter(Eagle3Config(shape_of(target.model), layers, **options), target).requires_grad_(False)
    for parameter in drafter.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    if drafter.kept is not None:
        drafter.kept.copy_(torch.randperm(VOCAB_SIZE, generator=generator)[: len(drafter.kept)])
    return drafter


def export(folder: Path, target: TargetModel, drafter: Eagle3Drafter, dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir()
    save(folder, drafter, dtype)
    write_manifest(folder, trained_artifact("eagle3", "tiny", fingerprint(target.model, target.tokenizer), {}))
    return folder


def drafts(drafter: Eagle3Drafter) -> torch.Tensor:
    """The logits of all tokens of some drafts."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, VOCAB_SIZE, (2, 30), generator=generator)
    sizes = len(drafter.config.target_layers), drafter.config.shape.hidden_size
    found = torch.stack(unrolled(drafter, tokens, torch.randn(2, 30, *sizes, generator=generator), 3))
    return drafter.spread(F.linear(found, drafter.unembedding), -1e9)


CASES = {
    "plain": {},
    "a vocabulary": {"draft_vocab": KEPT, "window_tokens": 16, "k": 3},
    "the target's head": {"draft_vocab": KEPT, "unembedding": "target", "fc_norm": True, "norm_output": True},
    "the target's whole head": {"unembedding": "target", "norm_before_fc": True, "norm_before_residual": True},
    "an embedding, two states": {"own_embedding": True, "target_layers": (0, 7)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_is_opened_and_exported_byte_by_byte(tmp_path, target, case, dtype):
    drafter = drafter_for(target, **CASES[case])
    first = export(tmp_path / "first", target, drafter, dtype)
    opened = load(first, target)
    again = export(tmp_path / "again", target, opened, dtype)
    names = sorted(file.name for file in first.iterdir())
    assert names == sorted(file.name for file in again.iterdir())
    assert ("kept.npy" in names) == ("draft_vocab" in CASES[case])
    assert [name for name in names if (first / name).read_bytes() != (again / name).read_bytes()] == []
    assert opened.config == drafter.config
    if dtype == torch.float32:
        state = opened.state_dict()
        assert all(torch.equal(state[name], one) for name, one in drafter.state_dict().items())


def published(folder: Path, drafter: Eagle3Drafter, change: Callable[[dict, dict], object], file: str = "") -> Path:
    """A folder as others write it: ours, but for what is ours alone, after `change(config, tensors)`.

    `file`: pytorch_model.bin, or two, which are shards.
    """
    folder.mkdir()
    save(folder, drafter)
    (folder / "kept.npy").unlink(missing_ok=True)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    config = {name: value for name, value in config.items() if name not in OURS}
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    if file == "pytorch_model.bin":
        torch.save(tensors, folder / file)
    elif file == "shards":
        places = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
        for one in set(places.values()):
            save_file({name: tensors[name] for name in places if places[name] == one}, folder / one)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def renamed(tensors: dict, *names: tuple[str, str]) -> None:
    for old, new in names:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)


def safeai(config: dict, tensors: dict) -> None:
    """It names neither layers nor RoPE, and calls itself an ordinary Llama."""
    for name in (LAYERS, "eagle_config", "rope_theta", "target_hidden_size", "head_dim"):
        del config[name]
    config["architectures"] = ["LlamaForCausalLM"]


def specforge(config: dict, tensors: dict) -> None:
    del config[LAYERS]


def automodel(config: dict, tensors: dict) -> None:
    """Its config is the target's, but for a few keys; its checkpoint has the target's embedding."""
    safeai(config, tensors)
    config |= {"architectures": ["LlamaEagle3DraftModel"], "num_hidden_layers": N_LAYER, "rope_theta": 10000.0}
    tensors["embed_tokens.weight"] = tiny_model("llama", num_hidden_layers=N_LAYER).model.embed_tokens.weight.detach()
    renamed(tensors, ("midlayer.", "layers.0."))
    renamed(
        tensors, *((name, f"model.{name}") for name in list(tensors) if name[0] in "efln" and "lm_head" not in name)
    )


def speculators(config: dict, tensors: dict) -> None:
    """Its config.json holds what differs from the defaults of a Llama."""
    layer = {name: config.pop(name) for name in list(config) if name not in (LAYERS, "draft_vocab_size", "fc_norm")}
    layer = {name: layer[name] for name in ("model_type", *SIZES, "rope_theta") if layer.get(name) is not None}
    layer |= {"layer_types": ["sliding_attention"], "sliding_window": 16}
    config |= {"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"]}
    config |= {"transformer_layer_config": layer, "norm_before_residual": True}
    config["speculators_config"] = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}]}
    renamed(tensors, ("midlayer.", "layers.0."))


def sglang(config: dict, tensors: dict) -> None:
    """An earlier name of fc_norm."""
    del config["fc_norm"]
    config["use_aux_norm"] = True
    renamed(tensors, *((f"fc_norm.{i}.", f"aux_norm_{name}.") for i, name in enumerate(("low", "mid", "high"))))


ROPE_LINE = "it has no rope_theta"
LAYERS_LINE = "it names no layers, so it reads the inputs of blocks 2, 4, 5"
LAYOUTS = {  # layout, file, options of the drafter, what is said
    "SafeAILab": (safeai, "pytorch_model.bin", {"draft_vocab": KEPT}, LAYERS_LINE),
    "SpecForge": (specforge, "", {"draft_vocab": KEPT, "target_layers": (1, 3, 7)}, ""),
    "Automodel": (automodel, "shards", {}, LAYERS_LINE),
    "speculators": (speculators, "", {"norm_before_residual": True, "window_tokens": 16, "k": 3, "fc_norm": True}, ""),
    "SGLang": (sglang, "", {"fc_norm": True, "draft_vocab": KEPT}, ""),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_of_others_drafts_as_what_it_was_made_of(tmp_path, target, layout, caplog):
    change, file, options, said = LAYOUTS[layout]
    drafter = drafter_for(target, **options)
    folder = published(tmp_path / "theirs", drafter, change, file)
    with caplog.at_level(logging.INFO):
        opened = load(folder, target)
    assert [record.message.partition("is read so: ")[2] for record in caplog.records] == [said] * bool(said)
    assert opened.config == drafter.config
    assert opened.kept is None or opened.kept.tolist() == sorted(drafter.kept.tolist())  # they know no other order
    torch.testing.assert_close(drafts(opened), drafts(drafter), rtol=0, atol=0)
    assert is_export(folder)
    assert read_manifest(folder).method == "eagle3"
    assert given_artifacts(str(folder)) == {"eagle3": str(folder)}
    with pytest.raises(UserError, match="is a EAGLE-3 drafter; give a vanilla drafter"):
        load_draft_model(target, str(folder))
