"""The questions that methods are measured on and targets answer: of a file, or modules of Python's standard library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from spectrain.config import conf_dir
from spectrain.data.prompts import Question, read_prompts
from spectrain.data.texts import STDLIB_HELD_OUT, is_held_out, read_documents, unit_hash

BUNDLED = ("chat", "code", "math")  # kinds of prompts that come with spectrain, in conf/questions/
# Of modules of the standard library that are held out, and of others: how many are asked by default, and how many of
# their characters. Those of the others fit the bundled target with 512 new tokens, even at one token per character.
STDLIB_QUESTIONS = {True: (20, 1200), False: (400, 400)}
STDLIB_LEAST_CHARACTERS = 2400  # of a module, so that there is something to continue


def read_questions(prompts: str | None, limit: int | None, held_out: bool = True) -> list[Question]:
    """Read the first `limit` questions of a prompt file, or of code, chat or math, which come with spectrain.

    Without a file they are beginnings of modules of the standard library: 20 by default of those that are held out, or
    400 of those that training sees as well, in hashed order.
    """
    if prompts in BUNDLED and not Path(prompts).exists():
        prompts = str(conf_dir() / "questions" / f"{prompts}.jsonl")
    if prompts is not None:
        return read_prompts(prompts, limit)
    n_questions, n_characters = STDLIB_QUESTIONS[held_out]
    found = [
        Question(d.id if held_out else f"{d.id}:0", "stdlib", (d.text[:n_characters],))
        for d in read_documents(None)
        if len(d.text) > STDLIB_LEAST_CHARACTERS and is_held_out(d.id, STDLIB_HELD_OUT) == held_out
    ]
    if not held_out:
        found.sort(key=lambda one: unit_hash(one.id))
    return found[: limit or n_questions]


def name_of(prompts: str | None) -> str:
    """Return the name of the questions of `read_questions` in results."""
    form, colon, path = (prompts or "").rpartition(":")
    return f"{form}{colon}{Path(path).name}" if prompts else "held-out modules of the Python standard library"


def digest(questions: Sequence[Question]) -> str:
    """Hash the questions: a resumed run must have the same."""
    return hashlib.sha256(json.dumps([asdict(q) for q in questions]).encode()).hexdigest()[:16]
