"""The config and the trainer of tests: one rank on the CPU, validated every few steps, without bars and files."""

from __future__ import annotations

from lightning import Trainer
from lightning.pytorch.callbacks import Checkpoint

from spectrain.cli import composed
from spectrain.config import options_of
from spectrain.config.training import Train
from spectrain.planning.defaults import settled


def config_of(*overrides: str) -> Train:
    """Return the resolved config of a training, as a command settles it."""
    return settled(options_of("train", composed("train", *overrides)))


def quiet_trainer(**options: object) -> Trainer:
    """Return a trainer with these options beside the usual ones."""
    return Trainer(
        accelerator="cpu",
        enable_checkpointing=any(isinstance(one, Checkpoint) for one in options.get("callbacks", ())),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        **options,
    )
