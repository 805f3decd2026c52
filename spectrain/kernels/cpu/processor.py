"""The features of this CPU, and the variable SPECTRAIN_CPU that overrides them."""

from __future__ import annotations

import os
from functools import cache

import llvmlite.binding as llvm
import torch

# What a processor multiplies half precision with, by LLVM's names.
ARITHMETIC = {
    torch.bfloat16: ("avx512bf16", "amx-bf16", "bf16"),
    torch.float16: ("avx512fp16", "amx-fp16", "fullfp16"),
}
SWITCH = "SPECTRAIN_CPU"  # the environment variable that changes which instructions are used
NARROW_MKL = "narrow-mkl"  # our name, beside LLVM's: MKL uses only half of each vector


@cache
def cpu_features() -> dict[str, bool]:
    """Return which instructions are used, by LLVM's names: those of this processor, as SPECTRAIN_CPU changes them.

    Each word of it removes one or adds one, as in `-avx512f,+avx512bf16`. So the way that the code takes on another
    processor can be taken on this one: what is added is computed with the instructions that are there.
    """
    changes = [word for word in os.environ.get(SWITCH, "").split(",") if word]
    if wrong := [word for word in changes if word[0] not in "+-"]:
        raise ValueError(f"{SWITCH}: {wrong[0]} has no sign; write -avx512f, +avx512bf16, or leave it unset")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    found = dict(llvm.get_host_cpu_features()) | {word[1:]: word[0] == "+" for word in changes}
    is_amd = llvm.get_host_cpu_name().startswith("znver") and torch.backends.mkl.is_available()
    return {NARROW_MKL: bool(found.get("avx512f")) and is_amd} | found


def has(feature: str) -> bool:
    """Whether this processor itself has instructions of LLVM's name, and they are used."""
    return bool(llvm.get_host_cpu_features().get(feature) and cpu_features().get(feature))


def multiplies(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies numbers of this dtype itself; if not, float32 is many times faster."""
    return dtype not in ARITHMETIC or any(cpu_features().get(name) for name in ARITHMETIC[dtype])


def mkl_is_narrow() -> bool:
    """Whether MKL uses only half of each vector, as it does on processors of AMD with AVX-512."""
    return cpu_features()[NARROW_MKL]


def width() -> int:
    """Return the floats of a vector register."""
    found = cpu_features()
    return 16 if found.get("avx512f") else 8 if found.get("avx2") else 4
