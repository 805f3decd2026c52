"""Lightning's Trainer of a config: the `trainer` group, on one process or on the ranks of torchrun or Lightning."""

from __future__ import annotations

import os
import sys

from lightning import Callback, Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig

from spectrain.errors import UserError


def build_trainer(cfg: DictConfig, callbacks: list[Callback], loggers: list[Logger]) -> Trainer:
    """The Trainer of a config; writes nothing yet.

    Raises:
        UserError: Lightning does not take `trainer`, its hardware is missing, or a batch cannot be shared out.
    """
    try:
        trainer = Trainer(
            **(dict(cfg.trainer) | ranks_of_torchrun()),
            max_steps=cfg.max_steps,
            check_val_every_n_epoch=None,  # val_check_interval counts batches of the run, not of an epoch
            use_distributed_sampler=False,  # SeededBatches gives each rank its share
            callbacks=callbacks,
            logger=loggers,
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
    if cfg.data.batch_size % trainer.world_size:
        raise UserError(
            f"data.batch_size={cfg.data.batch_size} rows cannot be shared out evenly by {trainer.world_size} ranks; "
            f"give a multiple of {trainer.world_size}, or fewer ranks"
        )
    return trainer


def ranks_of_torchrun() -> dict[str, int]:
    """What torchrun's processes say of themselves, in place of trainer.devices and trainer.num_nodes."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return {}
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    return {"devices": local, "num_nodes": world // local}
