"""Lightning's Trainer for every training: callbacks, loggers, and the run's checkpoint where there is one."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable

import torch
from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig

from spectrain.decoding import TargetModel, fingerprint
from spectrain.errors import UserError, check_whole
from spectrain.runs import RunFolder
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
    trainer = build_trainer(cfg, run)
    global_batch = cfg.data.batch_size * trainer.world_size
    if len(data.train) < global_batch:
        raise UserError(
            f"there are {len(data.train)} training rows, fewer than one batch of {global_batch}; lower "
            "data.batch_size or data.row_tokens, or give more text"
        )
    run.begin(fingerprint(target.model, target.tokenizer) if target else None)
    if begun is not None:
        begun()
    log.info("run folder: %s", run.path)
    checkpoint = run.checkpoint_file if run.checkpoint_file.is_file() else None
    if checkpoint:
        log.info("resuming from %s", checkpoint)
        check_readable(run)
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
    trainer.validate(module, datamodule=data, verbose=False)
    return trainer


def build_trainer(cfg: DictConfig, run: RunFolder) -> Trainer:
    """The Trainer of a config; writes nothing yet."""
    return new_trainer(
        cfg,
        max_steps=cfg.max_steps,
        check_val_every_n_epoch=None,  # val_check_interval counts batches of the run, not of an epoch
        use_distributed_sampler=False,  # SeededBatches gives each rank its share
        callbacks=callbacks(run),
        logger=loggers(cfg, run),
        enable_progress_bar=sys.stderr.isatty(),
        num_sanity_val_steps=0,
    )


def world_size(cfg: DictConfig) -> int:
    """Ranks that will train together, as Lightning finds them (`devices: auto`, torchrun)."""
    return new_trainer(cfg, logger=False, enable_progress_bar=False).world_size


def new_trainer(cfg: DictConfig, **options: object) -> Trainer:
    """Raises UserError where Lightning does not take `trainer`, or its hardware is missing."""
    try:
        return Trainer(
            **cfg.trainer,
            **options,
            enable_checkpointing=False,  # Checkpoints saves, at whole steps only
            enable_model_summary=False,
        )
    except (MisconfigurationException, TypeError, ValueError) as error:
        line = str(error).strip().splitlines()[0]
        raise UserError(
            f"the trainer cannot be made as configured ({line}); change trainer=... or its options"
        ) from error


def callbacks(run: RunFolder) -> list[Callback]:
    return [
        TokensPerSecond(),
        StopOnBadLoss(),
        Checkpoints(run.checkpoint_file),
        ProgressBar(leave=True) if sys.stderr.isatty() else ProgressLines(),
    ]


def loggers(cfg: DictConfig, run: RunFolder) -> list[Logger]:
    """CSV always; Weights & Biases when asked, offline without a key."""
    attempt = len(list((run.path / "metrics").glob("*"))) if (run.path / "metrics").is_dir() else 0
    chosen: list[Logger] = [CSVLogger(run.path, name="metrics", version=attempt)]  # a resumed run begins a new file
    if cfg.logger.wandb and rank_zero_only.rank == 0:
        import wandb

        chosen.append(
            WandbLogger(
                project=cfg.logger.project,
                group=cfg.logger.group,
                name=run.name,
                version=run.id,  # a resumed run goes on in the same W&B run
                save_dir=run.path,
                mode=os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline"),
                config=run.config,
            )
        )
    return chosen


def check_readable(run: RunFolder) -> None:
    """Raises UserError where the run's checkpoint is damaged."""
    try:
        torch.load(run.checkpoint_file, map_location="meta", weights_only=True, mmap=True)
    except Exception as error:  # torch, pickle and zipfile each raise their own types here
        raise UserError(
            f"checkpoint {run.checkpoint_file} cannot be read ({type(error).__name__}); delete it to start over"
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
