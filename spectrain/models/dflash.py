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

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.errors import UserError
from spectrain.models import published
from spectrain.models.drafter_model import FusingConfig, FusingDrafter
from spectrain.models.kinds import Kind
from spectrain.models.published import Published, Read, blocks_json, is_dflash, opened, types_of
from spectrain.models.root_attention import attend
from spectrain.target.llama import KeysValues, LlamaBlock
from spectrain.target.target import TargetModel

BLOCK = "layers.{}."
WINDOWED = "sliding_attention"

KIND = Kind(
    *("drafter", "DFlash drafter", "spectrain.train +exp=dflash"),
    method="dflash",
    about="A DFlash drafter: one pass drafts a block of tokens, whose rows read the target's states of the text.",
    auto={"dflash": ()},
    engine="dflash",
    recognises=is_dflash,
)


@dataclass(frozen=True)
class DFlashConfig(FusingConfig):
    """What a DFlash drafter is."""

    n_layer: int = 5
    block_tokens: int = 16  # B, with the root
    mask_token: int = 0  # stands for each token that is to be drafted
    draft_vocab: int | None = None  # tokens that it can draft; None: all
    unembedding: str = "target"  # target: the target's rows of these tokens; trained: its own

    own_embedding = False  # the target's is read

    def __post_init__(self) -> None:
        super().__post_init__()
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


class DFlashBlock(LlamaBlock):
    """A block whose context is normed already."""

    def normed_memories(self, memories: Tensor) -> Tensor:
        return memories


class DFlashDrafter(FusingDrafter):
    """Fusion of the target's states, norm, blocks, norm. It reads blocks of tokens, never one after the other."""

    config_type, in_programs = DFlashConfig, False

    def __init__(self, config: DFlashConfig, target: TargetModel | None = None) -> None:
        super().__init__()
        shape, d = config.shape, config.shape.hidden_size
        self.fc = nn.Linear(len(config.target_layers) * d, d, bias=False)
        self.hidden_norm = nn.RMSNorm(d, shape.rms_norm_eps)
        self.blocks = nn.ModuleList(DFlashBlock(shape) for _ in range(config.n_layer))
        self.add_output(config, target)

    def read_target(self, captured: Tensor, following: Tensor | None) -> tuple[list[Tensor], Tensor]:
        features = self.fused(captured)
        return [features] * len(self.blocks), features

    def fused(self, captured: Tensor) -> Tensor:
        """Return the features c [.., D] of the target's states [.., C, D] of `target_layers`."""
        return self.hidden_norm(self.fc(captured.to(self.norm.weight.dtype).flatten(-2)))

    def block_of(self, roots: Tensor) -> Tensor:
        """Return the inputs [.., B, D] of the blocks of these roots [..] int64."""
        return self.embed(F.pad(roots[..., None], (0, self.config.k), value=self.config.mask_token))


def drafted(
    drafter: DFlashDrafter,
    tokens: Tensor,
    captured: Tensor,
    every: int = 1,
    first_root: int = 0,
    starts: Tensor | None = None,
) -> list[Tensor]:
    """Draft a block from every `every`-th token of whole texts, as decoding does it.

    For the arguments see `eagle3.unrolled`. Return the inputs [n, R, D] of the unembedding for each drafted token, as
    that does: of step i they predict the tokens at first_root + r * every + i + 1. They mean nothing where
    `drafted_places` says so.
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


def load(folder: Path, target: TargetModel, option: str = "drafter") -> DFlashDrafter:
    """Open a DFlash drafter, see `published.opened`."""
    return opened("dflash", folder, target, option, read, DFlashDrafter)


def default_layers(n_layer: int, n_states: int) -> tuple[int, ...]:
    """Return the blocks whose inputs z-lab reads of a target of so many blocks: from the second to the third last."""
    outputs = [n_layer // 2]
    if n_states > 1:
        outputs = [round(1 + i * (n_layer - 4) / (n_states - 1)) for i in range(n_states)]
    return tuple(sorted({min(max(1 + output, 0), n_layer - 1) for output in outputs}))


def save(folder: Path, drafter: DFlashDrafter, dtype: torch.dtype = torch.float32) -> None:
    """Write a drafter into an existing folder, in z-lab's layout, which vLLM and SGLang load; see `published.write`."""
    config = drafter.config
    own = {
        "layer_types": ["full_attention"] * config.n_layer,
        "block_size": config.block_tokens,
        "dflash_config": {  # layers by their outputs
            "mask_token_id": config.mask_token,
            "target_layer_ids": [layer - 1 for layer in config.target_layers],
        },
    }
    blocks = blocks_json("DFlashDraftModel", config.shape, "qwen3", config.n_layer)
    published.write(folder, drafter, dtype, BLOCK, blocks, own)


def read(found: Published) -> Read:
    """Return the fields of `DFlashConfig`, and the drafter's state."""
    facts, layer, given = found.facts, found.layer, found.given
    own = facts.get("dflash_config") or {}
    _check_variant(facts, layer, own, given)
    if "speculators_model_type" in facts:  # its layers are inputs
        layers, mask_token = facts.get("aux_hidden_state_layer_ids"), facts.get("mask_token_id")
    else:
        outputs, mask_token = own.get("target_layer_ids"), own.get("mask_token_id")
        layers = None if outputs is None else [layer + 1 for layer in outputs]
    if mask_token is None or "block_size" not in facts:
        raise UserError(f"{given} has no mask_token_id or no block_size, which drafting takes; fetch it again")
    if layers is not None and list(layers) != sorted(set(layers)):
        raise UserError(f"{given} reads layers that are not in order ({layers}), which is not read; give another one")
    shape, n_layer = found.shape(BLOCK), layer["num_hidden_layers"]
    fields = {"shape": shape, "n_layer": n_layer, "block_tokens": int(facts["block_size"])}
    fields |= {"mask_token": int(mask_token)}
    fields["target_layers"] = found.layers(layers, default_layers(found.target.n_layer, n_layer))
    vocabulary, state = found.without_embedding().state(BLOCK, shape.vocab_size)
    return fields | vocabulary, state


def _check_variant(facts: Mapping, layer: Mapping, own: Mapping, given: str) -> None:
    """Raise UserError where a folder's drafter computes something else than the plain DFlash."""
    said, is_causal = types_of(facts), layer.get("is_causal", own.get("causal"))
    variants = {
        "of DSpark": "dspark" in said,
        "of DFlash 2": "dflash2" in said,
        "whose blocks are causal": is_causal,
        "with sliding windows": own.get("use_swa") or WINDOWED in (layer.get("layer_types") or []),
        "with sinks or scaled values in its attention": own.get("attention_sink_bias")
        or own.get("attention_value_scale"),
        "that drafts from its anchor, too": facts.get("sample_from_anchor") or own.get("sample_from_anchor"),
    }
    if found := next((name for name, is_so in variants.items() if is_so), None):
        raise UserError(f"{given} is a drafter {found}, which is not read; give a plain one of DFlash")
