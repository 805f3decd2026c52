"""`method=magicdec`: drafts computed from sink and window only, equal to slow computations by other means, lossless."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers.models.llama import modeling_llama

from spectrain.decoding import Context, Sampling, generate
from spectrain.errors import UserError
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.magicdec import MagicDec
from spectrain.target import KVCache, TargetModel
from tests.conftest import COMMON, random_prompts, tiny_model


class Recorded(Context):
    """A context that keeps the draft logits it was asked to draw from."""

    def draw(self, logits, active=None, place=1):
        self.__dict__.setdefault("asked", []).append(logits)
        return super().draw(logits, active)


def drafted(target: TargetModel, method: MagicDec, prompts: list[list[int]], room: tuple[int, ...] = ()):
    """One proposal behind `prompts`, whose last tokens become roots. Returns the context and the tokens [n, gamma]."""
    context, cache = Recorded(Sampling(), max_rows=len(prompts)), KVCache(len(prompts), block_tokens=8)
    texts, lengths = [prompt[:-1] for prompt in prompts], [len(prompt) - 1 for prompt in prompts]
    context.append(texts, [99] * len(texts), [None] * len(prompts))
    padded = torch.tensor([text + [0] * (max(lengths) - len(text)) for text in texts])
    method.start(target, cache)
    output = target.prefill(padded, lengths, cache, range(len(prompts)))
    context.root(range(len(prompts)), torch.tensor([prompt[-1] for prompt in prompts]), output.logits[:, 0])
    context.room[: len(room)] = room
    return context, method.propose(context).tokens[:, 1:]


def through_sparse_mask(target: TargetModel, method: MagicDec, prompt: list[int], drafts: list[int]) -> Tensor:
    """Draft logits [gamma, V] with the full cache, where a mask admits sink, window and the chain so far."""
    n, chain = len(prompt) - 1, [prompt[-1], *drafts[:-1]]
    cache = target.model(torch.tensor([prompt[:-1]]), use_cache=True).past_key_values
    mask = torch.zeros(1, 1, len(chain), n + len(chain), dtype=torch.bool)
    mask[..., : method.sink_tokens] = True
    mask[..., max(0, n - method.window_tokens) : n] = True
    mask[..., n:] = torch.ones(len(chain), len(chain), dtype=torch.bool).tril()
    positions = torch.arange(n, n + len(chain))[None]
    chain = torch.tensor([chain])
    return target.model(chain, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[0]


def rotated(model, keys: Tensor, positions: Tensor) -> Tensor:
    return modeling_llama.apply_rotary_pos_emb(keys, keys, *model.model.rotary_emb(keys, positions))[1]


def unrotated(family: str, model, tokens: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Keys before RoPE and values of each block, [1, H, T, D_head], caught at the projections of a plain forward."""
    names = ["k_norm" if family == "qwen3" else "k_proj", "v_proj"]
    attentions = [block.self_attn for block in model.base_model.layers]
    caught: list[Tensor] = []
    hooks = [
        getattr(attention, name).register_forward_hook(lambda _, __, output: caught.append(output))
        for attention in attentions
        for name in names
    ]
    model(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    heads = [states.view(1, len(tokens), -1, attentions[0].head_dim).transpose(1, 2) for states in caught]
    return list(zip(heads[0::2], heads[1::2], strict=True))


def through_gathered_cache(family: str, target: TargetModel, method: MagicDec, prompt, drafts) -> Tensor:
    """Draft logits [gamma, V] over a Hugging Face cache of sink and window, rotated by their places in it."""
    n, sink, chain = len(prompt) - 1, method.sink_tokens, [prompt[-1], *drafts[:-1]]
    kept = list(range(n))
    if n > sink + method.window_tokens:
        kept = kept[:sink] + kept[n - method.window_tokens :]
    cache = DynamicCache()
    for i, (keys, values) in enumerate(unrotated(family, target.model, prompt[:-1])):
        places = torch.arange(len(kept))[None]
        cache.update(rotated(target.model, keys[:, :, kept], places), values[:, :, kept], i)
    positions = torch.arange(len(kept), len(kept) + len(chain))[None]
    return target.model(torch.tensor([chain]), position_ids=positions, past_key_values=cache).logits[0]


@pytest.fixture(params=["llama_gqa", "qwen3", "gemma"])
def family(request) -> str:
    return request.param


LENGTHS = [[30], [30, 5, 12, 13, 2]]  # around sink + window = 2 + 9 committed tokens, and below


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
class TestDraftLogits:
    def test_at_text_positions_equal_a_sparse_mask_over_the_full_cache(self, family, lengths):
        target, method = TargetModel(tiny_model(family)), MagicDec(4, 2, 9, positions="text")
        prompts = random_prompts(lengths)
        context, drafts = drafted(target, method, prompts)
        for row, prompt in enumerate(prompts):
            expected = through_sparse_mask(target, method, prompt, drafts[row].tolist())
            got = torch.stack([logits[row] for logits in context.asked])
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)

    def test_at_cache_positions_equal_gathered_and_rotated_keys(self, family, lengths):
        target, method = TargetModel(tiny_model(family)), MagicDec(4, 2, 9)
        prompts = random_prompts(lengths)
        context, drafts = drafted(target, method, prompts)
        for row, prompt in enumerate(prompts):
            expected = through_gathered_cache(family, target, method, prompt, drafts[row].tolist())
            got = torch.stack([logits[row] for logits in context.asked])
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("positions", ["cache", "text"])
def test_every_draft_is_accepted_when_the_window_holds_the_context(family_target, positions, batch_size):
    method = MagicDec(gamma=4, window_tokens=100, positions=positions)
    generations = generate(
        family_target, method, random_prompts([12, 30, 1]), 31, batch_size=batch_size, stop_token_ids=()
    )
    assert [g.accepted for g in generations] == [[4] * 6] * 3


