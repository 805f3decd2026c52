"""Packed and 8-bit weights on the CPU: what they compute, where they lie, and what happens where torch lacks them."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from spectrain.decoding import KVCache, TargetModel, fingerprint, generate, weights
from spectrain.decoding.errors import UserError
from spectrain.decoding.weights import Int8Linear, PackedLinear, draft_weights, for_drafting
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.speculative import Speculative
from tests.conftest import noisy_copy, random_prompts, tiny_model
from tests.decoding.reference import random_parents, tree_of
from tests.decoding.test_lean import MODELS

CPU = torch.device("cpu")


@pytest.fixture(params=MODELS)
def model(request) -> PreTrainedModel:
    return MODELS[request.param]()


def packed(model: PreTrainedModel, **options) -> TargetModel:
    return TargetModel(copy.deepcopy(model), weights="packed", **options)


def weight_bytes(model: nn.Module) -> int:
    return sum({p.data_ptr(): p.nbytes for p in model.parameters() if not p.is_meta}.values())


@torch.inference_mode()
@pytest.mark.parametrize("lengths", [[7], [23, 5, 14]], ids=str)
def test_packed_weights_have_the_logits_and_states_of_transformers(model, lengths):
    draws, outputs = torch.Generator().manual_seed(0), []
    prompts = torch.tensor([prompt + [0] * (max(lengths) - len(prompt)) for prompt in random_prompts(lengths)])
    tree = tree_of(random_prompts([9] * len(lengths), seed=1), [random_parents(9, draws) for _ in lengths])
    options = {"capture_layers": [0, 2], "prefill_chunk": 8, "keeps_hidden": True}
    for target in (packed(model, **options), TargetModel(model, engine="transformers", **options)):
        cache = KVCache(len(lengths), block_tokens=4)
        first = target.prefill(prompts, lengths, cache, range(len(lengths)))
        outputs.append(
            (first.logits, *(getattr(target.score(tree, cache), n) for n in ("logits", "captured", "hidden")))
        )
    for ours, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_packed_weights_take_the_place_of_the_models_own_and_go_back(model, tmp_path):
    target, prompts = packed(model), random_prompts([9])
    expected = generate(TargetModel(model), Autoregressive(), prompts, 8)[0].tokens
    print_ = fingerprint(model, None)
    for _ in range(2):  # packed, put back, and packed again
        assert generate(target, Autoregressive(), prompts, 8)[0].tokens == expected
        own = target._engine._model
        assert all(block.mlp.down_proj.weight.is_meta for block in own.model.layers)
        assert weight_bytes(own) <= weight_bytes(model.model.embed_tokens) + 10_000  # and norms and biases
        torch.testing.assert_close(target.unembedding, model.get_output_embeddings().weight, atol=0, rtol=0)
        assert own.model.layers[0].mlp.down_proj.weight.is_meta  # for the unembedding alone nothing is put back
        for name, parameter in target.model.named_parameters():
            assert torch.equal(parameter, model.get_parameter(name)), name
        assert fingerprint(target.model, None) == print_
        tied = target.model.get_output_embeddings().weight is target.model.get_input_embeddings().weight
        assert tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)
    target.model.save_pretrained(tmp_path)
    assert fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path), None) == print_


@pytest.mark.parametrize("exact", [True, False])
def test_a_tied_table_is_kept_in_bfloat16_only_where_nothing_is_lost(exact):
    model = tiny_model(tie_word_embeddings=True)
    if exact:
        model.to(torch.bfloat16).float()
    target = packed(model)
    expected = generate(TargetModel(model), Autoregressive(), random_prompts([9]), 8)[0].tokens
    assert generate(target, Autoregressive(), random_prompts([9]), 8)[0].tokens == expected
    table = target._engine.decoder.embed_tokens if target.weights == "plain" else target._engine._compact.embed_tokens
    assert table.weight.dtype == (torch.bfloat16 if exact else torch.float32)
    for name, parameter in target.model.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


def test_gradient_mode_and_other_dtypes_bring_the_plain_weights_back():
    model = tiny_model()
    target, tokens = packed(model), torch.tensor(random_prompts([9]))
    with torch.inference_mode():
        target.forward(tokens)
    torch.testing.assert_close(target.forward(tokens).logits, model(tokens).logits, atol=1e-4, rtol=1e-4)
    assert not target._engine._model.model.layers[0].mlp.down_proj.weight.is_meta
    target.model.to(torch.bfloat16)
    with torch.inference_mode():
        assert target.forward(tokens).logits.dtype == torch.bfloat16
    assert target._engine._model.model.layers[0].mlp.down_proj.weight.is_meta


@pytest.mark.parametrize("fault", ["missing", "wrong", "no way back"])
def test_operators_that_torch_lacks_are_a_line_in_the_log(fault, monkeypatch, caplog):
    class Faulty(PackedLinear):
        def __init__(self, linear: nn.Linear) -> None:
            if fault == "missing":
                raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")
            super().__init__(linear)

        def forward(self, x):
            return super().forward(x) * (2 if fault == "wrong" else 1)

        def plain(self):
            return super().plain() + (fault == "no way back")

    monkeypatch.setitem(weights.KINDS, "packed", Faulty)
    weights.works.cache_clear()
    model, prompts = tiny_model(), random_prompts([9])
    with caplog.at_level(logging.WARNING):
        target = packed(model)
        found = generate(target, Autoregressive(), prompts, 8)[0].tokens
    weights.works.cache_clear()
    assert found == generate(TargetModel(model), Autoregressive(), prompts, 8)[0].tokens
    assert not target._engine._model.model.layers[0].mlp.down_proj.weight.is_meta
    assert [r.message for r in caplog.records if "plain ones are used, which are slower" in r.message]


@pytest.mark.parametrize("n_in", [8, 16, 24, 48, 66])
@pytest.mark.parametrize("bias", [False, True])
def test_8_bit_products_are_near_the_plain_ones(n_in, bias):
    torch.manual_seed(0)
    linear, x = nn.Linear(n_in, 61, bias=bias).requires_grad_(False), torch.randn(2, 3, n_in)
    linear.weight[3] = 0
    found, expected = Int8Linear(linear)(x), linear(x)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 0.03 * expected.abs().max()


def test_drafters_in_8_bits_follow_the_weights_that_they_were_made_of():
    model, prompts = tiny_model(), random_prompts([9])
    trained = noisy_copy(model)
    drafter = Speculative(TargetModel(trained), draft_dtype="int8")
    first = generate(TargetModel(model), drafter, prompts, 20)[0]
    assert drafter.draft_model.weights == "int8"
    with torch.no_grad():
        for parameter, own in zip(trained.parameters(), model.parameters(), strict=True):
            parameter.copy_(own)
    second = generate(TargetModel(model), drafter, prompts, 20)[0]
    assert second.tokens == first.tokens
    assert second.target_forwards < first.target_forwards


def test_draft_dtype_chooses_dtype_and_weights(monkeypatch):
    module = nn.Linear(4, 4)
    assert draft_weights("auto", CPU, torch.float32) == (torch.float32, "int8")
    assert draft_weights("bfloat16", CPU, torch.float32) == (torch.bfloat16, "packed")
    assert draft_weights("auto", torch.device("cuda"), torch.bfloat16) == (torch.bfloat16, "plain")
    assert for_drafting(module, "float32", CPU, torch.float32)(torch.ones(4)).dtype == torch.float32
    assert module.weight.dtype == torch.float32
    with pytest.raises(UserError, match="draft_dtype=int4 must be one of auto, float32, bfloat16, int8"):
        draft_weights("int4", CPU, torch.float32)
    with pytest.raises(UserError, match="draft_dtype=int8 has no operators on cuda; give draft_dtype=bfloat16 or auto"):
        draft_weights("int8", torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(weights, "works", lambda kind, dtype: False)
    assert draft_weights("auto", CPU, torch.float32) == (torch.float32, "plain")
