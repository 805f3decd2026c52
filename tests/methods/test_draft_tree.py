"""Trees of draft models: a node is read as the chain above it would be, and all candidates meet in one tree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spectrain.decoding import Sampling, Verified, generate
from spectrain.drafting import runtime
from spectrain.drafting.model_candidates import N_KINDS, N_SHARES, merge_lookup
from spectrain.drafting.tree_drafter import DraftModelGate, TreeDrafter
from spectrain.methods.auto import Auto
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.speculative import Speculative
from spectrain.methods.spire import Spire
from spectrain.methods.sssd import Sssd, SssdOptions
from spectrain.models.rollout import rollout
from spectrain.target import DraftTree, KVCache, Source, TargetModel
from spectrain.target.tree import ROOT_PARENT
from tests.conftest import VOCAB_SIZE, random_prompts, tiny_model
from tests.decoding.reference import follow
from tests.methods.test_spire import INPUTS, ForcedContext
from tests.models.test_spire import make


@pytest.mark.parametrize("fuses", [True, False])
@pytest.mark.parametrize("options", [{}, {"family": "qwen3", "sink_tokens": 2}, {"feedback": False}, *INPUTS], ids=str)
def test_a_node_of_a_spire_tree_is_read_as_training_reads_its_branch(options, fuses, monkeypatch):
    """The text's own branch stands between others, in two rows, before and after a step that accepted a part of it."""
    if not fuses:
        monkeypatch.setattr(runtime, "can_fuse", lambda *_: False)
    target, drafter = make(**options)
    k, lengths = 4, [24, 12]  # both roots begin a block; longer than the window of 8
    sequences = torch.randint(4, VOCAB_SIZE, (2, 40))
    expected = drafter.logits(rollout(drafter, sequences, target.features(sequences).captured))
    method, cache = Spire(drafter, k, tree_nodes=10), KVCache(max_rows=2, block_tokens=16)
    context = ForcedContext(sequences, lengths)
    method.start(target, cache)
    read = method.read_of_prompts(torch.tensor(lengths))
    padded = sequences[:, : max(lengths)]
    method.prefill(context, target.prefill(padded, lengths, cache, range(2), read), range(2))
    for round_ in range(2):
        tokens, parents, branch = context.roots[:, None], torch.tensor([[ROOT_PARENT]]), 0
        logits = method.read_roots(context)[:, None]
        for step in range(k):
            for row, length in enumerate(lengths):
                place = expected[row, length + k * round_ + step]
                kept = place if method.names is None else place[method.names]
                atol = 1e-3 if "previous_state" in options else 1e-5  # rounding grows from one state to the next
                found = logits[row, branch - tokens.shape[1]]
                torch.testing.assert_close(found.softmax(-1), kept.softmax(-1), atol=atol, rtol=0)
            if step + 1 < k:
                others = torch.randint(4, VOCAB_SIZE, (2, 2))
                right = context.following(step)[:, None]
                new = torch.cat([others[:, :1], right, others[:, 1:]], dim=1)
                above = torch.tensor([[branch, branch, max(0, branch - 1)]])
                tokens, parents = torch.cat([tokens, new], dim=1), torch.cat([parents, above], dim=1)
                branch = tokens.shape[1] - 2
                tree = DraftTree(tokens, parents.expand(2, -1), torch.zeros_like(tokens))
                logits = method.read_nodes(context, tree, 3)
        output = target.score(tree, cache)
        path = torch.tensor([[0, 2, 5, 8, *[-1] * 6]]).expand(2, -1)
        verified = Verified(path, torch.tensor([3, 3]), context.following(3))
        cache.commit(path, verified.accepted)
        cache.extend([k, k])
        emitted = [sequences[r, n : n + k].tolist() for r, n in enumerate(context.n_tokens)]
        follow(method, context, tree, output, verified, output.logits[:, 8], emitted)


def test_a_node_of_a_vanilla_tree_is_read_as_the_text_above_it():
    model = tiny_model("llama", seed=5)
    method, sequences = Speculative(TargetModel(model), 3), torch.randint(4, VOCAB_SIZE, (2, 20))
    context = ForcedContext(sequences, [9, 5])
    target = TargetModel(tiny_model("llama"))
    cache = target.caches.new(2, 16, 40)
    method.start(target, cache)
    method.prefill(context, None, range(2))

    def plain(row: int, *more: int) -> torch.Tensor:
        text = context.tokens[row, : context.n_tokens[row]].tolist() + list(more)
        return model(torch.tensor([text])).logits[0, -1]

    logits = method.read_roots(context)
    parents = torch.tensor([[-1, 0, 0, 2, 1]]).expand(2, -1)
    tokens = torch.cat([context.roots[:, None], torch.randint(4, VOCAB_SIZE, (2, 4))], dim=1)
    first = DraftTree(tokens[:, :3], parents[:, :3], torch.zeros(2, 3, dtype=torch.int64))
    second = DraftTree(tokens, parents, torch.zeros_like(tokens))
    below = torch.cat([method.read_nodes(context, first, 2), method.read_nodes(context, second, 2)], dim=1)
    for row in range(2):
        torch.testing.assert_close(logits[row], plain(row), atol=1e-4, rtol=0)
        for node, path in enumerate([(1,), (2,), (2, 3), (1, 4)]):
            torch.testing.assert_close(
                below[row, node], plain(row, *tokens[row, list(path)].tolist()), atol=1e-4, rtol=0
            )


