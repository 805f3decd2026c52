"""Ctrl-C and SIGTERM while a command runs: one sentence, and exit code 130 or 143.

The first signal raises KeyboardInterrupt or Terminated, so that the command can save what it has. A later one ends the
process at once, which loses nothing, as commands survive kill -9.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from spectrain.errors import IS_STAGE

SAID = {signal.SIGINT: ("interrupted", 130), signal.SIGTERM: ("terminated", 143)}
EXIT_CODES = tuple(code for _, code in SAID.values())
SAME_SIGNAL_S = 1.0  # terminals and torchrun send one Ctrl-C to a process twice
LATER_S = 0.05  # until a signal that was lost is sent again


class Interrupted(KeyboardInterrupt):
    """A Ctrl-C. After a plain KeyboardInterrupt has left `exec("...")`, Python ends by SIGINT, with no exit code."""


class Terminated(KeyboardInterrupt):
    """A SIGTERM, which ends a command as Ctrl-C does."""


class Signals:
    """How this process answers signals."""

    def __init__(self) -> None:
        self.first: int | None = None  # the number of the first signal; None before
        self._first_s, self._said = 0.0, False

    def anew(self) -> None:
        """Forget earlier signals."""
        self.first = None

    def asked_again(self, number: int) -> bool:
        """Note a signal. Returns whether it asks once more, which the same one does only after `SAME_SIGNAL_S`."""
        if self.first is None:
            self.first, self._first_s = number, time.monotonic()
            return False
        return number != self.first or time.monotonic() - self._first_s > SAME_SIGNAL_S

    def end_at_once(self) -> None:
        """Let a signal end this process with its sentence, where it has nothing to save."""
        self._take_over(self._end)

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Take over while a command runs, which is the block, and give the handlers of before back.

        A signal that is ignored, as those of a shell's background job are, stays ignored.
        """
        self.first, self._said = None, False
        hook = sys.unraisablehook
        sys.unraisablehook = partial(self._again, hook)
        before = self._take_over(self._interrupt)
        try:
            yield
        except KeyboardInterrupt:  # where the command did not expect it
            raise SystemExit(self.say()) from None
        finally:
            sys.unraisablehook, self._said = hook, True  # the command has ended, so nothing is left to repeat
            for number, handler in before.items():
                signal.signal(number, handler)

    def say(self, then: str = "again", terminated: bool = False) -> int:
        """Print the sentence once, and return the exit code. `then` says what the same command does next."""
        what, code = SAID[self.first or (signal.SIGTERM if terminated else signal.SIGINT)]
        if not (self._said or os.environ.get(IS_STAGE)):
            self._said = True
            with suppress(OSError):  # nobody listens; `print` fails where the signal interrupted another one
                os.write(2, f"{what}; run the same command {then}\n".encode())
        return code

    def _again(self, otherwise: Callable, lost: sys.UnraisableHookArgs) -> None:
        """Send a signal again that came where Python ignores errors, as in the `__del__` of a library's object."""
        if self.first is None or not issubclass(lost.exc_type, KeyboardInterrupt):
            return otherwise(lost)
        number, self.first = self.first, None
        threading.Timer(LATER_S, os.kill, (os.getpid(), number)).start()

    @staticmethod
    def _take_over(handler: Callable) -> dict[int, Any]:
        """Answer signals that are not ignored by a handler, and return those of before."""
        taken = [number for number in SAID if signal.getsignal(number) is not signal.SIG_IGN]
        return {number: signal.signal(number, handler) for number in taken}

    def _end(self, number: int, frame: object) -> None:
        is_first = self.first is None
        if self.asked_again(number) or is_first:
            self._said = self._said or os.environ.get("RANK", "0") != "0"  # of several ranks one says it
            os._exit(self.say())

    def _interrupt(self, number: int, frame: object) -> None:
        is_first = self.first is None
        if self.asked_again(number):
            os._exit(self.say())
        if is_first:
            raise Terminated if number == signal.SIGTERM else Interrupted


SIGNALS = Signals()  # one per process, as handlers are
