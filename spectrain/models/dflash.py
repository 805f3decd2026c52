"""The DFlash drafter (z-lab, 2026): a few blocks that draft all tokens of a draft at once, from the target's states.

A draft from the root, the token at position a, is one pass over the block

    [e(root), e(mask), .., e(mask)]   at positions a .. a + B - 1,   logits of token a + j: lm_head(norm(h_j)), j = 1 ..

All of these B rows see each other, and the context before a: of a token at t its keys and values in each block are
projected from the feature c_t = hidden_norm(fc(states of `target_layers` at t)) itself, without the block's input norm.
So context costs projections only, and what a row says of its token is independent of what the others draft.

Training does the same from many roots of a row at once; see `drafted`.

Letters: as in docs/design.md, but B, the tokens of a block with its root, here; R roots of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.errors import UserError
from spectrain.models.dflash_folders import read, write
from spectrain.models.drafter_model import FusingDrafter, TargetTables
from spectrain.models.kinds import Kind
from spectrain.models.published import is_dflash, opened
from spectrain.models.root_attention import attend
from spectrain.target.llama import KeysValues, LlamaBlock, LlamaShape, Rope, grouped
from spectrain.target.target import TargetModel

KIND = Kind(
    *("drafter", "DFlash drafter", "spectrain.train +exp=dflash"),
    method="dflash",
    about="A DFlash drafter: one pass drafts a block of tokens, whose rows read the target's states of the text.",
    auto={"dflash": ()},
    recognises=is_dflash,
)


@dataclass(frozen=True)
class DFlashConfig:
    """What a DFlash drafter is."""

    shape: LlamaShape  # of its blocks; width and vocabulary are the target's
    target_layers: tuple[int, ...]  # blocks of the target whose inputs it reads, ascending
    n_layer: int = 5
    block_tokens: int = 16  # B, with the root
    mask_token: int = 0  # stands for each token that is to be drafted
    draft_vocab: int | None = None  # tokens that it can draft; None: all
    unembedding: str = "target"  # target: the target's rows of these tokens; trained: its own

    # What `drafting` asks of every drafter.
    sink_tokens, own_key, previous_state, feedback, own_embedding = 0, True, False, False, False

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", replace(self.shape, tie_embeddings=False))  # its tables are never one
        if self.block_tokens < 2:
            raise UserError(f"block_tokens={self.block_tokens} must be 2 or more: the root, and a token to draft")
        if not 0 <= self.mask_token < self.shape.vocab_size:
            raise UserError(
                f"mask_token={self.mask_token} must be 0..{self.shape.vocab_size - 1}, a token of the target"
            )

    @property
    def k(self) -> int:
        """Draft tokens of a block."""
        return self.block_tokens - 1

    @property
    def window_tokens(self) -> int:
        return self.shape.max_positions

    @property
    def captured_layers(self) -> tuple[int, ...]:
        return self.target_layers

    def sees_itself(self, others: Tensor) -> Tensor:
        return torch.ones_like(others[..., 0])


class DFlashBlock(LlamaBlock):
    """A block whose context is normed already."""

    def normed_memories(self, memories: Tensor) -> Tensor:
        return memories


class DFlashDrafter(FusingDrafter):
    """Fusion of the target's states and its norm, blocks, norm. It reads blocks of tokens, never one after the other.

    Args:
        config: its options.
        target: whose embedding, and unembedding where it has none of its own, it reads; None: it is not run.
    """

    config_type, in_programs = DFlashConfig, False

    def __init__(self, config: DFlashConfig, target: TargetModel | None = None) -> None:
        super().__init__()
        shape = config.shape
        d = shape.hidden_size
        self.config, self.tables = config, TargetTables(target) if target else None
        self.fc = nn.Linear(len(config.target_layers) * d, d, bias=False)
        self.hidden_norm = nn.RMSNorm(d, shape.rms_norm_eps)
        self.blocks = nn.ModuleList(DFlashBlock(shape) for _ in range(config.n_layer))
        self.norm = nn.RMSNorm(d, shape.rms_norm_eps)
        if config.unembedding == "trained":
            self.lm_head = nn.Linear(d, config.draft_vocab or shape.vocab_size, bias=False)
        self.register_buffer("kept", torch.arange(config.draft_vocab) if config.draft_vocab else None)
        self.rope = Rope(shape)

    def read_target(self, captured: Tensor, following: Tensor | None) -> tuple[list[Tensor], Tensor]:
        features = self.fused(captured)
        return [features] * len(self.blocks), features

    def fused(self, captured: Tensor) -> Tensor:
        """Return the features c [.., D] of the target's states [.., C, D] of `target_layers`."""
        return self.hidden_norm(self.fc(captured.to(self.norm.weight.dtype).flatten(-2)))

    def block_of(self, roots: Tensor) -> Tensor:
        """Return the inputs [.., B, D] of the blocks of these roots [..] int64."""
        return self.embed(F.pad(roots[..., None], (0, self.config.k), value=self.config.mask_token))

    def step(
        self, x: Tensor, rope: tuple[Tensor, Tensor], past: Sequence[KeysValues], mask: Tensor
    ) -> tuple[Tensor, list[KeysValues]]:
        mask, owns = grouped(mask, self.config.shape), []
        for block, keys_values in zip(self.blocks, past, strict=True):
            x, own = block(x, rope, keys_values, mask)
            owns.append(own)
        return self.norm(x), owns


