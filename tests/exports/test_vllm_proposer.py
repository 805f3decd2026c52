"""The vLLM proposer by itself. tests/engines/test_lookups.py is about what it does in vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spectrain.decoding import Context, Sampling
from spectrain.errors import UserError
from spectrain.exports.vllm_proposer import KEPT_CALLS, LookupProposer
from spectrain.target import DraftTree, TargetModel
from spectrain.target.tree import ROOT_PARENT
from tests.conftest import tiny_model
from tests.methods.lookup_export import export_lookup
from tests.models.test_artifacts import tiny_tokenizer

MAX_MODEL_LEN = 30


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(tiny_model("llama"), tiny_tokenizer())


def proposer(target: TargetModel, tokenizer: str | None = None, **additional: str) -> LookupProposer:
    """The proposer, of a config that holds what it reads of vLLM's."""
    sizes = {"max_model_len": MAX_MODEL_LEN, "get_vocab_size": lambda: target.vocab_size}
    model = SimpleNamespace(**sizes, tokenizer=tokenizer)
    speculative = SimpleNamespace(num_speculative_tokens=5)
    return LookupProposer(
        SimpleNamespace(model_config=model, speculative_config=speculative, additional_config=additional)
    )


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
    return Steps(proposer(target))


def test_a_row_with_another_text_is_read_anew(steps):
    assert steps([7, 8, 9, 7, 8]) == [[9, 7, 8]]
    assert steps([10, 11, 12, 13, 10]) == [[11, 12, 13, 10]]  # 7 8 9 would give []
    assert steps([10, 11, 12, 14, 10, 11]) == [[12, 14, 10, 11]]  # one token differs in the middle


def test_no_draft_is_longer_than_the_longest_text_leaves_room_for(steps):
    text = [7, 8, 9, 10, 11, 12, 13]
    filler = list(range(14, 14 + MAX_MODEL_LEN - 2 - 2 * len(text)))
    assert steps([*text, *filler, *text[:2]]) == [[9, 10, 11, 12, 13]]
    assert steps([*filler, *text, *range(40, 45), *text[:2]]) == [[9, 10]]
    assert steps([*text, *range(14, 14 + MAX_MODEL_LEN - len(text) - 2), 7, 8]) == [[]]


def test_a_placeholder_that_is_no_token_gives_no_drafts(steps, target):
    assert steps([7, 8, -1, 7, 8], [5, 6, 5]) == [[], [6, 5]]
    assert steps([7, 8, target.vocab_size, 7, 8]) == [[]]
    assert steps([7, 8, 9, 7, 8]) == [[9, 7, 8]]
    assert steps([7, 8, 9, 7, 8, -1]) == [[]]


def test_a_preempted_request_is_not_read_again(steps, monkeypatch):
    text = [7, 8, 9, 7, 8]
    steps([5, 6, 5], text)
    read = []
    new_row = steps.proposer.drafter.new_row
    monkeypatch.setattr(steps.proposer.drafter, "new_row", lambda tokens: read.append(tokens) or new_row(tokens))
    for _ in range(KEPT_CALLS - 1):
        steps([5, 6, 5])
    assert steps([5, 6, 5], [*text, 9]) == [[6, 5], [7, 8, 9]]
    assert read == []
    for _ in range(KEPT_CALLS):
        steps([5, 6, 5])
    steps([5, 6, 5], [*text, 9, 7])
    assert read == [[*text, 9, 7]]


def refused(target, folder: Path | None, monkeypatch, caplog, tokenizer: str | None = None) -> str:
    """The sentence in the engine's log, and in its error."""
    caplog.clear()
    monkeypatch.delenv("SPECTRAIN_LOOKUP", raising=False)
    if folder is not None:
        monkeypatch.setenv("SPECTRAIN_LOOKUP", str(folder))
    with pytest.raises(UserError) as error:
        proposer(target, tokenizer)
    assert caplog.messages == [f"lookup drafter refused: {error.value}"]
    return str(error.value)


def test_what_cannot_be_served_is_said_at_the_start(target, tmp_path, monkeypatch, caplog):
    folder = export_lookup(tmp_path / "rest", target, "rest")
    assert "no lookup method is named; give its folder" in refused(target, None, monkeypatch, caplog)
    assert "does not exist" in refused(target, tmp_path / "nowhere", monkeypatch, caplog)
    smaller = TargetModel(tiny_model("llama", vocab_size=50))
    assert "the served model has a vocabulary of 50" in refused(smaller, folder, monkeypatch, caplog)
    tiny_tokenizer("b").save_pretrained(tmp_path / "other")
    said = refused(target, folder, monkeypatch, caplog, tokenizer=str(tmp_path / "other"))
    assert "was exported for the tokenizer" in said
    file = next((folder / "datastore").glob("suffixes*"))
    file.write_bytes(file.read_bytes()[:100])
    assert "suffixes-00000.npy is damaged" in refused(target, folder, monkeypatch, caplog)


def test_the_folder_may_stand_in_the_engines_own_config(target, tmp_path, monkeypatch):
    monkeypatch.delenv("SPECTRAIN_LOOKUP", raising=False)
    target.tokenizer.save_pretrained(tmp_path / "tokenizer")
    folder = export_lookup(tmp_path / "sssd", target, "sssd")
    found = proposer(target, str(tmp_path / "tokenizer"), spectrain_lookup=str(folder))
    assert found.drafter.method.store.folder == folder / "datastore"
