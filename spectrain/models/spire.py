"""The SPIRe drafter (Neelam et al. 2025, section 3): sparse KV, pruned initialisation, recurrent feedback.

A stack of the target's own blocks that attends to *memories*. The memory of a context token is the target's activation
(the input of the target block that the draft block was copied from), so context costs K/V projections only. The memory
of a drafted token is a learned mix of the draft's own activations,

    m_t^i = sum_l softmax(w_i)_l x_t^l,   l = 0 (embedding) .. n_layer.

Attention is sparse: the first `sink_tokens` positions and the last `window_tokens` (t - window + 1 .. t), in training
(`spectrain.models.rollout`) as in decoding (`spectrain.methods.spire`); both go through `SpireBlock.forward`.

Letters: B rows, L row tokens, k rollout depth, c chunks of a row, n queries of a call, P past keys, H heads, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spectrain.decoding.errors import UserError, check_whole


@dataclass(frozen=True)
class LlamaShape:
    """Dimensions of a Llama-like decoder: RoPE, RMSNorm, gated MLP, grouped queries, optional biases and q/k norms."""

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


@dataclass(frozen=True)
class SpireConfig:
    """The options of a drafter, saved as `config.json` beside its weights."""

    shape: LlamaShape  # of the target
    target_layers: tuple[int, ...]  # of the target, one for each draft block; their inputs are the memories
    k: int = 4  # draft tokens of a training rollout, and the default draft length
    window_tokens: int = 64  # a query at t sees positions t - window + 1 .. t
    sink_tokens: int = 1  # first positions of the text, always seen
    feedback: bool = True  # memories of drafted tokens mix all layers; False: each block's own input
    target_activations: bool = True  # memories of context tokens are the target's; False: the drafter reads the context

    def __post_init__(self) -> None:
        for name, least in (("k", 1), ("window_tokens", 1), ("sink_tokens", 0)):
            check_whole(name, getattr(self, name), least)
        if self.k > self.window_tokens:
            raise UserError(f"k={self.k} is larger than window_tokens={self.window_tokens}; raise it, or lower k")
        if self.feedback and not self.target_activations:
            raise UserError("target_activations=false needs feedback=false, or the context is read token by token")

    @property
    def n_layer(self) -> int:
        return len(self.target_layers)

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Blocks of the target whose inputs the drafter reads."""
        return self.target_layers if self.target_activations else ()


@dataclass(frozen=True)
class KeysValues:
    """Rotated keys, and values, of one block."""

    keys: Tensor  # [R, H_kv, P, D_head]
    values: Tensor  # [R, H_kv, P, D_head]

    @staticmethod
    def cat(parts: list[KeysValues]) -> KeysValues:
        return KeysValues(torch.cat([p.keys for p in parts], 2), torch.cat([p.values for p in parts], 2))


