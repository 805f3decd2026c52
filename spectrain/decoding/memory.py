"""Turn an out-of-memory error into advice: the largest batch that fits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from spectrain.decoding.kv_cache import KVCache
    from spectrain.decoding.target import TargetModel

USABLE_SHARE = 0.8  # of the free memory; the rest is for activations and fragments


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the CPU (where torch raises a plain RuntimeError)."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = ("can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def free_bytes(device: torch.device) -> int | None:
    """Bytes that the process may still allocate on a device; None where the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch has reserved but not handed out can be allocated, too.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        import resource  # Unix only

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)  # `ulimit -v`
        if limit == resource.RLIM_INFINITY:
            return available
        used_pages = int(Path("/proc/self/statm").read_text().split()[0])
        return min(available, max(0, limit - used_pages * os.sysconf("SC_PAGE_SIZE")))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def out_of_memory_advice(
    target: TargetModel, cache: KVCache, batch_size: int, row_tokens: int, free: int | None
) -> str:
    """Say what to do about `batch_size` rows of up to `row_tokens` tokens that did not fit.

    `free` is the number of bytes that were free before the cache was allocated; None: not known.
    """
    if batch_size == 1:
        return (
            f"out of memory: one row of {row_tokens} tokens does not fit on {target.device}; shorten the prompt, lower "
            "max_new_tokens, or give target.dtype=bfloat16 or target.parallel=device_map"
        )
    blocks = -(-row_tokens // cache.block_tokens)
    row_bytes = blocks * cache.block_tokens * slot_bytes(target) + row_tokens * 8
    fitting = batch_size if free is None else int(free * USABLE_SHARE / row_bytes)
    if fitting >= batch_size:  # something else took the memory: logits, a draft model's cache
        fitting = batch_size // 2
    return (
        f"out of memory with batch_size={batch_size} rows of up to {row_tokens} tokens on {target.device}; the largest "
        f"batch that fits is about {max(1, fitting)}, lower batch_size"
    )


def slot_bytes(target: TargetModel) -> int:
    """Bytes of one token's keys and values in all blocks."""
    config = target.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * target.n_layer * heads * width * target.dtype.itemsize
