"""Callbacks of every training: throughput, progress, the best weights, checkpoints at interruption, a bad loss."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable
from itertools import islice

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from torch import Tensor

from spectrain.errors import AllRanksError
from spectrain.stores.signals import SAID, SIGNALS, FirstSignal
from spectrain.training.checkpoints import BestFolder, CheckpointFolder
from spectrain.training.strategies import whole_state

log = logging.getLogger(__name__)

TAU_METRICS = ("eval/tau", "eval/tau_low", "eval/tau_high")  # with its 95 % interval over contexts


class TokensPerSecond(Callback):
    """Logs `train/tokens_per_s` of all ranks, and `train/wait_share`, the share of time that rank zero waits for data.

    Both are means over about the last 20 batches.
    """

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None  # time, and seconds waited by the loader's clock
        self._means: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: object, batch: Tensor, batch_idx):
        now_s, waited_s = time.perf_counter(), getattr(trainer.train_dataloader, "waited_s", 0.0)
        if self._last is not None:
            elapsed_s = now_s - self._last[0]
            values = {"tokens_per_s": batch.n_tokens * trainer.world_size / elapsed_s}
            values["wait_share"] = (waited_s - self._last[1]) / elapsed_s
            for name, value in values.items():
                self._means[name] = 0.95 * self._means.get(name, value) + 0.05 * value
                module.log(f"train/{name}", self._means[name], prog_bar=name == "tokens_per_s", rank_zero_only=True)
        self._last = now_s, waited_s

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._last = None  # validation is not training time


class ProgressBar(TQDMProgressBar):
    """Lightning's progress bar with time left and, by their short names, the metrics."""

    def get_metrics(self, trainer: Trainer, module: LightningModule) -> dict[str, object]:
        metrics = super().get_metrics(trainer, module)
        return {name.removeprefix("train/"): value for name, value in metrics.items() if name != "v_num"}


class ProgressLines(Callback):
    """Logs a line every `every_steps` steps with step, metrics and time left: the progress bar of a log file."""

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


class KeepBest(Callback):
    """Measures tau after every `every` validations and at the end, logs it as `eval/tau`, and keeps the best weights.

    The best are those with the highest `eval/tau_expected`: it is computed on the same held-out rows each time, without
    a draw, where a tau of a few contexts varies by more than two validations differ. Rank zero decodes, the others
    wait. Give it before `Checkpoints`, whose last checkpoint says that this is done.

    Args:
        folder: where the weights are kept.
        measure: tau of whole weights in the real loop, with the bounds of its 95 % interval; called on rank zero only.
            None: the last weights are kept.
        every: validations between two measurements; 0: never, the last weights are kept.
    """

    def __init__(
        self,
        folder: BestFolder,
        measure: Callable[[dict[str, Tensor]], tuple[float, float, float]] | None = None,
        every: int = 1,
    ) -> None:
        self.folder, self.measure, self.every = folder, measure if every else None, every
        self._validations = 0
        self._step = -1  # of the last measurement

    def on_validation_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        self._validations += 1
        if self.measure is None or self._validations % self.every:
            return
        tau = self._offer(trainer, module, module.expected_tau())
        for name, value in zip(TAU_METRICS, tau, strict=True):
            module.log(name, value, sync_dist=True, prog_bar=name == "eval/tau")  # equal on all ranks

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self._step == trainer.global_step:  # its last validation has just measured it
            return
        tau = self._offer(trainer, module, _validated(trainer, module) if self.measure else None)
        for logger in trainer.loggers if tau else ():
            metrics = dict(zip(TAU_METRICS, tau, strict=True))
            logger.log_metrics(metrics, step=trainer.global_step - 1)  # the number that Lightning gives the step
            logger.save()

    def _offer(
        self, trainer: Trainer, module: LightningModule, expected: float | None
    ) -> tuple[float, float, float] | None:
        """Measure the weights and keep them if they are the best. All ranks call it."""
        weights, tau = whole_state(trainer, module), None
        if weights is not None:
            tau = self.measure(weights) if self.measure else None
            kept = self.folder.offer(trainer.global_step, weights, tau, expected)
            if tau:
                best = ", the best so far" if kept else ""
                log.info("step %d: tau %.3f [%.3f, %.3f]%s", trainer.global_step, *tau, best)
        self._step = trainer.global_step
        return trainer.strategy.broadcast(tau)

    def state_dict(self) -> dict[str, int]:
        return {"validations": self._validations, "step": self._step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._validations, self._step = state["validations"], state["step"]


def _validated(trainer: Trainer, module: LightningModule) -> float | None:
    """Validate the last weights, which are whole until the training ends. Return the tau to expect, if it is known."""
    if not trainer.enable_validation:
        return None
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    module.on_validation_epoch_start()
    (n_batches,) = trainer.num_val_batches  # infinite for a loader without a length
    batches = trainer.datamodule.val_dataloader()
    with torch.no_grad():
        for i, batch in enumerate(batches if n_batches == float("inf") else islice(batches, int(n_batches))):
            trainer.strategy.validation_step(trainer.strategy.batch_to_device(batch), i)
    for part, was_training in modes:
        part.training = was_training
    return module.expected_tau()


class Checkpoints(Callback):
    """Saves every `every_s` seconds, at the end, and at Ctrl-C or SIGTERM, which then exit with 130 or 143.

    It saves only after a whole optimizer step: a checkpoint from where the signal struck, or from between the batches
    of an accumulated gradient, could not be resumed exactly. If a validation follows the step, it saves after that,
    because Lightning would not make up for it. What Lightning logs of the step only later stands in the checkpoint.
    """

    def __init__(self, folder: CheckpointFolder, every_s: float = 120.0) -> None:
        self.folder, self.every_s = folder, every_s
        self._saved_s = time.monotonic()
        self._asked = FirstSignal()
        self._step_before = 0
        self._waits = False  # for the validation
        self._unlogged: dict[str, float] = {}
        self._previous: dict[int, object] = {}

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        if self._unlogged:  # at the step that the checkpoint was written after
            for logger in trainer.loggers:
                logger.log_metrics(dict(self._unlogged), step=trainer.global_step - 1)
                logger.save()
            self._unlogged = {}

    def _note(self, number: int, frame: object) -> None:
        if self._asked.asked_again(number):  # leave at once, the last checkpoint remains
            raise SystemExit(SIGNALS.say(terminated=number == signal.SIGTERM))

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Tensor, batch_idx: int) -> None:
        self._step_before = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: object, batch: Tensor, batch_idx):
        if trainer.global_step in (self._step_before, trainer.max_steps):  # no whole step; on_train_end follows at once
            return
        due = self._asked.number or time.monotonic() - self._saved_s > self.every_s
        if not trainer.strategy.reduce_boolean_decision(bool(due), all=False):
            return
        if trainer.enable_validation and (trainer.fit_loop.total_batch_idx + 1) % trainer.val_check_batch == 0:
            self._waits = True
            return
        if trainer.global_step % trainer.log_every_n_steps == 0:  # Lightning logs these only after this hook
            logged = {name: float(v) for name, v in trainer.logged_metrics.items() if name.startswith("train/")}
            self._unlogged = {**logged, "epoch": trainer.current_epoch}
        self._save(trainer, module)

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self._waits:
            self._waits = False
            self._save(trainer, module)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._save(trainer, module)

    def _save(self, trainer: Trainer, module: LightningModule) -> None:
        stop_at_bad_weights(trainer, module, self.folder)
        self.folder.save(trainer)
        self._unlogged = {}
        self._saved_s = time.monotonic()
        if trainer.strategy.reduce_boolean_decision(bool(self._asked.number), all=False):
            what, code = SAID[self._asked.number or signal.SIGTERM]
            log.info("%s at step %d and saved; run the same command to resume", what, trainer.global_step)
            raise SystemExit(code)

    def state_dict(self) -> dict[str, dict[str, float]]:
        return {"unlogged": self._unlogged}

    def load_state_dict(self, state: dict[str, dict[str, float]]) -> None:
        self._unlogged = state["unlogged"]

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()


