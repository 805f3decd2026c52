"""Trains toys, each position from the target's final state before it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from spectrain.methods.toy import ToyMethod
from spectrain.models.toy import ToyConfig, ToyDrafter, load, save
from torch import Tensor

from spectrain.decoding import Drafter
from spectrain.target.lean import shape_of
from spectrain.training.checkpoints import load_weights
from spectrain.training.data import RowBatch, Rows
from spectrain.training.drafters import DrafterExperiment, DrafterTraining, drafted_tokens
from spectrain.training.losses import LossSettings


class ToyTraining(DrafterTraining):
    def states(self, batch: RowBatch, captured: Tensor, first_root: int) -> Tensor:
        before = F.pad(captured[:, :-1, -1], (0, 0, 1, 0))
        return self.drafter.norm(self.drafter.previous(before.to(self.drafter.norm.weight.dtype)))


class ToyExperiment(DrafterExperiment):
    exports = "toy"

    def block_layers(self) -> tuple[int, ...]:
        return ()

    def empty(self, kept: Tensor | None) -> ToyDrafter:
        config = ToyConfig(shape_of(self.target.model), self.own.k, None if kept is None else len(kept))
        drafter = ToyDrafter(config, self.target)
        if kept is not None:
            drafter.kept = kept
        return drafter

    def new(self, rows: Rows) -> ToyDrafter:
        drafter = self.empty(drafted_tokens(self.own.draft_vocab, rows, self.target))
        torch.nn.init.eye_(drafter.previous.weight)
        return drafter

    def trained_before(self) -> ToyDrafter:
        return load(Path(self.own.init), self.target, "init")

    def training(self, drafter: ToyDrafter, is_new: bool) -> ToyTraining:
        return ToyTraining(drafter, self.target, LossSettings(), self.own.optimizer)

    def model(self, weights: dict[str, Tensor]) -> ToyDrafter:
        return load_weights(self.empty(weights.get("drafter.kept")), weights, "drafter")

    def drafter(self, weights: dict[str, Tensor]) -> Drafter:
        return ToyMethod(self.model(weights), draft_dtype="auto")

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        save(folder, self.model(weights))
