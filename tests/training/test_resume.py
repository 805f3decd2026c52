"""An interrupted training goes on exactly: same data, same weights, bit for bit, on one CPU rank."""

from __future__ import annotations

import csv
import logging
import os
import signal
from itertools import pairwise

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import CSVLogger

from spectrain.errors import UserError
from spectrain.training.callbacks import EXPECTED_TAU, Checkpoints, KeepBest, StopOnBadLoss
from spectrain.training.checkpoints import BestFolder, CheckpointFolder, step_of
from spectrain.training.data import RowData, SeededLoader, TokenRows
from spectrain.training.optim import OptimizerSettings
from spectrain.training.runs import RunFolder
from spectrain.training.sums import ValidationSums
from spectrain.training.vanilla import LanguageModelTraining
from tests.conftest import VOCAB_SIZE, tiny_model
from tests.training.trainers import quiet_trainer


class Signal(Callback):
    """Sends this process a signal while a step runs."""

    def __init__(self, step: int, number: int = signal.SIGINT):
        self.step, self.number = step, number

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)


class Losses(Callback):
    def __init__(self):
        self.values = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.values.append(outputs["loss"].item())


def train(
    tmp_path,
    *callbacks,
    optimizer="muon",
    ckpt_path=None,
    max_steps=14,
    accumulate=1,
    logger=False,
    every=50,
    sums=None,
):
    """5 batches an epoch, so that interruptions fall inside and at the end of epochs. Returns weights and losses."""
    torch.manual_seed(0)
    rows = torch.randint(4, VOCAB_SIZE, (11, 16), dtype=torch.int32)
    model = tiny_model("llama", initializer_range=0.02).train().requires_grad_(True)
    module = LanguageModelTraining(model, OptimizerSettings(name=optimizer, lr=1e-2, warmup_steps=2))
    module.sums = sums or module.sums
    losses = Losses()
    trainer = quiet_trainer(
        max_steps=max_steps,
        accumulate_grad_batches=accumulate,
        callbacks=[losses, *callbacks],
        logger=logger,
        log_every_n_steps=every,
        default_root_dir=tmp_path,
        val_check_interval=4,
    )
    data = RowData(TokenRows(rows), TokenRows(rows[:2]), batch_size=2, seed=3)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return {name: p.detach().clone() for name, p in model.named_parameters()}, losses.values


@pytest.mark.parametrize(("step", "optimizer"), [(2, "muon"), (4, "muon"), (7, "adamw")])
def test_interrupted_training_equals_uninterrupted(tmp_path, step, optimizer):
    expected, expected_losses = train(tmp_path, optimizer=optimizer)
    folder = CheckpointFolder(tmp_path / "checkpoints")
    with pytest.raises(SystemExit) as stop:
        train(tmp_path, Signal(step), Checkpoints(folder), optimizer=optimizer)
    assert stop.value.code == 130
    found, losses = train(tmp_path, ckpt_path=folder.newest(), optimizer=optimizer)
    assert losses == expected_losses[step + 1 :]  # the step that was running was finished and saved
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_is_logged_before_a_checkpoint_is_what_is_logged_behind_it(tmp_path):
    """A kill between the two loses nothing."""
    keeps = Checkpoints(CheckpointFolder(tmp_path / "checkpoints"), every_s=0.0)
    train(tmp_path, keeps, logger=CSVLogger(tmp_path, "metrics", 0, flush_logs_every_n_steps=1), every=2)
    with (tmp_path / "metrics/version_0/metrics.csv").open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["train/loss"]]
    before = [row for row, behind in pairwise(rows) if row["step"] == behind["step"]]
    assert len(before) >= 3
    assert all(rows.count(row) == 2 for row in before)