class StopOnBadLoss(Callback):
    """Stops all ranks as soon as the loss of one is NaN or infinite; the last checkpoint is left as it was.

    Weights are checked before they are measured, because the loss of their step may still have been finite. Give it
    before `KeepBest`.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: dict, batch: Tensor, batch_idx):
        loss = float(outputs["loss"])
        rows = ", ".join(map(str, batch.numbers))
        stop_where(not math.isfinite(loss), trainer, self.folder, f"the loss became {loss} on rows {rows}")

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            stop_at_bad_weights(trainer, module, self.folder)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        stop_at_bad_weights(trainer, module, self.folder)


def stop_at_bad_weights(trainer: Trainer, module: LightningModule, folder: CheckpointFolder) -> None:
    """Raise an AllRanksError on all ranks where a weight of one is NaN or infinite. All ranks call it."""
    parts = (getattr(parameter, "ds_tensor", parameter) for parameter in module.parameters())  # ZeRO-3: its shard
    bad = not all(bool(part.detach().isfinite().all()) for part in parts)
    stop_where(bad, trainer, folder, "the weights are no numbers any more")


def stop_where(bad: bool, trainer: Trainer, folder: CheckpointFolder, reason: str) -> None:
    """Raise an AllRanksError on all ranks where `bad` holds on one of them. All ranks call it."""
    if not trainer.strategy.reduce_boolean_decision(bad, all=False):
        return
    reasons: list[str | None] = [reason if bad else None]
    if trainer.world_size > 1:
        reasons = [None] * trainer.world_size
        torch.distributed.all_gather_object(reasons, reason if bad else None)
    rank, said = next((rank, text) for rank, text in enumerate(reasons) if text)
    where = f" of rank {rank}" if trainer.world_size > 1 else ""
    checkpoint = trainer.strategy.broadcast(folder.newest())
    last = f"the last good checkpoint is {checkpoint}" if checkpoint else "no checkpoint was written before"
    raise AllRanksError(
        f"{said}{where} at step {trainer.global_step}, {last}; lower optimizer.lr or raise data.batch_size, and start "
        "again"
    )
