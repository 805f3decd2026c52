"""Folders of DFlash drafters: ours in z-lab's layout, which vLLM and SGLang load, z-lab's, and those of speculators."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from spectrain.errors import UserError
from spectrain.models import published
from spectrain.models.drafter_model import DrafterModel
from spectrain.models.published import Published, Read, blocks_json, types_of

BLOCK = "layers.{}."
WINDOWED = "sliding_attention"


def default_layers(n_layer: int, n_states: int) -> tuple[int, ...]:
    """Return the blocks whose inputs z-lab reads of a target of so many blocks: from the second to the third last."""
    outputs = [n_layer // 2]
    if n_states > 1:
        outputs = [round(1 + i * (n_layer - 4) / (n_states - 1)) for i in range(n_states)]
    return tuple(sorted({min(max(1 + output, 0), n_layer - 1) for output in outputs}))


def write(folder: Path, drafter: DrafterModel, dtype: torch.dtype) -> None:
    """Fill an existing folder, see `published.write`."""
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
