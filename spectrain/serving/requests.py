"""What a lookup method keeps of an engine's requests, which move between rows and have no names.

A state depends on the text alone, so any state that has read the beginning of a row's text serves that row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from spectrain.methods.lookup import RowState

KEPT_CALLS = 8  # a request that is not in the batch is remembered for so many calls: it may have been preempted
KEY_TOKENS = 8  # by which a moved request is looked for, before its whole text is compared

Read = Callable[[np.ndarray, RowState | None], RowState | None]


@dataclass
class Request:
    """What is kept of one request."""

    state: RowState
    text: np.ndarray  # [room] int32: what the state has read, then room for more
    n_tokens: int
    row: int  # where it stood in the last call that had it
    seen: int  # number of that call

    def begins(self, text: np.ndarray) -> bool:
        """Whether `text` goes on from what was read."""
        n_tokens = self.n_tokens
        return n_tokens <= len(text) and np.array_equal(self.text[:n_tokens], text[:n_tokens])

    def keep(self, text: np.ndarray) -> None:
        """The state has read all of `text` by now."""
        if len(text) > len(self.text):
            longer = np.empty(2 * len(text), dtype=np.int32)
            longer[: self.n_tokens] = self.text[: self.n_tokens]
            self.text = longer
        self.text[self.n_tokens : len(text)] = text[self.n_tokens :]
        self.n_tokens = len(text)


class Memory:
    """The states of requests, found by where they stood last, else by their text."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._calls = 0

    def states(
        self, rows: Sequence[int], texts: Sequence[np.ndarray], new: Sequence[int], read: Read
    ) -> list[RowState | None]:
        """The state of each row, after all of its text.

        Args:
            rows: of the engine's arrays.
            texts: of each, int32.
            new: tokens of each that this step brought.
            read: (tokens, state or None) -> the state after them, or None where they cannot be read.

        Returns:
            A state a row, or None.
        """
        self._calls += 1
        by_row = {request.row: request for request in self._requests}
        by_end: dict[tuple, list[Request]] = {}
        for request in self._requests:
            by_end.setdefault(_end(request.text, request.n_tokens), []).append(request)
        taken: set[int] = set()
        states = []
        for row, text, n_new in zip(rows, texts, new, strict=True):
            found = None
            for request in (by_row.get(row), *by_end.get(_end(text, len(text) - n_new), ())):
                if request is not None and id(request) not in taken and request.begins(text):
                    found = request
                    break
            if found is None:
                state = read(text, None)
                if state is not None:
                    found = Request(state, text.astype(np.int32), len(text), row, self._calls)
                    self._requests.append(found)
            else:
                state = read(text[found.n_tokens :], found.state)
                found.keep(text)
            if found is not None:
                taken.add(id(found))
                found.row, found.seen = row, self._calls if state is not None else -KEPT_CALLS
            states.append(state)
        self._requests = [request for request in self._requests if self._calls - request.seen < KEPT_CALLS]
        return states


def _end(text: np.ndarray, n_tokens: int) -> tuple[int, bytes]:
    """What tells texts of so many tokens apart, nearly always."""
    return n_tokens, text[max(0, n_tokens - KEY_TOKENS) : max(0, n_tokens)].astype(np.int32).tobytes()
