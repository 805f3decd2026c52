"""Tables of the n-grams of one row's text, prompt and output, updated as the text grows.

`PositionTable` tells where an n-gram occurred before (PLD, LogitSpec), `CountTable` which token followed it most often
(ANPD). The cost of a new token does not depend on the length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

NEVER = (0, -1)  # occurrences and token of an unknown context


class PositionTable:
    """Every n-gram, n = 1..max_ngram, and the position of the token that followed it.

    An n-gram is entered once its following token is known, so the end of the text never finds itself.

    Args:
        tokens: the text so far.
        max_ngram: length of the longest n-gram.
        match: which of several occurrences is kept: "latest", "earliest" (as in Hugging Face), or "latest_full", the
            last one that is followed by `horizon` tokens; if none is, the first, which is followed by the most.
        horizon: tokens of a full continuation, for "latest_full".
        past_end: a continuation that reaches the end of the text goes on with its own beginning, as LZ77 copies; False:
            it ends there.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        max_ngram: int = 3,
        match: str = "latest",
        horizon: int = 20,
        past_end: bool = False,
    ):
        self.max_ngram, self.match, self.horizon, self.past_end = max_ngram, match, horizon, past_end
        self.tokens: list[int] = []
        self._positions: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token behind it
        self._tail: tuple[int, ...] = ()  # the last max_ngram tokens
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append these tokens to the text."""
        first = max(1, len(self.tokens))
        self.tokens += tokens
        for position in range(first, len(self.tokens)):
            self._enter(position, overwrite=self.match == "latest")
            full = position + 1 - self.horizon  # the token at `position` has just completed this continuation
            if self.match == "latest_full" and full > 0:
                self._enter(full, overwrite=True)
        self._tail = tuple(self.tokens[-self.max_ngram :])

    def _enter(self, position: int, overwrite: bool) -> None:
        """Enter the n-grams that end right before `position`."""
        positions = self._positions
        longest = tuple(self.tokens[max(0, position - self.max_ngram) : position])
        for start in range(len(longest)):
            if overwrite:
                positions[longest[start:]] = position
            else:
                positions.setdefault(longest[start:], position)

    def continuation(self, limit: int, extra: tuple[int, ...] = (), min_ngram: int = 1) -> tuple[list[int], int]:
        """Return up to `limit` tokens that followed the longest known suffix of text + extra, and that one's length.

        [] and 0 if none is known. A suffix has min_ngram..max_ngram tokens. `extra` is not entered in the table.
        """
        suffix, positions = self._tail + extra, self._positions
        for start in range(max(0, len(suffix) - self.max_ngram), len(suffix) - min_ngram + 1):
            position = positions.get(suffix[start:])
            if position is not None:
                found = self.tokens[position : position + limit]
                if self.past_end and len(found) < limit:
                    found = list(islice(cycle([*found, *extra]), limit))
                return found, len(suffix) - start
        return [], 0


class CountTable:
    """The token that most often followed each context of 1..max_order - 1 tokens; of equal counts the latest.

    Args:
        tokens: the text so far.
        max_order: length of the longest n-gram: a context and the token that follows it.
    """

    def __init__(self, tokens: Sequence[int], max_order: int = 5):
        self.max_order = max_order
        self.tokens: list[int] = []
        self._counts: dict[tuple[int, ...], int] = {}  # (context.., token) -> occurrences
        self._best: dict[tuple[int, ...], tuple[int, int]] = {}  # context -> (occurrences, token) of the likeliest
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append these tokens to the text."""
        first = max(1, len(self.tokens))
        self.tokens += tokens
        counts, best = self._counts, self._best
        for position in range(first, len(self.tokens)):
            ngram = tuple(self.tokens[max(0, position - self.max_order + 1) : position + 1])
            for start in range(len(ngram) - 1):
                key = ngram[start:]
                count = counts[key] = counts.get(key, 0) + 1
                context = key[:-1]
                # A token that reaches the highest count is the latest of those that have it.
                if count >= best.get(context, NEVER)[0]:
                    best[context] = count, key[-1]

    def chain(self, limit: int) -> list[tuple[int, int]]:
        """Return up to `limit` tokens of the likeliest continuation, and the length of the context that told each.

        It is the longest known one. They are fewer if a context of one token is unknown.
        """
        n_context = self.max_order - 1
        text = tuple(self.tokens[-n_context:])
        chain: list[tuple[int, int]] = []
        while len(chain) < limit:
            for start in range(len(text)):
                found = self._best.get(text[start:])
                if found is not None:
                    break
            else:
                break
            chain.append((found[1], len(text) - start))
            text = (*text, found[1])[-n_context:]
        return chain
