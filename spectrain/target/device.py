"""Devices: copies for which nobody waits, advice where memory is full, and which one a planned step stands for."""

from __future__ import annotations

from contextvars import ContextVar

import torch
from torch import Tensor

# The device that a step on `meta`, which has no autocast, stands for, and the dtype of its products.
PLANNED: ContextVar[tuple[str, torch.dtype]] = ContextVar("planned", default=("cuda", torch.bfloat16))


def device_type(device: torch.device) -> str:
    """Return the type of a device, or of the one that `meta` stands for."""
    return PLANNED.get()[0] if device.type == "meta" else device.type


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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the CPU (where torch raises a plain RuntimeError)."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = ("can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def out_of_memory_advice(device: torch.device, batch_size: int, row_tokens: int) -> str:
    """Say what to do about `batch_size` rows of up to `row_tokens` tokens that did not fit."""
    if batch_size == 1:
        return (
            f"out of memory: one row of {row_tokens} tokens does not fit on {device}; shorten the prompt, lower "
            "max_new_tokens, or give target.dtype=bfloat16 or target.parallel=device_map"
        )
    return (
        f"out of memory with batch_size={batch_size} rows of up to {row_tokens} tokens on {device}; "
        f"try batch_size={batch_size // 2}"
    )
