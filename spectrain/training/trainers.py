"""Lightning's Trainer of a config: the `trainer` group, on one process or on the ranks of torchrun or Lightning."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import torch
from lightning import Callback, Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from omegaconf import DictConfig, OmegaConf

from spectrain.cli import in_multirun
from spectrain.decoding.errors import UserError
from spectrain.training.checkpoints import StraightToDisk, check_readable, cut_anew, ranks_of
from spectrain.training.strategies import ZeroSettings, ZeroStrategy, zero_strategy

OURS = ("strategy", "activation_checkpointing")  # of the `trainer` group; the rest are Lightning's


def build_trainer(cfg: DictConfig, callbacks: list[Callback], loggers: list[Logger]) -> Trainer:
    """The Trainer of a config; writes nothing yet.

    Raises:
        UserError: Lightning does not take `trainer`, its hardware is missing, or a batch cannot be shared out.
    """
    options = {name: value for name, value in cfg.trainer.items() if name not in OURS} | ranks_of_torchrun()
    try:
        trainer = Trainer(
            **options,
            strategy=strategy(cfg),
            max_steps=cfg.max_steps,
            check_val_every_n_epoch=None,  # val_check_interval counts batches of the run, not of an epoch
            use_distributed_sampler=False,  # SeededBatches gives each rank its share
            callbacks=callbacks,
            logger=loggers,
            plugins=[StraightToDisk()],
            enable_progress_bar=sys.stderr.isatty(),
            enable_checkpointing=False,  # Checkpoints saves, at whole steps only
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
    except (MisconfigurationException, TypeError, ValueError) as error:
        line = str(error).strip().splitlines()[0]
        raise UserError(
            f"the trainer cannot be made as configured ({line}); change trainer=... or its options"
        ) from error
    if in_multirun() and trainer.world_size > 1 and not ranks_of_torchrun():
        raise UserError(  # Lightning starts the other ranks with this very command: each would run the whole sweep
            f"-m on {trainer.world_size} ranks needs torchrun --nproc-per-node {trainer.world_size} -m spectrain.train "
            "... -m; or give trainer.devices=1"
        )
    if cfg.data.batch_size % trainer.world_size:
        raise UserError(
            f"data.batch_size={cfg.data.batch_size} rows cannot be shared out evenly by {trainer.world_size} ranks; "
            f"give a multiple of {trainer.world_size}, or fewer ranks"
        )
    return trainer


def strategy(cfg: DictConfig) -> str | Strategy:
    """What `trainer.strategy` says: a name that Lightning knows, or a node with options of DeepSpeed.

    Raises:
        UserError: the node makes no sense, or DeepSpeed is to step what only a whole matrix can be stepped by.
    """
    given = cfg.trainer.strategy
    if not OmegaConf.is_dict(given):
        return given
    options = OmegaConf.to_container(given, resolve=True)
    if options.pop("name", None) != "deepspeed":
        raise UserError(f"trainer.strategy={given} is unknown; give ddp, auto or trainer=deepspeed_zero2")
    if cfg.optimizer.name == "muon":
        raise UserError(
            "optimizer.name=muon needs whole matrices, which DeepSpeed cuts into pieces; give optimizer.name=adamw, or "
            "trainer=ddp"
        )
    known = [field.name for field in dataclasses.fields(ZeroSettings)]
    for name in options:
        if name not in known:
            raise UserError(f"trainer.strategy has no option {name}; it has {', '.join(known)}")
    return zero_strategy(ZeroSettings(**options), on_cpu=not uses_gpu(cfg))


def uses_gpu(cfg: DictConfig) -> bool:
    """Whether the trainer runs on GPUs."""
    accelerator = cfg.trainer.accelerator
    return accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())


def ranks_of_torchrun() -> dict[str, int]:
    """What torchrun's processes say of themselves, in place of trainer.devices and trainer.num_nodes."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return {}
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    return {"devices": local, "num_nodes": world // local}


def check_accumulation(cfg: DictConfig, trainer: Trainer, n_batches: int) -> None:
    """Raises UserError where DeepSpeed would let a gradient run on into the next epoch, which Lightning does not count.

    Args:
        cfg: the whole config.
        trainer: of it.
        n_batches: of an epoch.
    """
    accumulated = cfg.trainer.accumulate_grad_batches
    left = n_batches % accumulated and trainer.max_steps > n_batches // accumulated
    if left and isinstance(trainer.strategy, ZeroStrategy):
        raise UserError(
            f"trainer.accumulate_grad_batches={accumulated} does not divide the {n_batches} batches of an epoch, as it "
            "must under DeepSpeed; give a divisor, or trainer=ddp"
        )


def go_on(checkpoint: Path, trainer: Trainer) -> None:
    """Makes sure that this trainer can go on from a checkpoint, if need be by cutting it for other ranks.

    Raises:
        UserError: it is damaged, or was written with DeepSpeed and is read without, or the other way.
    """
    sharded = isinstance(trainer.strategy, ZeroStrategy)
    ranks = ranks_of(checkpoint)
    if sharded != (ranks is not None):
        before, now = ("without", "with") if sharded else ("with", "without")
        raise UserError(
            f"{checkpoint} was written {before} DeepSpeed and cannot be resumed {now} it; give the trainer=... that "
            "began the run, or another run_dir"
        )
    check_readable(checkpoint)
    if sharded and ranks != trainer.world_size:
        if trainer.is_global_zero:
            cut_anew(checkpoint)
        trainer.strategy.read_universal()
        meet(trainer)


def meet(trainer: Trainer) -> None:
    """Under torchrun, waits for all ranks; Lightning starts the others itself, later."""
    if ranks_of_torchrun() and trainer.world_size > 1:
        trainer.strategy.setup_environment()
        trainer.strategy.barrier("met")
