"""Runs commands in forks of one process that has imported everything, so that a case costs milliseconds."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from spectrain.cli import command

COMMANDS = {
    **{
        name: f"spectrain.{name}"
        for name in ("train", "generate", "bench", "tune", "export", "cost", "report", "parity")
    },
    **{name: f"data_prep.{name}" for name in ("responses", "activations", "acceptance", "datastore")},
}
POLL_S = 0.005


@dataclass(frozen=True)
class Outcome:
    """What a command left behind: `code` None where it had to be killed after the time limit."""

    arguments: tuple[str, ...]  # the command's name first
    code: int | None
    output: str  # of both streams
    elapsed_s: float

    @property
    def fault(self) -> str | None:
        """What is wrong with it whatever was asked for: a hang, a traceback, or a refusal that is no sentence."""
        if self.code is None:
            return "hang"
        if "Traceback (most recent call last)" in self.output:
            return "traceback"
        if self.code not in (0, 2):
            return f"exit code {self.code}"
        errors = [line for line in self.output.splitlines() if line.startswith("error: ")]
        if self.code == 2 and (len(errors) != 1 or self.output.rstrip().splitlines()[-1] != errors[0]):
            return "no single sentence"
        return None


def load_commands() -> None:
    """Import what commands import, once, before the first fork."""
    torch.set_num_threads(1)  # a fork of a process with threads of its own may hang
    for module in COMMANDS.values():
        importlib.import_module(module)


def run(arguments: Sequence[str], folder: Path, limit_s: float = 10.0) -> Outcome:
    """Type a command (`["bench", "limit=1"]`) in a folder, in a fork of this process."""
    log = folder / ".output"
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _become(arguments, folder, log)
    code = _wait(child, started + limit_s)
    return Outcome(tuple(arguments), code, log.read_text(errors="replace"), time.monotonic() - started)


def _wait(child: int, deadline: float) -> int | None:
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL_S)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _become(arguments: Sequence[str], folder: Path, log: Path) -> None:
    """Run the command in this process, which is a fork, and end it without the parent's handlers."""
    code = 1
    try:
        os.chdir(folder)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        name, *sys.argv[1:] = arguments
        sys.argv[0] = name
        entry: Callable[[], None] = command(name)(importlib.import_module(COMMANDS[name]).main)
        entry()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
