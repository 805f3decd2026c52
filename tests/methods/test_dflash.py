"""`method=dflash`: decoding computes the blocks that training trains on, and drafts no more than a block has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spectrain.decoding import Sampling, Verified, generate
from spectrain.drafting.tree_drafter import TreeDrafter
from spectrain.drafting.window_keys import WholeKeys
from spectrain.errors import UserError
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.dflash import DFlash, build, for_trees
from spectrain.models.dflash import drafted
from spectrain.target import TargetModel
from tests.conftest import VOCAB_SIZE, random_prompts, tiny_model
from tests.decoding.reference import follow
from tests.methods.test_eagle3 import begun
from tests.models.test_artifacts import tiny_tokenizer
from tests.models.tiny_dflash import export_dflash, fitted_dflash, new_dflash


@pytest.mark.parametrize("options", [{}, {"draft_vocab": 30, "block_tokens": 5}, {"unembedding": "trained"}], ids=str)
@pytest.mark.parametrize("family", ["llama_gqa", "qwen3"])
def test_decoding_equals_the_blocks_of_training(family, options):
    """Two rows of different length, two rounds: after prefill, and after a step that accepted part of the path."""
    target = TargetModel(tiny_model(family))
    drafter = new_dflash(target, **options)
    target = target.with_capture(drafter.config.captured_layers)
    k, lengths, sequences = drafter.config.k, [24, 12], torch.randint(4, VOCAB_SIZE, (2, 40))
    steps = drafted(drafter, sequences, target.features(sequences).captured)
    expected = [drafter.spread(F.linear(step, drafter.unembedding)) for step in steps]
    method = DFlash(drafter)
    context, cache = begun(method, target, sequences, lengths)
    assert isinstance(method.keys, WholeKeys)
    for round_ in range(2):
        context.asked = []
        tree = method.propose(context)
        for step, logits in enumerate(context.asked):
            for row, length in enumerate(lengths):
                place = expected[step][row, length + 3 * round_]
                torch.testing.assert_close(logits[row].softmax(-1), place.softmax(-1), atol=1e-5, rtol=0)
        assert len(context.asked) == k
        # Two drafts accepted, the others rejected.
        output = target.score(tree, cache)
        path = torch.tensor([[0, 1, 2] + [-1] * (k - 2)]).expand(2, -1)
        verified = Verified(path, torch.tensor([2, 2]), context.following(2))
        cache.keep(3)
        emitted = [sequences[r, n : n + 3].tolist() for r, n in enumerate(context.n_tokens)]
        follow(method, context, tree, output, verified, output.logits[:, 2], emitted)


def test_a_block_is_one_pass_and_its_tokens_make_trees(monkeypatch):
    """Greedy chains are the likeliest tokens of a block, and first branches of trees; both are often right."""
    target = TargetModel(tiny_model("llama_gqa"))
    drafter, passes, logits_of = fitted_dflash(target), [], DFlash._logits
    monkeypatch.setattr(DFlash, "_logits", lambda *given: passes.append(1) or logits_of(*given))
    plain = generate(target, Autoregressive(), random_prompts([9, 20, 4]), 20, Sampling(), batch_size=3)
    for method in (DFlash(drafter), TreeDrafter(DFlash(drafter), max_nodes=9)):
        passes.clear()
        found = generate(target, method, random_prompts([9, 20, 4]), 20, Sampling(), batch_size=3)
        assert [one.tokens for one in found] == [one.tokens for one in plain]
        assert max(one.target_forwards for one in found) <= len(passes) + 1 < 20
        assert sum(sum(one.accepted) for one in found) > 3


def test_no_more_is_drafted_than_a_block_has(tmp_path):
    target = TargetModel(tiny_model("llama_gqa"), tiny_tokenizer())
    folder = str(export_dflash(tmp_path / "dflash", target))
    assert build(target, folder, max_nodes="auto").gamma == 3
    assert build(target, folder, gamma=2).gamma == 2
    assert for_trees(target, folder, 5, 2).gamma == 3
    with pytest.raises(UserError, match=r"gamma=4 must be 1..3: a block of this drafter has 3 tokens to draft"):
        build(target, folder, gamma=4)
