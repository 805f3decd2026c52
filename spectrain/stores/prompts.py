"""Questions to measure on: prompt files in the formats of the field, and conversations as token ids.

A prompt file is JSONL. Its first row's keys tell which format it has, one of `FORMATS`; every row must have those keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from spectrain.decoding.errors import UserError, check_whole

FORMATS = {  # the first whose keys a file's first row has
    "Spec-Bench": ("question_id", "category", "turns"),
    "HumanEval": ("task_id", "prompt"),
    "GSM8K": ("question",),
    "Alpaca": ("instruction", "input"),
    "plain": ("prompt",),
}


@dataclass(frozen=True)
class Question:
    """What is asked, in one or more turns."""

    id: str  # unique within its file: question_id, task_id or "<stem>-<line>"
    category: str  # Spec-Bench's category, else the file's stem
    turns: tuple[str, ...]  # user turns, played one after the other


def read_prompts(path: str | Path, limit: int | None = None) -> list[Question]:
    """Reads the questions of a prompt file, the first `limit` of them; all when None.

    Raises:
        UserError: there is no such file, it has no question, or a line is not a row of the file's format.
    """
    if limit is not None:
        check_whole("limit", limit, 1)
    file = Path(path).expanduser()
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "does not exist"
        raise UserError(f"prompts={path} {what}; give one .jsonl file of {_formats()} rows")
    questions: dict[str, Question] = {}
    format_name = None
    for number, row in _rows(file):
        where = f"line {number} of {file.name}"
        format_name = format_name or _recognise(row, where)
        question = _question(row, format_name, where, f"{file.stem}-{number}", file.stem)
        if question.id in questions:
            raise UserError(f"{where} repeats the id {question.id!r} of an earlier line; give each question its own")
        questions[question.id] = question
        if len(questions) == limit:
            break
    if not questions:
        raise UserError(f"{path} has no question; give one .jsonl file of {_formats()} rows")
    return list(questions.values())


def _rows(file: Path) -> Iterator[tuple[int, dict]]:
    """Line numbers from 1 and rows, empty lines left out."""
    number = 0
    try:
        # newline="\n": nothing else ends a line, neither a carriage return nor a U+2028 inside a JSON string.
        with file.open(encoding="utf-8-sig", newline="\n") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, parse_row(line, f"line {number} of {file.name}")
    except UnicodeDecodeError as error:
        raise UserError(f"{file.name} is not UTF-8 text after line {number}; save it as UTF-8") from error


def parse_row(line: str, where: str) -> dict:
    """A line of a user's JSON-lines file, which `where` names. Raises UserError where it is no JSON object."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON ({error.msg}, column {error.colno}); mend or remove the line") from error
    if not isinstance(row, dict):
        raise UserError(f"{where} is no JSON object but {_type_name(row)}; give one {{...}} a line")
    return row


def _recognise(row: dict, where: str) -> str:
    for name, keys in FORMATS.items():
        if all(key in row for key in keys):
            return name
    raise UserError(f"{where} has {_keys(row)}; expected one of {_formats(with_keys=True)}")


def _question(row: dict, format_name: str, where: str, line_id: str, stem: str) -> Question:
    """A row as a question, every value checked."""
    for key in FORMATS[format_name]:
        if key not in row:
            raise UserError(
                f"{where} lacks the key {key!r} (it has {_keys(row)}), which {format_name} rows like the file's first "
                "have; add it or remove the line"
            )
    if format_name == "Spec-Bench":
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise UserError(f"{where} has {_type_name(turns)} as 'turns'; give a list of one or more texts")
        texts = [_text(turn, f"'turns' at index {i}", where) for i, turn in enumerate(turns)]
        return Question(_id(row, "question_id", where), _text(row["category"], "'category'", where), tuple(texts))
    if format_name == "HumanEval":
        return Question(_id(row, "task_id", where), stem, (_text(row["prompt"], "'prompt'", where),))
    if format_name == "Alpaca":
        instruction = _text(row["instruction"], "'instruction'", where)
        extra = _text(row["input"], "'input'", where, may_be_empty=True)
        return Question(line_id, stem, (f"{instruction}\n{extra}" if extra.strip() else instruction,))
    (key,) = FORMATS[format_name]
    return Question(line_id, stem, (_text(row[key], repr(key), where),))


def _text(value: object, name: str, where: str, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where} has {_type_name(value)} as {name}; give a text")
    if not value.strip() and not may_be_empty:
        raise UserError(f"{where} has an empty text as {name}; fill it in or remove the line")
    return value


def _id(row: dict, key: str, where: str) -> str:
    value = row[key]
    if not isinstance(value, int | str) or isinstance(value, bool) or not str(value).strip():
        given = "an empty text" if isinstance(value, str) else _type_name(value)
        raise UserError(f"{where} has {given} as {key!r}; give a whole number or a text")
    return str(value)


def _type_name(value: object) -> str:
    if value == [] and isinstance(value, list):
        return "an empty list"
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a truth value",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "null")


def _keys(row: dict) -> str:
    if not row:
        return "no keys"
    return f"key{'s' if len(row) > 1 else ''} {', '.join(map(str, row))}"


def _formats(with_keys: bool = False) -> str:
    names = [f"{name} ({', '.join(keys)})" if with_keys else name for name, keys in FORMATS.items()]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def conversation_ids(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[str],
    replies: Sequence[str | Sequence[int]],
    chat: bool | None = None,
) -> list[int]:
    """Token ids of a conversation that waits for its next reply.

    With `chat` the turns alternate in the tokenizer's template, which closes each reply itself. Without, turns and
    replies are one text, joined by line breaks.

    Args:
        tokenizer: the target's.
        turns: the user's turns so far.
        replies: the replies to all of them but the last, as text or as the token ids that a model generated: special
            tokens and a closing end-of-text token are dropped from those.
        chat: whether to use the template; None: where the tokenizer has one.

    Raises:
        UserError: `chat` is True and the tokenizer has no template.
    """
    assert len(turns) == len(replies) + 1, (len(turns), len(replies))
    if chat and tokenizer.chat_template is None:
        raise UserError("chat=true, but the target's tokenizer has no chat template; use chat=false")
    texts = [reply if isinstance(reply, str) else _decode(tokenizer, reply) for reply in replies]
    if chat is False or tokenizer.chat_template is None:
        said = [text for pair in zip(turns, texts, strict=False) for text in pair]
        return list(tokenizer("\n".join([*said, turns[-1]]))["input_ids"])
    messages = [{"role": "user", "content": turns[0]}]
    for reply, turn in zip(texts, turns[1:], strict=True):
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": turn}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def _decode(tokenizer: PreTrainedTokenizerBase, reply: Sequence[int]) -> str:
    end = len(reply)
    # An end of text that the tokenizer does not list as special would survive `skip_special_tokens`.
    while end and reply[end - 1] == tokenizer.eos_token_id:
        end -= 1
    return tokenizer.decode(list(reply[:end]), skip_special_tokens=True)
