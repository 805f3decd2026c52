"""What every training shows and guards: throughput, progress without a terminal, interruption, a bad loss."""

from __future__ import annotations

import logging
import signal
import time

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor

from spectrain.errors import UserError
from spectrain.training.checkpoints import CheckpointFolder

log = logging.getLogger(__name__)


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


class ProgressBar(TQDMProgressBar):
    """Lightning's progress bar with time left and, by their short names, the metrics."""

    def get_metrics(self, trainer: Trainer, module: LightningModule) -> dict[str, object]:
        metrics = super().get_metrics(trainer, module)
        return {name.removeprefix("train/"): value for name, value in metrics.items() if name != "v_num"}


class ProgressLines(Callback):
    """A line every `every_steps` steps with step, metrics and time left: the progress bar of a log file."""

    def __init__(self, every_steps: int = 25) -> None:
        self.every_steps = every_steps
        self._start: tuple[int, float] | None = None

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: object, batch: Tensor, batch_idx):
        step, now_s = trainer.global_step, time.perf_counter()
        if self._start is None:
            self._start = (step, now_s)
        elif step % self.every_steps == 0 and step > self._start[0]:
            left_s = (now_s - self._start[1]) / (step - self._start[0]) * (trainer.max_steps - step)
            metrics = "  ".join(f"{k} {float(v):.5g}" for k, v in trainer.progress_bar_metrics.items())
            log.info("step %d/%d  %s  %.0f s left", step, trainer.max_steps, metrics, left_s)


class Checkpoints(Callback):
    """Saves every `every_s` seconds, at the end, and at Ctrl-C or SIGTERM, which then exit with 130 or 143.

    Only ever after a whole optimizer step: where the signal struck, or between the batches of an accumulated gradient,
    a checkpoint would not go on exactly.
    """

    def __init__(self, folder: CheckpointFolder, every_s: float = 120.0) -> None:
        self.folder, self.every_s = folder, every_s
        self._saved_s = time.monotonic()
        self._received = 0
        self._step_before = 0
        self._previous: dict[int, object] = {}

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        if self._received:  # asked twice: leave at once, the last checkpoint remains
            raise SystemExit(128 + number)
        self._received = number

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Tensor, batch_idx: int) -> None:
        self._step_before = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: object, batch: Tensor, batch_idx):
        if trainer.global_step == self._step_before:
            return
        due = self._received or time.monotonic() - self._saved_s > self.every_s
        if not trainer.strategy.reduce_boolean_decision(bool(due), all=False):
            return
        self._save(trainer)
        if trainer.strategy.reduce_boolean_decision(bool(self._received), all=False):
            log.info("interrupted at step %d and saved; the same command goes on from here", trainer.global_step)
            raise SystemExit(128 + (self._received or signal.SIGTERM))

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        self.folder.save(trainer)
        self._saved_s = time.monotonic()

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()


class StopOnBadLoss(Callback):
    """Stops the run, naming the step, as soon as the loss is NaN or infinite; the last checkpoint is left as it was."""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: dict, batch: Tensor, batch_idx):
        if not torch.isfinite(outputs["loss"]):
            raise UserError(
                f"the loss became {outputs['loss'].item()} at step {trainer.global_step}; lower optimizer.lr or "
                "data.batch_size and start again: the last checkpoint is from before this step"
            )
