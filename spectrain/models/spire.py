"""The SPIRe drafter (Neelam et al. 2025, section 3): sparse KV, pruned initialisation, recurrent feedback.

A stack of the target's own blocks that attends to *memories*. The memory of a context token is the target's activation
(the input of the target block that the draft block was copied from), so context costs K/V projections only. The memory
of a drafted token is a learned mix of the draft's own activations,

    m_t^i = sum_l softmax(w_i)_l x_t^l,   l = 0 (embedding) .. n_layer.

Attention is sparse: the first `sink_tokens` positions and the last `window_tokens` (t - window + 1 .. t), in training
(`spectrain.models.rollout`) as in decoding (`spectrain.methods.spire`); both go through `LlamaBlock.forward`.

Letters: B rows, L row tokens, k rollout depth, c chunks of a row, n queries of a call, P past keys, H heads, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spectrain.decoding.errors import UserError, check_whole
from spectrain.decoding.llama import KeysValues, LlamaBlock, LlamaShape, Rope, grouped


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
        self.blocks = nn.ModuleList(LlamaBlock(shape) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        if shape.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        if config.feedback:  # w [n_layer, n_layer + 1]; w[i, i] weighs block i's own input
            start = self.FEEDBACK_START * torch.eye(config.n_layer, config.n_layer + 1)
            self.feedback_weight = nn.Parameter(start, requires_grad=config.k > 1)  # with k = 1 no memory is ever read
        self.rope = Rope(shape)
        self.recomputes = False  # training: a block's activations are computed again for the backward pass, not kept

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

        For `rope` and `mask` see `LlamaBlock.forward`. If `last`, no later token will see these tokens, so their
        memories are not computed. Returns the normed final hidden state [R, n, D], and for each block the K/V of the
        tokens' memories.
        """
        states, owns, mask = [x], [], grouped(mask, self.config.shape)
        for block, keys_values in zip(self.blocks, past, strict=True):
            x, own = self.run_block(block, x, rope, keys_values, mask)
            states.append(x)
            owns.append(own)
        if self.config.feedback and not last:
            owns = [block.keys_values(m, rope) for block, m in zip(self.blocks, self.memories(states), strict=True)]
        return self.norm(x), owns

    def run_block(self, block: LlamaBlock, *inputs: object) -> tuple[Tensor, KeysValues]:
        """Call `block(*inputs)`. If the drafter `recomputes`, only the inputs are kept for the backward pass."""
        if self.recomputes and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)  # nothing is drawn
        return block(*inputs)
