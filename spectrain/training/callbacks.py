"""Callbacks of every training: throughput, progress, the best weights, checkpoints, and a loss that is no number."""

from __future__ import annotations

import logging
import math
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from spectrain.config.training import Train
from spectrain.errors import AllRanksError
from spectrain.stores.signals import SAID, SIGNALS
from spectrain.terminal import stage
from spectrain.training.checkpoints import PARTIAL, BestFolder, CheckpointFolder, remove
from spectrain.training.runs import RunFolder
from spectrain.training.strategies import share_of, whole_state

log = logging.getLogger(__name__)

UNKNOWN_STEPS = 10**9  # of a run whose first steps will say how many it has
EXPECTED_TAU = "eval/tau_expected"
PASSES_OF_HOURS = 20  # over the text, whatever the hours
FEWEST_STEPS = 50  # of which a drafter learns something


def callbacks(
    config: Train, run: RunFolder, peak_tokens_per_s: float | None, ends_s: float | None, n_rows: int
) -> list[Callback]:
    """Return them in the order in which they act: what a checkpoint speaks of is done before it is written."""
    most = PASSES_OF_HOURS * n_rows // (config.data.batch_size * config.trainer.accumulate_grad_batches)
    return [
        *([StepsForHours(ends_s, most, run.note_steps)] if ends_s else []),
        TokensPerSecond(peak_tokens_per_s),
        StopOnBadLoss(run.checkpoints),
        KeepBest(run.best, config.select.every),
        Checkpoints(run.checkpoints, config.checkpoint_s),
        ShowSteps(),
    ]


@dataclass(eq=False)
class TokensPerSecond(Callback):
    """Logs `train/tokens_per_s` of all ranks over about the last 20 batches, and of it `train/mfu`."""

    kept = 0.95  # of the sums, with each batch

    peak_tokens_per_s: float | None = None  # at the peak of the arithmetic of all ranks; None: there is no `train/mfu`
    _last_s: float | None = None
    _tokens: float = 0.0
    _seconds: float = 0.0  # not a mean of rates: of accumulated batches one has the optimizer's time

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: object, batch: Tensor, batch_idx):
        now_s = time.perf_counter()
        if self._last_s is not None:
            self._tokens = self.kept * self._tokens + batch.n_tokens * trainer.world_size
            self._seconds = self.kept * self._seconds + now_s - self._last_s
            rate = self._tokens / self._seconds
            module.log("train/tokens_per_s", rate, prog_bar=True, rank_zero_only=True)
            if self.peak_tokens_per_s:
                module.log("train/mfu", rate / self.peak_tokens_per_s, prog_bar=True, rank_zero_only=True)
        self._last_s = now_s

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._last_s = None  # validation is not training time


@dataclass(eq=False)
class StepsForHours(Callback):
    """Sets how many steps a run has, so that they end in time.

    The time that the first ones take decides, while the learning rate still rises. Halfway it is decided once more,
    because validations and other work on the machine add to it.
    """

    skipped, measured = 2, 8  # steps: the first ones compile

    ends_s: float  # when the steps shall end, by `time.monotonic`
    most: int  # steps, after which it would learn the rows by heart
    note: Callable[[int], None]  # is told the number of steps
    _ended_s: dict[int, float] = field(default_factory=dict)  # step -> when it ended
    _halfway: int | None = None

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: object, batch: Tensor, batch_idx):
        step, now_s = trainer.global_step, time.monotonic()
        if trainer.max_steps == UNKNOWN_STEPS:
            self._ended_s.setdefault(step, now_s)  # several batches may make a step
            if len(self._ended_s) <= self.skipped + self.measured:
                return
            ends = [*self._ended_s.values()][self.skipped :]
            step_s = statistics.median(later - one for one, later in pairwise(ends))
        elif step == self._halfway:
            first, began_s = [*self._ended_s.items()][-1]
            step_s, self._halfway = (now_s - began_s) / (step - first), None
        else:
            return
        fitting = step + max(1, round((self.ends_s - now_s) / step_s))
        steps = trainer.strategy.broadcast(max(step + 1, min(fitting, self.most)))
        if trainer.max_steps == UNKNOWN_STEPS:
            self._halfway = (step + steps) // 2
            if trainer.is_global_zero:
                self._say(steps, step_s, PASSES_OF_HOURS * steps / max(1, self.most))
        trainer.fit_loop.epoch_loop.max_steps = steps
        self.note(steps)

    def _say(self, steps: int, step_s: float, passes: float) -> None:
        log.info("%d steps of %.2f s fit into hours=, %.1f passes over the text", steps, step_s, passes)
        if steps == self.most:
            log.warning(
                "the text is small: %d steps have read it %d times, so no more are made", steps, PASSES_OF_HOURS
            )
        elif steps < FEWEST_STEPS:
            log.warning("%d steps are too few to learn much; give more hours=, or a smaller data.row_tokens=", steps)


