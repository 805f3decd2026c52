"""The questions that methods are measured on: of a prompt file, or held-out modules of the Python standard library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from spectrain.config import conf_dir
from spectrain.data.prompts import Question, read_prompts
from spectrain.data.texts import STDLIB_HELD_OUT, is_held_out, read_documents

BUNDLED = ("chat", "code", "math")  # kinds of prompts that come with spectrain, in conf/questions/
STDLIB_QUESTIONS = 20
STDLIB_CHARACTERS = 1200  # of a module, to be continued


def read_questions(prompts: str | None, limit: int | None) -> list[Question]:
    """Read the first `limit` questions of a prompt file, or of code, chat or math, which come with spectrain.

    Without a file they are of the standard library (20 by default).
    """
    if prompts in BUNDLED and not Path(prompts).exists():
        prompts = str(conf_dir() / "questions" / f"{prompts}.jsonl")
    if prompts is not None:
        return read_prompts(prompts, limit)
    documents = [d for d in read_documents(None) if is_held_out(d.id, STDLIB_HELD_OUT)]
    long_enough = [d for d in documents if len(d.text) > 2 * STDLIB_CHARACTERS]
    chosen = long_enough[: limit or STDLIB_QUESTIONS]
    return [Question(d.id, "stdlib", (d.text[:STDLIB_CHARACTERS],)) for d in chosen]


def name_of(prompts: str | None) -> str:
    """Return the name of the questions of `read_questions` in results."""
    form, colon, path = (prompts or "").rpartition(":")
    return f"{form}{colon}{Path(path).name}" if prompts else "held-out modules of the Python standard library"


def digest(questions: Sequence[Question]) -> str:
    """Hash the questions: a resumed run must have the same."""
    return hashlib.sha256(json.dumps([asdict(q) for q in questions]).encode()).hexdigest()[:16]
