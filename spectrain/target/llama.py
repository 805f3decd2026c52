"""The lean decoder of Llama-like models: one attention, one MLP and one rotary embedding for targets and drafters.

It computes what the modules of transformers compute (`tests/target/test_lean.py` compares the logits), from the same
tensors, with a third of the calls: projections of the same input are one matrix, grouped keys and values are never
expanded, and the inputs of blocks are returned without hooks.

Letters: K key/value heads, G = H / K, E width of a head, F width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spectrain.target.device import device_type
from spectrain.target.kv_cache import KVCache

# Tokens of whole texts whose states inside a block lie in memory at the same time. Behind the pieces they are copied.
PIECE_TOKENS = {"cpu": 1 << 12, "cuda": 1 << 15}  # on a GPU most batches of a training are one piece


@dataclass(frozen=True)
class LlamaShape:
    """Dimensions of a Llama-like decoder: RoPE, RMSNorm, gated MLP, grouped queries, optional biases and q/k norms.

    `layer_types` are Gemma 3's alone, one for each block of the target: the entry of rope_parameters that it takes.
    Such blocks also norm what attention and MLP add.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_head: int
    n_kv_head: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    rope_parameters: dict
    max_positions: int
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = True
    layer_types: tuple[str, ...] = ()

    @property
    def rope_types(self) -> list[str]:
        return sorted(set(self.layer_types))


@dataclass(frozen=True)
class KeysValues:
    """Rotated keys, and values, of one block."""

    keys: Tensor  # [B, K, S, E]
    values: Tensor  # [B, K, S, E]

    @staticmethod
    def cat(parts: list[KeysValues]) -> KeysValues:
        return KeysValues(torch.cat([p.keys for p in parts], 2), torch.cat([p.values for p in parts], 2))


