"""What this machine's CPU does: FLOPs of a large matrix product, bytes of a stream through memory.

Peaks of a data sheet are of other silicon; a CPU's depend on threads, clocks and what else runs. Both numbers are
medians of interleaved repeats, so that a drifting machine hurts both alike.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from spectrain.decoding.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
N = 1024  # rows and columns of the matrix product: three matrices of 4 MiB in float32, 2.1 GFLOP
STREAM_BYTES = 2**27  # several times the last-level cache of a server's share of cores
REPEATS = 7


@dataclass(frozen=True)
class MachineSpeed:
    """Medians."""

    name: str
    threads: int
    flops_per_s: float
    bytes_per_s: float


def measure_cpu(dtype: str, repeats: int = REPEATS, n: int = N, stream_bytes: int = STREAM_BYTES) -> MachineSpeed:
    """Times a matrix product, and a matrix-vector product of a matrix that no cache holds, as decoding reads weights.

    Args:
        dtype: fp32 | bf16
        repeats: of each, in turn.
        n: rows and columns of the product.
        stream_bytes: of the matrix that is streamed.

    Raises:
        UserError: numbers of another kind are asked for.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype} cannot be measured on the CPU; give {' or '.join(DTYPES)}")
    kind = DTYPES[dtype]
    a, b = torch.ones(n, n, dtype=kind), torch.ones(n, n, dtype=kind)
    rows = stream_bytes // (4 * n)
    matrix, vector = torch.ones(rows, n), torch.ones(n)  # float32: in other dtypes the kernel is slower than memory
    work: tuple[Callable[[], object], ...] = (lambda: a @ b, lambda: matrix @ vector)
    seconds: tuple[list[float], ...] = ([], [])
    with torch.inference_mode():
        for repeat in range(repeats + 1):
            for one, own in zip(work, seconds, strict=True):
                begun = time.perf_counter()
                one()
                elapsed_s = time.perf_counter() - begun
                if repeat:  # the first is the warm-up
                    own.append(elapsed_s)
    product_s, stream_s = (statistics.median(own) for own in seconds)
    return MachineSpeed(cpu_name(), torch.get_num_threads(), 2 * n**3 / product_s, 4 * rows * n / stream_s)


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
