"""The order of `rank=acceptance`: which documents give a lookup method the tokens of a target's sample answers.

A lookup method drafts what followed the last tokens elsewhere. A document therefore offers a token of an answer where
it holds that token behind the same one or two tokens, in other words an n-gram of the answer. The documents are
ordered greedily: next comes the one that offers the most per token of its own. A token that m documents offer is worth
m / (m + 1), so that copies of a text do not all come first. (A sum of concave functions of n-gram counts, as in
Kirchhoff and Bilmes 2014, "Submodularity for Data Selection in Machine Translation".)

A token that its own prompt and answer said before, behind the same tokens, counts for nothing: every lookup method
finds it there.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

NGRAMS = 2, 3  # tokens: a context of one or two, and the token that is offered
KEY_BITS = 21  # of a token: three of them are a key of 64 bits


def ngram_keys(tokens: np.ndarray, n: int) -> np.ndarray:
    """Return a key of each n-gram, in the order of their last tokens: [max(0, len(tokens) - n + 1)] uint64."""
    n_keys = max(0, len(tokens) - n + 1)
    keys = np.zeros(n_keys, dtype=np.uint64)
    for i in range(n):
        keys = (keys << np.uint64(KEY_BITS)) | tokens[i : i + n_keys].astype(np.uint64)
    return keys


@dataclass(frozen=True)
class Samples:
    """The n-grams of sample answers that end in the answer, each with the number of answers that need it.

    Needed are those that neither the prompt nor the answer held before.
    """

    keys: tuple[np.ndarray, ...]  # for each of NGRAMS, sorted uint64
    needed: np.ndarray  # [n-grams of all lengths] float64

    @classmethod
    def of(cls, answers: Iterable[tuple[np.ndarray, np.ndarray]]) -> Samples:
        """Read the n-grams of prompts and answers, as token ids."""
        found: list[list[np.ndarray]] = [[] for _ in NGRAMS]
        for prompt, answer in answers:
            text = np.concatenate([prompt, answer])
            for n, of_length in zip(NGRAMS, found, strict=True):
                distinct, first = np.unique(ngram_keys(text, n), return_index=True)
                of_length.append(distinct[first + n - 1 >= len(prompt)])
        counted = [np.unique(np.concatenate(of_length), return_counts=True) for of_length in found]
        return cls(tuple(keys for keys, _ in counted), np.concatenate([n for _, n in counted]).astype(np.float64))

    def offered(self, document: np.ndarray) -> np.ndarray:
        """Return the numbers of the n-grams that a document holds: [n] int32, each once."""
        found, begin = [], 0
        for n, keys in zip(NGRAMS, self.keys, strict=True):
            if len(keys):
                own = np.unique(ngram_keys(document, n))
                places = np.minimum(np.searchsorted(keys, own), len(keys) - 1)
                found.append(begin + places[keys[places] == own])
            begin += len(keys)
        return np.concatenate([np.zeros(0, np.int32), *found]).astype(np.int32)


def acceptance_places(samples: Samples, documents: Iterable[np.ndarray]) -> np.ndarray:
    """Return the place of each document in the order described above: [documents] int64, 0 for the first.

    Of documents that are worth the same, the earlier one comes first.
    """
    offered: list[np.ndarray] = []
    lengths: list[int] = []
    for document in documents:
        offered.append(samples.offered(document))
        lengths.append(len(document))
    n_offering = np.zeros(len(samples.needed))  # documents so far, by n-gram

    def worth(i: int) -> float:
        m = n_offering[offered[i]]
        return float((samples.needed[offered[i]] / ((m + 1) * (m + 2))).sum()) / lengths[i]

    # What a document adds only falls. So the first of the queue is the best if it still adds what it did.
    queue = [(-worth(i), i) for i in range(len(offered))]
    heapq.heapify(queue)
    places = np.zeros(len(offered), dtype=np.int64)
    for place in range(len(offered)):
        while (now := (-worth(queue[0][1]), queue[0][1])) > queue[0]:
            heapq.heapreplace(queue, now)
        _, chosen = heapq.heappop(queue)
        places[chosen] = place
        n_offering[offered[chosen]] += 1
    return places
