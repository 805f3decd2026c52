"""Pruned initialisation: a SPIRe drafter from the target's own modules (SPIRe, section 3.2).

Embedding, the last `n_layer` blocks, final norm and unembedding are copied.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from spectrain.decoding.errors import UserError, check_whole
from spectrain.decoding.lean import block_state
from spectrain.models.spire import SpireConfig, SpireDrafter


def last_layers(target: PreTrainedModel, n_layer: int) -> tuple[int, ...]:
    """Return the indices of the target's last `n_layer` blocks. Raise UserError if it has fewer."""
    n_target = target.config.num_hidden_layers
    check_whole("n_layer", n_layer, 1)
    if n_layer > n_target:
        raise UserError(f"n_layer={n_layer} must be 1..{n_target}, the number of the target's blocks")
    return tuple(range(n_target - n_layer, n_target))


def new_drafter(target: PreTrainedModel, config: SpireConfig, init: str) -> SpireDrafter:
    """Return a new drafter to train, in float32, whose config was made with `shape_of(target)`.

    `init` is "pruned", which copies the target's modules, or "random", which draws weights with the std of the target's
    family (0.02).
    """
    if init not in ("pruned", "random"):
        raise UserError(f"init={init} is unknown; choose pruned or random")
    drafter = SpireDrafter(config)
    if init == "random":
        drafter.apply(lambda module: _draw(module, target.config.initializer_range))
        return drafter
    drafter.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    for block, layer in zip(drafter.blocks, config.target_layers, strict=True):
        block.load_state_dict(block_state(target.model.layers[layer].state_dict()))
    drafter.norm.load_state_dict(target.model.norm.state_dict())
    drafter.lm_head.load_state_dict(target.get_output_embeddings().state_dict())
    return drafter


def _draw(module: nn.Module, std: float) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        torch.nn.init.normal_(module.weight, std=std)
        if getattr(module, "bias", None) is not None:
            torch.nn.init.zeros_(module.bias)
