"""What a command of `data_prep` shows: a bar on a terminal, elsewhere a log line now and then, and its table."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

log = logging.getLogger(__name__)

TABLE_COLUMNS = 100  # where the output is no terminal
LOG_EVERY_S = 15.0

Advance = Callable[..., None]  # (units, tokens): so many units are done, in which there were so many tokens


def show_facts(title: str, facts: Mapping[str, str | None], next_command: str | None = None) -> None:
    """Print a table of facts, without those that are None, and the command to type next."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        if fact is not None:
            table.add_row(name, fact)
    console = Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS)
    console.print(table)
    if next_command is not None:
        console.print(f"next: {next_command}", style="dim", soft_wrap=True)


def target_override(config: Mapping) -> str:
    """Return how the next command names the target of this config."""
    path = config.get("target", {}).get("path")
    return "" if path in (None, "pystdlib-8l") else f" target={path}"


def speed(tokens_per_s: float | None) -> str | None:
    return None if tokens_per_s is None else f"{tokens_per_s:,.0f} tokens/s"


@contextlib.contextmanager
def token_progress(stage: str, total: int | None, shown: bool = True) -> Iterator[Advance]:
    """Show how far a stage is, with tokens/s.

    Args:
        stage: what is being done, one word.
        total: units of work in all; None: not known.
        shown: False on ranks other than zero.

    Yields:
        `advance(units, tokens)`; without `tokens`, units are tokens.
    """
    on_terminal = shown and sys.stderr.isatty()
    tokens = TextColumn("{task.fields[tokens]:,} tokens, {task.fields[rate]:,.0f} tokens/s")
    columns = TextColumn("{task.description:<10}"), BarColumn(), TaskProgressColumn(), tokens, TimeRemainingColumn()
    bar = Progress(*columns, console=Console(stderr=True), disable=not on_terminal)
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
            log.info("%s: %s%d tokens, %.0f tokens/s", stage, f"{done / total:.0%}, " if total else "", n_tokens, rate)

    with bar:
        yield advance
