"""Questions to measure on: prompt files in the formats of the field, and conversations as token ids.

A prompt file is JSONL. The keys of its first row tell which of `FORMATS` it has, and every row must have those keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from spectrain.decoding.text import chat_ids
from spectrain.errors import UserError, check_whole
from spectrain.stores.files import parse_json

FORMATS = {  # a file has the first of these whose keys its first row has
    "Spec-Bench": ("question_id", "category", "turns"),
    "HumanEval": ("task_id", "prompt"),
    "GSM8K": ("question",),
    "Alpaca": ("instruction", "input"),
    "plain": ("prompt",),
}
SURROGATE = re.compile("[\ud800-\udfff]")  # half a character: JSON can name it, UTF-8 and tokenizers cannot
SHOWN_CHARACTERS = 40  # of a wrong value in a message


@dataclass(frozen=True)
class Question:
    """A question in one or more turns."""

    id: str  # unique within its file: question_id, task_id or "<stem>-<line>"
    category: str  # Spec-Bench's category, else the file's stem
    turns: tuple[str, ...]  # user turns, played one after the other


def read_prompts(path: str | Path, limit: int | None = None) -> list[Question]:
    """Read the first `limit` questions of a prompt file; None: all. Halves of characters become U+FFFD.

    UserError is raised where there is no such file, or a line is not a row of its format.
    """
    if limit is not None:
        check_whole("limit", limit, 1)
    file = Path(path).expanduser()
    known = ", ".join(list(FORMATS)[:-1]) + " or plain"
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise UserError(f"prompts={path} {what}; give one .jsonl file of {known} rows")
    questions: dict[str, Question] = {}
    stem, format_name = SURROGATE.sub("\ufffd", file.stem), None
    for number, row in json_rows(file, file.name):
        where = f"line {number} of {file.name}"
        format_name = format_name or _format_of(row, where)
        question = _question(row, format_name, where, f"{stem}-{number}", stem)
        if question.id in questions:
            raise UserError(f"{where} repeats the id {question.id!r} of an earlier line; give each question its own")
        questions[question.id] = question
        if len(questions) == limit:
            break
    if not questions:
        raise UserError(f"{path} has no question; give one .jsonl file of {known} rows")
    return list(questions.values())


def json_rows(file: Path, name: str) -> Iterator[tuple[int, dict]]:
    """Yield line numbers, from 1, and objects of a user's JSON-lines file, which messages call `name`."""
    with file.open("rb") as lines:  # as bytes only a line feed ends a line, no carriage return or U+2028
        for number, line in enumerate(lines, start=1):
            where = f"line {number} of {name}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                row = parse_json(text) if text.strip() else None
            except UnicodeDecodeError as error:
                raise UserError(f"{where} is not UTF-8 (byte {error.start + 1}); save the file as UTF-8") from error
            except json.JSONDecodeError as error:
                raise UserError(f"{where} is not JSON ({error.msg}, column {error.colno}); mend it") from error
            except ValueError as error:  # NaN or Infinity
                raise UserError(f"{where} cannot be read ({error}); mend it") from error
            if isinstance(row, dict):
                yield number, row
            elif text.strip():
                raise UserError(f"{where} is no JSON object but {_shown(row)}; give one {{...}} per line")


def _format_of(row: dict, where: str) -> str:
    for name, keys in FORMATS.items():
        if all(key in row for key in keys):
            return name
    known = ", ".join(f"{name} ({', '.join(keys)})" for name, keys in FORMATS.items())
    raise UserError(f"{where} has the keys {_shown(list(row))}; expected those of one format: {known}")


def _question(row: dict, format_name: str, where: str, line_id: str, stem: str) -> Question:
    """Return a row as a question, every value checked; `line_id` and `stem` are for rows without id and category."""
    values = {}
    for key in FORMATS[format_name]:
        if key not in row:
            raise UserError(f"{where} lacks the key {key!r} of {format_name} rows like the file's first; add it")
        value = row[key]
        if key == "turns":
            if not isinstance(value, list) or not value:
                raise UserError(f"{where} has {_shown(value)} as 'turns'; give a list of one or more texts")
            values[key] = tuple(_text(turn, f"turns[{i}]", where) for i, turn in enumerate(value))
        else:
            is_number = key in ("question_id", "task_id") and type(value) is int
            values[key] = _text(str(value) if is_number else value, key, where, may_be_empty=key == "input")
    texts = [values[key] for key in ("prompt", "question", "instruction", "input") if key in values]
    turns = values.get("turns", ("\n".join(text for text in texts if text.strip()),))
    return Question(values.get("question_id", values.get("task_id", line_id)), values.get("category", stem), turns)


def _text(value: object, key: str, where: str, may_be_empty: bool = False) -> str:
    """Return a value of a row that must be a text, without halves of characters."""
    if not isinstance(value, str) or not (value.strip() or may_be_empty):
        raise UserError(f"{where} has {_shown(value)} as {key!r}; give a text or remove the line")
    return SURROGATE.sub("\ufffd", value)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}.."


def conversation_ids(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[str],
    replies: Sequence[str | Sequence[int]],
    chat: bool | str = "auto",
) -> list[int]:
    """Return the token ids of a conversation that waits for its next reply.

    With `chat` the turns alternate in the tokenizer's template, which closes each reply itself. Without it, turns and
    replies are one text, joined by line breaks.

    Args:
        tokenizer: of the target.
        turns: of the user so far.
        replies: to all turns but the last, as text or as token ids. From ids, special tokens and closing end-of-text
            tokens are dropped.
        chat: whether to use the template, which must exist then; "auto": if the tokenizer has one.
    """
    assert len(turns) == len(replies) + 1, (len(turns), len(replies))
    if chat not in ("auto", True, False):
        raise UserError(f"chat={chat} must be auto, true or false")
    if chat is True and tokenizer.chat_template is None:
        raise UserError("chat=true, but the target's tokenizer has no chat template; use chat=false")
    messages = [{"role": "user", "content": turns[0]}]
    for reply, turn in zip(replies, turns[1:], strict=True):
        if not isinstance(reply, str):
            end = len(reply)
            # An end of text that the tokenizer does not list as special would survive `skip_special_tokens`.
            while end and reply[end - 1] == tokenizer.eos_token_id:
                end -= 1
            reply = tokenizer.decode(list(reply[:end]), skip_special_tokens=True)
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": turn}]
    if chat is False or tokenizer.chat_template is None:
        return list(tokenizer("\n".join(message["content"] for message in messages))["input_ids"])
    return chat_ids(tokenizer, messages)