class ShowSteps(Callback):
    """Shows how far the training is, and its metrics: on a terminal, or in the log now and then."""

    every_s = 1.0  # reading metrics waits for a GPU

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._shown, self._step, self._read_s, self._note = ExitStack(), trainer.global_step, -math.inf, ""
        total = None if trainer.max_steps == UNKNOWN_STEPS else trainer.max_steps - self._step
        self._advance = self._shown.enter_context(stage("training", total))

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: object, batch: Tensor, batch_idx):
        steps, self._step = trainer.global_step - self._step, trainer.global_step
        if time.monotonic() - self._read_s > self.every_s:
            metrics = (f"{name} {float(value):.4g}" for name, value in trainer.progress_bar_metrics.items())
            self._read_s, self._note = time.monotonic(), "  ".join([f"step {self._step}", *metrics])
        self._advance(steps, self._note)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._shown.close()

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        self._shown.close()


class KeepBest(Callback):
    """Keeps the weights with the highest expected tau, which validation computes on the same rows each time.

    It compares after every `every` validations and after the last step, which Lightning validates too. Without a tau,
    or where `every` is 0, the last weights are kept. Give it before `Checkpoints`, whose last checkpoint says that this
    is done.
    """

    def __init__(self, folder: BestFolder, every: int = 1) -> None:
        self.folder, self.every = folder, every
        self._validations = 0
        self._step = -1  # of the last comparison

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: object, batch: Tensor, batch_idx):
        if trainer.global_step == trainer.max_steps:
            trainer.should_stop = True  # Lightning then validates before it stops

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        self._validations += 1
        expected, is_last = trainer.callback_metrics.get(EXPECTED_TAU), trainer.global_step == trainer.max_steps
        is_compared = expected is not None and self.every and (is_last or self._validations % self.every == 0)
        if is_compared or is_last:  # now, as a run that is killed behind its last checkpoint trains no more
            self._offer(trainer, module, float(expected) if is_compared else None)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self._step != trainer.global_step:
            self._offer(trainer, module, None)

    def _offer(self, trainer: Trainer, module: LightningModule, expected: float | None) -> None:
        """Keep the weights if they are the best. All ranks call it."""
        weights = whole_state(trainer, module)
        if weights is not None:
            self.folder.offer(trainer.global_step, weights, expected)
        self._step = trainer.global_step

    def state_dict(self) -> dict[str, int]:
        return {"validations": self._validations, "step": self._step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._validations, self._step = state["validations"], state["step"]


class Checkpoints(ModelCheckpoint):
    """Saves every `every_s` seconds, after each validation, and at Ctrl-C or SIGTERM, which then exit with 130 or 143.

    Lightning's ModelCheckpoint would save between the batches of an accumulated gradient, and before the validation of
    the same step. A run that resumes there would not go on exactly. This one saves after whole optimizer steps only,
    and after the validation where one follows.
    """

    def __init__(self, folder: CheckpointFolder, every_s: float = 120.0) -> None:
        self.folder = folder
        super().__init__(
            folder.path,
            "step-{step:08d}",
            auto_insert_metric_name=False,
            train_time_interval=timedelta(seconds=min(every_s, timedelta.max.total_seconds() / 2)),
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )
        self._previous: dict[int, object] = {}

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        pass  # ModelCheckpoint's own would warn that the folder of a resumed run is not empty

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        super().on_train_start(trainer, module)
        SIGNALS.anew()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        if SIGNALS.asked_again(number):  # leave at once, the last checkpoint remains
            raise SystemExit(SIGNALS.say(terminated=number == signal.SIGTERM))

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: object, batch: Tensor, batch_idx):
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return
        is_validated = trainer.should_stop or (trainer.fit_loop.total_batch_idx + 1) % trainer.val_check_batch == 0
        if trainer.enable_validation and is_validated:
            self._defer_save_until_validation = True
            return
        if trainer.strategy.reduce_boolean_decision(bool(SIGNALS.first), all=False):
            self._last_time_checked = -math.inf  # due at once
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        if not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Save under another name, and rename. All ranks call it."""
        stop_at_bad_weights(trainer, trainer.lightning_module, self.folder)
        self._log_step(trainer)
        final = Path(filepath)
        partial = final.with_name(PARTIAL)
        if trainer.is_global_zero:
            remove(partial)
        trainer.strategy.barrier("before a checkpoint")
        super()._save_checkpoint(trainer, str(partial))
        if trainer.is_global_zero:
            self.folder.replace(partial, final)
        trainer.strategy.barrier("after a checkpoint")
        self._last_time_checked = time.monotonic()
        if trainer.strategy.reduce_boolean_decision(bool(SIGNALS.first), all=False):
            what, code = SAID[SIGNALS.first or signal.SIGTERM]
            log.info("%s at step %d and saved; run the same command to resume", what, trainer.global_step)
            raise SystemExit(code)

    def _log_step(self, trainer: Trainer) -> None:
        """Log what Lightning logs of this step only after the callbacks, so that no number is lost by a kill."""
        if trainer.validating or trainer.global_step % trainer.log_every_n_steps:
            return
        metrics = {name: float(v) for name, v in trainer.logged_metrics.items() if name.startswith("train/")}
        metrics["epoch"] = trainer.current_epoch
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step - 1)  # the number that Lightning gives the step
            logger.save()

    def state_dict(self) -> dict:
        return {}  # the folder says which checkpoints there are

    def load_state_dict(self, state: dict) -> None:
        pass

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()


class StopOnBadLoss(Callback):
    """Stops all ranks as soon as the loss of one is NaN or infinite; the last checkpoint is left as it was.

    Weights are checked before they are validated or saved, because the loss of their step may still have been finite.
    Give it before `KeepBest`.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: dict, batch: Tensor, batch_idx):
        loss = float(outputs["loss"])
        numbers = f" on rows {', '.join(map(str, batch.numbers))}" if trainer.world_size == 1 else ""
        stop_where(not math.isfinite(loss), trainer, self.folder, f"the loss is NaN or infinite{numbers}")

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            stop_at_bad_weights(trainer, module, self.folder)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        stop_at_bad_weights(trainer, module, self.folder)


def stop_at_bad_weights(trainer: Trainer, module: LightningModule, folder: CheckpointFolder) -> None:
    """Raise an AllRanksError on all ranks where a weight of one is NaN or infinite. All ranks call it."""
    bad = not all(bool(share_of(parameter).detach().isfinite().all()) for parameter in module.parameters())
    stop_where(bad, trainer, folder, "a weight is NaN or infinite")


def stop_where(bad: bool, trainer: Trainer, folder: CheckpointFolder, reason: str) -> None:
    """Raise an AllRanksError on all ranks where `bad` holds on one of them. All ranks call it."""
    if not trainer.strategy.reduce_boolean_decision(bad, all=False):
        return
    checkpoint = trainer.strategy.broadcast(folder.newest())
    last = f"the last good checkpoint is {checkpoint}" if checkpoint else "no checkpoint was written before"
    raise AllRanksError(
        f"{reason} at step {trainer.global_step}, {last}; lower optimizer.lr or raise data.batch_size, and start again"
    )
