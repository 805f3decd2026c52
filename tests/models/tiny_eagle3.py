"""Tiny EAGLE-3 drafters; see `tiny`."""

from __future__ import annotations

from pathlib import Path

from spectrain.models.drafter_model import plain_shape
from spectrain.models.eagle3 import Eagle3Config, Eagle3Drafter, unrolled
from spectrain.target import TargetModel
from spectrain.target.lean import shape_of
from tests.models.tiny import exported, fitted, randomised


def new_eagle3(target: TargetModel, seed: int = 1, **options) -> Eagle3Drafter:
    """A random drafter that reads the inputs of all blocks of a tiny target."""
    layers = tuple(range(target.config.num_hidden_layers))
    return randomised(Eagle3Drafter(Eagle3Config(plain_shape(shape_of(target.model)), layers, **options), target), seed)


def fitted_eagle3(target: TargetModel, **options) -> Eagle3Drafter:
    return fitted(new_eagle3(target, **options), target, lambda *texts: unrolled(*texts, 1)[0])


def export_eagle3(folder: Path, target: TargetModel, **options) -> Path:
    return exported("eagle3", folder, target, fitted_eagle3(target, **options))
