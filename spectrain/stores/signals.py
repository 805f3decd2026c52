"""Ctrl-C and SIGTERM at any moment of a command: one sentence, and exit code 130 or 143.

While a command is imported, a signal ends the process at once. While it runs, the first signal raises KeyboardInterrupt
or Terminated, so that the command can save what it has, and a later one ends the process at once. When the command has
ended, a signal only shortens what Python still clears away. Ending at once loses nothing, as commands survive kill -9.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

SAID = {signal.SIGINT: ("interrupted", 130), signal.SIGTERM: ("terminated", 143)}
EXIT_CODES = tuple(code for _, code in SAID.values())
PACKAGES = ("spectrain.", "data_prep.")
SAME_SIGNAL_S = 1.0  # terminals and torchrun send one Ctrl-C to a process twice


class Terminated(KeyboardInterrupt):
    """A SIGTERM, which ends a command as Ctrl-C does."""


@dataclass
class FirstSignal:
    """The signal that asked for an end first; None before."""

    number: int | None = None
    at_s: float = 0.0

    def asked_again(self, number: int) -> bool:
        """Note a signal. Returns whether it asks once more, which the same one does only after `SAME_SIGNAL_S`."""
        if self.number is None:
            self.number, self.at_s = number, time.monotonic()
            return False
        return number != self.number or time.monotonic() - self.at_s > SAME_SIGNAL_S


class Signals:
    """How this process answers signals."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._first = FirstSignal()
        self._said = False
        self._code: int | None = None  # with which the command has ended
        self._pid = os.getpid()

    @property
    def first(self) -> int | None:
        """The number of the first signal, None before."""
        return self._first.number

    def answer_while_importing(self) -> None:
        """Take over where `python -m` is importing a command; change nothing where this package is a library."""
        if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].removeprefix("-m").startswith(PACKAGES):
            self._handle(self._end_at_once)
            # The last thing that Python calls before it takes its handlers away, and frees what it holds without them.
            atexit.register(self._handle, signal.SIG_IGN)

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Take over while a command runs, which is the block, and give the handlers of before back."""
        self._begin()
        hook, before = sys.unraisablehook, self._handle(self._interrupt)
        sys.unraisablehook = lambda told: self._raised_in_vain(told.exc_type) or hook(told)
        try:
            try:
                yield
                self._code = 0
            except SystemExit as stop:
                self._code = stop.code
                raise
            except Exception:
                self._code = 1
                raise
        except KeyboardInterrupt:  # where the command did not expect it
            raise SystemExit(self.say()) from None
        finally:
            sys.unraisablehook = hook
            for number, handler in before.items():
                signal.signal(number, handler)

    def say(self, then: str = "again", terminated: bool = False) -> int:
        """Print the sentence once, and return the exit code. `then` says what the same command does next."""
        what, code = SAID[self.first or (signal.SIGTERM if terminated else signal.SIGINT)]
        if not self._said:
            self._said = True
            with suppress(OSError):  # nobody listens; `print` fails where the signal interrupted another one
                os.write(2, f"{what}; run the same command {then}\n".encode())
        return code

    def _handle(self, handler: object) -> dict[int, object]:
        """Set the handler of the signals that are not ignored, as those of a shell's background job are."""
        taken = [number for number in SAID if signal.getsignal(number) is not signal.SIG_IGN]
        return {number: signal.signal(number, handler) for number in taken}

    def _interrupt(self, number: int, frame: object) -> None:
        if os.getpid() != self._pid:  # a worker of the command, which speaks for it
            os._exit(SAID[number][1])
        is_first = self.first is None
        if self._first.asked_again(number) or (is_first and self._code is not None):
            self._end_at_once(number)
        if is_first:
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    def _end_at_once(self, number: int, frame: object = None) -> None:
        self._first.asked_again(number)
        code = self.say() if self._code is None else self._code
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # it was interrupted in the middle of a write
                stream.flush()
        os._exit(code if isinstance(code, int) else 1)

    def _raised_in_vain(self, error: type[BaseException]) -> None:
        """End the process where the exception came up in a place from which none is raised, such as a `__del__`."""
        if issubclass(error, KeyboardInterrupt):
            self._end_at_once(self.first or signal.SIGINT)


SIGNALS = Signals()  # one per process, as handlers are
