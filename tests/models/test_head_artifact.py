"""An exported head comes back whole, and only for the drafter and target it was trained with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from spectrain.decoding import Sampling, TargetModel, fingerprint
from spectrain.decoding.errors import UserError
from spectrain.methods.specdecpp import build, open_drafter
from spectrain.models.acceptance_head import AcceptanceHead, HeadConfig
from spectrain.models.artifacts import Artifact, write_manifest
from spectrain.models.head_artifact import DrafterFacts, HeadFacts, load_head, read_head_facts, save_head
from tests.conftest import tiny_model
from tests.models.test_artifacts import export_spire, export_vanilla, tiny_tokenizer


def export_head(folder: Path, target: TargetModel, drafter: Path, kind: str = "vanilla", n_blocks: int = 2) -> Path:
    opened = open_drafter(target, kind, str(drafter))
    head = AcceptanceHead(HeadConfig(opened.states.hidden_size, n_blocks))
    head.output.weight.data.mul_(5)
    folder.mkdir()
    save_head(folder, head, HeadFacts(head.config, opened.facts, Sampling(temperature=0.8, top_k=50), 6.0, 0.15))
    write_manifest(folder, Artifact("head", "tiny", fingerprint(target.model, target.tokenizer), {}))
    return folder


@pytest.fixture
def target() -> TargetModel:
    return TargetModel(tiny_model("llama"), tiny_tokenizer())


@pytest.mark.parametrize("kind", ["vanilla", "spire"])
def test_a_saved_head_is_read_back_whole(tmp_path, target, kind):
    drafter = {"vanilla": export_vanilla, "spire": export_spire}[kind](tmp_path / "drafter", target)
    folder = export_head(tmp_path / "head", target, drafter, kind)
    facts = read_head_facts(folder, fingerprint(target.model, target.tokenizer))
    assert facts.sampling == Sampling(temperature=0.8, top_k=50)
    assert (facts.drafter.kind, facts.drafter.path, facts.w_rej) == (kind, str(drafter), 6.0)
    opened = open_drafter(target, kind, str(drafter))
    head = load_head(folder, facts, opened.facts, opened.states.hidden_size)
    assert head.config == HeadConfig(opened.states.hidden_size, 2)
    again = load_head(folder, facts, opened.facts, opened.states.hidden_size)
    states = torch.randn(5, opened.states.hidden_size)
    assert torch.equal(head(states), again(states))
    assert build(target, str(folder), str(drafter)).gamma == 20


def test_another_drafter_is_refused(tmp_path, target):
    drafter = export_vanilla(tmp_path / "drafter", target)
    folder = export_head(tmp_path / "head", target, drafter)
    torch.manual_seed(1)
    other = export_vanilla(tmp_path / "other", target)
    with pytest.raises(UserError, match=r"head=.* was trained on the vanilla drafter .*drafter .*, not on .*other"):
        build(target, str(folder), str(other))


def test_another_width_is_refused(tmp_path, target):
    drafter = export_vanilla(tmp_path / "drafter", target)
    folder = export_head(tmp_path / "head", target, drafter)
    facts = read_head_facts(folder, fingerprint(target.model, target.tokenizer))
    with pytest.raises(UserError, match="reads states of width 16, but the drafter x has 32"):
        load_head(folder, facts, DrafterFacts("vanilla", "x", facts.drafter.fingerprint), 32)


def test_another_target_is_refused(tmp_path, target):
    folder = export_head(tmp_path / "head", target, export_vanilla(tmp_path / "drafter", target))
    with pytest.raises(UserError, match="was trained for tiny"):
        read_head_facts(folder, "0" * 16)


def test_a_drafter_is_no_head(tmp_path, target):
    drafter = export_vanilla(tmp_path / "drafter", target)
    with pytest.raises(UserError, match=r"head=.*drafter is a vanilla drafter; give one made by \+exp=specdecpp"):
        read_head_facts(drafter, fingerprint(target.model, target.tokenizer))


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors"])
def test_a_damaged_head_is_said(tmp_path, target, broken):
    drafter = export_vanilla(tmp_path / "drafter", target)
    folder = export_head(tmp_path / "head", target, drafter)
    if broken == "config.json":
        values = json.loads((folder / broken).read_text())
        del values["drafter"]
        (folder / broken).write_text(json.dumps(values))
    else:
        (folder / broken).write_bytes(b"not a tensor")
    with pytest.raises(UserError, match="is damaged"):
        build(target, str(folder), str(drafter))
