"""The vLLM proposer, called by an engine that stands in for vLLM: the text is the target's, drafts are our loop's."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from spectrain import load_method
from spectrain.decoding import Context, DraftTree, Sampling, TargetModel
from spectrain.decoding.tree import ROOT_PARENT
from spectrain.errors import UserError
from spectrain.models.vanilla import new_vanilla
from spectrain.serving.vllm_proposer import KEPT_CALLS, LookupProposer
from tests.conftest import random_prompts, tiny_model
from tests.methods.lookup_export import OPTIONS, export_lookup
from tests.models.test_artifacts import tiny_tokenizer
from tests.serving.engine import StandInEngine
from tests.serving.engine_source import engine_files, importable

CONFIG = json.dumps(
    {
        "method": "custom_class",
        "model": "spectrain.serving.vllm_proposer.LookupProposer",
        "num_speculative_tokens": 5,
    }
)
REGISTRY = "vllm/model_executor/models/registry.py"
LENGTHS, NEW = [3, 20, 9, 17, 8, 30, 5], [30, 12, 40, 25, 6, 33, 20]
MAX_MODEL_LEN = 65  # the sixth request ends at 63: its last tokens are decoded with little room for drafts


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(tiny_model("llama"), tiny_tokenizer())


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    found = random_prompts(LENGTHS)
    found[4] = found[2][:8]  # one begins as another does
    found.append(list(found[1]))  # and two are equal
    return found


def greedy(target: TargetModel, prompt: list[int], n: int) -> list[int]:
    """The n tokens with which the target goes on."""
    text = list(prompt)
    with torch.inference_mode():
        for _ in range(n):
            text.append(int(target.model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.fixture(scope="module")
def own(target, prompts) -> list[list[int]]:
    return [greedy(target, prompt, n) for prompt, n in zip(prompts, [*NEW, NEW[1]], strict=True)]


def tree_of_our_loop(drafter, target: TargetModel, text: list[int], n_drafts: int) -> DraftTree:
    """The tree that a drafter, which has just read the text, proposes in our loop."""
    context = Context(Sampling(), "cpu", 1)
    context.append([text[:-1]], [n_drafts + 2], [torch.Generator()])
    context.root(range(1), torch.tensor([text[-1]]), torch.zeros(1, target.vocab_size))
    drafter.start(target, None)
    drafter.prefill(context, None, range(1))
    return drafter.propose(context)


def branch_of_our_loop(drafter, target: TargetModel, text: list[int], n_drafts: int) -> list[int]:
    """Its likeliest branch. Slow and on its own: from each node to the child that was added first."""
    tree = tree_of_our_loop(drafter, target, text, n_drafts)
    parents, tokens = tree.parents[0].tolist(), tree.tokens[0].tolist()
    assert parents[0] == ROOT_PARENT
    branch, node = [], 0
    while node in parents:
        node = parents.index(node)
        branch.append(tokens[node])
    return branch


@pytest.fixture(params=["stand-in", pytest.param("vllm", marks=pytest.mark.slow)])  # a wheel of 336 MB
def create(request):
    """What makes the proposer: a stand-in for vLLM, or vLLM's own file."""
    if request.param == "stand-in":
        yield LookupProposer
    else:
        with importable("vllm"):
            yield import_module("vllm.v1.spec_decode.custom_class_proposer").create_custom_proposer


@pytest.mark.slow
def test_both_engines_know_what_a_vanilla_drafter_is(target, tmp_path):
    new_vanilla(target.model).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (name,) = config["architectures"]
    assert f'"{name}": ("llama", "{name}")' in (engine_files("vllm") / REGISTRY).read_text()
    assert f"class {name}(nn.Module)" in (engine_files("sglang") / "sglang/srt/models/llama.py").read_text()
    for asked in ("vocab_size", "max_position_embeddings"):  # both refuse another, or shorten what is served
        assert config[asked] == getattr(target.model.config, asked)


