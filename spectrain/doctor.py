"""Say what this machine has to decode and train with, and what is wrong with it.

    python -m spectrain.doctor

What is wrong stands below the table, with what to do about it. Nothing is changed.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that --help and a wrong option are answered before torch is imported
    from spectrain.__main__ import run

    run("spectrain.doctor")

import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HOME
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spectrain.config.commands import Doctor
from spectrain.kernels import why_no_kernels, works
from spectrain.kernels.cpu.processor import width
from spectrain.measure.tables import size
from spectrain.stores.environment import CGROUP, OtherWork, cpu_name, host_memory, is_disturbed, n_cores, version_of
from spectrain.stores.files import free_bytes
from spectrain.terminal import stage

LOAD_S = 1.0  # in which the work of other processes is measured
LITTLE_BYTES = 2 * 2**30  # of memory or disk
DRIVER = Path("/proc/driver/nvidia/version")

Finding = tuple[str, str, str]  # what it is, how it is here, and what is wrong, with what to do; "": nothing


def main(options: Doctor) -> None:
    with stage("looking at this machine"):
        findings = [*machine(), *software()]
    table, console = Table(box=None, show_header=False, padding=(0, 2, 0, 0)), Console(highlight=False)
    for what, found, problem in findings:
        table.add_row(what, Text(found, style="yellow" if problem else ""))
    console.print(table, "")
    problems = [Text.assemble((f"{what}: ", "bold yellow"), problem) for what, _, problem in findings if problem]
    for problem in problems or ["Nothing is wrong."]:
        console.print(problem)


def machine() -> Iterator[Finding]:
    """Cores, threads, what other processes do, memory, disk, and each GPU that torch sees, or why it sees none."""
    cores = n_cores()
    vectors = {16: "AVX-512", 8: "AVX2"}.get(width(), "128 bits")
    yield "processor", f"{cpu_name()}, {cores} of {os.cpu_count()} cores, {vectors}", ""
    file, usable = CGROUP / "cpu.max", cores  # of a container: microseconds of a core, in how many
    if file.is_file() and (quota := file.read_text(encoding="utf-8").split())[0] != "max":
        usable = max(1, min(cores, int(quota[0]) // int(quota[1])))
    threads = torch.get_num_threads()
    wrong = f"{threads} threads wait for each other on {usable} cores; set OMP_NUM_THREADS={usable}"
    yield "threads", str(threads), wrong if threads > usable else ""
    others = OtherWork()
    time.sleep(LOAD_S)
    share = others.share() or 0.0
    wrong = "what is measured now is too slow; wait for their end" if is_disturbed(share) else ""
    yield "other processes", f"take {share:.0%} of the processor's time now", wrong
    total, free = host_memory()
    yield "memory", f"{size(free)} of {size(total)} are free", "end other programs" if free < LITTLE_BYTES else ""
    free, wrong = free_bytes(Path()), "delete something, or give out= elsewhere"
    yield "disk", f"{size(free)} are free here", wrong if free < LITTLE_BYTES else ""
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        said = f"{torch.cuda.get_device_name(number)}, {size(free)} of {size(total)} are free"
        why = why_no_kernels(torch.device("cuda", number))
        wrong = f"our own kernels do not run: {why}; install Triton and a C compiler" if why else ""
        yield f"GPU {number}", f"{said}, CUDA {torch.version.cuda}", wrong
    if not torch.cuda.device_count():
        has_driver = DRIVER.is_file()
        wrong = f"torch {torch.__version__} sees no GPU; install one for the CUDA of this driver, or update the driver"
        yield "GPU", "not seen, though there is a driver" if has_driver else "none", wrong if has_driver else ""


def software() -> Iterator[Finding]:
    """What we compile, versions, and where models are kept."""
    dtypes = (torch.float32, torch.bfloat16, torch.int8)
    failed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes if not works(dtype))
    wrong = f"there are none for {failed}, and torch's own are slower; pip install -U numba llvmlite" if failed else ""
    yield "compiled kernels", "not all work" if failed else "work", wrong
    names = ("spectrain", "torch", "transformers", "lightning", "numba")
    yield "versions", ", ".join(f"{name} {version_of(name) or 'not installed'}" for name in names), ""
    yield "caches", f"models in {HF_HOME}", ""
