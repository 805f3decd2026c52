"""Finds the questions of a benchmark in training text, by hashes of every 13 tokens in a row.

    known = question_runs(read_prompts("gsm8k.jsonl"), tokenizer)
    shares_any(document.tokens, known)

Runs of 13 are what GPT-3's authors compared (Brown et al. 2020, appendix C), of words there. Shorter questions are not
found. What a drafter was trained on is kept beside it as a sample of hashes, so that a benchmark can tell later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from spectrain.data.prompts import Question
from spectrain.stores.files import write_whole

RUN = 13  # tokens
FACTOR, MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)  # as in splitmix64
MOST_SAMPLED = 1 << 18  # hashes that are kept beside a drafter: 2 MiB
SEEN_SHARE = 0.5  # of a question's runs, from which on it counts as seen
TRAINED_ON = "trained_on.npz"
HASHED_TOKENS = 1 << 22  # at once


def runs(tokens: np.ndarray | Sequence[int]) -> np.ndarray:
    """Hash every run of RUN tokens: [n - RUN + 1] uint64, none of a shorter text."""
    tokens = np.asarray(tokens).astype(np.uint64)
    n_runs = max(0, len(tokens) - RUN + 1)
    hashes = np.zeros(n_runs, np.uint64)
    for place in range(RUN if n_runs else 0):
        hashes = hashes * FACTOR + tokens[place : place + n_runs] + np.uint64(1)
    hashes = (hashes ^ (hashes >> np.uint64(30))) * MIX
    return hashes ^ (hashes >> np.uint64(27))


def question_runs(questions: Iterable[Question], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return the hashes of all turns of questions, sorted."""
    texts = [turn for question in questions for turn in question.turns]
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    return np.unique(np.concatenate([np.zeros(0, np.uint64), *map(runs, ids)]))


def found_in(hashes: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return which hashes are among sorted ones: a bool of each."""
    if not len(known):
        return np.zeros(len(hashes), bool)
    return known[np.searchsorted(known, hashes).clip(max=len(known) - 1)] == hashes


def shares_any(tokens: np.ndarray, known: np.ndarray) -> bool:
    """Return whether any run of a text is among sorted hashes."""
    return bool(found_in(runs(tokens), known).any())


@dataclass(frozen=True)
class Sample:
    """Some of the runs of a text: those whose hashes end with `zeros` bits of 0."""

    hashes: np.ndarray  # [n] uint64, sorted
    zeros: int = 0

    @classmethod
    def of(cls, texts: Iterable[np.ndarray]) -> Sample:
        """Sample texts, so that at most MOST_SAMPLED hashes are kept."""
        kept, zeros, waiting, n_waiting = np.zeros(0, np.uint64), 0, [], 0
        for tokens in chain(texts, [None]):  # None: no more
            for start in range(0, 0 if tokens is None else len(tokens), HASHED_TOKENS):
                new = runs(tokens[start : start + HASHED_TOKENS + RUN - 1])
                waiting.append(new[_ends_with(new, zeros)])
                n_waiting += len(waiting[-1])
            if tokens is None or n_waiting >= HASHED_TOKENS:
                kept, waiting, n_waiting = np.unique(np.concatenate([kept, *waiting])), [], 0
                while len(kept) > MOST_SAMPLED:
                    zeros += 1
                    kept = kept[_ends_with(kept, zeros)]
        return cls(kept[_ends_with(kept, zeros)], zeros)

    def save(self, folder: Path) -> None:
        """Write it into the folder of a drafter."""
        write_whole(folder / TRAINED_ON, partial(np.savez, hashes=self.hashes, zeros=self.zeros))

    @classmethod
    def load(cls, folder: Path) -> Sample | None:
        """Return what lies beside a drafter; None where nothing does."""
        if not (folder / TRAINED_ON).is_file():
            return None
        with np.load(folder / TRAINED_ON) as found:
            return cls(found["hashes"], int(found["zeros"]))


def seen_questions(
    questions: Sequence[Question], tokenizer: PreTrainedTokenizerBase, text: Sample | Iterable[np.ndarray]
) -> list[str]:
    """Return the ids of the questions of whose runs SEEN_SHARE or more stand in a text, or in a sample of one."""
    asked = {question.id: question_runs([question], tokenizer) for question in questions}
    if isinstance(text, Sample):
        asked = {name: hashes[_ends_with(hashes, text.zeros)] for name, hashes in asked.items()}
        found = text.hashes
    else:
        known = np.unique(np.concatenate([np.zeros(0, np.uint64), *asked.values()]))
        found = np.zeros(0, np.uint64)
        for tokens in text:
            hashes = runs(tokens)
            if (shared := found_in(hashes, known)).any():
                found = np.union1d(found, hashes[shared])
    return [name for name, hashes in asked.items() if len(hashes) and found_in(hashes, found).mean() >= SEEN_SHARE]


def _ends_with(hashes: np.ndarray, zeros: int) -> np.ndarray:
    return hashes & np.uint64((1 << zeros) - 1) == 0
