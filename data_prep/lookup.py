"""What a datastore answers to a context, for people: how often it stands there, and what follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spectrain.retrieval.datastore import Datastore

MAX_PLACES = 2000  # looked at, at regular intervals of the sorted range
MAX_TOKENS = 10  # of a continuation
MAX_CONTINUATIONS = 5


@dataclass(frozen=True)
class Continuation:
    """What follows, and at how many of the places looked at."""

    tokens: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class Found:
    """The longest suffix of a context that a store holds."""

    suffix: list[int]
    count: int  # places in the store
    looked_at: int  # of them
    continuations: list[Continuation]  # likeliest first


def look_up(store: Datastore, context: Sequence[int]) -> Found:
    """Where the longest known suffix of a context stands, and what follows there.

    Args:
        store: open.
        context: token ids.
    """
    length, ranges = store.longest_suffix(context, 1, max(1, len(context))) if len(context) else (0, None)
    if not length:
        return Found([], 0, 0, [])
    count = int((ranges[:, 1] - ranges[:, 0]).sum())
    following = [_following(store, shard, place + length) for shard, place in _places(store, ranges)]
    return Found(list(context[-length:]), count, len(following), likeliest(following))


def _places(store: Datastore, ranges: np.ndarray) -> list[tuple[int, int]]:
    """Shards and positions, at regular intervals over all shards' ranges."""
    sizes = ranges[:, 1] - ranges[:, 0]
    total = int(sizes.sum())
    picks = np.linspace(0, total - 1, min(total, MAX_PLACES)).round().astype(np.int64)
    ends = np.cumsum(sizes)
    shards = np.searchsorted(ends, picks, side="right")
    rows = ranges[shards, 0] + picks - (ends - sizes)[shards]
    return [(int(shard), int(store.suffixes[shard][row])) for shard, row in zip(shards, rows, strict=True)]


def _following(store: Datastore, shard: int, position: int) -> tuple[int, ...]:
    """At most MAX_TOKENS tokens, none behind the document's end."""
    tokens = store.tokens[shard][position : position + MAX_TOKENS].tolist()
    return tuple(tokens[: tokens.index(store.separator)] if store.separator in tokens else tokens)


def likeliest(following: Sequence[tuple[int, ...]]) -> list[Continuation]:
    """The most frequent first tokens, each followed for as long as most of its places agree."""
    found = []
    first = Counter(tokens[0] for tokens in following if tokens)
    for token, _ in first.most_common(MAX_CONTINUATIONS):
        group, n_tokens = [tokens for tokens in following if tokens[:1] == (token,)], 1
        while n_tokens < MAX_TOKENS:
            following_here = Counter(tokens[n_tokens] for tokens in group if len(tokens) > n_tokens)
            best, count = following_here.most_common(1)[0] if following_here else (None, 0)
            if 2 * count <= len(group):
                break
            group = [tokens for tokens in group if tokens[n_tokens : n_tokens + 1] == (best,)]
            n_tokens += 1
        found.append(Continuation(group[0][:n_tokens], len(group)))
    return found
