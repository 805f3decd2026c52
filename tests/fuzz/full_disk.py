"""Runs a job on a disk that is too small for it, and again after the disk was made larger."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from spectrain.stores.folder import read_json
from tests.fuzz.compare import differences
from tests.fuzz.fork_server import POLL_S, Outcome, start
from tests.fuzz.jobs import Job

LARGE_BYTES = 2**30
PAGE_BYTES = 4096  # of a tmpfs
LIMIT_S = 120.0
METRICS = "metrics.csv"  # rows are added to it


class MayNotMount(PermissionError):
    """A disk of its own needs root."""


@dataclass(frozen=True)
class Trial:
    """The outcome of a job on a small disk. `fault` is None if every promise was kept."""

    job: str
    size_bytes: int
    outcomes: tuple[Outcome, ...]  # on the small disk, and after there was room where it was refused
    fault: str | None

    @property
    def refused(self) -> bool:
        return len(self.outcomes) > 1


@contextmanager
def disk(folder: Path, size_bytes: int) -> Iterator[None]:
    """Make the folder, with a disk of its own. Raises MayNotMount."""
    folder.mkdir(parents=True)
    if subprocess.run(_mount(folder, size_bytes), capture_output=True, check=False).returncode:
        folder.rmdir()
        raise MayNotMount
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    try:
        yield
    finally:
        os.environ.pop("TMPDIR")
        if before:
            os.environ["TMPDIR"] = before
        tempfile.tempdir = None
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


def _mount(folder: Path, size_bytes: int, again: bool = False) -> list[str]:
    options = f"{'remount,' if again else ''}size={max(PAGE_BYTES, size_bytes)}"
    return ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]


def undisturbed(job: Job, folder: Path) -> int:
    """Run a job in a folder that has a large disk of its own. Returns the most bytes that it held on the way."""
    running, most = start(job.typed, folder, log=_log(folder)), 0
    while not os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(POLL_S)
        room = os.statvfs(folder)
        most = max(most, (room.f_blocks - room.f_bfree) * room.f_frsize)
    outcome = running.wait(LIMIT_S)
    assert outcome.code == 0, outcome
    return most


def fill_trial(job: Job, whole: Path, folder: Path, size_bytes: int) -> Trial:
    """Run a job in a folder on a disk of a size, and compare with the folder `whole` of an undisturbed run."""
    with disk(folder, size_bytes):
        outcomes = [start(job.typed, folder, log=_log(folder)).wait(LIMIT_S)]
        fault = _fault_of(outcomes[0]) or _half_written(folder)
        if outcomes[0].code != 0:
            subprocess.run(_mount(folder, LARGE_BYTES, again=True), check=True)
            outcomes.append(start(job.typed, folder, log=_log(folder)).wait(LIMIT_S))
            fault = fault or (f"then exit code {outcomes[1].code}" if outcomes[1].code != 0 else None)
        fault = fault or next((one.what for one in differences(whole, folder, job.by_the_clock)), None)
        return Trial(job.name, size_bytes, tuple(outcomes), fault)


def _log(folder: Path) -> str:
    """Return the file for the output, which does not lie on the disk that is filled."""
    return str(folder.with_name(f"{folder.name}.output"))


def _fault_of(outcome: Outcome) -> str | None:
    if outcome.code == 2 and outcome.fault is None and "disk" not in outcome.output and "free" not in outcome.output:
        return "it does not speak of the disk"
    return outcome.fault


def _half_written(folder: Path) -> str | None:
    """Name a file that is not whole and does not have the hidden name of one that is being written."""
    for file in sorted(folder.rglob("[!.]*")):
        try:
            if not _is_whole(file):
                return f"{file.relative_to(folder)} is half-written"
        except Exception as error:  # of whatever reads the file
            return f"{file.relative_to(folder)} is half-written ({type(error).__name__})"
    return None


def _is_whole(file: Path) -> bool:
    if not file.is_file() or file.name == METRICS:
        return True
    if file.suffix == ".json":
        return read_json(file) is not None
    if file.suffix == ".safetensors":
        return safe_open(file, "pt") is not None
    ends = {".html": b"</html>\n", ".png": b"IEND\xaeB`\x82", ".csv": b"\n", ".yaml": b"\n", ".md": b"\n"}
    return file.suffix not in ends or file.read_bytes().rstrip(b"\n").endswith(ends[file.suffix].rstrip(b"\n"))
