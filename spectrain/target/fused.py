"""A step of Llama-like blocks through the kernels of `spectrain/kernels/cuda/triton_kernels.py`, which needs Triton.

It computes what `LlamaBlock` computes, of tokens whose keys and values go straight into their slots of a cache. What a
block returns has two parts, x and what is still to be added to it, or None, because the next norm adds them.

Letters: M = B N tokens; the others as in `triton_kernels.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spectrain.kernels.cuda import triton_kernels
from spectrain.target.kv_cache import KVCache
from spectrain.target.llama import LlamaBlock, LlamaDecoder, Rope
from spectrain.target.masks import Nodes


@dataclass(frozen=True)
class Step:
    """Where tokens stand in a cache, and what they see of it. All tensors are contiguous."""

    rope: Rope
    positions: Tensor  # [B, N] int64
    slots: Tensor  # [B, N] int64, where their keys and values go
    nodes: Nodes

    def attend(
        self, block: LlamaBlock, x: Tensor, added: Tensor | None, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the block's input [M, D], the sum of both parts, and what its heads attended to, [M, H E].

        keys, values: [rows, K, S, E] of the cache, to which the tokens' own are written.
        """
        x, joined = _norm_linear(block.input_norm, block.qkv, x, added)
        return x, self.attended(block, joined, keys, values)

    def attended(self, block: LlamaBlock, joined: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the same [M, H E] from the joined projection of queries, keys and values."""
        queries = self._written(block, joined, keys, values)
        return triton_kernels.attend(queries, keys, values, self.nodes.lengths, self.nodes.seen)

    def remember(self, block: LlamaBlock, memories: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write what memories [M, D] project to into their slots: see `LlamaBlock.keys_values`."""
        first, norm, bias = block.shape.n_head * block.shape.head_dim, block.input_norm, block.qkv.bias
        weights = block.qkv.weight[first:], None if bias is None else bias[first:]
        _, joined = triton_kernels.norm_linear(memories, None, (norm.weight, norm.eps), *weights)
        self._written(block, joined, keys, values)

    def _written(self, block: LlamaBlock, joined: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        norms = (block.query_norm.weight, block.key_norm.weight) if block.shape.qk_norm else None
        rope = self.rope.inv_freq, self.rope.scaling
        where = self.positions, self.slots, keys, values
        return triton_kernels.rotate(joined, norms, block.shape.rms_norm_eps, rope, *where)


def after_attention(block: LlamaBlock, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return both parts [M, D] of the block's output."""
    x, added = triton_kernels.linear_add(attended, block.output.weight, block.output.bias, x)
    x, inner = _norm_linear(block.mlp_norm, block.gate_up, x, added, block.shape.hidden_act)
    return triton_kernels.linear_add(inner, block.down.weight, block.down.bias, x)


def normed(norm: nn.RMSNorm, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sum of both parts [M, D], and its norm."""
    return triton_kernels.add_norm(x, added, norm.weight, norm.eps)


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return the outputs [.., O] of inputs x [.., I]."""
    return triton_kernels.linear(x.flatten(0, -2), layer.weight, layer.bias).view(*x.shape[:-1], -1)


def forward(
    decoder: LlamaDecoder,
    tokens: Tensor,
    positions: Tensor,
    nodes: Nodes,
    cache: KVCache,
    capture_layers: Sequence[int] = (),
) -> tuple[Tensor, list[Tensor]]:
    """Run the nodes of trees behind each row's committed tokens. Returns what `LlamaDecoder.forward` does.

    Arguments are those of `LlamaDecoder.forward`, with nodes in place of a mask, and a cache that has its buffers.
    """
    decoder.rope.move(tokens.device)
    slots = nodes.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    nodes = Nodes(nodes.lengths, nodes.seen.contiguous())
    step = Step(decoder.rope, positions.contiguous(), slots, nodes)
    x, added, inputs = decoder.embed_tokens(tokens).to(decoder.norm.weight.dtype).flatten(0, 1), None, []
    for block, keys, values in zip(decoder.blocks, cache.keys, cache.values, strict=True):
        x, attended = step.attend(block, x, added, keys, values)
        inputs.append(x)
        x, added = after_attention(block, x, attended)
    final = normed(decoder.norm, x, added)[1]
    shape = *tokens.shape, -1
    return final.view(shape), [[*inputs, final][layer].view(shape) for layer in capture_layers]


def _norm_linear(
    norm: nn.RMSNorm, layer: nn.Linear, x: Tensor, added: Tensor | None, activation: str | None = None
) -> tuple[Tensor, Tensor]:
    return triton_kernels.norm_linear(x, added, (norm.weight, norm.eps), layer.weight, layer.bias, activation)
