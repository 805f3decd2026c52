"""The fitted input of a SPIRe or EAGLE-3 drafter finds the linear map that made its data."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from spectrain.models.drafter_model import plain_shape
from spectrain.models.eagle3 import Eagle3Config, Eagle3Drafter
from spectrain.models.pruned_init import InputFit, draw_weights
from spectrain.target import TargetModel
from spectrain.target.hidden_states import Features
from spectrain.target.lean import shape_of
from spectrain.training.eagle3 import NEW_SHARE, FusionFit, copy_last_block
from tests.conftest import VOCAB_SIZE, tiny_model
from tests.models.test_spire import make


@pytest.mark.parametrize("kind", ["projected", "trained"])
def test_a_map_of_the_embedding_is_found_again_without_the_first_positions(kind):
    target, drafter = make(input=kind, unembedding="target")
    embedding = target.model.model.embed_tokens.weight
    wanted = torch.randn(32, 32)
    fit = InputFit(drafter, 0)
    for _ in range(20):
        tokens = torch.randint(0, VOCAB_SIZE, (2, 30))
        inputs = embedding[tokens] @ wanted.T
        inputs[:, 0] = 1e6
        fit.add(tokens, Features(inputs[:, :, None], torch.zeros_like(inputs)))
    fit.finish()
    found = drafter.embed(torch.arange(VOCAB_SIZE))
    error = (found - embedding @ wanted.T).square().mean() / found.square().mean()
    assert error < 1e-3  # of the ridge


def test_a_map_of_the_token_and_of_the_state_before_it_are_found_together():
    target, drafter = make(input="projected", unembedding="target", previous_state=True)
    embedding = target.model.model.embed_tokens.weight
    of_token, of_state = torch.randn(32, 32), torch.randn(32, 32)
    fit = InputFit(drafter, 0)
    for _ in range(20):
        tokens, states = torch.randint(0, VOCAB_SIZE, (2, 30)), torch.randn(2, 30, 32)
        inputs = embedding[tokens] @ of_token.T
        inputs[:, 1:] += states[:, :-1] @ of_state.T
        fit.add(tokens, Features(inputs[:, :, None], states))
    fit.finish()
    found = drafter.joined(drafter.embed(tokens)[:, 1:], states[:, :-1])
    assert (found - inputs[:, 1:]).square().mean() < 2e-3 * inputs.square().mean()


@pytest.mark.parametrize("family", ["llama", "llama_gqa"])
def test_what_an_eagle3_drafter_reads_is_found_again_by_fc_and_by_heads_that_see_their_own_token(family):
    target = TargetModel(tiny_model(family, initializer_range=0.1))
    drafter = Eagle3Drafter(Eagle3Config(shape_of(target.model), (1, 2)), target).apply(draw_weights)
    copy_last_block(drafter, target.model)
    shape, block, fit = drafter.config.shape, drafter.blocks[0], FusionFit(drafter, 3)
    d, e = shape.hidden_size, shape.head_dim
    assert torch.equal(block.down.weight, target.model.model.layers[-1].mlp.down_proj.weight)
    of_states, of_token = torch.randn(2 * d, d), torch.randn(d, e) @ torch.randn(e, d)
    for _ in range(40):
        tokens, states = torch.randint(0, VOCAB_SIZE, (2, 30)), torch.randn(2, 30, 2, d)
        normed = F.rms_norm(drafter.embed(tokens), (d,), eps=shape.rms_norm_eps)
        wanted = normed @ of_token
        wanted[:, 1:] += states[:, :-1].flatten(2) @ of_states
        fit.add(tokens, Features(torch.cat([states, wanted[:, :, None]], dim=2), wanted))
    fit.finish()
    n = shape.n_head // shape.n_kv_head * e  # columns of the heads that share the first keys
    with torch.no_grad():
        queries, own = block.queries_keys_values(
            drafter.joined(normed, torch.zeros_like(normed)), drafter.rope(torch.arange(30)[None])
        )
        scores = queries[:, 0] @ own.keys[:, 0].mT / e**0.5
        found = F.linear(own.values[:, 0].repeat(1, 1, n // e), block.output.weight[:, :n])
        found[:, 1:] += drafter.fused(states)[:, :-1]
    assert (found - wanted)[:, 1:].square().mean() < 5e-3 * wanted.square().mean()
    assert float(scores.diagonal(dim1=1, dim2=2).mean()) == pytest.approx(FusionFit.SCORE, rel=0.2)


@pytest.mark.parametrize(("family", "n_copied"), [("qwen3", 48), ("gemma3", 0)])
def test_of_other_blocks_than_a_plain_llamas_what_is_alike_is_copied(family, n_copied):
    target = TargetModel(tiny_model(family))
    shape = replace(plain_shape(shape_of(target.model)), intermediate_size=64)
    drafter = Eagle3Drafter(Eagle3Config(shape, (1, 2)), target).apply(draw_weights)
    block, mlp = drafter.blocks[0], target.model.model.layers[-1].mlp
    before = block.output.weight.clone(), block.down.weight.clone()
    copy_last_block(drafter, target.model)
    assert torch.equal(block.output.weight, before[0] * NEW_SHARE)
    assert torch.equal(block.down.weight[:, n_copied:], before[1][:, n_copied:] * NEW_SHARE)
    assert torch.equal(block.down.weight[:, :n_copied], mlp.down_proj.weight[:, :n_copied])
