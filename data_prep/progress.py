"""What a command of `data_prep` shows: a bar on a terminal, elsewhere a log line now and then, and its table."""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

log = logging.getLogger(__name__)

TABLE_COLUMNS = 100  # where the output is no terminal


def console() -> Console:
    """Where a command's tables are printed."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that is not UTF-8, or a character that the terminal lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS)


def show_facts(title: str, facts: Mapping[str, str | None], next_command: str | None = None) -> None:
    """Print a table of facts, those that are None left out, and the command to type next."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        if fact is not None:
            table.add_row(name, fact)
    console().print(table)
    if next_command is not None:
        console().print(f"next: {next_command}", style="dim", soft_wrap=True)


def target_override(path: str) -> str:
    """How the next command names this target."""
    return "" if path == "pystdlib-8l" else f" target={path}"


def speed(tokens_per_s: float | None) -> str | None:
    """As the table tells it; None where nothing was done."""
    return None if tokens_per_s is None else f"{tokens_per_s:,.0f} tokens/s"


def readable(n_bytes: float) -> str:
    """12.3 MB"""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.1f} {unit}" if unit != "B" else f"{n_bytes:.0f} B"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"


class TokenProgress:
    """Shows how far a stage is, tokens/s and time left.

    Args:
        stage: what is being done, one word.
        total: units of work in all; None: not known, and no time left is shown.
        shown: False on ranks other than zero.
        every_s: seconds between log lines.
    """

    def __init__(self, stage: str, total: int | None, shown: bool = True, every_s: float = 15.0):
        self.stage, self.total, self.shown, self.every_s = stage, total, shown, every_s
        self._bar = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[tokens]:,} tokens, {task.fields[rate]:,.0f} tokens/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not (shown and sys.stderr.isatty()),
        )
        self._task = self._bar.add_task(stage, total=total, tokens=0, rate=0.0)
        self.tokens = self._done = 0
        self._start_s = self._said_s = time.monotonic()

    def __enter__(self) -> TokenProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def advance(self, units: int, tokens: int | None = None) -> None:
        """`units` of `total` are done, in which there were so many tokens; None: units are tokens."""
        self._done += units
        self.tokens += units if tokens is None else tokens
        now_s = time.monotonic()
        elapsed_s = max(now_s - self._start_s, 1e-9)
        self._bar.update(self._task, advance=units, tokens=self.tokens, rate=self.tokens / elapsed_s)
        if not self.shown or not self._bar.disable or now_s - self._said_s <= self.every_s:
            return
        self._said_s = now_s
        share = f"{self._done / self.total:.0%}, " if self.total else ""
        left = ""
        if self.total and self._done:
            left = f", {elapsed_s / self._done * max(self.total - self._done, 0):.0f} s left"
        log.info("%s: %s%d tokens, %.0f tokens/s%s", self.stage, share, self.tokens, self.tokens / elapsed_s, left)
