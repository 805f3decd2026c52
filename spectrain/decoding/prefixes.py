"""Keys and values of texts that have ended, for texts that begin alike: a chat's next turn, a shared system prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np

from spectrain.target.kv_cache import KVCache, States

LEAST_TOKENS = 32  # of a beginning that is worth copying
MOST_TEXTS = 128  # that are kept; each is compared with each prompt
TARGET = None  # the mark of the target's states; those of a drafter have its mark in `KVCache.beside`
Known = dict[Hashable, States]  # the states of a text, of the target and of the drafters that have followed it


class Prefixes:
    """Texts with their keys and values, in memory of at most `max_bytes`; those that were not used for long go first.

    Several engines of one target may share it, in one thread. A text also has the keys of drafters that keep them for
    whole texts, as far as they have followed it.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.bytes = max_bytes, 0
        self._texts: OrderedDict[bytes, tuple[np.ndarray, Known]] = OrderedDict()  # the last one was used last

    def longest(self, tokens: Sequence[int]) -> tuple[Known, int] | None:
        """Return the states of the text that shares most tokens with the beginning of `tokens`, and how many.

        Of several such texts it is the one that was used last. One token at least is left to be read, whose logits the
        caller needs. None: too few are shared.
        """
        wanted, best, most = np.asarray(tokens[:-1], dtype=np.int64), None, LEAST_TOKENS
        for key, (text, _) in self._texts.items():
            if (shared := shared_tokens(text, wanted)) >= most:
                best, most = key, shared
        if best is None:
            return None
        self._texts.move_to_end(best)
        return self._texts[best][1], most

    def add(self, tokens: np.ndarray, cache: KVCache, row: int) -> None:
        """Keep a row of a cache that holds these tokens [T] int64, instead of the texts that it goes on."""
        if len(tokens) < LEAST_TOKENS:
            return
        states, older = {TARGET: cache.states_of(row, len(tokens))}, []
        for drafter, mark in cache.beside.items():
            if mark not in states:  # several methods may draft with one drafter
                states[mark] = drafter.states_of(row, len(tokens))
        for key, (text, known) in self._texts.items():
            shared = shared_tokens(text, tokens)
            if shared == len(tokens) and states.keys() <= known.keys():
                return self._texts.move_to_end(key)  # it is kept already
            if shared == len(text):
                older.append(key)
                states = known | states  # a drafter that did not follow this text knows its beginning
        n_bytes = _bytes(states)
        if n_bytes > self.max_bytes:
            return
        for key in older:
            self._drop(key)
        while self._texts and (self.bytes + n_bytes > self.max_bytes or len(self._texts) >= MOST_TEXTS):
            self._drop(next(iter(self._texts)))
        copies = {mark: [(keys.clone(), values.clone()) for keys, values in own] for mark, own in states.items()}
        self._texts[tokens.tobytes()] = tokens.copy(), copies
        self.bytes += n_bytes

    def _drop(self, key: bytes) -> None:
        self.bytes -= _bytes(self._texts.pop(key)[1])


def _bytes(states: Known) -> int:
    return sum(one.nbytes for own in states.values() for pair in own for one in pair)


def shared_tokens(first: np.ndarray, second: np.ndarray) -> int:
    """Count the tokens with which two texts begin alike."""
    n = min(len(first), len(second))
    differs = (first[:n] != second[:n]).argmax() if n else 0
    return n if n == 0 or first[differs] == second[differs] else int(differs)
