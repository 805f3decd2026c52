"""A few tokens through a Llama-like decoder on a CPU, as one program."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from spectrain import kernels
from spectrain.kernels import Program
from spectrain.target.kv_cache import KVCache
from spectrain.target.llama import LlamaBlock, LlamaDecoder, LlamaShape, Rope
from spectrain.target.weights import RowsLinear


def can_fuse(module: nn.Module, shape: LlamaShape) -> bool:
    """Whether programs can run the blocks of this module: in float32 on a CPU, and nothing unusual in them."""
    linears = [layer for layer in module.modules() if isinstance(layer, RowsLinear)]
    return (
        bool(linears)
        and all(layer.fits for layer in linears)
        and module.norm.weight.dtype == torch.float32
        and shape.hidden_act == "silu"
        and not shape.layer_types
        and not (shape.output_bias or shape.mlp_bias)
        and module.embed_tokens.weight.dtype in (torch.float32, torch.bfloat16)
        and 2 * shape.n_kv_head * shape.head_dim >= kernels.LEAST_OUTPUTS  # what memories are projected to
        and shape.head_dim % 2 == 0
        and kernels.runner() is not None
    )


class DecoderProgram(Program):
    """A program with the buffers of a Llama-like decoder, and with what its blocks are made of."""

    def __init__(self, shape: LlamaShape, n_rows: int, n_tokens: int) -> None:
        super().__init__(n_rows, n_tokens, shape.rms_norm_eps)
        self.shape = shape
        m, d, e = n_rows * n_tokens, shape.hidden_size, shape.head_dim
        heads = shape.n_head + 2 * shape.n_kv_head
        self.x, self.normed, self.added = self.floats(m, d), self.floats(m, d), self.floats(m, d)
        self.qkv, self.queries = self.floats(m, heads * e), self.floats(m, shape.n_head * e)
        self.attended, self.gate_up = self.floats(m, shape.n_head * e), self.floats(m, 2 * shape.intermediate_size)
        self.inner = self.floats(m, shape.intermediate_size)
        self.rope = self.floats(m, e // 2), self.floats(m, e // 2)  # cos and sin

    def linear(self, x: Tensor, linear: RowsLinear, y: Tensor, first: int = 0) -> int:
        """The outputs of a layer from the row `first` of its weight on."""
        scale = None if linear.scale is None else linear.scale[first:]
        return self.product(x, linear.weight[first:], y, scale)

    def rope_angles(self, rope: Rope) -> int:
        return self.angles(rope.inv_freq.float().contiguous(), rope.scaling, *self.rope)

    def split(self, block: LlamaBlock, keys: Tensor, values: Tensor) -> int:
        """Queries, and in their slots keys and values, from `qkv`."""
        norms = (block.query_norm.weight, block.key_norm.weight) if self.shape.qk_norm else (None, None)
        return self.rotate(self.qkv, block.qkv.bias, norms, self.rope, self.queries, keys, values)

    def remember(self, block: LlamaBlock, normed: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write the keys and values of normed memories into their slots."""
        bias, first = block.qkv.bias, self.shape.n_head * self.shape.head_dim
        self.linear(normed, block.qkv, self.qkv, first)
        norms = None, block.key_norm.weight if self.shape.qk_norm else None
        self.rotate(self.qkv, None if bias is None else bias[first:], norms, self.rope, None, keys, values)

    def mlp(self, block: LlamaBlock) -> None:
        """The block behind its attention; what it adds to x is left in `added`."""
        self.linear(self.attended, block.output, self.added)
        self.norm(self.x, self.added, block.mlp_norm.weight, self.normed)
        self.linear(self.normed, block.gate_up, self.gate_up)
        self.silu(self.gate_up, self.inner)
        self.linear(self.inner, block.down, self.added)


