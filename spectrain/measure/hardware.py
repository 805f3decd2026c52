"""The hardware of the throughput model: peaks from `conf/hardware/`, two numbers, or this machine's CPU as measured.

The peaks of a data sheet are those of other silicon, and a CPU's depend on threads, clocks and what else runs. So both
numbers of the CPU are medians of interleaved repeats: a drifting machine then hurts both alike.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch

from spectrain.errors import UserError, check_number
from spectrain.measure.cost import Hardware
from spectrain.stores.environment import cpu_name
from spectrain.stores.locations import conf_dir

BYTES_PER_VALUE = {"fp8": 1, "int8": 1, "fp16": 2, "bf16": 2, "tf32": 4, "fp32": 4}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
N = 1024  # rows and columns of the matrix product: three matrices of 4 MiB in float32, 2.1 GFLOP
STREAM_BYTES = 2**27  # several times the last-level cache of a server's share of cores
REPEATS = 7


def read_hardware(options: Mapping, chosen: str | None = None) -> Hardware:
    """Read the hardware of the command's options; `hardware=cpu` is measured now.

    `chosen` is the name that the user gave; if it names no file of conf/hardware/, the option is no mapping.

    Raises:
        UserError: the hardware is unknown, has no peak for this dtype, or a number is out of range.
    """
    node, given = options.get("hardware"), options["operational_intensity"]
    if not isinstance(node, Mapping):
        known = sorted(path.stem for path in (conf_dir() / "hardware").glob("*.yaml"))
        raise UserError(f"hardware={chosen or node} is unknown; choose among {', '.join(known)}")
    dtype = options["dtype"] if options["dtype"] is not None else node.get("dtype")
    if dtype is not None and dtype not in BYTES_PER_VALUE:
        raise UserError(f"dtype={dtype} is unknown; choose among {', '.join(BYTES_PER_VALUE)}")
    default = node.get("bytes_a_value") if options["dtype"] is None else None
    per_value = next(v for v in (options["bytes_a_value"], default, BYTES_PER_VALUE.get(dtype), 1) if v is not None)
    sizes = {k: options[k] if options[k] is not None else per_value for k in ("weight_bytes", "kv_bytes")}
    if given is not None:
        return Hardware(f"{given} FLOPs per byte", given, **sizes, source="given")
    if node.get("operational_intensity") is not None:
        return Hardware(node["name"], node["operational_intensity"], **sizes, source=node["source"])
    facts = {key: node[key] for key in ("name", "source", "flops_per_s", "bytes_per_s")}
    if facts["flops_per_s"] is None or facts["bytes_per_s"] is None:
        facts = measure_cpu(dtype)
    elif dtype not in facts["flops_per_s"]:
        known = ", ".join(facts["flops_per_s"])
        raise UserError(f"hardware={facts['name']} has no peak for dtype={dtype}; choose among {known}")
    else:
        facts["flops_per_s"] = facts["flops_per_s"][dtype]
    for key in ("flops_per_s", "bytes_per_s"):
        check_number(f"hardware.{key}", facts[key], "(0, inf)")
    return Hardware(operational_intensity=facts["flops_per_s"] / facts["bytes_per_s"], dtype=dtype, **sizes, **facts)


def measure_cpu(dtype: str, repeats: int = REPEATS, n: int = N, stream_bytes: int = STREAM_BYTES) -> dict:
    """Time a matrix product, and a matrix-vector product with a matrix that no cache holds, as decoding reads weights.

    Each is repeated in turn. The product has n rows and columns, the streamed matrix `stream_bytes`.

    Returns:
        `name`, `source`, and the medians `flops_per_s` and `bytes_per_s`.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype} cannot be measured on the CPU; give {' or '.join(DTYPES)}")
    a, b = (torch.ones(n, n, dtype=DTYPES[dtype]) for _ in range(2))
    rows = stream_bytes // (4 * n)
    matrix, vector = torch.ones(rows, n), torch.ones(n)  # float32: in other dtypes the kernel is slower than memory
    seconds = []
    with torch.inference_mode():
        for _ in range(repeats + 1):
            for left, right in ((a, b), (matrix, vector)):
                begun = time.perf_counter()
                left @ right
                seconds.append(time.perf_counter() - begun)
    product_s, stream_s = np.median(np.reshape(seconds, (-1, 2))[1:], axis=0)  # the first is the warm-up
    threads = torch.get_num_threads()
    return {
        "name": f"this CPU ({cpu_name()}, {threads} thread{'s' if threads > 1 else ''})",
        "source": "measured by this command",
        "flops_per_s": float(2 * n**3 / product_s),
        "bytes_per_s": float(4 * rows * n / stream_s),
    }