def test_a_drafter_that_is_the_target_has_all_of_its_greedy_tokens_accepted():
    model = tiny_model("llama", tie_word_embeddings=False)
    model.lm_head.weight.data.mul_(50)  # so that it is sure, and goes on drafting
    target, prompts = TargetModel(model), random_prompts([9, 5, 12], seed=2)
    method = TreeDrafter(Speculative(TargetModel(model), 4), max_nodes=9, branches=2, levels=4)
    found = generate(target, method, prompts, 21, batch_size=2)
    plain = generate(target, Autoregressive(), prompts, 21)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert all(set(one.accepted[:-1]) == {4} for one in found)


def test_trees_share_noise_by_default_and_then_the_target_itself_has_all_tokens_accepted():
    model = tiny_model("llama")
    target, prompts = TargetModel(model), random_prompts([9, 5, 12], seed=2)
    method = TreeDrafter(Speculative(TargetModel(model), 4), max_nodes=9, branches=2, levels=4)
    found = generate(target, method, prompts, 21, Sampling(1.0), batch_size=2)
    plain = generate(target, Autoregressive(), prompts, 21, Sampling(1.0, draws="shared"))
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert all(set(one.accepted[:-1]) == {4} for one in found)
    other = generate(target, method, prompts, 21, Sampling(1.0, draws="inverse"), batch_size=2)
    assert any(set(one.accepted[:-1]) != {4} for one in other)


def test_what_a_lookup_finds_joins_the_models_tree():
    model = tiny_model("llama", seed=5)
    target, text = TargetModel(tiny_model("llama")), [5, 6, 7, 8, 9] * 6
    parts = [TreeDrafter(Speculative(TargetModel(model), 3), 24, 2, 3, lookup) for lookup in (None, input_only())]
    alone, joined = (generate(target, method, [text], 12)[0] for method in parts)
    assert alone.tokens == joined.tokens
    assert joined.drafted_by_source[Source.INPUT] > 0 == alone.drafted_by_source[Source.INPUT]
    assert joined.drafted_by_source[Source.DRAFT] > 0


def input_only() -> Sssd:
    return Sssd(None, SssdOptions(datastore_source=False))


def test_two_drafts_share_nodes_that_spell_the_same():
    """Kinds of the lookup are 0 to 4, and 5 to 9 where the model names others; the model's begin with 10."""
    draft = np.zeros((4, 9), dtype=np.int64)
    draft[:, :4] = [[9, 1, 2, 3], [-1, 0, 0, 1], [0, 6, 6, 6], [0, 13, 11 + N_SHARES, 10]]
    other = np.array([[9, 2, 4, 1, 3, 7], [-1, 0, 1, 0, 3, 0], [0, 3, 3, 3, 3, 3], [0, 1, 1, 2, 2, 4]])
    size = merge_lookup(draft, 4, other, 6, np.array([1, 0.9, 0.5, 0.1, 0.06, 0.3]), (5, 10))
    both = 10 + N_KINDS
    assert size == 6
    assert draft[:3, :6].tolist() == [[9, 1, 2, 3, 4, 7], [-1, 0, 0, 1, 2, 0], [0, 6, 6, 6, 3, 3]]
    # Chances of the lookup, given the parent: 0.1, 0.9, 0.6; 4 stands behind a node that the model has not read.
    assert draft[3, :6].tolist() == [0, both + 3, both + 3 * N_SHARES + 1, both + 2 * N_SHARES, 1, 4 + 5]


def test_where_the_model_does_not_pay_only_the_lookup_drafts():
    target, text = TargetModel(tiny_model("llama")), [5, 6, 7, 8, 9] * 6
    method = TreeDrafter(Speculative(TargetModel(tiny_model("llama", seed=5)), 3), "auto", 2, 3, input_only())
    asked = []

    def should_read(found, price):
        asked.append(len(asked) % 3 == 0)
        return asked[-1]

    method.gate.should_read = should_read
    parts = Auto({"tree": method}), Autoregressive()
    found, plain = (generate(target, one, [text, text[:12]], 30, batch_size=2) for one in parts)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert 0 < sum(asked) < len(asked)
    assert sum(one.drafted_by_source[Source.DRAFT] for one in found) > 0


def test_a_model_is_asked_where_it_has_added_more_than_its_seconds_are_worth():
    gate = DraftModelGate()
    sure, unsure = DraftModelGate.FOUND[-1] + 1, DraftModelGate.FOUND[0] / 2
    asked = {sure: 0, unsure: 0}
    for _ in range(300):
        for found, added in ((sure, 0.1), (unsure, 0.5)):
            if gate.should_read(found, 0.2):
                gate.record_gain(added)
                asked[found] += 1
    assert asked == {unsure: 300, sure: 300 // DraftModelGate.SELDOM}
    for _ in range(20 * DraftModelGate.SELDOM):  # the text changes
        if gate.should_read(sure, 0.2):
            gate.record_gain(2.0)
    assert gate.should_read(sure, 0.2)
