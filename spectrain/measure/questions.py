"""The questions that methods are measured on: a prompt file, or held-out modules of the Python standard library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from spectrain.decoding import TargetModel
from spectrain.decoding.errors import UserError
from spectrain.decoding.loop import check_prompt
from spectrain.stores.prompts import Question, conversation_ids, read_prompts
from spectrain.stores.texts import STDLIB_HELD_OUT, is_held_out, read_documents

STDLIB_QUESTIONS = 20
STDLIB_CHARACTERS = 1200  # of a module, to be continued


def read_questions(prompts: str | None, limit: int | None) -> list[Question]:
    """The first `limit` questions of a prompt file; without a file, of the standard library (20 by default)."""
    if prompts is not None:
        return read_prompts(prompts, limit)
    documents = [d for d in read_documents(None) if is_held_out(d.id, STDLIB_HELD_OUT)]
    long_enough = [d for d in documents if len(d.text) > 2 * STDLIB_CHARACTERS]
    chosen = long_enough[: limit or STDLIB_QUESTIONS]
    return [Question(d.id, "stdlib", (d.text[:STDLIB_CHARACTERS],)) for d in chosen]


def name_of(prompts: str | None) -> str:
    """What results call the questions of `read_questions`."""
    return Path(prompts).name if prompts else "held-out modules of the Python standard library"


def digest(questions: Sequence[Question]) -> str:
    """A hash of the questions: a resumed run must have the same."""
    return hashlib.sha256(json.dumps([asdict(q) for q in questions]).encode()).hexdigest()[:16]


def prompt_ids(
    questions: Sequence[Question], target: TargetModel, chat: str | bool, max_new_tokens: int
) -> dict[str, list[int]]:
    """The token ids of each question's first turn, by its id. Raises UserError where one does not fit the target."""
    chat, found = use_chat(chat, target.tokenizer), {}
    for question in questions:
        found[question.id] = conversation_ids(target.tokenizer, question.turns[:1], [], chat)
        check_prompt(target, found[question.id], max_new_tokens, f"prompt {question.id}")
    return found


def use_chat(chat: str | bool, tokenizer: PreTrainedTokenizerBase) -> bool | None:
    """Whether prompts go into the tokenizer's chat template; None: where it has one.

    Args:
        chat: auto, true or false, as users give it.
        tokenizer: the target's.

    Raises:
        UserError: `chat` is something else, or the tokenizer has no template for chat=true.
    """
    if chat == "auto":
        return None
    if chat not in (True, False):
        raise UserError(f"chat={chat} must be auto, true or false")
    if chat and tokenizer.chat_template is None:
        raise UserError("chat=true, but the target's tokenizer has no chat template; use chat=auto or false")
    return chat