def drafted(
    drafter: DFlashDrafter,
    tokens: Tensor,
    captured: Tensor,
    every: int = 1,
    first_root: int = 0,
    starts: Tensor | None = None,
) -> list[Tensor]:
    """Draft a block from every `every`-th token of whole texts, as decoding does it.

    Args:
        drafter: the model.
        tokens: [n, L] int64.
        captured: [n, L, C, D] of the target on them.
        every: distance of two roots.
        first_root: position of the first root.
        starts: [n, L] int64, where in the row each token's document begins; None: a row is one document.

    Returns:
        The inputs [n, R, D] of the unembedding for each drafted token, as `eagle3.unrolled` gives them: of step i they
        predict the tokens at first_root + r * every + i + 1. They mean nothing where `drafted_places` says so.
    """
    n_tokens, size, device = tokens.shape[1], drafter.config.block_tokens, tokens.device
    roots, positions = range(first_root, n_tokens, every), torch.arange(n_tokens + size - 1, device=device)
    places = positions[first_root:n_tokens:every, None] + positions[:size]
    of_text, of_blocks = (drafter.rope(of[None]) for of in (positions[:n_tokens], places.flatten()))
    features = drafter.run(drafter.fused, captured)
    first = (torch.zeros_like(tokens[:1]) if starts is None else starts)[:, first_root::every]
    x = drafter.block_of(tokens[:, first_root::every]).flatten(1, 2)  # [n, R B, D]
    for block in drafter.blocks:
        context = drafter.run(block.keys_values, features, of_text)
        queries, own = drafter.run(block.queries_keys_values, x, of_blocks)
        queries, *own = (one.unflatten(2, (-1, size)) for one in (queries, own.keys, own.values))
        attended = attend(queries, context, [KeysValues(*own)], roots, first, n_tokens)
        x = drafter.run(block.after_attention, x, attended.flatten(1, 2))
    return list(drafter.norm(x).unflatten(1, (-1, size)).unbind(2)[1:])


def save(folder: Path, drafter: DFlashDrafter, dtype: torch.dtype = torch.float32) -> None:
    """Write a drafter into an existing folder, in z-lab's layout; see `dflash_folders`."""
    write(folder, drafter, dtype)


def load(folder: Path, target: TargetModel, option: str = "drafter") -> DFlashDrafter:
    """Open a DFlash drafter, see `published.opened`."""
    return opened("dflash", folder, target, option, read, DFlashDrafter)
