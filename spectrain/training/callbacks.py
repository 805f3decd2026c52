"""What every training shows and guards: throughput and a stop at the first loss that is not a number."""

from __future__ import annotations

import time

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from spectrain.errors import UserError


class TokensPerSecond(Callback):
    """Logs `train/tokens_per_s`, over all ranks, smoothed over about 20 batches."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._smoothed: float | None = None

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: object, batch: Tensor, batch_idx):
        now_s = time.perf_counter()
        if self._last_s is not None:
            rate = batch.numel() * trainer.world_size / (now_s - self._last_s)
            self._smoothed = rate if self._smoothed is None else 0.95 * self._smoothed + 0.05 * rate
            module.log("train/tokens_per_s", self._smoothed, prog_bar=True, rank_zero_only=True)
        self._last_s = now_s

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._last_s = None  # validation is not training time


class StopOnBadLoss(Callback):
    """Stops the run, naming the step, as soon as the loss is NaN or infinite; the last checkpoint is left as it was."""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: dict, batch: Tensor, batch_idx):
        if not torch.isfinite(outputs["loss"]):
            raise UserError(
                f"the loss became {outputs['loss'].item()} at step {trainer.global_step}; lower optimizer.lr or "
                "data.batch_size and start again: the last checkpoint is from before this step"
            )