@pytest.mark.parametrize("method", OPTIONS)
def test_served_text_is_the_targets_own_and_drafts_are_those_of_our_loop(
    method, create, target, prompts, own, tmp_path, monkeypatch
):
    """However rows move; a random model seldom repeats itself, so without a datastore few drafts are accepted."""
    documents = [prompt + text for prompt, text in zip(prompts, own, strict=True)][::2]  # half of the answers
    folder = export_lookup(tmp_path / method, target, method, documents + random_prompts([20] * 10, seed=5))
    monkeypatch.setenv("SPECTRAIN_LOOKUP", str(folder))
    engine = StandInEngine(target, CONFIG, max_rows=3, max_model_len=MAX_MODEL_LEN, create=create)
    assert engine.serve(prompts, [*NEW, NEW[1]]) == own
    without_drafts = sum(NEW) + NEW[1] + sum((len(prompt) - 1) // 8 for prompt in prompts)
    assert engine.n_forwards < (0.85 if (folder / "datastore").is_dir() else 0.95) * without_drafts
    drafter = load_method(folder, target)
    compared, cut = 0, 0
    for call in engine.calls:
        for text, sampled, drafts in zip(call.texts, call.sampled, call.drafts, strict=True):
            room = min(5, MAX_MODEL_LEN - len(text))
            cut += room < 5
            expected = branch_of_our_loop(drafter, target, text, room) if sampled and room > 0 else []
            assert drafts == expected
            compared += len(expected) > 0
    assert compared > 20
    assert cut > 0


class Steps:
    """Arrays of two rows, and calls by hand."""

    def __init__(self, proposer: LookupProposer):
        self.proposer = proposer

    def __call__(self, *texts: list[int], sampled: list[list[int]] | None = None) -> list[list[int]]:
        tokens = np.full((4, 100), -1, dtype=np.int32)
        lengths = np.zeros(4, dtype=np.int32)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
            lengths[row] = len(text)
        sampled = sampled or [[text[-1]] for text in texts]
        return self.proposer.propose(sampled, lengths, tokens, slot_mappings=None)


@pytest.fixture
def steps(target, tmp_path, monkeypatch) -> Steps:
    monkeypatch.setenv("SPECTRAIN_LOOKUP", str(export_lookup(tmp_path / "pld", target, "pld")))
    return Steps(StandInEngine(target, CONFIG).proposer)


def test_a_row_with_another_text_is_read_anew(steps):
    assert steps([7, 8, 9, 7, 8]) == [[9, 7, 8]]
    assert steps([10, 11, 12, 13, 10]) == [[11, 12, 13, 10]]  # 7 8 9 would give []
    assert steps([10, 11, 12, 14, 10, 11]) == [[12, 14, 10, 11]]  # one token differs in the middle


def test_a_placeholder_that_is_no_token_gives_no_drafts(steps, target):
    assert steps([7, 8, -1, 7, 8], [5, 6, 5]) == [[], [6, 5]]
    assert steps([7, 8, target.vocab_size, 7, 8]) == [[]]
    assert steps([7, 8, 9, 7, 8]) == [[9, 7, 8]]
    assert steps([7, 8, 9, 7, 8, -1]) == [[]]


def test_a_preempted_request_is_not_read_again(steps, monkeypatch):
    text = [7, 8, 9, 7, 8]
    steps([5, 6, 5], text)
    read = []
    new_row = steps.proposer.lookup.drafter.new_row
    monkeypatch.setattr(steps.proposer.lookup.drafter, "new_row", lambda tokens: read.append(tokens) or new_row(tokens))
    for _ in range(KEPT_CALLS - 1):
        steps([5, 6, 5])
    assert steps([5, 6, 5], [*text, 9]) == [[6, 5], [7, 8, 9]]
    assert read == []
    for _ in range(KEPT_CALLS):
        steps([5, 6, 5])
    steps([5, 6, 5], [*text, 9, 7])
    assert read == [[*text, 9, 7]]


def refused(target, folder: Path | None, monkeypatch, **more) -> str:
    monkeypatch.delenv("SPECTRAIN_LOOKUP", raising=False)
    if folder is not None:
        monkeypatch.setenv("SPECTRAIN_LOOKUP", str(folder))
    with pytest.raises(UserError) as error:
        StandInEngine(target, CONFIG, **more)
    return str(error.value)


def test_what_cannot_be_served_is_said_at_the_start(target, tmp_path, monkeypatch):
    folder = export_lookup(tmp_path / "rest", target, "rest")
    assert "no lookup method is named; give its folder" in refused(target, None, monkeypatch)
    assert "does not exist" in refused(target, tmp_path / "nowhere", monkeypatch)
    smaller = TargetModel(tiny_model("llama", vocab_size=50))
    assert "the served model has a vocabulary of 50" in refused(smaller, folder, monkeypatch)
    tiny_tokenizer("b").save_pretrained(tmp_path / "other")
    said = refused(target, folder, monkeypatch, tokenizer=str(tmp_path / "other"))
    assert "was exported for the tokenizer" in said
    file = next((folder / "datastore").glob("suffixes*"))
    file.write_bytes(file.read_bytes()[:100])
    assert "suffixes-00000.npy is damaged" in refused(target, folder, monkeypatch)


def test_the_folder_may_stand_in_the_engines_own_config(target, tmp_path, monkeypatch):
    monkeypatch.delenv("SPECTRAIN_LOOKUP", raising=False)
    target.tokenizer.save_pretrained(tmp_path / "tokenizer")
    folder = export_lookup(tmp_path / "sssd", target, "sssd")
    named = {"spectrain_lookup": str(folder)}
    engine = StandInEngine(target, CONFIG, additional_config=named, tokenizer=str(tmp_path / "tokenizer"))
    assert engine.proposer.lookup.drafter.store.folder == folder / "datastore"
