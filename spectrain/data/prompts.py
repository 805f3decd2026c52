"""Questions to measure on, from the same files as corpora (`chats.read_row`), and conversations as token ids."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from spectrain.config import conf_dir
from spectrain.data.chats import Broken, Row, Tally, clean
from spectrain.data.texts import source_rows
from spectrain.decoding.text import chat_ids
from spectrain.errors import UserError, check_whole

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Question:
    """A question in one or more turns."""

    id: str  # unique within its source: the row's question_id or task_id, or "<stem>-<line>"
    category: str  # Spec-Bench's category, else the source's stem
    turns: tuple[str, ...]  # user turns, played one after the other
    system: str = ""  # what the system says before them; empty: nothing
    tools: list[dict] | None = None  # what the assistant may call


def read_prompts(path: str | Path, limit: int | None = None) -> list[Question]:
    """Read the first `limit` questions of a file, a folder, or a dataset of the hub (`owner/name` or with `:split`).

    Of a conversation the user's turns are asked, up to the first one that a tool's answer leads to. In
    `gsm8k_8shot:<file>` each first turn is put into a template of conf/formats/. The log says what was left out.

    Raises:
        UserError: there is nothing at the path, too many rows cannot be read, or two have the same id.
    """
    if limit is not None:
        check_whole("limit", limit, 1)
    template, path = _template_of(str(path))
    is_here = Path(path).expanduser().exists()
    name, _, split = (str(Path(path).expanduser()), "", "") if is_here else path.partition(":")
    questions: dict[str, Question] = {}
    tally = Tally(str(path))
    for where, row, columns in source_rows(name, (), split or "train", None, tally, "prompts"):
        origin, _, number = where.rpartition(":")
        stem = Path(origin if Path(name, origin).is_file() else name.rstrip("/")).name.partition(".")[0]
        try:
            if row.kind == "files":
                raise Broken("is no file of questions, conversations or texts in rows")
            question = _question(row, columns, f"{stem}-{number}", stem)
        except Broken as error:
            tally.refuse(where, str(error))
            continue
        if question is None:
            tally.skipped["without a question"] += 1
            continue
        if question.id in questions:
            raise UserError(f"{where} repeats the id {question.id!r} of an earlier row; give each question its own")
        tally.take(row)
        first, *later = question.turns
        questions[question.id] = replace(question, turns=(template.replace("{}", first), *later))
        if len(questions) == limit:
            break
    tally.check()
    if not questions:
        raise UserError(f"prompts={path} has no question; give one file of questions, conversations or texts")
    if tally.skipped or tally.n_broken or tally.ignored:
        log.warning(tally.say())
    return list(questions.values())


def _template_of(path: str) -> tuple[str, str]:
    """Return the template that a path begins with, in which {} stands for a question, and the path behind it."""
    name, _, rest = path.partition(":")
    file = conf_dir() / "formats" / f"{name}.txt"
    if Path(path).expanduser().exists() or "/" in name or not file.is_file():
        return "{}", path
    if not rest:
        raise UserError(f"prompts={path} is a format of questions; give prompts={name}:<file of questions>")
    return file.read_text(encoding="utf-8").removesuffix("\n"), rest


def _question(row: Row, columns: Mapping, row_id: str, stem: str) -> Question | None:
    """Return what a row asks, or None; `row_id` and `stem` are for rows without id and category."""
    known = next((columns[key] for key in ("question_id", "task_id") if columns.get(key) is not None), row_id)
    if not isinstance(known, str | int):
        raise Broken(f"has the id {known!r}; give a text or a number")
    category = columns["category"] if isinstance(columns.get("category"), str) and "question_id" in columns else stem
    if row.chat is None:
        return Question(clean(str(known)), category, (row.text,)) if row.text.strip() else None
    asked = takewhile(lambda m: m["role"] != "tool" and "tool_calls" not in m, row.chat.messages)
    said = [(message["role"], message["content"]) for message in asked]
    turns = tuple(text for role, text in said if role == "user")
    system = "\n\n".join(text for role, text in said if role == "system")
    return Question(clean(str(known)), clean(category), turns, system, row.chat.tools) if turns else None


def question_ids(
    tokenizer: PreTrainedTokenizerBase,
    question: Question,
    replies: Sequence[str | Sequence[int]],
    chat: bool | str = "auto",
) -> list[int]:
    """Return the token ids of the turn of a question that waits for its reply; see `conversation_ids`."""
    turns = question.turns[: len(replies) + 1]
    return conversation_ids(tokenizer, turns, replies, chat, question.system, question.tools)


def conversation_ids(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[str],
    replies: Sequence[str | Sequence[int]],
    chat: bool | str = "auto",
    system: str = "",
    tools: list[dict] | None = None,
) -> list[int]:
    """Return the token ids of a conversation that waits for its next reply.

    With `chat` the turns alternate in the tokenizer's template, which closes each reply itself. Without it, turns and
    replies are one text, joined by line breaks.

    Args:
        turns: of the user so far.
        replies: to all turns but the last, as text or as token ids. From ids, special tokens and closing end-of-text
            tokens are dropped.
        chat: whether to use the template, which must exist then; "auto": if the tokenizer has one.
        system: what the system says first. Where the template refuses that, the first turn begins with it.
        tools: what the assistant may call, as JSON schemas.
    """
    assert len(turns) == len(replies) + 1, (len(turns), len(replies))
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
        texts = [system] * bool(system) + [message["content"] for message in messages]
        return list(tokenizer("\n".join(texts))["input_ids"])
    return chat_ids(tokenizer, messages, tools, system)
