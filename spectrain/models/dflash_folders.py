"""Folders of DFlash drafters: ours in z-lab's layout, which vLLM and SGLang load, z-lab's, and those of speculators."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from spectrain.errors import UserError
from spectrain.models.artifacts import MANIFEST
from spectrain.models.published import (
    Read,
    blocks_json,
    check_layers,
    in_our_words,
    read_by,
    shape_of_blocks,
    types_of,
    without_embedding,
    write_weights,
)
from spectrain.stores.files import write_json
from spectrain.target.target import TargetModel

BLOCK = "layers.{}."
WINDOWED = "sliding_attention"


def default_layers(n_layer: int, n_states: int) -> tuple[int, ...]:
    """Return the blocks whose inputs z-lab reads of a target of so many blocks: from the second to the third last."""
    outputs = [n_layer // 2]
    if n_states > 1:
        outputs = [round(1 + i * (n_layer - 4) / (n_states - 1)) for i in range(n_states)]
    return tuple(sorted({min(max(1 + output, 0), n_layer - 1) for output in outputs}))


def write(folder: Path, config: Mapping, state: Mapping[str, Tensor], dtype: torch.dtype, ends: Mapping) -> None:
    """Fill an existing folder; for the arguments see `eagle3_folders.write`."""
    shape, n_layer = config["shape"], config["n_layer"]
    has_head = write_weights(folder, state, shape, dtype, BLOCK)
    facts = {
        "architectures": ["DFlashDraftModel"],
        **blocks_json(shape, "qwen3", n_layer),
        **({"draft_vocab_size": config["draft_vocab"] or shape.vocab_size} if has_head else {}),
        "layer_types": ["full_attention"] * n_layer,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **ends,
        "block_size": config["block_tokens"],
        "dflash_config": {  # layers by their outputs
            "mask_token_id": config["mask_token"],
            "target_layer_ids": [layer - 1 for layer in config["target_layers"]],
        },
        "unembedding": config["unembedding"],
    }
    write_json(folder / "config.json", facts)


def read(folder: Path, given: str, target: TargetModel) -> Read:
    """Return the fields of `DFlashConfig`, and the drafter's state, of a folder of ours or of another project.

    For arguments and errors see `eagle3_folders.read`.
    """
    return read_by(_read, folder, given, target)


def _read(
    folder: Path, given: str, facts: dict, tensors: dict[str, Tensor], target: TargetModel, guesses: list[str]
) -> Read:
    is_own, layer = (folder / MANIFEST).is_file(), facts.get("transformer_layer_config", facts)
    own = facts.get("dflash_config") or {}
    _check_variant(facts, layer, own, given)
    if "speculators_model_type" in facts:  # its layers are inputs
        layers, mask_token = facts.get("aux_hidden_state_layer_ids"), facts.get("mask_token_id")
    else:
        outputs, mask_token = own.get("target_layer_ids"), own.get("mask_token_id")
        layers = None if outputs is None else [layer + 1 for layer in outputs]
    if mask_token is None or "block_size" not in facts:
        raise UserError(f"{given} has no mask_token_id or no block_size, which drafting takes; fetch it again")
    n_layer = layer["num_hidden_layers"]
    if layers is None:
        layers = default_layers(target.n_layer, n_layer)
        guesses.append(f"it names no layers, so it reads the inputs of blocks {layers}")
    if list(layers) != sorted(set(layers)):
        raise UserError(f"{given} reads layers that are not in order ({layers}), which is not read; give another one")
    config = {"shape": shape_of_blocks(layer, tensors, target, given, guesses, is_own, BLOCK), "n_layer": n_layer}
    config |= {"target_layers": check_layers(layers, target.n_layer, given)}
    config |= {"block_tokens": int(facts["block_size"]), "mask_token": int(mask_token)}
    tensors = without_embedding(tensors, target)
    state = in_our_words(folder, given, facts, tensors, config["shape"].vocab_size, guesses, BLOCK)
    kept = state.get("kept")
    config |= {"draft_vocab": None if kept is None else len(kept)}
    config |= {"unembedding": "trained" if "lm_head.weight" in state else "target"}
    return config, state


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
