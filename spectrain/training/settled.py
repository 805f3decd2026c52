"""Options that fit the machine and the target where the user gives none, as runs and stores are named by them.

`target.dtype=auto` is the checkpoint's on a GPU, and float32 on a CPU, where it costs little and texts are lossless.
`trainer=auto` trains on all GPUs, else on the CPU. `data.batch_size` is 4 rows, or as many as ranks share out evenly.
"""

from __future__ import annotations

import os

import torch
from transformers import AutoConfig

from spectrain.config.commands import Target
from spectrain.config.training import Train
from spectrain.decoding.loading import DTYPES
from spectrain.errors import UserError
from spectrain.models.packages import target_path
from spectrain.training.strategies import precision_of, uses_gpu

BATCH_ROWS = 4


def settle(options: object) -> None:
    """Replace what is `auto`, or null, in the options of a command."""
    trains = isinstance(options, Train) and bool(options.trainer)
    if trains:
        _settle_training(options)
    target = getattr(options, "target", None)
    if isinstance(target, Target) and target.dtype == "auto":
        on_gpu = uses_gpu(options.trainer["accelerator"]) if trains else torch.cuda.is_available()
        target.dtype = _checkpoint_dtype(target.path) if on_gpu and target.device != "cpu" else "float32"


def _settle_training(options: Train) -> None:
    trainer, data = options.trainer, options.data
    trainer["accelerator"] = "gpu" if uses_gpu(trainer["accelerator"]) else "cpu"
    trainer["precision"] = precision_of(trainer)
    if data["batch_size"] is None:
        n_ranks = _n_ranks(trainer)
        data["batch_size"] = -(-BATCH_ROWS // n_ranks) * n_ranks


def _n_ranks(trainer: dict) -> int:
    """Return how many ranks will train; see `fit.ranks_of_torchrun`."""
    devices = trainer.get("devices", 1)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if devices in ("auto", -1):
        devices = torch.cuda.device_count() if trainer["accelerator"] == "gpu" else 1
    n_devices = len(devices) if isinstance(devices, list) else devices if isinstance(devices, int) else 1
    return max(1, n_devices) * trainer.get("num_nodes", 1)


def _checkpoint_dtype(path: str) -> str:
    """Return the dtype that a target's config names, float32 where it names none that we compute in."""
    try:
        found = getattr(AutoConfig.from_pretrained(target_path(path)), "dtype", None)
    except (OSError, ValueError, UserError):  # loading the target will say what is wrong
        return "float32"
    return next((name for name, dtype in DTYPES.items() if dtype == found), "float32")
