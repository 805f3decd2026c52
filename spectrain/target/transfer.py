"""Small copies between host and device, for which nobody waits."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device. On a GPU the host goes on at once; a plain copy would wait for all kernels."""
    if device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def without(values: Tensor, row: int) -> Tensor:
    """Return a copy of values [n, ...] without one row: the last one is in its place."""
    kept = values[:-1].clone()
    if row < len(kept):
        kept[row] = values[-1]
    return kept
