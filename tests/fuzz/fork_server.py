"""Runs commands in forks of one process that has imported everything, so that a case costs milliseconds."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from hydra.core.plugins import Plugins

from spectrain.cli import command
from spectrain.kernels.cpu import products, running
from spectrain.stores.options import schema

COMMANDS = {
    **{
        name: f"spectrain.{name}"
        for name in ("train", "generate", "bench", "tune", "export", "cost", "report", "parity")
    },
    **{name: f"data_prep.{name}" for name in ("responses", "activations", "acceptance", "datastore")},
}
IMPORTED_LATE = ("antlr4.LL1Analyzer", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg")
POLL_S = 0.005
MOST_BETWEEN_S = 0.5  # of waiting that count between two looks: more means that this process was stopped as well


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
    """Import and compile what commands need, once, before the first fork."""
    torch.set_num_threads(1)  # a fork of a process with threads of its own may hang
    for module in (*COMMANDS.values(), *IMPORTED_LATE):
        importlib.import_module(module)
    for name in COMMANDS:
        schema(name)
    Plugins.instance()  # Hydra looks through all packages for them
    for dtype in products.BITS:
        running.works(dtype)
    running.runner()
    gc.collect()
    gc.freeze()  # or each fork goes through all these objects, and copies their pages


@dataclass(frozen=True)
class Running:
    """A command in a fork, which leads a process group of its own."""

    arguments: tuple[str, ...]
    pid: int
    log: Path
    started_s: float

    def wait(self, limit_s: float, exact: bool = False) -> Outcome:
        """Wait for its end; kill it with all that it started where it is still running after `limit_s` seconds.

        Unless `exact`, seconds in which it waited for a core that other processes had do not count.
        """
        code, waited_s, looked = None, 0.0, time.monotonic()
        try:
            while code is None and waited_s < limit_s + (0 if exact else self.starved_s):
                done, status = os.waitpid(self.pid, os.WNOHANG)
                if done:
                    code = os.waitstatus_to_exitcode(status)
                else:
                    time.sleep(POLL_S)
                now = time.monotonic()
                waited_s, looked = waited_s + min(now - looked, MOST_BETWEEN_S), now
        finally:  # also where Ctrl-C ends the waiting
            if code is None:
                self.kill()
        elapsed_s = time.monotonic() - self.started_s
        return Outcome(self.arguments, code, self.log.read_text(errors="replace"), elapsed_s)

    @property
    def starved_s(self) -> float:
        """Seconds in which it could have run and had no core; 0 where the system does not say."""
        with suppress(OSError):
            return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[1]) / 1e9
        return 0.0

    def kill(self) -> None:
        """Kill -9 of the command and all that it started, and wait for its end."""
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def run(arguments: Sequence[str], folder: Path, limit_s: float = 10.0) -> Outcome:
    """Type a command (`["bench", "limit=1"]`) in a folder, in a fork of this process, and wait for its end."""
    return start(arguments, folder).wait(limit_s)


def start(arguments: Sequence[str], folder: Path, log: str = ".output") -> Running:
    """Type a command in a folder, in a fork of this process; its output goes to the file `log` there."""
    started_s = time.monotonic()
    (folder / log).write_bytes(b"")  # here already, for a command that is killed before it says anything
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        _become(arguments, folder, folder / log)
    with suppress(PermissionError, ProcessLookupError):  # done by the child itself, or over
        os.setpgid(child, child)
    return Running(tuple(arguments), child, folder / log, started_s)


def _become(arguments: Sequence[str], folder: Path, log: Path) -> None:
    """Run the command in this process, which is a fork, and end it without the parent's handlers."""
    code = 1
    try:
        torch.set_num_threads(1)  # makes torch's pool anew; two threads that did so at once would each find none
        os.chdir(folder)
        os.environ["HOME"] = str(folder)  # a corpus may be what lies there
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
