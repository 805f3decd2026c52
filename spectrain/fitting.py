"""What every training goes through: Lightning's Trainer, callbacks, and the run's checkpoint where there is one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from lightning import Callback, LightningModule, Trainer
from omegaconf import DictConfig

from spectrain.decoding import TargetModel, fingerprint
from spectrain.errors import UserError, check_whole
from spectrain.loggers import loggers
from spectrain.runs import RunFolder
from spectrain.trainers import build_trainer
from spectrain.training.acceptance_data import ResponsesData
from spectrain.training.callbacks import Checkpoints, ProgressBar, ProgressLines, StopOnBadLoss, TokensPerSecond
from spectrain.training.data import PackedRowsData
from spectrain.training.optim import OptimizerSettings

log = logging.getLogger(__name__)


def fit(
    cfg: DictConfig,
    run: RunFolder,
    module: LightningModule,
    data: PackedRowsData | ResponsesData,
    target: TargetModel | None = None,
    begun: Callable[[], None] | None = None,
) -> Trainer:
    """Trains, or goes on where the run was interrupted, and validates.

    Args:
        cfg: the whole config; `trainer`, `max_steps` and `data` are read.
        run: where checkpoints and metrics go; begun here.
        module: what is trained.
        data: its rows.
        target: the frozen target, where there is one: an interrupted run goes on with no other.
        begun: called once the run folder stands, before training; may refuse to go on.

    Raises:
        UserError: the trainer's hardware is missing, there are too few rows, or the checkpoint cannot be read.
    """
    check_whole("max_steps", cfg.max_steps, 1)
    trainer = build_trainer(cfg, callbacks(run), loggers(cfg, run))
    if len(data.train) < cfg.data.batch_size:
        raise UserError(
            f"there are {len(data.train)} training rows, fewer than one batch of {cfg.data.batch_size}; lower "
            "data.batch_size or data.row_tokens, or give more text"
        )
    run.begin(fingerprint(target.model, target.tokenizer) if target else None)
    if begun is not None:
        begun()
    log.info("run folder: %s", run.path)
    checkpoint = run.checkpoints.newest()
    if checkpoint:
        log.info("resuming from %s", checkpoint)
        check_readable(checkpoint)
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
    trainer.validate(module, datamodule=data, verbose=False)
    return trainer


def callbacks(run: RunFolder) -> list[Callback]:
    return [
        TokensPerSecond(),
        StopOnBadLoss(),
        Checkpoints(run.checkpoints),
        ProgressBar(leave=True) if sys.stderr.isatty() else ProgressLines(),
    ]


def check_readable(checkpoint: Path) -> None:
    """Raises UserError where a checkpoint is damaged."""
    try:
        torch.load(checkpoint, map_location="meta", weights_only=True, mmap=True)
    except Exception as error:  # torch, pickle and zipfile each raise their own types here
        raise UserError(
            f"checkpoint {checkpoint} cannot be read ({type(error).__name__}); delete it to start over"
        ) from error


def target_device(cfg: DictConfig) -> str:
    """Where the frozen target runs: with the trainer."""
    return "cpu" if cfg.trainer.accelerator == "cpu" else cfg.target.device


def optimizer_settings(cfg: DictConfig) -> OptimizerSettings:
    return OptimizerSettings(**{**cfg.optimizer, "betas": tuple(cfg.optimizer.betas)})


def check_rows(cfg: DictConfig) -> None:
    """Raises UserError where a number of `data` makes no sense."""
    for name in ("row_tokens", "batch_size", "val_rows"):
        check_whole(f"data.{name}", cfg.data[name], 1)
