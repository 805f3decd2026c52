"""The lean decoder against the modules of transformers, for every architecture and feature that it knows."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from spectrain.decoding import generate
from spectrain.errors import UserError
from spectrain.methods.autoregressive import Autoregressive
from spectrain.target import DraftTree, KVCache, TargetModel
from spectrain.target.loading import shorten
from tests.conftest import COMMON, random_prompts, tiny_model
from tests.decoding.reference import random_parents, tree_of

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}


def mistral() -> PreTrainedModel:
    torch.manual_seed(0)
    config = MistralConfig(**COMMON, num_key_value_heads=2, sliding_window=256, head_dim=12)  # no window
    return MistralForCausalLM(config).eval().requires_grad_(False)


def qwen2() -> PreTrainedModel:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**COMMON, num_key_value_heads=2)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # which begin as zeros
            parameter.normal_()
    return model


MODELS = {
    "llama": tiny_model,
    "llama, grouped queries": lambda: tiny_model("llama_gqa"),
    "llama, tied": lambda: tiny_model(tie_word_embeddings=True),
    "llama, biases": lambda: biased(tiny_model(attention_bias=True, mlp_bias=True)),
    "llama, gelu": lambda: tiny_model(hidden_act="gelu"),
    "llama, linear rope": lambda: tiny_model(
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    ),
    "llama, llama3 rope": lambda: tiny_model(rope_parameters=LLAMA3),
    "llama, yarn": lambda: tiny_model(
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64
        }
    ),
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": lambda: tiny_model("qwen3"),
}  # fmt: skip


def biased(model: PreTrainedModel) -> PreTrainedModel:
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
    return model


@pytest.fixture(params=MODELS)
def model(request) -> PreTrainedModel:
    return MODELS[request.param]()


def both(model: PreTrainedModel, **options) -> list[TargetModel]:
    return [TargetModel(model, engine=engine, **options) for engine in ("lean", "transformers")]


def test_texts_have_the_same_logits_and_states(model):
    tokens = torch.tensor(random_prompts([40, 40]))
    lean, modules = (target.forward(tokens) for target in both(model, capture_layers=[0, 2]))
    torch.testing.assert_close(lean.logits, modules.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lean.captured, modules.captured, atol=1e-4, rtol=1e-4)
    lean, modules = (target.features(tokens) for target in both(model, capture_layers=[1]))
    torch.testing.assert_close(lean.final_hidden, modules.final_hidden, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(lean.captured, modules.captured, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("short", [False, True], ids=["float32", "kept in bfloat16"])
@pytest.mark.parametrize("lengths", [[7], [23, 5, 14]], ids=str)
def test_prefill_in_pieces_and_trees_have_the_same_logits_and_states(model, lengths, short):
    generator, outputs = torch.Generator().manual_seed(0), []
    if short:
        model = model.to(torch.bfloat16).float()
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # whose frequencies were rounded, too
    ours = copy.deepcopy(model)
    if short:
        shorten(ours)
        assert ours.dtype == torch.bfloat16
    options = {"capture_layers": [0, 1], "prefill_chunk": 8, "keeps_hidden": True}
    prompts = [prompt + [0] * (max(lengths) - len(prompt)) for prompt in random_prompts(lengths)]
    trees = [tree_of(random_prompts([9] * len(lengths), seed=1), [random_parents(9, generator) for _ in lengths])]
    chain = torch.tensor(random_prompts([5] * len(lengths), seed=2))
    trees.append(DraftTree.chain(chain[:, 0], chain[:, 1:]))
    targets = TargetModel(ours, dtype=torch.float32, **options), TargetModel(model, engine="transformers", **options)
    for target in targets:
        cache = KVCache(len(lengths), block_tokens=4)
        found = [target.prefill(torch.tensor(prompts), lengths, cache, range(len(lengths)))]
        for tree in trees:
            found.append(target.score(tree, cache))
            cache.keep(2)
        outputs.append(found)
    assert targets[0].dtype == torch.float32
    torch.testing.assert_close(targets[0].unembedding, targets[1].unembedding)
    for i, (lean, modules) in enumerate(zip(*outputs, strict=True)):
        torch.testing.assert_close(lean.logits, modules.logits, atol=1e-4, rtol=1e-4)
        real = [slice(None)] * len(lengths) if i else [slice(length) for length in lengths]
        for row, part in enumerate(real):
            torch.testing.assert_close(lean.captured[row, part], modules.captured[row, part], atol=1e-4, rtol=1e-4)
        if i:
            torch.testing.assert_close(lean.hidden, modules.hidden, atol=1e-4, rtol=1e-4)


def test_prefill_keeps_the_states_that_are_asked_for():
    prompts, lengths = random_prompts([23, 23]), [23, 9]
    target = TargetModel(tiny_model(), capture_layers=[0, 2], prefill_chunk=8)
    everything = target.prefill(torch.tensor(prompts), lengths, KVCache(2), range(2))
    read = torch.tensor([[0, 22, 7, 8, -1], [0, 1, 8, -1, -1]])
    found = target.prefill(torch.tensor(prompts), lengths, KVCache(2), range(2), read)
    assert found.captured.shape == (2, 5, 2, 32)
    assert torch.equal(found.positions, read)
    for row, column in (read >= 0).nonzero().tolist():
        torch.testing.assert_close(found.captured[row, column], everything.captured[row, read[row, column]])


def test_weights_stay_in_one_place_and_move_with_the_model(model, tmp_path):
    tokens = torch.tensor(random_prompts([12]))
    expected = model(tokens).logits
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    target = TargetModel(model, engine="lean")
    memory = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    own = {parameter.untyped_storage().data_ptr() for parameter in target._engine.decoder.parameters()}
    assert own == memory  # no second copy
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    torch.testing.assert_close(model(tokens).logits, expected)
    model.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(saved(tokens).logits, expected)
    torch.testing.assert_close(copy.deepcopy(model)(tokens).logits, expected)
    model.to(torch.float64)
    assert target.forward(tokens).logits.dtype == torch.float64
    torch.testing.assert_close(target.forward(tokens).logits.float(), expected, atol=1e-4, rtol=1e-4)


def test_a_target_reads_new_weights_and_says_so_if_its_modules_have_changed(model):
    prompt, target = random_prompts([9]), TargetModel(model)
    other = copy.deepcopy(model).eval()
    for weight in other.parameters():
        weight.mul_(-1)
    model.load_state_dict(other.state_dict(), assign=True)
    (expected,) = generate(TargetModel(other, engine="transformers"), Autoregressive(), prompt, 12)
    assert generate(target, Autoregressive(), prompt, 12)[0].tokens == expected.tokens
    model.model.layers[1].register_forward_hook(lambda module, args, output: 2 * output)
    assert TargetModel(model).engine == "transformers"
    with pytest.raises(UserError, match="hooks of the model have changed since a target was made of it"):
        generate(target, Autoregressive(), prompt, 12)


@pytest.mark.parametrize("family", ["gemma", "gpt_neox", "mistral", "gemma3"])
def test_other_architectures_run_on_the_modules_of_transformers(family, llama_target):
    assert llama_target.engine == "lean"
    assert TargetModel(tiny_model(family)).engine == "transformers"
    with pytest.raises(UserError, match=r"engine=lean runs llama, .*qwen3, but .*; give target.engine=transformers"):
        TargetModel(tiny_model(family), engine="lean")
    with pytest.raises(UserError, match="target.engine=fast must be one of auto, lean, transformers"):
        TargetModel(llama_target.model, engine="fast")
