"""Tiny DFlash drafters; see `tiny`."""

from __future__ import annotations

from pathlib import Path

from spectrain.models.dflash import DFlashConfig, DFlashDrafter, drafted
from spectrain.models.drafter_model import plain_shape
from spectrain.target import TargetModel
from spectrain.target.lean import shape_of
from tests.models.tiny import exported, fitted, randomised


def new_dflash(target: TargetModel, seed: int = 1, **options) -> DFlashDrafter:
    """A random drafter that reads the inputs of all blocks of a tiny target."""
    shape = plain_shape(shape_of(target.model), qk_norm=True)
    options = {"n_layer": 2, "block_tokens": 4, "mask_token": shape.vocab_size - 1} | options
    config = DFlashConfig(shape, tuple(range(target.config.num_hidden_layers)), **options)
    return randomised(DFlashDrafter(config, target), seed)


def fitted_dflash(target: TargetModel, **options) -> DFlashDrafter:
    """The unembedding is fitted to the first token of each block."""
    new = new_dflash(target, unembedding="trained", **options)
    return fitted(new, target, lambda *texts: drafted(*texts)[0])


def export_dflash(folder: Path, target: TargetModel, drafter: DFlashDrafter | None = None, **options) -> Path:
    return exported("dflash", folder, target, drafter or fitted_dflash(target, **options))
