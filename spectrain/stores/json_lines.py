"""JSON-lines files that a run appends to, row by row, and may be killed while it does."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path


def each_line(file: Path) -> Iterator[dict]:
    """The rows of a file, one after the other; none where there is no file. Lines that were cut off are left out."""
    if not file.is_file():
        return
    with file.open("rb") as lines:  # as bytes nothing but a line feed ends a line
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError:
                continue


def read_lines(file: Path) -> list[dict]:
    """All rows of a file, as `each_line` gives them."""
    return list(each_line(file))


def write_lines(file: Path, rows: Iterable[dict]) -> None:
    """Replaces the file by these rows, by renaming."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
    temporary.rename(file)


def end_last_line(file: Path) -> None:
    """Closes a line that was cut off, so that the next row that is appended does not join it."""
    if not file.is_file() or not file.stat().st_size:
        return
    with file.open("rb+") as content:
        content.seek(-1, 2)
        if content.read(1) != b"\n":
            content.write(b"\n")
