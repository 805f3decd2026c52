"""What a command of `data_prep` shows: a bar on a terminal, elsewhere a log line now and then, and its table."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

log = logging.getLogger(__name__)

TABLE_COLUMNS = 100  # where the output is no terminal
LOG_EVERY_S = 15.0

Advance = Callable[..., None]  # (units, tokens): so many units are done, in which there were so many tokens


def console() -> Console:
    """Return where a command's tables are printed."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that is not UTF-8, or a character that the terminal lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS)


def show_facts(title: str, facts: Mapping[str, str | None], next_command: str | None = None) -> None:
    """Print a table of facts, without those that are None, and the command to type next."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        if fact is not None:
            table.add_row(name, fact)
    console().print(table)
    if next_command is not None:
        console().print(f"next: {next_command}", style="dim", soft_wrap=True)


def target_override(config: Mapping) -> str:
    """Return how the next command names the target of this config."""
    path = config.get("target", {}).get("path")
    return "" if path in (None, "pystdlib-8l") else f" target={path}"


def speed(tokens_per_s: float | None) -> str | None:
    return None if tokens_per_s is None else f"{tokens_per_s:,.0f} tokens/s"


@contextlib.contextmanager
def token_progress(stage: str, total: int | None, shown: bool = True) -> Iterator[Advance]:
    """Show how far a stage is, tokens/s and time left.

    Args:
        stage: what is being done, one word.
        total: units of work in all; None: not known, and no time left is shown.
        shown: False on ranks other than zero.

    Yields:
        `advance(units, tokens)`; without `tokens`, units are tokens.
    """
    on_terminal = shown and sys.stderr.isatty()
    tokens = TextColumn("{task.fields[tokens]:,} tokens, {task.fields[rate]:,.0f} tokens/s")
    bar = Progress(
        *(TextColumn("{task.description:<10}"), BarColumn(), TaskProgressColumn(), tokens),
        *(TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()),
        console=Console(stderr=True),
        disable=not on_terminal,
    )
    task = bar.add_task(stage, total=total, tokens=0, rate=0.0)
    done = n_tokens = 0
    start_s = logged_s = time.monotonic()

    def advance(units: int, tokens: int | None = None) -> None:
        nonlocal done, n_tokens, logged_s
        done += units
        n_tokens += units if tokens is None else tokens
        now_s = time.monotonic()
        rate = n_tokens / max(now_s - start_s, 1e-9)
        bar.update(task, advance=units, tokens=n_tokens, rate=rate)
        if shown and not on_terminal and now_s - logged_s > LOG_EVERY_S:
            logged_s = now_s
            share = f"{done / total:.0%}, " if total else ""
            left = f", {(now_s - start_s) / done * max(total - done, 0):.0f} s left" if total and done else ""
            log.info("%s: %s%d tokens, %.0f tokens/s%s", stage, share, n_tokens, rate, left)

    with bar:
        yield advance
