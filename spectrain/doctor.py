"""Say what this machine has to decode and train with, and what is wrong with it.

    python -m spectrain.doctor

What is wrong stands below the table, with what to do about it. Nothing is changed.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that --help and a wrong option are answered before torch is imported
    from spectrain.cli import run

    run("spectrain.doctor")

import importlib.metadata
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import getproxies

import torch
from huggingface_hub import get_session
from huggingface_hub.constants import HF_HOME
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spectrain.config.commands import Doctor
from spectrain.data.row_cache import ROWS
from spectrain.drafting.step_costs import Table as Seconds
from spectrain.kernels import multiplies, why_no_kernels, works
from spectrain.kernels.cpu.attention import move
from spectrain.kernels.cpu.products import width
from spectrain.measure.tables import size
from spectrain.stores.environment import CGROUP, OtherWork, cpu_name, host_memory, is_disturbed, version_of
from spectrain.stores.files import free_bytes
from spectrain.stores.locations import BUNDLED, CHECKPOINTS, MADE, SHIPPED, SHIPPED_STORES, bundled_folder
from spectrain.terminal import stage

LOAD_S = 1.0  # in which the work of other processes is measured
LITTLE_BYTES = 2 * 2**30  # of memory or disk
DRIVER = Path("/proc/driver/nvidia/version")
QUOTA = CGROUP / "cpu.max"  # microseconds of processor time, in how many

Finding = tuple[str, str, str]  # what it is, how it is here, and what is wrong, with what to do; "": nothing


def main(options: Doctor) -> None:
    with stage("looking at this machine"):
        findings = [*processor(), *gpus(), *compilers(), *versions(), *files(), *surroundings()]
    table, console = Table(box=None, show_header=False, padding=(0, 2, 0, 0)), Console(highlight=False)
    for what, found, problem in findings:
        table.add_row(what, Text(found, style="yellow" if problem else ""))
    console.print(table, "")
    problems = [Text.assemble((f"{what}: ", "bold yellow"), problem) for what, _, problem in findings if problem]
    for problem in problems or ["Nothing is wrong."]:
        console.print(problem)


def processor() -> Iterator[Finding]:
    """Cores, threads, instructions, memory, and what other processes do."""
    quota, period = QUOTA.read_text(encoding="utf-8").split() if QUOTA.is_file() else ("max", "1")
    cores = usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    said = f"{cpu_name()}, {cores} of {os.cpu_count()} cores"
    if quota != "max":
        usable = max(1, min(cores, int(quota) // int(period)))
        said += f", of which the container may use the time of {int(quota) / int(period):g}"
    yield "processor", said, ""
    threads, asked, wrong = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS"), ""
    if threads > usable:
        wrong = f"{threads} threads wait for each other on {usable} cores; set OMP_NUM_THREADS={usable}"
    elif asked and 2 * threads <= usable:
        wrong = f"most of the {usable} cores are idle; unset OMP_NUM_THREADS, or set OMP_NUM_THREADS={usable}"
    yield "threads", f"{threads} (OMP_NUM_THREADS {f'is {asked}' if asked else 'is not set'})", wrong
    vectors = {16: "AVX-512", 8: "AVX2"}.get(width(), "128 bits")
    yield "vectors", f"{vectors}; bfloat16 is {'multiplied' if multiplies(torch.bfloat16) else 'emulated'}", ""
    others = OtherWork()
    time.sleep(LOAD_S)
    share = others.share() or 0.0
    wrong = "what is measured now is too slow; wait for their end"
    said = f"take {share:.0%} of the processor's time now, load {os.getloadavg()[0]:.1f}"
    yield "other processes", said, wrong if is_disturbed(share) else ""
    total, free = host_memory()
    yield "memory", f"{size(free)} of {size(total)} are free", "end other programs" if free < LITTLE_BYTES else ""


def gpus() -> Iterator[Finding]:
    """Each GPU that torch sees, or why it sees none."""
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        said = (
            f"{torch.cuda.get_device_name(number)}, {size(free)} of {size(total)} are free, CUDA {torch.version.cuda}"
        )
        why = why_no_kernels(torch.device("cuda", number))
        yield (
            f"GPU {number}",
            said,
            f"our own kernels do not run: {why}; install Triton and a C compiler" if why else "",
        )
    if not torch.cuda.device_count():
        wrong = f"torch {torch.__version__} sees no GPU; install one for the CUDA of this driver, or update the driver"
        driver = DRIVER.read_text(encoding="utf-8").splitlines()[0] if DRIVER.is_file() else "none"
        yield "GPU", driver, wrong if DRIVER.is_file() else ""


def compilers() -> Iterator[Finding]:
    """Whether what we compile for this processor works; a first time takes some 15 seconds."""
    began, dtypes = time.perf_counter(), (torch.float32, torch.bfloat16, torch.int8)
    failed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes if not works(dtype))
    wrong = f"there are none for {failed}, and torch's own are slower; pip install -U numba llvmlite" if failed else ""
    yield "compiled kernels", f"ready in {time.perf_counter() - began:.1f} s", wrong
    folder = Path(move.stats.cache_path).parent
    yield "their cache", f"{size_on_disk(folder, '*.nb[ci]')} below {folder}", ""


def versions() -> Iterator[Finding]:
    """The versions that matter, and those that spectrain does not go with."""
    names = ("spectrain", "torch", "transformers", "lightning", "numba")
    yield "versions", ", ".join(f"{name} {version_of(name) or 'not installed'}" for name in names), ""
    for one in map(Requirement, importlib.metadata.requires("spectrain") or [] if version_of("spectrain") else []):
        if one.marker is None and not one.specifier.contains(version_of(one.name) or "0", prereleases=True):
            yield one.name, version_of(one.name) or "missing", f"spectrain needs another; pip install '{one}'"


def files() -> Iterator[Finding]:
    """What comes with spectrain, what was learnt and cached, and the room for more."""
    names = (BUNDLED, *SHIPPED, *SHIPPED_STORES)
    lacking = [name for name in names if bundled_folder(name) is None]
    made = [f"{name} {'is here' if bundled_folder(name) else 'is downloaded at its first use'}" for name in MADE]
    wrong = f"without {', '.join(lacking)}; install spectrain again" if lacking else ""
    yield "checkpoints", f"{', '.join(name for name in names if name not in lacking)}; {', '.join(made)}", wrong
    for file in sorted(CHECKPOINTS.glob("seconds-*.json")):
        yield "seconds of steps", f"{len(Seconds.read(file).seconds)} curves in {file}", ""
    hub = Path(HF_HOME, "hub")
    is_lost = HF_HOME.startswith(f"{tempfile.gettempdir()}/spectrain-")  # see `caches`
    wrong = "they are lost at a restart; set HF_HOME to a folder that can be written" if is_lost else ""
    yield "caches", f"{size_on_disk(ROWS)} of rows in {ROWS}, {size_on_disk(hub)} of models in {hub}", wrong
    free = free_bytes(Path())
    yield (
        "disk",
        f"{size(free)} are free here",
        "delete something, or give out= elsewhere" if free < LITTLE_BYTES else "",
    )


def surroundings() -> Iterator[Finding]:
    """Which characters the output takes, and the proxies of the environment."""
    wrong = "characters that it lacks are shown as ?; unset PYTHONIOENCODING, or set it to utf-8"
    yield "output", f"encoded in {sys.stdout.encoding}", "" if "utf" in sys.stdout.encoding.lower() else wrong
    wrong = ""
    try:
        get_session()
    except Exception as error:  # the HTTP library's own types
        wrong = f"the hub cannot be asked through them ({error}); set them to http://host:port, or unset them"
    yield "proxies", ", ".join(sorted(getproxies())) or "none", wrong


def size_on_disk(folder: Path, pattern: str = "*") -> str:
    return size(sum(file.lstat().st_size for file in folder.rglob(pattern) if file.is_file()))
