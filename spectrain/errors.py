"""The one exception that reaches the user as a sentence."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable
from functools import partial

IS_STAGE = "SPECTRAIN_STAGE"  # set: this process is a stage of `spectrain speedup`, which speaks for it
SHOWN_CHARACTERS = 80  # of a wrong value
LARGEST = sys.float_info.max
ALIKE = 0.6  # see `likeness`


class UserError(ValueError):
    """A mistake in what the user asked for, not in the code.

    The message is one sentence that names the value, what was expected and what to change.
    Commands print it without a traceback and exit with code 2; see `spectrain.cli`.
    """


class AllRanksError(UserError):
    """An error that every rank raises alike, so that one of them can print it for all."""


class NoneFitsError(UserError):
    """No folder of a kind fits the target, and none was given."""


class LostRankError(UserError):
    """Another rank has ended, and its error is the cause."""


class TooLittleText(UserError):
    """A corpus makes no row for training or none for validation; shorter rows may help."""


class FinishedRun(AllRanksError):
    """The run that was asked for is finished already. A sweep leaves it out, on all ranks or on none."""


def shown(value: object) -> str:
    """Write a value on one line, shortened. Of one that cannot be written it is the type."""
    try:
        text = " ".join(str(value).split()).encode(errors="replace").decode()
    except Exception:  # such as that of a number with more than 4,300 digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def check_whole(name: str, value: object, least: int, most: int = 2**63 - 1) -> None:
    """Raise UserError unless the option `name` is a whole number of at least `least`, and at most `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{name}={shown(value)} must be a whole number of at least {least}")
    if value > most:
        raise UserError(f"{name}={shown(value)} must be at most {most}; lower it")


def check_number(name: str, value: object, interval: str) -> None:
    """Raise UserError unless the option `name` is a number in an interval such as "[0, 1)" or "(0, inf)"."""
    low, high = map(float, interval[1:-1].split(","))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    ends = {low} if interval[0] == "(" else set()
    ends |= {high} if interval[-1] == ")" else set()
    if not is_number or not low <= value <= min(high, LARGEST) or value in ends:
        raise UserError(f"{name}={shown(value)} must be a number in {interval}")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise UserError unless the option `name` has one of these values."""
    choices = list(choices)
    if not isinstance(value, str) or value not in choices:
        raise UserError(f"{name}={shown(value)} must be one of {', '.join(choices)}{nearest(value, choices)}")


def nearest(word: object, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the known word that is most like a wrong one, or "" if none is."""
    near = closest(shown(word), known)
    return f"; did you mean {near}?" if near else ""


def closest(word: str, known: Iterable[str]) -> str:
    """Return the known word that is most like another one, or "" if none is."""
    near = max(known, key=partial(likeness, word), default="")
    return near if likeness(word, near) >= ALIKE else ""


def likeness(word: str, known: str) -> float:
    """Return how alike two names are, from 0 to 1. A part of a known one, as of `data.row_tokens`, counts less."""
    whole, *parts = known, known.rpartition(".")[2], *re.split(r"[._]", known)
    ratios = [difflib.SequenceMatcher(None, word, one).ratio() for one in (whole, *parts)]
    return max(ratios[0], 0.95 * ratios[1], *(0.8 * one for one in ratios[2:]))