class Forward(DecoderProgram):
    """Forwards of B rows of n nodes of a whole decoder, against one cache. See `DraftTree` for `n_silent`.

    With n silent nodes there are no logits at all.
    """

    def __init__(
        self,
        decoder: LlamaDecoder,
        cache: KVCache,
        n_rows: int,
        n_tokens: int,
        capture_layers: Sequence[int],
        n_silent: int = 0,
    ) -> None:
        super().__init__(decoder.shape, n_rows, n_tokens)
        d, m = decoder.shape.hidden_size, n_rows * n_tokens
        self.chain = self.hold(torch.ones(1, n_tokens, n_tokens, dtype=torch.bool, device="cpu").tril())
        self.capture_layers, self.attends, self.rotates = capture_layers, [], []
        self.captures = [0] * len(capture_layers)  # places of copies
        self.final, self.n_vocabulary = self.floats(m, d), decoder.lm_head.weight.shape[0]
        self.embed(decoder.embed_tokens.weight, self.x)
        self.rope_angles(decoder.rope)
        added = None
        for i, block in enumerate(decoder.blocks):
            self.norm(self.x, added, block.input_norm.weight, self.normed)
            for c, layer in enumerate(capture_layers):
                if layer == i:
                    self.captures[c] = self.goes_on(self.copy(self.x, None))
            self.linear(self.normed, block.qkv, self.qkv)
            own = cache.keys[i], cache.values[i]
            self.rotates.append(self.split(block, *own))
            self.attends.append(self.attend(self.queries, *own, self.attended, self.chain))
            self.mlp(block)
            added = self.added
        self.norm(self.x, added, decoder.norm.weight, self.final)
        for c, layer in enumerate(capture_layers):
            if layer < 0:
                self.captures[c] = self.goes_on(self.copy(self.final, None))
        self.silent = slice(1, 1 + n_silent)
        parts = [slice(0, 1), slice(1 + n_silent, m)] if n_rows == 1 and n_silent else [slice(0, m)]
        if n_silent == n_tokens:
            parts = []
        here = self.final  # of the logits, whose place each call says
        self.logits_at = [(self.linear(here[part], decoder.lm_head, here), part.start) for part in parts]
        if parts:
            self.argmax_at, self.best_at = self.argmax(self.final, self.n_vocabulary, None)
        self.seen = self.first_row = 0
        self.row_bytes = cache.keys[0][0].nbytes
        self.finish()

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        lengths: Tensor,
        ancestors: Tensor | None,
        first_row: int = 0,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
        """Return logits [B, n, V], the likeliest tokens [B, n], captured [B, n, C, D] and final states [B, n, D].

        The last are overwritten by the next call. Logits and likeliest tokens are None where all nodes are silent.
        `first_row` is the place of the B rows in the cache.
        """
        shape = self.n_rows, self.n
        self.tokens.copy_(tokens)
        self.positions.copy_(positions)
        self.slots.copy_(slots)
        self.lengths.copy_(lengths)
        seen, stride = (self.chain, 0) if ancestors is None else (ancestors.contiguous(), self.n * self.n)
        if self.seen != seen.data_ptr():
            self.seen = seen.data_ptr()
            self.point(self.attends, 6, seen)
            self.point(self.attends, 7, stride)
        if self.first_row != first_row:
            moved, self.first_row = (first_row - self.first_row) * self.row_bytes, first_row
            self.shift(self.rotates, slice(3, 5), moved)
            self.shift(self.attends, slice(2, 4), moved)
        logits = best = captured = None
        if self.logits_at:
            logits = torch.empty(*shape, self.n_vocabulary, dtype=torch.float32)
            best = torch.empty(shape, dtype=torch.int64)
            if len(self.logits_at) > 1:
                logits[:, self.silent] = 0
            self.point(self.argmax_at, 1, logits)
            for place, row in self.logits_at:
                self.point(place, 4, logits[0, row:] if row else logits)
            self.point(self.best_at, 4, best)
        if self.captures:
            captured = torch.empty(len(self.capture_layers), *shape, self.x.shape[1], dtype=torch.float32)
            self.point(self.captures, 2, [*map(Tensor.data_ptr, captured)])
            captured = captured.movedim(0, 2)
        self.run()
        return logits, best, captured, self.final.view(*shape, -1)
