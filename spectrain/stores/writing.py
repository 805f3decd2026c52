"""How every file of the project is written, so that it appears whole or not at all, and what is said of a full disk."""

from __future__ import annotations

import errno
import os
import re
import shutil
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
    """Return what a link points to, and any other path as it is."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


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
    """Turn the error of a write that found no room into a UserError that names the folder on the fullest disk."""
    try:
        yield
    except UserError:  # raised where the folder is known better
        raise
    except Exception as error:
        if not is_disk_full(error):
            raise
        free, folder = min((free_bytes(folder), str(folder)) for folder in folders)
        need = "" if need_bytes is None else f" of the {decimal(need_bytes)} that its next file needs"
        raise UserError(
            f"the disk of {folder} is full; free some and run the same command again ({decimal(free)}{need} are free)"
        ) from error


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
    path = path.absolute()
    return shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.is_dir())).free
