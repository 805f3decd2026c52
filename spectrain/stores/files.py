"""Every file that the project writes: it appears whole or not at all, and JSON is strict (no NaN, no Infinity)."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Annotated, BinaryIO, Generic, NoReturn, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from rich.filesize import decimal

from spectrain.errors import UserError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# How numpy, safetensors and torch say that a disk is full.
SAID_OF_A_FULL_DISK = re.compile(r"\d+ requested and \d+ written|os error (28|122)\)|iostream error")
Count = Annotated[int, Field(ge=0)]

T = TypeVar("T")  # a dataclass, a TypedDict or a mapping of typed values
Row = TypeVar("Row")  # a dataclass

_adapter = cache(TypeAdapter)  # of a type


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
def naming_a_full_disk(folder: Path, need_bytes: int | None = None) -> Iterator[None]:
    """Turn the error of a write that found no room into a UserError that names the folder."""
    try:
        yield
    except UserError:  # raised where the folder is known better
        raise
    except Exception as error:
        if not is_disk_full(error):
            raise
        if getattr(error, "filename", None):
            folder = Path(error.filename).parent
        need = "" if need_bytes is None else f" of the {decimal(need_bytes)} that its next file needs"
        free = decimal(free_bytes(folder))
        raise UserError(
            f"the disk of {folder} is full; free some and run the same command again ({free}{need} are free)"
        ) from error


def is_disk_full(error: BaseException) -> bool:
    """Return whether a write found no room, which some libraries say only as text."""
    if getattr(error, "errno", None) in DISK_FULL or SAID_OF_A_FULL_DISK.search(str(error)):
        return True
    before = error.__cause__ or error.__context__
    return before is not None and is_disk_full(before)


def free_bytes(path: Path) -> int:
    """Return the room on the disk of a path, which need not exist yet."""
    path = path.absolute()
    return shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.is_dir())).free


def write_json(file: Path, value: object, sort_keys: bool = False) -> None:
    """Write plain values or a dataclass as strict JSON; see `strict` and `write_whole`."""
    write_whole(file, json.dumps(strict(value), indent=2, sort_keys=sort_keys, allow_nan=False) + "\n")


def json_line(value: object) -> str:
    """Return plain values or a dataclass as one line of strict JSON; see `strict`."""
    return json.dumps(strict(value), allow_nan=False) + "\n"


def strict(value: object) -> object:
    """Return a value as strict JSON holds it: dataclasses as dictionaries, None in place of NaN and infinities."""
    if dataclasses.is_dataclass(value):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {key: strict(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [strict(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(file: Path) -> object:
    """Read a JSON file; see `load_json`, whose ValueError becomes a UserError that names the file."""
    try:
        return load_json(file)
    except ValueError as error:
        raise UserError(f"{file} is no JSON that can be read ({error}); restore or remove it") from error


def read_object(file: Path, kind: type[T], otherwise: str) -> T:
    """Read a JSON file that holds a dataclass, or a mapping of typed values.

    Raises:
        UserError: it is damaged, or holds something else; `otherwise` says what to do then.
    """
    try:
        return from_json(kind, load_json(file))
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}); {otherwise}") from error


def load_json(file: Path) -> object:
    """Read a JSON file; see `parse_json`."""
    return parse_json(file.read_bytes())


def parse_json(text: str | bytes) -> object:
    """Read strict JSON. Raises ValueError where it is none, also for NaN and Infinity."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}, which is not JSON")


def from_json(kind: type[T], values: object) -> T:
    """Make a dataclass, and those in its fields, of what a JSON file held.

    Mappings of another `kind` are checked and returned as they are.

    Raises:
        ValueError: it is no object, or a field is missing, unknown or of another type.
    """
    if not isinstance(values, Mapping):
        raise ValueError("it holds no names with values")
    if dataclasses.is_dataclass(kind):
        unknown = sorted(values.keys() - {field.name for field in dataclasses.fields(kind)})
        if unknown:
            raise ValueError(f"{unknown[0]} is unknown")
    try:
        made = _adapter(kind).validate_json(json.dumps(values), strict=True)
        return made if dataclasses.is_dataclass(kind) else values
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))) from error


def read_lines(file: Path) -> list[dict]:
    """Return the rows of a JSON-lines file; none where there is no file. Lines that a kill cut off are left out."""
    rows = []
    if file.is_file():
        for line in file.read_bytes().split(b"\n"):  # as bytes nothing but a line feed ends a line
            with suppress(ValueError):
                rows.append(parse_json(line))
    return rows


def end_last_line(file: Path) -> None:
    """Close a line that a kill cut off, so that the next row that is appended does not join it."""
    if file.is_file() and (content := file.read_bytes()) and not content.endswith(b"\n"):
        with file.open("ab") as out:
            out.write(b"\n")


class RowFile(Generic[Row]):
    """The rows of a measurement, each a dataclass, in a JSON-lines file that an interrupted run continues.

    `rows` are those that the file holds. Lines that were cut off or have other fields are dropped, and rows that `keep`
    refuses. Without `writes` the file stays as it is, because another rank writes the same rows.
    """

    def __init__(
        self, file: Path, row_type: type[Row], keep: Callable[[Row], bool] = lambda row: True, writes: bool = True
    ) -> None:
        self.file, self.rows, self.writes = file, [], writes
        for values in read_lines(file):
            with suppress(ValueError):
                self.rows.append(from_json(row_type, values))
        self.rows = list(filter(keep, self.rows))
        if writes:
            write_whole(file, "".join(map(json_line, self.rows)))

    def append(self, row: Row) -> None:
        self.rows.append(row)
        if self.writes:
            with self.file.open("a", encoding="utf-8") as out:
                out.write(json_line(row))
