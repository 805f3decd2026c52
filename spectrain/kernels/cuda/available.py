"""Whether the kernels of `triton_kernels.py` can run on a device. This module is imported where there is no Triton."""

from __future__ import annotations

import logging
import os
from functools import cache
from importlib.util import find_spec

import torch

LEAST_CAPABILITY = (8, 0)  # tensor cores that multiply bfloat16

log = logging.getLogger(__name__)


@cache
def why_no_kernels(device: torch.device) -> str | None:
    """Return why the kernels cannot run on a device; None: they can, and have been compared with torch there."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda":  # Triton's interpreter runs them anywhere
        return None if os.environ.get("TRITON_INTERPRET") == "1" else "the target is not on a GPU"
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return f"they need an NVIDIA GPU of compute capability {'.'.join(map(str, LEAST_CAPABILITY))}"
    from spectrain.kernels.cuda import triton_kernels  # here: only where there is Triton

    try:
        x, weight = torch.linspace(-1, 1, 384, device=device).view(2, 3, 64)
        found, expected = triton_kernels.add_norm(x, weight, weight[0], 1e-6)[1], x + weight
        torch.testing.assert_close(found, torch.nn.functional.rms_norm(expected, [64], weight[0], 1e-6))
    except Exception as error:  # without a compiler, or with a driver that Triton does not know
        log.warning("our own kernels are not used: %s", why := f"Triton fails here ({error!r:.200})")
        return why
    return None
