"""Tables of text: rows become a DataFrame, and a DataFrame becomes a table for the terminal or in Markdown.

The macro `table` of templates/macros.html writes the same DataFrame as HTML.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence

from pandas import DataFrame
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spectrain.reporting.formats import MISSING

NUMBER = re.compile(rf"[-+]?[\d.]|{MISSING}|$")  # how a cell begins that is no word


class Marked(str):
    """The text of a cell that must not be overlooked: it is printed in red."""


def table_of(rows: Iterable[Mapping[str, object]], names: Sequence[str] | None = None) -> DataFrame:
    """Rows of cells by the head of their column; missing cells are dashes.

    Args:
        rows: text, `Marked` text, or `Markup` for HTML. What follows a line break is small print.
        names: by which rows can be told from one another, for instance to shade one.
    """
    frame = DataFrame(list(rows), index=names, dtype=object)
    return frame.where(frame.notna(), MISSING)


def columns_of_words(frame: DataFrame) -> list[str]:
    """The columns that begin at the left: the first, and those that hold a word."""
    return [name for i, name in enumerate(frame) if i == 0 or not all(NUMBER.match(str(cell)) for cell in frame[name])]


def for_terminal(frame: DataFrame, notes: Sequence[str] = (), dim: str | None = None) -> Table:
    """A table that keeps its numbers whole: only the first column is folded where the terminal is narrow.

    `notes` are lines below it; the row of the name `dim` stands back.
    """
    style = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False, "show_edge": False}
    table = Table(caption_justify="left", **style)
    words = columns_of_words(frame)
    for i, name in enumerate(frame):
        first = {"overflow": "fold", "min_width": 8} if i == 0 else {"no_wrap": True}
        table.add_column(Text(name.replace(" ", "\n")), justify="left" if name in words else "right", **first)
    for label, *cells in frame.itertuples(name=None):
        # Text: a bracket in a name is no markup.
        texts = [Text(str(cell), style="red" if isinstance(cell, Marked) else "") for cell in cells]
        table.add_row(*texts, style="dim" if label == dim else None)
    table.caption = Text("\n".join(notes)) if notes else None
    return table


def as_markdown(frame: DataFrame) -> str:
    lines = [list(frame), ["---"] * len(frame.columns), *frame.itertuples(index=False)]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def show(parts: Iterable[tuple[str, DataFrame | None]], columns: int, files: str = "") -> None:
    """Print titles and their tables, `columns` wide where the output is no terminal; then which files were written."""
    console = Console(width=None if sys.stdout.isatty() else columns)
    for title, frame in parts:
        console.print(title, highlight=False, markup=False, soft_wrap=True)
        if frame is not None:
            console.print(for_terminal(frame), "")
    if files:
        Console(stderr=True).print(files, style="dim", soft_wrap=True)
