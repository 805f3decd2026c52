"""One process or several: what the commands of `data_prep` need of torchrun's ranks, through Lightning Fabric."""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Callable
from typing import TypeVar

import torch
from lightning import Fabric
from lightning.fabric.strategies import DDPStrategy

from spectrain.errors import UserError

WAIT = datetime.timedelta(days=30)  # ranks wait for each other, for example while rank zero reads a whole corpus

T = TypeVar("T")


def launch(device: str, parallel: str) -> Fabric:
    """Return this process alone, or as one of torchrun's ranks, for `target.device` and `target.parallel`."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Fabric(accelerator="cpu", devices=1)  # only counts ranks: the target stands where target.device says
    if parallel == "device_map":
        raise UserError(f"target.parallel=device_map works in one process, not in {world}; start it without torchrun")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    # Ranks that share out parts exchange nothing but "done"; one target on many GPUs talks through NCCL.
    backend = "nccl" if on_gpu and parallel == "tp" else "gloo"
    strategy = DDPStrategy(process_group_backend=backend, timeout=WAIT)
    accelerator = "cuda" if on_gpu else "cpu"
    fabric = Fabric(accelerator=accelerator, devices=local, num_nodes=world // local, strategy=strategy)
    fabric.launch()
    if not fabric.is_global_zero:
        logging.getLogger().setLevel(logging.WARNING)
    return fabric


def rank_device(fabric: Fabric) -> str | None:
    """Return the device of this rank's target; None: as configured."""
    return str(fabric.device) if fabric.world_size > 1 else None


def decided(fabric: Fabric, decide: Callable[[], T]) -> T:
    """Call `decide` on rank zero and return its answer on all ranks.

    Where it raises UserError, only rank zero reports it, and the others end with exit code 2.
    """
    answer, refusal = None, None
    if fabric.is_global_zero:
        try:
            answer = decide()
        except UserError as error:
            refusal = error
    answer, refused = fabric.broadcast((answer, refusal is not None))
    if refusal:
        raise refusal
    if refused:
        raise SystemExit(2)
    return answer
