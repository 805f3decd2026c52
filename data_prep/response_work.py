"""Answers while they come: what a killed `data_prep.responses` goes on from, in its work folder (work_folder.py).

    rows-0.jsonl     a row a finished prompt, appended by rank 0; likewise rows-1.jsonl, ..
    failed-0.jsonl   {"id", "reason"} of the prompts that failed in this attempt

A row counts from whichever rank, so any number of ranks goes on. Failures are forgotten when the next attempt begins:
it tries those prompts again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from spectrain.decoding import Sampling
from spectrain.stores.folder import each_line, end_last_line
from spectrain.stores.prompts import Question


@dataclass(frozen=True)
class Job:
    """One store of responses to make: of what, and where."""

    out: Path
    work: Path  # the folder it is made in, beside `out`
    config: dict  # resolved; what the responses depend on
    target: str  # name
    questions: Sequence[Question]
    chat: bool | None  # see `conversation_ids`
    sampling: Sampling
    max_new_tokens: int
    stop_strings: tuple[str, ...] = ()
    seed: int = 0
    fresh: bool = False
    allow_failed: bool = False
    served_model: str | None = None  # what a server was asked for
    ranks_share: bool = True  # False: all ranks hold one target together and answer the same prompts


@dataclass(frozen=True)
class Prompt:
    """A prompt as the target reads it."""

    number: int  # in the prompt file
    id: str
    category: str
    tokens: Sequence[int] = field(repr=False)


@dataclass(frozen=True)
class Answer:
    """What the target wrote."""

    tokens: list[int]  # ends with the EOS where one was drawn
    finish_reason: str  # eos | stop | length
    retokenized: bool = False  # the server gave text only


class Answers:
    """Where a rank puts its answers: a file it appends to, flushed row by row.

    Args:
        folder: exists.
        rank: names the files.
        writes: False where another rank writes the same answers.
    """

    def __init__(self, folder: Path, rank: int, writes: bool = True):
        self.folder, self.rank, self.writes = folder, rank, writes
        self._rows: TextIO | None = None
        self._failed: TextIO | None = None

    def __enter__(self) -> Answers:
        if self.writes:
            self._rows, self._failed = (self._open(name) for name in ("rows", "failed"))
        return self

    def __exit__(self, *error: object) -> None:
        for file in (self._rows, self._failed):
            if file is not None:
                file.close()

    def _open(self, name: str) -> TextIO:
        file = self.folder / f"{name}-{self.rank}.jsonl"
        end_last_line(file)
        return file.open("a")

    def add(self, prompt: Prompt, answer: Answer) -> None:
        """Keeps an answer; once this returns, a kill does not lose it."""
        row = {
            "id": prompt.id,
            "category": prompt.category,
            "number": prompt.number,
            "prompt": list(prompt.tokens),
            "response": answer.tokens,
            "finish_reason": answer.finish_reason,
            "retokenized": answer.retokenized,
        }
        self._append(self._rows, row)

    def fail(self, prompt: Prompt, reason: str) -> None:
        """Notes why a prompt has no answer."""
        self._append(self._failed, {"id": prompt.id, "reason": reason})

    def _append(self, file: TextIO | None, row: dict) -> None:
        if file is not None:
            file.write(json.dumps(row) + "\n")
            file.flush()


def answered_rows(folder: Path) -> Iterator[dict]:
    """The rows of all ranks, each prompt's first."""
    seen = set()
    for file in sorted(folder.glob("rows-*.jsonl")):
        for row in each_line(file):
            if row["id"] not in seen:
                seen.add(row["id"])
                yield row


def failures(folder: Path) -> dict[str, str]:
    """Reasons by the ids of the prompts that failed in the last attempt."""
    return {row["id"]: row["reason"] for file in failed_files(folder) for row in each_line(file)}


def failed_files(folder: Path) -> list[Path]:
    """The lists of failures, one a rank, without those that have none."""
    return sorted(file for file in folder.glob("failed-*.jsonl") if file.stat().st_size)


def forget_failures(folder: Path) -> None:
    """They are tried again."""
    for file in folder.glob("failed-*.jsonl"):
        file.unlink()
