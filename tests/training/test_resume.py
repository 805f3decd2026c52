"""An interrupted training goes on exactly: same data, same weights, bit for bit, on one CPU rank."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from lightning import Callback, Trainer

from spectrain.errors import UserError
from spectrain.training.callbacks import Checkpoints, StopOnBadLoss
from spectrain.training.checkpoints import CheckpointFolder
from spectrain.training.data import PackedRowsData, SeededBatches
from spectrain.training.language_model import LanguageModelTraining
from spectrain.training.optim import OptimizerSettings
from tests.conftest import VOCAB_SIZE, tiny_model


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


def train(tmp_path, *callbacks, optimizer="muon", ckpt_path=None, max_steps=14, accumulate=1):
    """5 batches an epoch, so that interruptions fall inside and at the end of epochs. Returns weights and losses."""
    torch.manual_seed(0)
    rows = torch.randint(4, VOCAB_SIZE, (11, 16), dtype=torch.int32)
    model = tiny_model("llama", initializer_range=0.02).train().requires_grad_(True)
    module = LanguageModelTraining(model, OptimizerSettings(name=optimizer, lr=1e-2, warmup_steps=2))
    losses = Losses()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        accumulate_grad_batches=accumulate,
        callbacks=[losses, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=tmp_path,
        check_val_every_n_epoch=None,
        val_check_interval=4,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, datamodule=PackedRowsData(rows, rows[:2], batch_size=2, seed=3), ckpt_path=ckpt_path)
    return {name: p.detach().clone() for name, p in model.named_parameters()}, losses.values


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("step", [2, 4, 7])
def test_interrupted_training_equals_uninterrupted(tmp_path, step, optimizer):
    expected, expected_losses = train(tmp_path, optimizer=optimizer)
    folder = CheckpointFolder(tmp_path / "checkpoints")
    with pytest.raises(SystemExit) as stop:
        train(tmp_path, Signal(step), Checkpoints(folder), optimizer=optimizer)
    assert stop.value.code == 130
    found, losses = train(tmp_path, ckpt_path=folder.newest(), optimizer=optimizer)
    assert losses == expected_losses[step + 1 :]  # the step that was running was finished and saved
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("died_at", [4, 8, 11])
def test_a_run_that_died_goes_on_from_its_periodic_checkpoint(tmp_path, died_at):
    """As after kill -9: the last checkpoint, written at no signal, is enough."""

    class Die(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == died_at:
                raise MemoryError

    expected, expected_losses = train(tmp_path)
    with pytest.raises(MemoryError):
        train(tmp_path, Checkpoints(CheckpointFolder(tmp_path), every_s=0.0), Die())
    found, losses = train(tmp_path, ckpt_path=CheckpointFolder(tmp_path).newest())
    assert losses == expected_losses[died_at:]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


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


def test_epochs_are_counted_once(tmp_path):
    class Epochs(Callback):
        steps = ()

        def on_train_epoch_start(self, trainer, module):
            self.steps += (trainer.global_step,)

    epochs = Epochs()
    train(tmp_path, epochs)
    assert epochs.steps == (0, 5, 10)


def test_sigterm_exits_with_its_own_code(tmp_path):
    with pytest.raises(SystemExit) as stop:
        train(tmp_path, Signal(3, signal.SIGTERM), Checkpoints(CheckpointFolder(tmp_path)))
    assert stop.value.code == 143
    assert CheckpointFolder(tmp_path).newest().name == "step-00000004.ckpt"


def test_handlers_are_given_back(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    train(tmp_path, Checkpoints(CheckpointFolder(tmp_path)), max_steps=2)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_step(tmp_path):
    class Poison(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 3:
                module.model.lm_head.weight.data.fill_(float("nan"))

    with pytest.raises(UserError, match="loss became nan at step 4"):
        train(tmp_path, Poison(), StopOnBadLoss())


def test_every_row_is_seen_once_an_epoch_and_ranks_share_a_batch():
    whole = SeededBatches(12, 4, seed=1)
    ranks = [SeededBatches(12, 4, seed=1, rank=r, world_size=2) for r in range(2)]
    for _ in range(2):
        batches = list(whole)
        assert sorted(sum(batches, [])) == list(range(12))
        halves = [list(rank) for rank in ranks]
        assert [sorted(a + b) for a, b in zip(*halves, strict=True)] == [sorted(b) for b in batches]


def test_order_changes_with_epoch_and_seed():
    batches = SeededBatches(50, 5, seed=1)
    first, second = list(batches), list(batches)
    assert first != second
    assert first != list(SeededBatches(50, 5, seed=2))
    assert first == list(SeededBatches(50, 5, seed=1))
