"""What a long command shows: a bar on a terminal, elsewhere a log line now and then; and where its tables go."""

from __future__ import annotations

import io
import logging
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

log = logging.getLogger(__name__)

TABLE_COLUMNS = 100  # where the output is no terminal


def console() -> Console:
    """Where a command's tables are printed."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that is not UTF-8, or a character that the terminal lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS)


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

    def advance(self, units: int, tokens: int) -> None:
        """`units` of `total` are done, in which there were so many tokens."""
        self._done += units
        self.tokens += tokens
        now_s = time.monotonic()
        rate = self.tokens / max(now_s - self._start_s, 1e-9)
        self._bar.update(self._task, advance=units, tokens=self.tokens, rate=rate)
        if self.shown and self._bar.disable and now_s - self._said_s > self.every_s:
            self._said_s = now_s
            log.info(
                "%s: %s%d tokens, %.0f tokens/s%s", self.stage, self._share(), self.tokens, rate, self._left(now_s)
            )

    def _share(self) -> str:
        return f"{self._done / self.total:.0%}, " if self.total else ""

    def _left(self, now_s: float) -> str:
        if not self.total or not self._done:
            return ""
        return f", {(now_s - self._start_s) / self._done * max(self.total - self._done, 0):.0f} s left"
