"""How every file of the project is written, so that it appears whole or not at all, and what is said of a full disk."""

from __future__ import annotations

import errno
import os
import re
import select
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from rich.filesize import decimal

from spectrain.errors import UserError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_whole(file: Path, content: str | bytes | Callable[[BinaryIO], object]) -> None:
    """Write a file, on disk and whole, in place of an older one, which stays where that fails.

    `content` is the text, the bytes, or what writes them into an open file. Where the file is a link, the file that it
    points to is replaced. UserError says that the disk is full.
    """
    file = real_path(file)
    content = content.encode() if isinstance(content, str) else content
    temporary = file.with_name(f".{file.name}.tmp")
    with naming_a_full_disk(file.parent, need_bytes=len(content) if isinstance(content, bytes) else None):
        try:
            with temporary.open("wb") as out:
                mode = os.fstat(out.fileno()).st_mode
                out.write(content) if isinstance(content, bytes) else content(out)
            temporary.chmod(mode)  # safetensors makes files for the user alone
            to_disk(temporary)
            rename(temporary, file)
        finally:
            with suppress(OSError):  # renamed, or never made
                temporary.unlink()


def real_path(path: Path) -> Path:
    """Return what a link points to, and any other path as it is. Raise UserError where links lead in a circle."""
    if not os.path.islink(path):
        return path
    real = Path(os.path.realpath(path))
    if os.path.islink(real):
        raise UserError(f"{path} is a link that leads back to itself; remove it or give another path")
    return real


def rename(path: Path, to: Path) -> None:
    """Rename a file or folder that is on disk, so that its new name outlives a failure of the machine too."""
    path.rename(to)
    _sync(to.parent)


def to_disk(path: Path) -> None:
    """Make sure that a file, or a folder with all in it, outlives a failure of the machine, not only of the process."""
    for one in [path, *path.rglob("*")]:
        _sync(one)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def naming_a_full_disk(*folders: Path, need_bytes: int | None = None) -> Iterator[None]:
    """Turn the error of a write that found no room into UserError, which names the folder whose disk is the fullest."""
    try:
        yield
    except UserError:  # said already, by who knew the folder better
        raise
    except Exception as error:
        if not is_disk_full(error):
            raise
        folder, free = _fullest(folders)
        need = "" if need_bytes is None else f" of the {decimal(need_bytes)} that its next file needs"
        raise UserError(
            f"the disk of {folder} is full; free some and run the same command again ({decimal(free)}{need} are free)"
        ) from error


def _fullest(folders: tuple[Path, ...]) -> tuple[str, int]:
    """Return the first of these folders, or stdout, on the disk with the least room, and this room in bytes."""
    disks: dict[int, Path] = {}  # each is asked once, because others write to it between two answers
    for folder in folders:
        disks.setdefault(_existing(folder).stat().st_dev, folder)
    rooms = {str(folder): free_bytes(folder) for folder in disks.values()}
    with suppress(OSError):  # stdout may be closed
        rooms |= {} if os.fstat(1).st_dev in disks else stdout_room()
    return min(rooms.items(), key=lambda one: one[1])


def is_disk_full(error: BaseException) -> bool:
    """Return whether a write found no room, which safetensors and numpy say as text, and torch only as a failure."""
    said = str(error)
    if isinstance(error, OSError) and re.search(r"\d+ requested and \d+ written", said):
        return True
    if getattr(error, "errno", None) in DISK_FULL or any(f"os error {code})" in said for code in DISK_FULL):
        return True
    if isinstance(error, RuntimeError) and "iostream error" in said:
        return True
    before = error.__cause__ or error.__context__
    return before is not None and is_disk_full(before)


def free_bytes(path: Path) -> int:
    """Return the room on the disk of a path, which need not exist yet."""
    return shutil.disk_usage(_existing(path)).free


def _existing(path: Path) -> Path:
    """Return the nearest folder that exists, from the path itself upwards."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def stdout_room() -> dict[str, int]:
    """Return the room on the disk that stdout goes to, by its name in messages; nothing where it goes to none."""
    with suppress(OSError):
        kind = os.fstat(1)
        if stat.S_ISREG(kind.st_mode):
            disk = os.fstatvfs(1)
            return {"stdout": disk.f_bavail * disk.f_frsize}
        if os.path.samestat(kind, os.stat("/dev/full")):
            return {"stdout": 0}
    return {}


def is_stdout_closed() -> bool:
    """Return whether stdout is a pipe whose reader has left."""
    ask = select.poll()
    ask.register(1, 0)
    return any(event & select.POLLERR for _, event in ask.poll(0))


def drop_stdout() -> None:
    """Print nothing any more: at its end Python would fail at what it still holds, with an exit code of its own."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
