"""Rows in JSON-lines files, to which a measurement adds row by row, and which an interrupted one continues."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from spectrain.stores.folder import json_line, parse_json
from spectrain.stores.typed import from_json
from spectrain.stores.writing import write_whole

Row = TypeVar("Row")  # a dataclass


def write_lines(file: Path, rows: Iterable[Mapping]) -> None:
    """Replace a JSON-lines file by these rows, whole."""
    write_whole(file, "".join(map(json_line, rows)))


def read_lines(file: Path) -> list[dict]:
    """Return the rows of a JSON-lines file; none where there is no file. Lines that a kill cut off are left out."""
    rows = []
    if file.is_file():
        for line in file.read_bytes().split(b"\n"):  # as bytes nothing but a line feed ends a line
            with suppress(ValueError):
                rows.append(parse_json(line))
    return rows


class RowFile(Generic[Row]):
    """The rows of a measurement, each a dataclass, in a JSON-lines file that an interrupted run continues.

    `rows` are those that the file holds. Lines that were cut off or have other fields are dropped, and rows that `keep`
    refuses.
    """

    def __init__(self, file: Path, row_type: type[Row], keep: Callable[[Row], bool] = lambda row: True) -> None:
        self.file, self.rows = file, []
        for values in read_lines(file):
            with suppress(ValueError):
                self.rows.append(from_json(row_type, values))
        self.rows = list(filter(keep, self.rows))
        write_lines(file, map(dataclasses.asdict, self.rows))

    def append(self, row: Row) -> None:
        self.rows.append(row)
        with self.file.open("a") as out:
            out.write(json_line(row))


def end_last_line(file: Path) -> None:
    """Close a line that a kill cut off, so that the next row that is appended does not join it."""
    if not file.is_file() or not file.stat().st_size:
        return
    with file.open("rb+") as content:
        content.seek(-1, 2)
        if content.read(1) != b"\n":
            content.write(b"\n")
