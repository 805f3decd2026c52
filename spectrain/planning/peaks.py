"""What a machine computes and reads per second: of GPUs by the files of conf/hardware/, of a CPU as it is measured."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from spectrain.config import conf_dir, read_yaml
from spectrain.config import groups as options
from spectrain.config.fields import typed
from spectrain.errors import UserError
from spectrain.stores.environment import cpu_name

MEASURED_S = 0.5  # of a CPU's rates


@dataclass(frozen=True)
class Peaks:
    """The peaks of a machine in one dtype."""

    name: str  # of the machine and the dtype
    flops_per_s: float
    bytes_per_s: float


def hardware_named(device: str) -> options.Hardware | None:
    """Return the file of conf/hardware/ for a GPU whose name holds the one that the file gives; None: there is none."""
    files = map(read_yaml, sorted((conf_dir() / "hardware").glob("*.yaml")))
    return next((typed(one, options.Hardware, checks=False) for one in files if one["name"] in device), None)


def read_peaks(node: options.Hardware, dtype: str) -> Peaks:
    """Return the peaks of a machine; where none are given it is this machine, which is measured now."""
    if node.flops_per_s is None:
        name = f"this CPU ({cpu_name()}, {torch.get_num_threads()} thread(s)), {dtype}"
        return Peaks(name, *cpu_rates(dtype, torch.get_num_threads()))
    if dtype not in node.flops_per_s:
        known = ", ".join(node.flops_per_s)
        raise UserError(f"hardware={node.name} has no peak for dtype={dtype}; choose among {known}")
    return Peaks(f"{node.name}, {dtype}", node.flops_per_s[dtype], node.bytes_per_s)


@cache
def cpu_rates(dtype: str, n_threads: int) -> tuple[float, float]:
    """Return FLOPs per second of a matrix product, and bytes per second of one with a vector that no cache holds.

    They are interleaved for half a second, and both are medians, so a machine whose speed drifts hurts both alike.
    A processor that only emulates bfloat16 is a hundred times slower, so the number of turns cannot be fixed.
    """
    square = torch.ones(512, 512, dtype=torch.float32 if dtype == "fp32" else torch.bfloat16)
    matrix, vector = torch.ones(2**15, 1024), torch.ones(1024)  # float32: in other dtypes slower than memory
    seconds = []
    with torch.inference_mode():
        while len(seconds) < 2 or np.sum(seconds) < MEASURED_S:  # the first turn is the warm-up
            seconds.append([_seconds(square, square), _seconds(matrix, vector)])
    product_s, stream_s = np.median(seconds[1:], axis=0)
    return float(2 * square.numel() ** 1.5 / product_s), float(4 * matrix.numel() / stream_s)


def _seconds(left: Tensor, right: Tensor) -> float:
    begun = time.perf_counter()
    left @ right
    return time.perf_counter() - begun