class Rope:
    """Rotary position embedding. No module: a cast to bfloat16 would round the frequencies and rotate far keys wrongly.

    Args:
        shape: of the model.
    """

    def __init__(self, shape: LlamaShape) -> None:
        options = {"hidden_size": shape.hidden_size, "num_attention_heads": shape.n_head, "head_dim": shape.head_dim}
        options["max_position_embeddings"] = shape.max_positions
        parameters = [shape.rope_parameters[name] for name in shape.rope_types] or [shape.rope_parameters]
        rotaries = [LlamaRotaryEmbedding(LlamaConfig(**options, rope_parameters=dict(one))) for one in parameters]
        self.inv_freq, self.scaling = torch.cat([one.inv_freq for one in rotaries]), rotaries[0].attention_scaling

    def move(self, device: torch.device) -> None:
        """Keep the frequencies on this device. Else the first call with positions on it moves them."""
        if self.inv_freq.device != device:
            self.inv_freq = self.inv_freq.to(device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [B, n, E] float32 at positions [B, n]; the first half of sin is negative, for `rotate`.

        Where blocks differ in their RoPE, each half holds the E / 2 columns of one type after the other.
        """
        self.move(positions.device)
        angles = positions[..., None] * self.inv_freq  # [B, n, E / 2]
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary position embedding, as `Rope` gives it, to x [B, heads, n, E]."""
    cos, sin = (part[:, None] for part in rope)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attend with grouped queries, without expanding keys and values.

    Args:
        queries: [B, H, n, E].
        keys, values: [B, K, S, E]. The G = H / K query heads of a group read the same ones.
        mask: [B or 1, 1, G n, S] of `grouped`, bool or `additive`. None: one query sees all slots, n = S are causal.

    Returns:
        [B, n, H E].
    """
    n_groups, n = queries.shape[1] // keys.shape[1], queries.shape[2]
    if mask is None and n > 1:
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=n_groups > 1)
    elif n_groups == 1:
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    else:  # the queries of a group stand one behind the other
        folded = queries.reshape(queries.shape[0], keys.shape[1], n_groups * n, queries.shape[3])
        attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask).reshape(queries.shape)
    return attended.transpose(1, 2).flatten(2)


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Turn a mask of bool into what attention adds to its scores: sdpa would do so in every block."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def grouped(mask: Tensor | None, shape: LlamaShape) -> Tensor | None:
    """Repeat a mask [B or 1, 1, n, S] for the query heads of a group, as `attention` takes it."""
    n_groups = shape.n_head // shape.n_kv_head
    return mask if mask is None or n_groups == 1 else mask.repeat(1, 1, n_groups, 1)


def in_pieces(function: Callable[..., Sequence[Tensor]], size: int, dim: int, *inputs: Tensor) -> Sequence[Tensor]:
    """Call a function that treats every token alike for `size` tokens at a time.

    inputs: [B, n, ..] of n tokens each. Returns the tensors of all tokens, which are at dimension `dim` of each.
    """
    n_tokens = inputs[0].shape[1]
    if n_tokens <= size:
        return function(*inputs)
    whole: list[Tensor] = []
    for start in range(0, n_tokens, size):
        parts = function(*(one[:, start : start + size] for one in inputs))
        whole = whole or [one.new_empty(*one.shape[:dim], n_tokens, *one.shape[dim + 1 :]) for one in parts]
        for one, part in zip(whole, parts, strict=True):
            one.narrow(dim, start, part.shape[dim]).copy_(part)
    return whole


class LlamaBlock(nn.Module):
    """One decoder block whose keys may come from elsewhere than its input.

    Projections of the same input are one matrix, because a step of a few tokens costs by the number of calls.

    Args:
        shape: of the model.
        layer: the block of the target that it is like, where these differ.
    """

    def __init__(self, shape: LlamaShape, layer: int = 0) -> None:
        super().__init__()
        d, d_q, d_kv = shape.hidden_size, shape.n_head * shape.head_dim, shape.n_kv_head * shape.head_dim
        self.shape = shape
        self.input_norm = nn.RMSNorm(d, shape.rms_norm_eps)
        self.qkv = nn.Linear(d, d_q + 2 * d_kv, bias=shape.qkv_bias)  # rows: queries, keys, values
        self.output = nn.Linear(d_q, d, bias=shape.output_bias)
        if shape.qk_norm:
            self.query_norm = nn.RMSNorm(shape.head_dim, shape.rms_norm_eps)
            self.key_norm = nn.RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.mlp_norm = nn.RMSNorm(d, shape.rms_norm_eps)
        if shape.layer_types:
            self.rope_type = shape.rope_types.index(shape.layer_types[layer])
            self.attended_norm, self.added_norm = (nn.RMSNorm(d, shape.rms_norm_eps) for _ in range(2))
        self.gate_up = nn.Linear(d, 2 * shape.intermediate_size, bias=shape.mlp_bias)  # rows: gate, up
        self.down = nn.Linear(shape.intermediate_size, d, bias=shape.mlp_bias)
        self.activation = ACT2FN[shape.hidden_act]

    def normed(self, x: Tensor) -> Tensor:
        """Return what queries, keys and values are projected from, given the block's inputs x [.., D]."""
        return self.input_norm(x)

    def normed_memories(self, memories: Tensor) -> Tensor:
        """Return what keys and values of memories [.., D] are projected from."""
        return self.normed(memories)

    def residual(self, x: Tensor) -> Tensor:
        """Return what attention and MLP are added to, [.., D], given the block's inputs."""
        return x

    def queries_keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, KeysValues]:
        """Return rotated queries [B, H, n, E], and K and V, of inputs x [B, n, D] at the positions of `rope`."""
        n_head, n_kv_head = self.shape.n_head, self.shape.n_kv_head
        heads = self._heads(self.qkv(self.normed(x)))
        queries_keys, values = heads.split([n_head + n_kv_head, n_kv_head], dim=1)
        if self.shape.qk_norm:
            queries, keys = queries_keys.split([n_head, n_kv_head], dim=1)
            queries_keys = torch.cat([self.query_norm(queries), self.key_norm(keys)], dim=1)
        queries, keys = rotate(queries_keys, self._own(rope)).to(values.dtype).split([n_head, n_kv_head], dim=1)
        return queries, KeysValues(keys, values)

    def keys_values(self, memories: Tensor, rope: tuple[Tensor, Tensor]) -> KeysValues:
        """Return K and V of memories [B, P, D] at the positions of `rope`."""
        d_q, x = self.shape.n_head * self.shape.head_dim, self.normed_memories(memories)
        if isinstance(self.qkv, nn.Linear):
            bias = None if self.qkv.bias is None else self.qkv.bias[d_q:]
            joined = F.linear(x, self.qkv.weight[d_q:], bias)
        else:
            joined = self.qkv(x, first=d_q)
        keys, values = self._heads(joined).chunk(2, dim=1)
        if self.shape.qk_norm:
            keys = self.key_norm(keys)
        return KeysValues(rotate(keys, self._own(rope)).to(values.dtype), values)

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the block's output [B, n, D] from its input and what its heads attended to, [B, n, H E]."""
        added = self.output(attended)
        x = self.residual(x) + (self.attended_norm(added) if self.shape.layer_types else added)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        added = self.down(self.activation(gate) * up)
        return x + (self.added_norm(added) if self.shape.layer_types else added)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        past: KeysValues,
        mask: Tensor,
        since: KeysValues | None = None,
    ) -> tuple[Tensor, KeysValues]:
        """Run the block over n queries x [B, n, D], whose own keys come after the past ones, and those `since` then.

        `rope` is cos and sin at the queries' positions, each [B or 1, n, E]. For `mask` see
        `attention`, which includes each query's own key. Returns the block's output [B, n, D], and K/V of its input.
        """
        queries, own = self.queries_keys_values(x, rope)
        every = KeysValues.cat([past, own] if since is None else [past, since, own])
        return self.after_attention(x, attention(queries, every.keys, every.values, mask)), own

    def of_text(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Run the block over whole texts x [B, n, D]; for `rope` and `mask` see `forward` and `attention`.

        What surrounds attention is computed for PIECE_TOKENS at a time, so long texts take little more than their x.
        """
        size = max(1, PIECE_TOKENS.get(device_type(x.device), PIECE_TOKENS["cuda"]) // len(x))
        attended = attention(*in_pieces(self.before_in_text, size, 2, x, *rope), mask)
        return in_pieces(self.after_in_text, size, 1, x, attended)[0]

    def before_in_text(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values; see `queries_keys_values`. It is compiled apart from that of steps."""
        queries, own = self.queries_keys_values(x, (cos, sin))
        return queries, own.keys, own.values

    def after_in_text(self, x: Tensor, attended: Tensor) -> tuple[Tensor]:
        """See `after_attention`."""
        return (self.after_attention(x, attended),)

    def _own(self, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return cos and sin of this block's type, [B, n, E]."""
        if len(types := self.shape.rope_types) < 2:
            return rope
        return tuple(one.unflatten(-1, (2, len(types), -1))[..., self.rope_type, :].flatten(-2) for one in rope)

    def _heads(self, x: Tensor) -> Tensor:  # [B, n, heads * E] -> [B, heads, n, E]
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)


class LlamaDecoder(nn.Module):
    """A whole Llama-like decoder: embedding, blocks, final norm, unembedding."""

    def __init__(self, shape: LlamaShape, n_layer: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(n_layer))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.rope = Rope(shape)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        capture_layers: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the final states [B, n, D] after the norm, and the inputs [B, n, D] of the blocks `capture_layers`.

        Args:
            tokens: [B, n] int64.
            positions: [B or 1, n] int64.
            cache: where `begin` has set the slots of these tokens; None: the tokens are the whole text.
            mask: [B or 1, 1, n, S] bool; None: one token that sees all slots, or n = S causal ones.
            capture_layers: indices of blocks; -1 stands for the final states.
        """
        x = self.embed_tokens(tokens).to(self.norm.weight.dtype)
        rope, mask = self.rope(positions), grouped(additive(mask, x.dtype), self.shape)
        inputs = {}
        for i, block in enumerate(self.blocks):
            if i in capture_layers:
                inputs[i] = x
            if cache is None:
                x = block.of_text(x, rope, mask)
                continue
            queries, own = block.queries_keys_values(x, rope)
            x = block.after_attention(x, attention(queries, *cache.update(own.keys, own.values, i), mask))
        inputs[-1] = self.norm(x)
        return inputs[-1], [inputs[layer] for layer in capture_layers]
