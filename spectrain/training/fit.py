"""What every training goes through: Lightning's Trainer, callbacks, and the run's checkpoint where there is one."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig
from torch import Tensor

from spectrain.decoding import TargetModel, fingerprint
from spectrain.decoding.errors import UserError, check_whole
from spectrain.decoding.memory import is_out_of_memory
from spectrain.stores.environment import commit_of, environment
from spectrain.stores.locations import PACKAGE
from spectrain.training.acceptance_data import ResponsesData
from spectrain.training.callbacks import Checkpoints, ProgressBar, ProgressLines, StopOnBadLoss, TokensPerSecond
from spectrain.training.checkpoints import step_of
from spectrain.training.data import PackedRowsData
from spectrain.training.feature_data import FeatureData
from spectrain.training.loggers import keep_config, loggers
from spectrain.training.optim import OptimizerSettings
from spectrain.training.runs import RunFolder
from spectrain.training.selection import KeepBest, Tau
from spectrain.training.trainers import build_trainer, check_accumulation, go_on, meet, uses_gpu

log = logging.getLogger(__name__)

LOST_RANK = ("Connection closed by peer", "Connection reset by peer")
Measure = Callable[[dict[str, Tensor]], Tau]


def fit(
    cfg: DictConfig,
    run: RunFolder,
    module: LightningModule,
    data: PackedRowsData | FeatureData | ResponsesData,
    target: TargetModel | None = None,
    begun: Callable[[], None] | None = None,
    measure: Measure | None = None,
) -> Trainer:
    """Trains, or goes on where the run was interrupted, and validates.

    Args:
        cfg: the whole config; `trainer`, `max_steps` and `data` are read.
        run: where checkpoints and metrics go; begun here.
        module: what is trained.
        data: its rows.
        target: the frozen target, where there is one: an interrupted run goes on with no other.
        begun: called once the run folder stands, before training; may refuse to go on.
        measure: tau of whole weights; the best are kept in `run.best`. None: the last are.

    Raises:
        UserError: the trainer's hardware is missing, there are too few rows, the checkpoint cannot be read, the loss is
            no number any more, or memory runs out.
    """
    check_whole("max_steps", cfg.max_steps, 1)
    check_seconds(cfg)
    trainer = build_trainer(cfg, callbacks(cfg, run, measure), loggers(cfg, run))
    if len(data.train) < cfg.data.batch_size:
        raise UserError(
            f"there are {len(data.train)} training rows, fewer than one batch of {cfg.data.batch_size}; lower "
            "data.batch_size or data.row_tokens, or give more text"
        )
    check_accumulation(cfg, trainer, len(data.train) // cfg.data.batch_size)
    run.begin(fingerprint(target.model, target.tokenizer) if target else None)
    with run.held():
        if begun is not None:
            begun()
        go_through(cfg, run, module, data, trainer)
    return trainer


def go_through(
    cfg: DictConfig,
    run: RunFolder,
    module: LightningModule,
    data: PackedRowsData | FeatureData | ResponsesData,
    trainer: Trainer,
) -> None:
    """From the run's newest checkpoint, or from nothing, to the last validation; see `fit`."""
    log.info("run folder: %s", run.path)
    meet(trainer)  # no rank looks for a checkpoint before rank zero has begun the run
    checkpoint = run.checkpoints.newest()
    if checkpoint:
        log.info("resuming from %s", checkpoint)
        go_on(checkpoint, trainer)
    if cfg.trainer.activation_checkpointing:
        module.recompute_activations()
    facts = {"code": commit_of(PACKAGE), "environment": environment(trainer.world_size)}
    keep_config(trainer, run)
    run.note_attempt(step_of(checkpoint) if checkpoint else 0, facts)
    with naming_the_remedy(cfg):
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
        trainer.validate(module, datamodule=data, verbose=False)


def callbacks(cfg: DictConfig, run: RunFolder, measure: Measure | None) -> list[Callback]:
    """In the order in which they act: what a checkpoint speaks of is done before it is written."""
    return [
        TokensPerSecond(),
        StopOnBadLoss(run.checkpoints),
        KeepBest(run.best, measure, cfg.select.every),
        Checkpoints(run.checkpoints, cfg.checkpoint_s),
        ProgressBar(leave=True) if sys.stderr.isatty() else ProgressLines(),
    ]


@contextmanager
def naming_the_remedy(cfg: DictConfig) -> Iterator[None]:
    """Says of a training that outgrows memory what to change, and of a rank that lost another that it did.

    Raises:
        UserError: in place of either error.
    """
    try:
        yield
    except Exception as error:
        if is_lost_rank(error):
            raise UserError(
                "another rank ended, and this one cannot go on alone; see what it said, then give the same command"
            ) from error
        if not is_out_of_memory(error):
            raise
        rank = f" on rank {rank_zero_only.rank}" if rank_zero_only.rank else ""
        raise UserError(
            f"out of memory{rank}: lower data.batch_size={cfg.data.batch_size} (and raise "
            f"trainer.accumulate_grad_batches) or data.row_tokens={cfg.data.row_tokens}, or give "
            "trainer.activation_checkpointing=true"
        ) from error


def is_lost_rank(error: Exception) -> bool:
    """Whether a rank that this one talks to is gone; gloo says so by a plain RuntimeError."""
    if isinstance(error, torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in LOST_RANK)


def check_seconds(cfg: DictConfig) -> None:
    """Raises UserError where the time between checkpoints, or validations between measurements, make no sense."""
    if isinstance(cfg.checkpoint_s, bool) or not isinstance(cfg.checkpoint_s, int | float) or cfg.checkpoint_s < 0:
        raise UserError(f"checkpoint_s={cfg.checkpoint_s} must be seconds between two checkpoints, 0 or more")
    check_whole("select.every", cfg.select.every, 0)


def target_device(cfg: DictConfig) -> str:
    """Where the frozen target runs: with the trainer."""
    if cfg.trainer.accelerator == "cpu":
        return "cpu"
    rank = os.environ.get("LOCAL_RANK")
    return cfg.target.device if rank is None or not uses_gpu(cfg) else f"cuda:{rank}"


def optimizer_settings(cfg: DictConfig) -> OptimizerSettings:
    return OptimizerSettings(**{**cfg.optimizer, "betas": tuple(cfg.optimizer.betas)})


def check_rows(cfg: DictConfig) -> None:
    """Raises UserError where a number of `data` makes no sense."""
    for name in ("row_tokens", "batch_size", "val_rows"):
        check_whole(f"data.{name}", cfg.data[name], 1)
