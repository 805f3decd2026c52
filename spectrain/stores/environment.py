"""What a run was made with: versions, devices, ranks, and the commit of the code."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import socket
import subprocess
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil
import torch

from spectrain.config import TYPED_COMMAND

LEAST_DISTURBING = 0.05  # of the time of the cores, that other processes take
MANY_FILES = 1 << 16
CGROUP = Path("/sys/fs/cgroup")  # a container's own group; version 2
LIBRARIES = ("torch", "lightning", "transformers", "deepspeed", "spectrain")


def environment(ranks: int) -> dict[str, object]:
    """Return versions, host and devices, as plain values for JSON."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        **{name: version_of(name) for name in LIBRARIES},
        "cuda": torch.version.cuda if gpus else None,
        "devices": gpus or [cpu_name()],
        "ranks": ranks,
        "host": socket.gethostname(),
    }


def provenance() -> dict[str, object]:
    """Return the origin of results: the command as typed, the date, and the main versions."""
    versions = {name: version_of(name) for name in ("spectrain", "torch", "transformers")}
    versions["python"] = platform.python_version()
    return {"command": TYPED_COMMAND.get(), "date": date_now(), "versions": versions}


def device_facts(device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    """Return the device, threads and dtype that seconds were measured with."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return {
        "device": f"{device} ({name})",
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }


def host_memory() -> tuple[int, int]:
    """Return the bytes of memory in all, and those that are free.

    A container has no more than its control group allows.
    """
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    if (limit := CGROUP / "memory.max").is_file() and (most := limit.read_text(encoding="utf-8").strip()) != "max":
        kinds = dict(line.split() for line in (CGROUP / "memory.stat").read_text(encoding="utf-8").splitlines())
        dropped = int(kinds["inactive_file"])  # files are, at need
        used = int((CGROUP / "memory.current").read_text(encoding="utf-8")) - dropped
        total, free = min(total, int(most)), min(free, max(0, int(most) - used))
    return total, free


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory()[1]


def free_files() -> int:
    """Raise the limit on this process's open files as far as it may, and return how many more can be opened."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS takes no infinite one
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (limit if limit != resource.RLIM_INFINITY else MANY_FILES) - psutil.Process().num_fds()


def date_now() -> str:
    """Return the date as results tell it: to the minute, UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())


@cache  # the system takes a millisecond to tell
def n_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """Return the model of this machine's processor, as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


class OtherWork:
    """The work of other processes on the cores that this one may use, from now on."""

    def __init__(self) -> None:
        self._before = self._seconds()

    def share(self) -> float | None:
        """Return the share of these cores' time that others took since the last call; None where no system tells it."""
        before, self._before = self._before, self._seconds()
        if before is None or self._before is None:
            return None
        (busy, own, whole) = (now - then for now, then in zip(self._before, before, strict=True))
        return min(1.0, max(0.0, (busy - own) / max(whole, 1e-9)))

    def _seconds(self) -> tuple[float, float, float] | None:
        """Return the seconds in which the cores worked, those of this process, and all there were."""
        try:
            cores, ticks = os.sched_getaffinity(0), os.sysconf("SC_CLK_TCK")
            lines = [line.split() for line in Path("/proc/stat").read_text(encoding="utf-8").splitlines()]
        except (AttributeError, OSError):
            return None
        # user, nice, system, idle, waiting for a disk, interrupts, the same in software, taken by the machine around it
        worked = [sum(map(int, [*line[1:4], *line[6:9]])) for line in lines if line[0] in {f"cpu{n}" for n in cores}]
        return sum(worked) / ticks, time.process_time(), time.monotonic() * len(cores)


def is_disturbed(share: float | None) -> bool:
    """Return whether other processes took so much of the time that seconds were measured beside other work."""
    return share is not None and share >= LEAST_DISTURBING


def version_of(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit_of(folder: Path) -> dict[str, object] | None:
    """Return the commit of the checkout that this code runs from, and whether files differ from it.

    None outside a checkout: a wheel may lie in an environment inside somebody else's.
    """

    def git(*arguments: str) -> str:
        return subprocess.check_output(
            ["git", *arguments], cwd=folder, stderr=subprocess.DEVNULL, encoding="utf-8", errors="replace", timeout=30
        )

    try:
        git("ls-files", "--error-unmatch", "cli.py")
        dirty = bool(git("status", "--porcelain", "--untracked-files=no"))
        return {"commit": git("rev-parse", "HEAD").strip(), "dirty": dirty}
    except (OSError, subprocess.SubprocessError):
        return None
