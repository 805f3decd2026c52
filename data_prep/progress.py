"""What a command of `data_prep` shows: how far it is, and a table at its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

from rich.table import Table

from spectrain.terminal import result_console, stage

Advance = Callable[..., None]  # (units, tokens): so many units are done, in which there were so many tokens


def show_facts(title: str, facts: Mapping[str, str | None]) -> None:
    """Print a table of facts, without those that are None."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, fact in facts.items():
        if fact is not None:
            table.add_row(name, fact)
    result_console().print(table)


def speed(tokens_per_s: float | None) -> str | None:
    return None if tokens_per_s is None else f"{tokens_per_s:,.0f} tokens/s"


@contextlib.contextmanager
def token_progress(what: str, total: int | None, shown: bool = True) -> Iterator[Advance]:
    """Show a stage (`spectrain.terminal.stage`) with its tokens/s.

    Yields:
        `advance(units, tokens)`; without `tokens`, units are tokens.
    """
    n_tokens, start_s = 0, time.monotonic()
    with stage(what, total, shown) as advance_stage:

        def advance(units: int, tokens: int | None = None) -> None:
            nonlocal n_tokens
            n_tokens += units if tokens is None else tokens
            rate = n_tokens / max(time.monotonic() - start_s, 1e-9)
            advance_stage(units, f"{n_tokens:,} tokens, {rate:,.0f} tokens/s")

        yield advance
