"""What commands say beside their results: what is being done while it takes time, and what to type next.

    with stage("answering", total=len(prompts)) as advance:
        for prompt in prompts:
            ...
            advance()
    say_next("generate", {"method": "spire", "drafter": out, "prompt": PROMPTS[is_chat]})

On a terminal a stage is a line on stderr, which goes away with the stage; stages may lie within each other. Elsewhere
it is one line in the log, after two seconds, and another one every quarter of a minute while it goes on. A
process that does not log (another rank, a library in somebody's program) shows nothing.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from spectrain.errors import IS_STAGE

log = logging.getLogger(__name__)

LOG_AFTER_S, LOG_EVERY_S = 2.0, 15.0
FRAMES_PER_S = 2  # drawing takes a millisecond, in which no Python of the stage runs
PROMPTS = {False: "def read_config(path):", True: "Explain what a draft model is."}  # whether it is a chat model

Advance = Callable[..., None]  # (units=1, note=""): so many more units are done; what stands behind the bar

Listener = Callable[[str, float | None], None]  # (what, done): what is being done, and how much of it, 0 to 1

_lines: ContextVar[Progress | None] = ContextVar("lines", default=None)  # of the stages that are going on
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)  # who is told of each stage


class _Bar(BarColumn):
    """A bar where the end is known."""

    def render(self, task: Task) -> object:
        return super().render(task) if task.total else Text()


@contextlib.contextmanager
def stage(what: str, total: float | None = None, shown: bool = True) -> Iterator[Advance]:
    """Say what is being done until the block ends, and how far it is.

    Args:
        what: in a few words, such as "reading the corpus".
        total: units of work in all; None: not known.
        shown: False says nothing.

    Yields:
        `advance(units=1, note="")`, to be called when more of the units are done.
    """
    listener = (_listener.get() if shown else None) or (lambda what, done: None)
    shown = shown and log.isEnabledFor(logging.INFO)
    on_terminal = shown and sys.stderr.isatty()
    outer = _lines.get()
    columns = SpinnerColumn(), "{task.description}", _Bar(24), "{task.fields[note]}", TimeElapsedColumn()
    lines = outer or Progress(
        *(*columns, TimeRemainingColumn(elapsed_when_finished=False)),
        **{"console": Console(stderr=True), "transient": True, "redirect_stdout": False, "disable": not on_terminal},
        refresh_per_second=FRAMES_PER_S,
    )
    task, done, logged_s = lines.add_task(escape(what), total=total, note="", visible=shown), 0.0, time.monotonic()
    timer = threading.Timer(LOG_AFTER_S, log.info, [what])
    timer.daemon = True

    began_s = logged_s
    listener(what, 0.0 if total else None)

    def advance(units: float = 1, note: str = "") -> None:
        nonlocal done, logged_s
        done += units
        far = ", ".join(filter(None, [f"{done / total:.0%}" if total else "", note]))
        lines.update(task, completed=done, note=escape(far))
        listener(what, done / total if total else None)
        if shown and not on_terminal and time.monotonic() - logged_s > LOG_EVERY_S:
            logged_s = time.monotonic()
            left = f", {(logged_s - began_s) * (total / done - 1):.0f} s left" if total and done else ""
            log.info("%s: %s%s", what, far, left)

    token = _lines.set(lines)
    try:
        with contextlib.nullcontext() if outer else lines:
            if shown and not on_terminal:
                timer.start()
            yield advance
    finally:
        timer.cancel()
        lines.remove_task(task)
        _lines.reset(token)


@contextlib.contextmanager
def speaking(quiet: bool, listener: Listener | None) -> Iterator[None]:
    """Let a program see the stages and the log of the block as commands show them, if it has set up no log of its own.

    `quiet` silences them, and from then on what this package logs below an error; else `listener` is told of stages.
    """
    ours, handler = logging.getLogger(__package__), logging._StderrHandler()  # of sys.stderr as it is then
    before = logging.ERROR if quiet else ours.level
    if quiet or not ours.hasHandlers():
        ours.addHandler(handler)
        ours.setLevel(logging.ERROR if quiet else logging.INFO)
    token = _listener.set(None if quiet else listener)
    try:
        yield
    finally:
        _listener.reset(token)
        ours.removeHandler(handler)
        ours.setLevel(before)


def open_streams() -> None:
    """Let stdout and stderr take every character, whatever their encoding, and exist where a process has none.

    Where the locale has no more than ASCII, start the process again in Python's UTF-8 mode: else libraries cannot open
    files with other characters in their names.
    """
    if sys.getfilesystemencoding() == "ascii" and os.environ.get("PYTHONUTF8") != "1":
        os.execve(sys.executable, sys.orig_argv, os.environ | {"PYTHONUTF8": "1"})
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the process's life
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def result_console(columns: int = 100) -> Console:
    """Where results are printed as they are, `columns` wide where the output is no terminal."""
    width = None if sys.stdout.isatty() else columns
    return Console(width=width, markup=False, highlight=False, emoji=False)


def say_next(command: str, options: Mapping[str, object]) -> None:
    """Print the line to type next, with values in quotes where a shell needs them.

    Options that are None are left out. A stage of another command prints nothing.
    """
    if os.environ.get(IS_STAGE):
        return
    words = [f"{name}={shlex.quote(str(value))}" for name, value in options.items() if value is not None]
    line = " ".join(["next: spectrain", command, *words])
    Console(highlight=False).print(Text(line, style="dim"), soft_wrap=True)
