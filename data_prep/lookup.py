"""What a datastore answers to a context, for people: how often it occurs there, and what follows."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from data_prep.progress import console
from spectrain.retrieval.datastore import Datastore

MAX_PLACES = 2000  # looked at, at regular intervals of the sorted range
MAX_TOKENS = 10  # of a continuation
MAX_CONTINUATIONS = 5


@dataclass(frozen=True)
class Occurrences:
    """The longest suffix of a context that a store holds."""

    suffix: list[int]
    count: int  # places in the store
    looked_at: int  # of them
    continuations: list[tuple[tuple[int, ...], int]]  # likeliest first, with the number of places looked at


def look_up(store: Datastore, context: Sequence[int]) -> Occurrences:
    """Find the longest known suffix of a context (token ids), and what follows it."""
    length, ranges = store.longest_suffix(context, 1, max(1, len(context))) if len(context) else (0, None)
    if not length:
        return Occurrences([], 0, 0, [])
    sizes = ranges[:, 1] - ranges[:, 0]
    total, ends = int(sizes.sum()), np.cumsum(sizes)
    picks = np.linspace(0, total - 1, min(total, MAX_PLACES)).round().astype(np.int64)  # over all shards' ranges
    shards = np.searchsorted(ends, picks, side="right")
    following = []
    for shard, row in zip(shards, ranges[shards, 0] + picks - (ends - sizes)[shards], strict=True):
        start = int(store.suffixes[shard][row]) + length
        tokens = store.tokens[shard][start : start + MAX_TOKENS].tolist()
        following.append(tuple(itertools.takewhile(lambda token: token != store.separator, tokens)))
    return Occurrences(list(context[-length:]), total, len(following), likeliest(following))


def likeliest(following: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], int]]:
    """Return the most frequent first tokens, each followed for as long as most of its places agree."""
    continuations = []
    for token, _ in Counter(tokens[0] for tokens in following if tokens).most_common(MAX_CONTINUATIONS):
        group, n_tokens = [tokens for tokens in following if tokens[:1] == (token,)], 1
        while n_tokens < MAX_TOKENS:
            following_here = Counter(tokens[n_tokens] for tokens in group if len(tokens) > n_tokens)
            best, count = following_here.most_common(1)[0] if following_here else (None, 0)
            if 2 * count <= len(group):
                break
            group = [tokens for tokens in group if tokens[n_tokens : n_tokens + 1] == (best,)]
            n_tokens += 1
        continuations.append((group[0][:n_tokens], len(group)))
    return continuations


def show_lookup(store: Datastore, tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """Print how often the longest known suffix of a text occurs, and what follows it."""
    found = look_up(store, tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if not found.count:
        console().print("no token of the text occurs in the store")
        return
    suffix = tokenizer.decode(found.suffix)
    console().print(f"{found.count:,} times: {suffix!r} ({len(found.suffix)} tokens)", markup=False, highlight=False)
    table = Table(title=f"what follows ({found.looked_at:,} places looked at)", title_justify="left")
    for column, justify in {"places": "right", "tokens": "right", "continuation": "left"}.items():
        table.add_column(column, justify=justify, overflow="fold")
    for tokens, count in found.continuations:
        table.add_row(f"{count:,}", str(len(tokens)), repr(tokenizer.decode(tokens)).replace("[", r"\["))
    console().print(table)
