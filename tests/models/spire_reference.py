"""SPIRe's drafter written slowly from the definition (methods.md section 4): one token, one key at a time.

It shares nothing with `spectrain.models.spire` but the weights.
"""

from __future__ import annotations

import json
from functools import cache

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spectrain.models.spire import SpireDrafter
from spectrain.target.llama import LlamaBlock


def slow_rollout(
    drafter: SpireDrafter, tokens: Tensor, captured: Tensor | None, k: int | None = None, first_root: int = 0
) -> Tensor:
    """Final hidden states [L, D] of one row: token t in the block that begins at t - (t - first_root) % k."""
    k = k or drafter.config.k
    hidden, memories = [], {}
    for t in range(len(tokens)):
        root = t - (t - first_root) % k
        states = [slow_input(drafter, tokens[t])]
        if drafter.config.previous_state:  # of the root's token the target's, behind which the root was drawn
            before = torch.zeros_like(states[0]) if t == 0 else hidden[t - 1] if t > root else captured[t - 1, -1]
            states[0] = states[0] + drafter.previous.weight @ before
        for i, block in enumerate(drafter.blocks):
            keys = {p: captured[p, i] if p < root else memories[p, i] for p in seen(drafter, t)}
            if drafter.config.own_key or not keys:
                keys[t] = states[i]  # the diagonal: its own input, not its memory
            states.append(slow_block(block, states[i], t, keys))
        for i in range(drafter.config.n_layer):
            memories[t, i] = slow_memory(drafter, states, i)
        hidden.append(rms(states[-1], drafter.norm.weight, drafter.config.shape.rms_norm_eps))
    return torch.stack(hidden)


def slow_input(drafter: SpireDrafter, token: Tensor) -> Tensor:
    """Return the input of the first block for each token: x = W e, or a row of a table."""
    if drafter.config.input == "projected":
        return drafter.input.weight @ drafter.tables.target.model.model.embed_tokens.weight[token].to(
            drafter.input.weight
        )
    return drafter.embed_tokens.weight[token]


def seen(drafter: SpireDrafter, t: int) -> list[int]:
    """Positions before t under sinks and window."""
    config = drafter.config
    return [p for p in range(t) if p < config.sink_tokens or p > t - config.window_tokens]


def slow_memory(drafter: SpireDrafter, states: list[Tensor], i: int) -> Tensor:
    if not drafter.config.feedback:
        return states[i]
    weights = drafter.feedback_weight[0 if drafter.config.feedback == "shared" else i]
    exps = [torch.exp(weights[layer]) for layer in range(len(states))]
    return sum(e * x for e, x in zip(exps, states, strict=True)) / sum(exps)


def slow_block(block: LlamaBlock, x: Tensor, t: int, inputs: dict[int, Tensor]) -> Tensor:
    """One block at position t, whose keys come from `inputs` by position."""
    shape = block.shape
    n_rows = [shape.n_head * shape.head_dim, *[shape.n_kv_head * shape.head_dim] * 2]
    weights_of = dict(zip("qkv", block.qkv.weight.split(n_rows), strict=True))

    def heads(name: str, value: Tensor, position: int) -> Tensor:
        normed = rms(value, block.input_norm.weight, shape.rms_norm_eps)
        out = (normed @ weights_of[name].T).view(-1, shape.head_dim)
        if name == "v":
            return out
        if shape.qk_norm:
            norm = block.query_norm if name == "q" else block.key_norm
            out = rms(out, norm.weight, shape.rms_norm_eps)
        return rotate(out, position, shape)

    query = heads("q", x, t)
    keys = [heads("k", v, p) for p, v in inputs.items()]
    values = [heads("v", v, p) for p, v in inputs.items()]
    out = []
    for head in range(shape.n_head):
        kv_head = head * shape.n_kv_head // shape.n_head
        weights = torch.softmax(torch.stack([query[head] @ k[kv_head] for k in keys]) / shape.head_dim**0.5, dim=0)
        out.append(sum(w * v[kv_head] for w, v in zip(weights, values, strict=True)))
    x = x + torch.cat(out) @ block.output.weight.T
    normed = rms(x, block.mlp_norm.weight, shape.rms_norm_eps)
    gate, up = (normed @ weight.T for weight in block.gate_up.weight.chunk(2))
    return x + (torch.nn.functional.silu(gate) * up) @ block.down.weight.T


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def rotate(x: Tensor, position: int, shape) -> Tensor:
    """Rotary embedding of heads [H, D_head] at one position, with Hugging Face's frequencies."""
    parameters = json.dumps(dict(shape.rope_parameters))
    angles = position * frequencies(shape.hidden_size, shape.n_head, shape.head_dim, shape.max_positions, parameters)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


@cache
def frequencies(hidden_size: int, n_head: int, head_dim: int, max_positions: int, parameters: str) -> Tensor:
    config = LlamaConfig(
        hidden_size=hidden_size,
        num_attention_heads=n_head,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters=json.loads(parameters),
    )
    return LlamaRotaryEmbedding(config).inv_freq  # [D_head / 2]
