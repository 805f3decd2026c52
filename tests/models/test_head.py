"""The head computes its equation block by block; an exported one comes back whole, for its own target alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spectrain.decoding import Sampling
from spectrain.errors import UserError
from spectrain.methods.specdecpp import build, open_drafter
from spectrain.models.artifacts import trained_artifact, write_manifest
from spectrain.models.head import (
    AcceptanceHead,
    HeadConfig,
    HeadFacts,
    load_head,
    read_head_facts,
    save_head,
)
from spectrain.target import TargetModel, fingerprint
from spectrain.target.weights import DRAFT_DTYPES
from tests.conftest import tiny_model
from tests.models.test_artifacts import export_spire, export_vanilla, tiny_tokenizer


def export_head(folder: Path, target: TargetModel, drafter: Path, kind: str = "vanilla", n_blocks: int = 2) -> Path:
    opened = open_drafter(target, kind, str(drafter))
    head = AcceptanceHead(HeadConfig(opened.states.hidden_size, n_blocks))
    head.output.weight.data.mul_(5)
    folder.mkdir()
    save_head(folder, head, HeadFacts(head.config, opened.facts, Sampling(temperature=0.8, top_k=50), 6.0, 0.15))
    write_manifest(folder, trained_artifact("head", "tiny", fingerprint(target.model, target.tokenizer), {}))
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
    head = load_head(folder, facts, opened.facts)
    assert head.config == HeadConfig(opened.states.hidden_size, 2)
    again = load_head(folder, facts, opened.facts)
    states = torch.randn(5, opened.states.hidden_size)
    assert torch.equal(head(states), again(states))
    assert build(target, str(folder), str(drafter)).gamma == 20
    asked = [(facts.sampling, "token"), (facts.sampling, "block"), (Sampling(), "token"), (Sampling(), "block")]
    warnings = [build(target, str(folder), str(drafter)).method.warning(*one) for one in asked]
    assert [None if one is None else one.split(" is used ")[1][:12] for one in warnings] == [
        None, "with verific", "for greedy: ", "for greedy: ",
    ]  # fmt: skip


@pytest.mark.parametrize(("draft_dtype", "nearly"), [("int8", 0.02), ("float32", 1e-6)])
def test_a_head_drafts_with_the_weights_of_its_drafter(tmp_path, target, draft_dtype, nearly):
    folder = export_head(tmp_path / "head", target, export_vanilla(tmp_path / "drafter", target))
    opened = open_drafter(target, "vanilla", str(tmp_path / "drafter"))
    facts = read_head_facts(folder, fingerprint(target.model, target.tokenizer))
    exact = load_head(folder, facts, opened.facts)
    for block in exact.blocks:
        torch.nn.init.normal_(block.weight, std=0.2)
    save_head(folder, exact, facts)
    head = opened.open_head(folder, facts, draft_dtype)
    assert {block.weight.dtype for block in head.blocks} == {DRAFT_DTYPES[draft_dtype]}
    states = torch.randn(5, opened.states.hidden_size)
    torch.testing.assert_close(head.probability(states), exact.probability(states), rtol=0, atol=nearly)


def test_another_drafter_is_refused(tmp_path, target):
    drafter = export_vanilla(tmp_path / "drafter", target)
    folder = export_head(tmp_path / "head", target, drafter)
    torch.manual_seed(1)
    other = export_vanilla(tmp_path / "other", target)
    with pytest.raises(UserError, match=r"head=.* was trained on the vanilla drafter .*drafter .*, not on .*other"):
        build(target, str(folder), str(other))


def random_head(n_blocks: int) -> AcceptanceHead:
    head = AcceptanceHead(HeadConfig(hidden_size=6, n_blocks=n_blocks))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head


@pytest.mark.parametrize("n_blocks", range(5))
def test_residual_blocks_then_a_linear_layer(n_blocks):
    head, hidden = random_head(n_blocks), torch.randn(3, 4, 6)
    h = hidden.double()
    for block in head.blocks:
        z = h @ block.weight.double().T + block.bias.double()
        h = h + z / (1 + torch.exp(-z))
    log_odds = (h * head.output.weight.double()[0]).sum(-1) + head.output.bias.double()
    torch.testing.assert_close(head(hidden).double(), log_odds, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(head.probability(hidden).double(), 1 / (1 + torch.exp(-log_odds)), atol=1e-5, rtol=1e-5)


def test_every_depth_begins_as_the_linear_layer_alone():
    head = AcceptanceHead(HeadConfig(hidden_size=6, n_blocks=4))
    hidden = torch.randn(5, 6)
    torch.testing.assert_close(head(hidden), head.output(hidden)[:, 0])
    head(hidden).sum().backward()
    assert all(block.weight.grad.abs().max() > 0 for block in head.blocks)  # and none is stuck there