def test_an_accumulated_gradient_is_never_cut(tmp_path):
    """The signal strikes between the two batches of a step; the step is finished before anything is saved."""

    class SignalInside(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 3 and batch_idx % 2 == 0:
                os.kill(os.getpid(), signal.SIGINT)

    expected, _ = train(tmp_path, accumulate=2, max_steps=6)
    with pytest.raises(SystemExit):
        train(tmp_path, SignalInside(), Checkpoints(CheckpointFolder(tmp_path)), accumulate=2, max_steps=6)
    found, losses = train(tmp_path, ckpt_path=CheckpointFolder(tmp_path).newest(), accumulate=2, max_steps=6)
    assert losses
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("number", "what"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_doubled_signal_saves_as_one_does(tmp_path, number, what, caplog):
    """Terminals and torchrun send one Ctrl-C to a process twice."""
    caplog.set_level(logging.INFO)
    with pytest.raises(SystemExit) as stop:
        train(tmp_path, Signal(3, number), Signal(3, number), Checkpoints(CheckpointFolder(tmp_path)))
    assert stop.value.code == 128 + number
    assert CheckpointFolder(tmp_path).newest().name == "step-00000004.ckpt"
    assert f"{what} at step 4 and saved" in caplog.text


class Poison(Callback):
    """Spoils a weight before a step, or after it."""

    def __init__(self, step: int, after: bool = False):
        self.step, self.after = step, after

    def spoil(self, trainer, module):
        if trainer.global_step == self.step:
            module.model.lm_head.weight.data.fill_(float("nan"))

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if not self.after:
            self.spoil(trainer, module)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.after:
            self.spoil(trainer, module)


def test_a_loss_that_is_no_number_stops_the_run_and_names_step_rows_and_checkpoint(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints")
    order = torch.randperm(11, generator=torch.Generator().manual_seed(3 * 1_000_003)).tolist()
    rows = ", ".join(map(str, order[6:8]))  # the fourth batch of two
    with pytest.raises(UserError) as stop:
        train(tmp_path, Poison(3), StopOnBadLoss(folder), Checkpoints(folder, every_s=0.0))
    assert f"the loss is NaN or infinite on rows {rows} at step 4" in str(stop.value)
    assert f"the last good checkpoint is {folder.path}/step-00000003.ckpt" in str(stop.value)
    assert [file.name for file in folder.path.iterdir()] == ["step-00000003.ckpt"]  # nothing was written after it


def test_weights_that_are_no_numbers_are_never_saved(tmp_path):
    """The loss of their step was finite still: only the next one would show it."""
    folder = CheckpointFolder(tmp_path / "checkpoints")
    with pytest.raises(UserError, match="a weight is NaN or infinite at step 3, the last good checkpoint is"):
        train(tmp_path, Poison(3, after=True), StopOnBadLoss(folder), Checkpoints(folder, every_s=0.0))
    assert folder.newest().name == "step-00000002.ckpt"


@pytest.mark.parametrize("max_steps", [4, 14])  # the step before the end, or before a validation
def test_weights_that_are_no_numbers_are_not_kept(tmp_path, max_steps):
    best = BestFolder(tmp_path / "best")
    kept = KeepBest(best)
    stop = StopOnBadLoss(CheckpointFolder(tmp_path / "checkpoints"))
    with pytest.raises(UserError, match="a weight is NaN or infinite at step 4"):
        train(tmp_path, Poison(4, after=True), stop, kept, max_steps=max_steps)
    assert best.read() is None


class Die(Checkpoint):
    """As kill -9 does, at some moment of a step; Lightning calls it after all others as it is a `Checkpoint`."""

    def __init__(self, hook: str, step: int):
        setattr(self, hook, self.die)
        self.step = step

    def die(self, trainer, *_):
        if trainer.global_step == self.step:
            raise MemoryError


class Expecting(ValidationSums):
    """In place of a target: a tau that goes up and down with the loss."""

    def compute(self):
        found = super().compute()
        return found | {EXPECTED_TAU: found["eval/loss"] * 1e3 % 1}


def train_logged(folder, *callbacks):
    """One attempt of a run with a curve, whose weights are compared at validations and at the end."""
    run = RunFolder(folder, {}, "id")
    if not folder.exists():
        run.begin()
    checkpoint = run.checkpoints.newest()
    logger = CSVLogger(folder, name="metrics", version=len(run.attempts))
    run.note_attempt(step_of(checkpoint) if checkpoint else 0, {})
    weights, _ = train(
        folder,
        KeepBest(run.best, every=2),
        Checkpoints(run.checkpoints, 0.0),
        *callbacks,
        logger=logger,
        every=2,
        ckpt_path=checkpoint,
        sums=Expecting(4),
    )
    return run, weights


MOMENTS = [
    ("on_train_batch_start", 7),
    ("on_train_batch_end", 6),  # logged after this hook: the checkpoint has to know
    ("on_train_batch_end", 5),  # the end of an epoch
    ("on_validation_start", 8),  # its step is done, the checkpoint of before is the newest
    ("on_validation_end", 8),  # a checkpoint was just written
    ("on_train_batch_start", 8),
    ("on_train_end", 14),  # after the last checkpoint
    ("on_train_batch_start", 0),  # before the first
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return train_logged(tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize(("hook", "step"), MOMENTS)
def test_the_curve_of_a_killed_run_is_that_of_an_uninterrupted_one(tmp_path, uninterrupted, hook, step):
    whole, expected = uninterrupted
    assert list(whole.curve()) == [1, 3, 5, 7, 9, 11, 13]  # every second step, counted from 0
    assert whole.curve()[7].keys() == {"train/loss", "train/lr", "eval/loss", EXPECTED_TAU}
    assert whole.best.read().step in (8, 14)
    with pytest.raises(MemoryError):
        train_logged(tmp_path / "run", Die(hook, step))
    cut, found = train_logged(tmp_path / "run")
    assert cut.curve() == whole.curve()
    assert len(cut.attempts) == 2
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert cut.best.read() == whole.best.read()
    kept = [run.best.weights() for run in (cut, whole)]
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[1])


def test_every_row_is_seen_once_an_epoch_and_ranks_share_a_batch():
    whole = SeededLoader(list, 12, 4, seed=1)
    ranks = [SeededLoader(list, 12, 4, seed=1, share=(r, 2)) for r in range(2)]
    for _ in range(2):
        batches = list(whole)
        assert sorted(sum(batches, [])) == list(range(12))
        halves = [list(rank) for rank in ranks]
        assert [sorted(a + b) for a, b in zip(*halves, strict=True)] == [sorted(b) for b in batches]
