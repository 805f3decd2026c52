"""Turn an out-of-memory error into advice."""

from __future__ import annotations

import torch


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
