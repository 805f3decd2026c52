"""Exports: what is written is what is read, and what does not fit is refused in one sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from spectrain.drafting.budget import ChainBudget
from spectrain.errors import UserError
from spectrain.methods import speculative, spire
from spectrain.models.artifacts import (
    MANIFEST,
    decoded_by,
    default_artifact,
    fastest_gamma,
    trained_acceptance,
    trained_artifact,
    write_manifest,
)
from spectrain.models.pruned_init import last_layers, new_drafter
from spectrain.models.spire import SpireConfig
from spectrain.models.spire import load as load_spire
from spectrain.models.spire import save as save_spire
from spectrain.models.vanilla import new_vanilla
from spectrain.target import TargetModel, fingerprint
from spectrain.target.lean import shape_of
from tests.conftest import EOS_ID, VOCAB_SIZE, tiny_model


def tiny_tokenizer(first: str = "a", vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    vocabulary = {first if i == 5 else f"<{i}>": i for i in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"<{EOS_ID}>", unk_token="<0>")


def export_spire(folder: Path, target: TargetModel, n_layer: int = 2, init: str = "pruned", **options) -> Path:
    config = SpireConfig(shape_of(target.model), last_layers(target.model, n_layer), **options)
    folder.mkdir()
    save_spire(folder, new_drafter(target, config, init))
    write_manifest(folder, trained_artifact("spire", "tiny", fingerprint(target.model, target.tokenizer), {}))
    return folder


def export_vanilla(folder: Path, target: TargetModel, model: PreTrainedModel | None = None) -> Path:
    """`model`: the drafter; None: a new one."""
    folder.mkdir()
    (model if model is not None else new_vanilla(target.model)).save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    write_manifest(folder, trained_artifact("vanilla", "tiny", fingerprint(target.model, target.tokenizer), {}))
    return folder


@pytest.fixture
def target() -> TargetModel:
    return TargetModel(tiny_model("llama"), tiny_tokenizer())


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_drafter_is_read_back_whole(tmp_path, tied):
    target = TargetModel(tiny_model("llama", tie_word_embeddings=tied), tiny_tokenizer())
    folder = export_spire(tmp_path / "spire", target, k=3, window_tokens=7, sink_tokens=2)
    drafter = load_spire(folder, target)
    assert (drafter.config.k, drafter.config.window_tokens, drafter.config.sink_tokens) == (3, 7, 2)
    assert (drafter.lm_head.weight is drafter.embed_tokens.weight) == tied
    torch.testing.assert_close(drafter.lm_head.weight, target.unembedding)
    torch.testing.assert_close(
        drafter.blocks[1].gate_up.weight.chunk(2)[1], target.model.model.layers[2].mlp.up_proj.weight
    )


@pytest.mark.parametrize("input_", ["projected", "trained"])
@pytest.mark.parametrize("unembedding", ["target", "trained"])
def test_a_drafter_shares_the_tables_that_its_folder_lacks(tmp_path, target, input_, unembedding):
    drafter = load_spire(export_spire(tmp_path / "spire", target, input=input_, unembedding=unembedding), target)
    assert (drafter.config.input, drafter.config.unembedding) == (input_, unembedding)
    with safe_open(tmp_path / "spire/model.safetensors", "pt") as file:
        names, tables = set(file.keys()), {"embed_tokens.weight", "lm_head.weight"}
    lacking = {"embed_tokens.weight": input_ == "projected", "lm_head.weight": unembedding == "target"}
    assert names & tables == {name for name, lacks in lacking.items() if not lacks}
    assert (drafter.unembedding.data_ptr() == target.unembedding.data_ptr()) == (unembedding == "target")
    tokens = torch.arange(9)
    inputs = F.embedding(tokens, target.model.get_input_embeddings().weight)
    expected = drafter.input(inputs) if input_ == "projected" else inputs
    torch.testing.assert_close(drafter.embed(tokens), expected)


@pytest.mark.parametrize("unembedding", ["target", "trained"])
def test_an_export_holds_the_tokens_that_it_can_draft(tmp_path, target, unembedding):
    kept = torch.tensor([3, 5, 8, VOCAB_SIZE - 1])
    options = {"input": "projected", "unembedding": unembedding, "draft_vocab": 4}
    config = SpireConfig(shape_of(target.model), last_layers(target.model, 2), **options)
    made, folder = new_drafter(target, config, "pruned", kept), tmp_path / "spire"
    folder.mkdir()
    save_spire(folder, made, torch.bfloat16)
    write_manifest(folder, trained_artifact("spire", "tiny", fingerprint(target.model, target.tokenizer), {}))
    drafter = load_spire(folder, target)
    assert torch.equal(drafter.kept, kept)
    logits = drafter.logits(torch.randn(2, 32))
    assert logits.shape == (2, VOCAB_SIZE)
    assert (logits > -torch.inf).nonzero()[:, 1].tolist() == 2 * kept.tolist()


def test_a_drafter_of_another_target_is_refused(tmp_path, target):
    folder = export_spire(tmp_path / "spire", target)
    other = TargetModel(tiny_model("llama", seed=1), target.tokenizer)
    with pytest.raises(UserError, match=r"was trained for tiny .* not for this target"):
        load_spire(folder, other)


def test_wrong_folders_are_named(tmp_path, target):
    with pytest.raises(UserError, match="does not exist"):
        load_spire(tmp_path / "nothing", target)
    with pytest.raises(UserError, match=r"has no spectrain\.json"):
        load_spire(tmp_path, target)
    with pytest.raises(UserError, match=r"is a vanilla drafter; give method=speculative, or one made by .*\+exp=spire"):
        load_spire(export_vanilla(tmp_path / "vanilla", target), target)


def test_an_export_says_which_method_decodes_with_it_and_what_training_measured(tmp_path, target):
    spire, vanilla = export_spire(tmp_path / "s", target), export_vanilla(tmp_path / "v", target)
    assert decoded_by(spire) == ("spire", {"drafter": str(spire)})
    assert decoded_by(vanilla) == ("speculative", {"drafter": str(vanilla)})
    assert (fastest_gamma(spire), trained_acceptance(spire), fastest_gamma(tmp_path)) == (None, None, None)
    manifest = json.loads((spire / MANIFEST).read_text())
    trained = {"fastest_gamma": 2, "metrics": {"eval/alpha": 0.25}}
    (spire / MANIFEST).write_text(json.dumps(manifest | {"trained": trained}))
    assert (fastest_gamma(spire), trained_acceptance(spire)) == (2, 0.25)


@pytest.mark.parametrize(("kind", "default"), [("spire", 4), ("vanilla", 4)])
def test_the_fastest_draft_length_is_the_default_of_an_export(tmp_path, target, kind, default):
    folder = {"spire": export_spire, "vanilla": export_vanilla}[kind](tmp_path / "one", target)
    build = {"spire": spire.build, "vanilla": speculative.build}[kind]
    assert build(target, str(folder)).gamma == default
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"trained": {"fastest_gamma": 2}}))
    assert (build(target, str(folder)).gamma, build(target, str(folder), gamma=3).gamma) == (2, 3)


@pytest.mark.parametrize("kind", ["spire", "vanilla"])
def test_a_length_that_adapts_starts_from_the_acceptance_that_training_measured(tmp_path, target, kind):
    folder = {"spire": export_spire, "vanilla": export_vanilla}[kind](tmp_path / "one", target)
    build = {"spire": spire.build, "vanilla": speculative.build}[kind]
    manifest = json.loads((folder / MANIFEST).read_text())
    for metrics, expected in (
        ({"eval/alpha": 0.25}, 0.25),
        ({}, ChainBudget.FIRST_CHANCE),
        (None, ChainBudget.FIRST_CHANCE),
    ):
        (folder / MANIFEST).write_text(json.dumps(manifest | {"trained": {"metrics": metrics}}))
        assert build(target, str(folder), max_nodes="auto").budget.prior[0] == expected


def test_the_newest_fitting_export_is_found(tmp_path, target):
    name = fingerprint(target.model, target.tokenizer)
    with pytest.raises(UserError, match=r"holds no spire drafter for this target; train one with .*\+exp=spire"):
        default_artifact(tmp_path, "spire", name)
    export_vanilla(tmp_path / "v", target)
    export_spire(tmp_path / "s", target)
    other = TargetModel(tiny_model("llama", seed=1), target.tokenizer)
    export_spire(tmp_path / "other", other)
    export_spire(tmp_path / "damaged", target)
    (tmp_path / "damaged" / "spectrain.json").write_text("{")
    assert default_artifact(tmp_path, "spire", name) == tmp_path / "s"


def test_of_several_fitting_exports_the_one_with_the_highest_measured_tau_is_taken(tmp_path, target, caplog):
    name = fingerprint(target.model, target.tokenizer)
    for i, taus in enumerate(({"256 tokens, T=1": 2.9}, {"256 tokens, T=1": 2.0, "512 tokens, T=1": 3.0}, None)):
        folder = export_spire(tmp_path / f"s{i}", target)
        manifest = json.loads((folder / MANIFEST).read_text())
        trained = {} if taus is None else {"tau": {"spire": {key: {"value": tau} for key, tau in taus.items()}}}
        (folder / MANIFEST).write_text(json.dumps(manifest | {"trained": trained}))
        os.utime(folder / MANIFEST, (i, i))
        with caplog.at_level("INFO"):
            found = default_artifact(tmp_path, "spire", name)
        assert found == tmp_path / "s0"
    assert "spire drafter of 3 that fit: " in caplog.text.lower()
    assert "the highest measured tau, 2.90" in caplog.text


def test_vanilla_is_an_eighth_of_the_body_and_an_ordinary_model(tmp_path):
    model = tiny_model("llama", num_hidden_layers=4)
    folder = export_vanilla(tmp_path / "v", TargetModel(model, tiny_tokenizer()))
    vanilla = AutoModelForCausalLM.from_pretrained(folder)

    def matrices(m) -> int:
        return sum(p.numel() for name, p in m.model.layers.named_parameters() if p.ndim == 2)

    assert matrices(model) == 8 * matrices(vanilla)
    assert vanilla.config.num_hidden_layers == 2
