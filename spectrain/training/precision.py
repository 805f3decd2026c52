"""Which precision `precision=auto` means on the devices at hand, in Lightning's words."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from spectrain.kernels import multiplies
from spectrain.training.strategies import uses_gpu


def fast_precision(precision: str | None, device_type: str) -> str | None:
    """Return `precision`, with "auto" replaced by what the device multiplies the fastest: bf16-mixed or 32-true."""
    if precision != "auto":
        return precision
    is_gpu = device_type == "cuda"
    fast = torch.cuda.is_bf16_supported(including_emulation=False) if is_gpu else multiplies(torch.bfloat16)
    return "bf16-mixed" if fast else "32-true"


def precision_of(trainer: Mapping) -> str | None:
    """Return the precision of a `trainer` node, with "auto" replaced likewise."""
    return fast_precision(trainer.get("precision"), "cuda" if uses_gpu(trainer["accelerator"]) else "cpu")
