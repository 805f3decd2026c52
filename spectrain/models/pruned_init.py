"""Pruned initialisation: a SPIRe drafter from the target's own modules (SPIRe, section 3.2).

The last `n_layer` blocks and the final norm are copied, as are embedding and unembedding where the drafter has its own.
Inputs other than `tied` are fitted later (`spectrain.models.input_fit`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spectrain.decoding.lean import block_state
from spectrain.decoding.target import TargetModel
from spectrain.errors import UserError
from spectrain.models.spire import SpireConfig, SpireDrafter

NEW = ("pruned", "random")  # what a new drafter starts from


def last_layers(target: PreTrainedModel, n_layer: int) -> tuple[int, ...]:
    """Return the indices of the target's last `n_layer` blocks. Raise UserError if it has fewer."""
    n_target = target.config.num_hidden_layers
    if not 1 <= n_layer <= n_target:
        raise UserError(f"n_layer={n_layer} must be 1..{n_target}, the number of the target's blocks")
    return tuple(range(n_target - n_layer, n_target))


def new_drafter(target: TargetModel, config: SpireConfig, init: str, kept: Tensor | None = None) -> SpireDrafter:
    """Return a new drafter to train, in float32, whose config was made with `shape_of(target.model)`.

    `kept` [K] int64 are the tokens that it can draft, where the config has a `draft_vocab` K; None: the first ones.
    `init` is "pruned", which copies the target's modules, or "random", see `draw_weights`.
    """
    drafter, model = SpireDrafter(config, target), target.model
    if kept is not None:
        drafter.kept.copy_(kept)
    if init == "random":
        drafter.apply(draw_weights)
        return drafter
    if config.input != "projected":
        drafter.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    for block, layer in zip(drafter.blocks, config.target_layers, strict=True):
        block.load_state_dict(block_state(model.model.layers[layer].state_dict()))
    drafter.norm.load_state_dict(model.model.norm.state_dict())
    if config.unembedding == "trained":
        drafter.lm_head.load_state_dict(drafter.tables.unembedding_layer(drafter.kept).state_dict())
    return drafter


def draw_weights(module: nn.Module) -> None:
    """Draw the weights of a layer or table anew, from a normal distribution of std 1 / sqrt(columns of the weight).

    The usual std of 0.02 is far too small for narrow models: in the few steps that a drafter is trained for, they spend
    many on growing.
    """
    if isinstance(module, nn.Linear | nn.Embedding):
        torch.nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
        if getattr(module, "bias", None) is not None:
            torch.nn.init.zeros_(module.bias)