class SpireBlock(nn.Module):
    """One decoder block whose keys may come from elsewhere than its input.

    Projections of the same input are one matrix, because a draft step of a few tokens costs by the number of calls.
    """

    def __init__(self, shape: LlamaShape) -> None:
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
        self.gate_up = nn.Linear(d, 2 * shape.intermediate_size, bias=shape.mlp_bias)  # rows: gate, up
        self.down = nn.Linear(shape.intermediate_size, d, bias=shape.mlp_bias)
        self.activation = ACT2FN[shape.hidden_act]

    def keys_values(self, memories: Tensor, rope: tuple[Tensor, Tensor]) -> KeysValues:
        """Return K and V of memories [R, P, D] at the positions of `rope`, after the block's input norm."""
        d_q = self.shape.n_head * self.shape.head_dim
        bias = None if self.qkv.bias is None else self.qkv.bias[d_q:]
        heads = self._heads(F.linear(self.input_norm(memories), self.qkv.weight[d_q:], bias))
        keys, values = heads.chunk(2, dim=1)
        if self.shape.qk_norm:
            keys = self.key_norm(keys)
        return KeysValues(_rotate(keys, rope).to(values.dtype), values)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], past: KeysValues, mask: Tensor
    ) -> tuple[Tensor, KeysValues]:
        """Run the block over n queries x [R, n, D], whose own keys come after the past ones.

        `rope` is cos and sin at the queries' positions, each [R or 1, n, D_head]. `mask` [R or 1, 1, n, P + n] bool is
        True where a query sees a key, always at its own. Returns the block's output [R, n, D], and K/V of its input.
        """
        n_head, n_kv_head = self.shape.n_head, self.shape.n_kv_head
        heads = self._heads(self.qkv(self.input_norm(x)))
        queries_keys, own_values = heads.split([n_head + n_kv_head, n_kv_head], dim=1)
        if self.shape.qk_norm:
            queries, keys = queries_keys.split([n_head, n_kv_head], dim=1)
            queries_keys = torch.cat([self.query_norm(queries), self.key_norm(keys)], dim=1)
        queries, own_keys = _rotate(queries_keys, rope).to(own_values.dtype).split([n_head, n_kv_head], dim=1)
        own = KeysValues(own_keys, own_values)
        every = KeysValues.cat([past, own])
        repeats = n_head // n_kv_head
        keys, values = (t.repeat_interleave(repeats, 1) if repeats > 1 else t for t in (every.keys, every.values))
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)  # [R, H, n, D_head]
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(self.activation(gate) * up), own

    def _heads(self, x: Tensor) -> Tensor:  # [R, n, heads * D_head] -> [R, heads, n, D_head]
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply rotary position embedding to x [R, H, n, D_head]; cos and sin [R or 1, n, D_head]."""
    cos, sin = (part[:, None] for part in rope)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class SpireDrafter(nn.Module):
    """Embedding, `n_layer` blocks, final norm, unembedding, and the feedback weights.

    The rollout that trains it is in `spectrain.models.rollout`.
    """

    FEEDBACK_START = 4.0  # softmax([4, 0, 0]) gives the block's own input 96 % of its memory at the start

    def __init__(self, config: SpireConfig) -> None:
        super().__init__()
        shape = config.shape
        self.config = config
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(SpireBlock(shape) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        if shape.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        if config.feedback:  # w [n_layer, n_layer + 1]; w[i, i] weighs block i's own input
            start = self.FEEDBACK_START * torch.eye(config.n_layer, config.n_layer + 1)
            self.feedback_weight = nn.Parameter(start, requires_grad=config.k > 1)  # with k = 1 no memory is ever read
        # In a list, hidden from nn.Module: a cast to bfloat16 would round the frequencies and rotate far keys wrongly.
        rotary_config = LlamaConfig(
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.n_head,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.max_positions,
            rope_parameters=dict(shape.rope_parameters),
        )
        self._rotary = [LlamaRotaryEmbedding(rotary_config)]
        self.recomputes = False  # training: a block's activations are computed again for the backward pass, not kept

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [R, n, D_head] float32 at positions [R, n]."""
        rotary = self._rotary[0].to(positions.device)
        angles = positions[..., None] * rotary.inv_freq  # [R, n, D_head / 2]
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling

    def memories(self, states: list[Tensor]) -> list[Tensor]:
        """Return the memories m^0 .. m^(n_layer - 1) that the blocks attend to, each [R, n, D].

        The states are x^0 (embedding output) .. x^n_layer of the same tokens, likewise.
        """
        if not self.config.feedback:
            return states[: self.config.n_layer]
        weights = self.feedback_weight.softmax(dim=-1)  # [n_layer, n_layer + 1]
        stacked = torch.stack(states)  # [n_layer + 1, R, n, D]; not a matrix product, which autocast would round
        return list((weights[:, :, None, None, None] * stacked).sum(dim=1))

    def step(
        self, x: Tensor, rope: tuple[Tensor, Tensor], past: list[KeysValues], mask: Tensor, last: bool = False
    ) -> tuple[Tensor, list[KeysValues]]:
        """Run all blocks over tokens that do not see one another, given their embeddings x [R, n, D].

        For `rope` and `mask` see `SpireBlock.forward`. If `last`, no later token will see these tokens, so their
        memories are not computed. Returns the normed final hidden state [R, n, D], and for each block the K/V of the
        tokens' memories.
        """
        states, owns = [x], []
        for block, keys_values in zip(self.blocks, past, strict=True):
            x, own = self.run_block(block, x, rope, keys_values, mask)
            states.append(x)
            owns.append(own)
        if self.config.feedback and not last:
            owns = [block.keys_values(m, rope) for block, m in zip(self.blocks, self.memories(states), strict=True)]
        return self.norm(x), owns

    def run_block(self, block: SpireBlock, *inputs: object) -> tuple[Tensor, KeysValues]:
        """Call `block(*inputs)`. If the drafter `recomputes`, only the inputs are kept for the backward pass."""
        if self.recomputes and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)  # nothing is drawn
        return block(*inputs)