def test_the_sparse_cache_has_room_for_sink_window_and_gamma_only(llama_target):
    method = MagicDec(gamma=3, sink_tokens=2, window_tokens=9)
    (generation,) = generate(llama_target, method, random_prompts([60]), 40, stop_token_ids=(), cache_block_tokens=64)
    assert len(generation.tokens) == 40
    assert method.cache.capacity == 2 + 9 + 3
    # 3 layers x (K and V) x 1 row x 4 heads x 14 slots x 8 wide x 4 bytes
    assert sum(states.nbytes for states in (*method.cache.keys, *method.cache.values)) == 3 * 2 * 1 * 4 * 14 * 8 * 4


SMALL = {key: value for key, value in COMMON.items() if key != "initializer_range"}


def model_of(model_class, config_class, **options):
    torch.manual_seed(0)
    return model_class(config_class(**{**SMALL, **options})).eval()


def with_another_tower():
    """No RoPE in the language model, but in a wider module beside it, as of a vision encoder."""
    model = model_of(GPT2LMHeadModel, GPT2Config)
    model.tower = torch.nn.Module()
    model.tower.inv_freq = torch.nn.Buffer(torch.ones(32))
    return model


UNFIT = {
    "interleaved": lambda: model_of(CohereForCausalLM, CohereConfig, num_key_value_heads=2),
    "no RoPE of its own": with_another_tower,
    "not in every block": lambda: model_of(
        SmolLM3ForCausalLM, SmolLM3Config, num_key_value_heads=2, no_rope_layers=[1, 0, 1]
    ),
    "dynamic": lambda: tiny_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
}


@pytest.mark.parametrize("unfit", UNFIT)
def test_keys_that_cannot_be_turned_are_refused_and_text_positions_serve(unfit):
    target, prompts = TargetModel(UNFIT[unfit]()), random_prompts([24, 9])
    with pytest.raises(UserError, match="cannot be moved to other positions .* use method.positions=text"):
        generate(target, MagicDec(window_tokens=8), prompts, 4)
    expected = generate(target, Autoregressive(), prompts, 12, stop_token_ids=())
    found = generate(target, MagicDec(window_tokens=8, positions="text"), prompts, 12, batch_size=2, stop_token_ids=())
    assert [g.tokens for g in found] == [g.tokens for g in expected]


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "linear", "factor": 2.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_fixed_scalings_of_rope_are_turned(scaling):
    target = TargetModel(tiny_model("llama", rope_parameters={"rope_theta": 1e4, **scaling}))
    method, (prompt,) = MagicDec(4, 2, 9), random_prompts([30])
    context, drafts = drafted(target, method, [prompt])
    expected = through_gathered_cache("llama", target, method, prompt, drafts[0].tolist())
    torch.testing.assert_close(torch.cat(context.asked), expected, rtol=1e-4, atol=1e-4)
