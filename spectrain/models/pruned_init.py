"""Pruned initialisation: a SPIRe drafter from the target's own modules (SPIRe, section 3.2).

Embedding, the last `n_layer` blocks, final norm and unembedding are copied.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spectrain.decoding.errors import UserError, check_whole
from spectrain.models.spire import LlamaShape, SpireConfig, SpireDrafter

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")  # others scale, soft-cap or norm in ways the block does not have
FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
}
RENAMED = {  # Hugging Face's names -> ours
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.o_proj": "output",
    "self_attn.q_norm": "query_norm",
    "self_attn.k_norm": "key_norm",
    "mlp.down_proj": "down",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # of others the frequencies change with the length of the text


def shape_of(target: PreTrainedModel) -> LlamaShape:
    """Return the dimensions of a Llama-like target. Raise UserError for another one."""
    config = target.config
    if (family := config.model_type) not in LLAMA_LIKE:
        known = ", ".join(LLAMA_LIKE)
        raise UserError(f"target of type {family} is not computed like Llama; give one of {known}, or +exp=vanilla")
    if (rope := config.rope_parameters.get("rope_type", "default")) not in ROPE_TYPES:
        raise UserError(f"the target's RoPE is of type {rope}; SPIRe supports {', '.join(ROPE_TYPES)}")
    attention, mlp = target.model.layers[0].self_attn, target.model.layers[0].mlp
    return LlamaShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        n_head=config.num_attention_heads,
        n_kv_head=config.num_key_value_heads,
        head_dim=attention.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        hidden_act=config.hidden_act,
        rope_parameters=dict(config.rope_parameters),
        max_positions=config.max_position_embeddings,
        qkv_bias=attention.q_proj.bias is not None,
        output_bias=attention.o_proj.bias is not None,
        mlp_bias=mlp.gate_proj.bias is not None,
        qk_norm=hasattr(attention, "q_norm"),
        tie_embeddings=target.get_output_embeddings().weight is target.get_input_embeddings().weight,
    )


def last_layers(target: PreTrainedModel, n_layer: int) -> tuple[int, ...]:
    """Return the indices of the target's last `n_layer` blocks. Raise UserError if it has fewer."""
    n_target = target.config.num_hidden_layers
    check_whole("n_layer", n_layer, 1)
    if n_layer > n_target:
        raise UserError(f"n_layer={n_layer} must be 1..{n_target}, the number of the target's blocks")
    return tuple(range(n_target - n_layer, n_target))


def new_drafter(target: PreTrainedModel, config: SpireConfig, init: str) -> SpireDrafter:
    """Return a new drafter to train, in float32, whose config was made with `shape_of(target)`.

    `init` is "pruned", which copies the target's modules, or "random", which draws weights with the std of the target's
    family (0.02).
    """
    if init not in ("pruned", "random"):
        raise UserError(f"init={init} is unknown; choose pruned or random")
    drafter = SpireDrafter(config)
    if init == "random":
        drafter.apply(lambda module: _draw(module, target.config.initializer_range))
        return drafter
    drafter.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    for block, layer in zip(drafter.blocks, config.target_layers, strict=True):
        block.load_state_dict(block_state(target.model.layers[layer].state_dict()))
    drafter.norm.load_state_dict(target.model.norm.state_dict())
    drafter.lm_head.load_state_dict(target.get_output_embeddings().state_dict())
    return drafter


def block_state(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the state of a Hugging Face block to that of a `SpireBlock`. Loading fails if a tensor is left over."""
    state = dict(layer)
    for fused, parts in FUSED.items():
        for kind in ("weight", "bias"):
            found = [state.pop(f"{part}.{kind}") for part in parts if f"{part}.{kind}" in state]
            if found:
                state[f"{fused}.{kind}"] = torch.cat(found)
    renamed = {}
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        renamed[f"{RENAMED.get(module, module)}.{kind}"] = tensor
    return renamed


def _draw(module: nn.Module, std: float) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        torch.nn.init.normal_(module.weight, std=std)
        if getattr(module, "bias", None) is not None:
            torch.nn.init.zeros_(module.bias)
