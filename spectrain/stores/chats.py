"""Reads a row of a user's file as a conversation or as a plain text, whatever columns the row has.

    row = read_row({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]})
    row.kind, row.chat.messages

A row is of the first of these kinds that it fits: a preference pair, whose chosen reply counts; turns in `messages`,
`conversations`, `conversation` or the one other column that holds some; UltraChat's texts of a user and an assistant in
turns; Spec-Bench's `turns` of a user; Alpaca's instruction; a prompt and its completion; a question and its answer; a
plain text. What fits none is refused.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from spectrain.errors import UserError

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
}
TURNS = dict.fromkeys(("messages", "conversations", "conversation"))  # usual names of columns of turns, in order
ALTERNATING = ("data", "dialog", "dialogue", *TURNS)  # columns of texts, a user's and an assistant's in turns
PAIRS = {  # kinds of rows in single texts: columns of the question, what belongs to it, and the reply
    "instructions": (("instruction",), ("input", "context"), ("output", "response")),
    "prompts": (("prompt",), (), ("completion", "response", "answer", "canonical_solution")),
    "questions": (("question", "query", "problem"), (), ("answer", "response", "solution")),
}
TEXTS = ("text", "content", "article", "document")  # columns of plain text, beside which others may stand
KEPT = ("tool_calls", "tool_call_id", "name", "reasoning_content")  # of a turn, besides its role and its content
CALL_ROLES = ("function_call",)  # whose text is a call of a tool, as LLaMA-Factory writes it
SURROGATE = re.compile("[\ud800-\udfff]")  # half a character: JSON can name it, UTF-8 and tokenizers cannot
BROKEN_SHARE = 0.1  # of the rows of a source, above which it is refused
SHOWN_BROKEN = 10  # rows that cannot be read are named

Messages = list[dict]


class Broken(ValueError):
    """A row that cannot be read; the message says why, and is the same for all rows that fail alike."""


@dataclass(frozen=True)
class Chat:
    """A conversation in OpenAI's shape.

    `messages` have a role (system | user | assistant | tool) and a text as content, and what else the row says, such as
    `tool_calls`, whose arguments are objects, or `reasoning_content`. No two neighbours are both users, nor both
    assistants who write text.
    """

    messages: Messages
    tools: list[dict] | None = None  # what the assistant may call, as JSON schemas

    @property
    def replies(self) -> int:
        """Turns of the assistant."""
        return sum(message["role"] == "assistant" for message in self.messages)

    def answered(self) -> Chat | None:
        """Return the conversation up to its last reply; None: it has none."""
        ends = [number for number, message in enumerate(self.messages, start=1) if message["role"] == "assistant"]
        return replace(self, messages=self.messages[: ends[-1]]) if ends else None


@dataclass(frozen=True)
class Row:
    """The content of a row: either `chat` or `text` is set."""

    kind: str
    chat: Chat | None = None
    text: str = ""
    mended: tuple[str, ...] = ()  # what was done to make a conversation of its turns


@dataclass
class Tally:
    """Counts the rows of a source that are used and those that are left out, with the reasons."""

    source: str = ""  # its name
    advice: str = "mend or remove what cannot be read"  # where too much cannot
    kinds: Counter = field(default_factory=Counter)  # rows that were taken
    replies: int = 0  # turns of assistants in them
    mended: Counter = field(default_factory=Counter)  # conversations that were changed, by what was done
    skipped: Counter = field(default_factory=Counter)  # rows and files that were left out, by the reason
    broken: list[str] = field(default_factory=list)  # of the rows that cannot be read, the first ones and why
    n_broken: int = 0

    @property
    def n_rows(self) -> int:
        """All rows, those that were left out too."""
        return self.kinds.total() + self.skipped.total() + self.n_broken

    def take(self, row: Row) -> None:
        """Count a row that is used."""
        self.kinds[row.kind] += 1
        self.mended.update(row.mended)
        if row.chat is not None:
            self.replies += row.chat.replies

    def refuse(self, where: str, reason: str) -> None:
        """Count a row that cannot be read; UserError where these are too many to be slips."""
        self.n_broken += 1
        if len(self.broken) < SHOWN_BROKEN:
            self.broken.append(f"{where} {reason}")
        if self.n_broken >= SHOWN_BROKEN:
            self.check()

    def check(self) -> None:
        """Raise UserError where more than BROKEN_SHARE of the rows cannot be read."""
        if self.n_broken > BROKEN_SHARE * self.n_rows:
            n_more = self.n_broken - 1
            more = f", and {n_more} of the other {self.n_rows - 1} rows alike" if n_more else ""
            raise UserError(f"{self.broken[0]}{more}; {self.advice}")

    def say(self) -> str:
        """Return what was read in one line, such as "a.json: 30 conversations, 84 assistant turns"."""
        mended = f" (of which {_counted(self.mended)})" if self.mended else ""
        parts = [f"{_counted(self.kinds)}{mended}"] if self.kinds else []
        if self.replies:
            parts.append(f"{self.replies:,} assistant turns")
        if self.skipped:
            parts.append(f"{self.skipped.total():,} skipped: {_counted(self.skipped)}")
        if self.n_broken:
            shown = "; ".join(self.broken) + ("; .." if self.n_broken > len(self.broken) else "")
            parts.append(f"{self.n_broken:,} that cannot be read: {shown}")
        return f"{self.source}: {', '.join(parts) or 'nothing'}"

    @property
    def is_remarkable(self) -> bool:
        """Whether there is more to say than that files of text were read, some of them empty."""
        return bool(self.kinds.keys() - {"files"} or self.skipped.keys() - {"empty", "not UTF-8"} or self.n_broken)


def _counted(counts: Counter) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.most_common())


def read_row(row: Mapping, fields: Sequence[str] = ()) -> Row:
    """Return what a row holds; see the module. Halves of characters become U+FFFD.

    Args:
        row: by column.
        fields: columns to take it from. A single one may hold turns; otherwise their texts are joined by blank lines.

    Raises:
        Broken: it fits no kind, lacks a field, or has turns that make no conversation.
    """
    if fields:
        return _of_fields(row, fields)
    given, row = row, {name: value for name, value in row.items() if value is not None}
    if "chosen" in row and "rejected" in row:
        return _of_turns("preferences", _preferred(row), row)
    if (column := _column_of_turns(row)) is not None:
        return _of_turns("conversations", row[column], row)
    if (column := next((name for name in ALTERNATING if _is_texts(row.get(name))), None)) is not None:
        turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(row[column])]
        return _of_turns("conversations", turns, row)
    if isinstance(row.get("turns"), list):  # Spec-Bench's, which are asked one after the other
        if not row["turns"] or not all(isinstance(turn, str) and turn.strip() for turn in row["turns"]):
            raise Broken("has an empty turn, or none")
        return Row("questions", Chat([{"role": "user", "content": clean(turn)} for turn in row["turns"]]))
    for kind, (asked, beside, answered) in PAIRS.items():
        column = next((name for name in asked if name in row), None)
        reply = next((row[name] for name in answered if name in row), None)
        if column is None or (reply is None and row.keys() & set(TEXTS)):
            continue
        question = row[column]
        if _is_turns(question):  # as in conversational prompt-completion sets
            return _of_turns(kind, [*question, *_as_turns(reply, "assistant")], row)
        more = [row[name] for name in beside if row.get(name)]
        if not all(isinstance(part, str) for part in (question, *more)):
            raise Broken(f"has no text as {column!r}")
        text = "\n".join(part for part in (question, *more) if part.strip())
        return _of_turns(kind, [*_as_turns(text, "user"), *_as_turns(reply, "assistant")], row)
    if row.keys() & {"role", "from"}:
        raise Broken("is a turn, where conversations are expected; give rows with a list of turns")
    if (column := next((name for name in TURNS if name in row), None)) is not None:
        if _is_turns(turns := _parsed(row[column])):  # as JSON in a cell of a table
            return _of_turns("conversations", turns, row)
        raise Broken(f"has something else than turns with roles in {column!r}")
    texts = [name for name, value in row.items() if isinstance(value, str)]
    column = next((name for name in TEXTS if name in texts), texts[0] if len(row) == len(texts) == 1 else None)
    if column is not None:
        return Row("texts", text=clean(row[column]))
    if given.keys() & TURNS.keys():  # of null
        return Row("conversations", Chat([]))
    raise Broken(
        f"has the columns {', '.join(given) or '(none)'}, which are those of no conversation, question or text"
    )


def clean(text: str) -> str:
    """Return a text without halves of characters."""
    return SURROGATE.sub("\ufffd", text)


def clean_all(value: object) -> object:
    """Return a value with all its texts cleaned, without the nulls that Arrow puts for names that a row lacks."""
    if isinstance(value, Mapping):
        return {clean(key): clean_all(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [clean_all(one) for one in value]
    return clean(value) if isinstance(value, str) else value


def plain_text(messages: Messages) -> str:
    """Return the turns joined by blank lines, for a tokenizer without a chat template."""
    return "\n\n".join(message["content"] for message in messages if message["content"])


def _of_fields(row: Mapping, fields: Sequence[str]) -> Row:
    texts = []
    for name in fields:
        if name not in row:
            raise Broken(f"has no column {name!r} ({', '.join(row)})")
        value = row[name]
        if len(fields) == 1 and _is_turns(value):
            return _of_turns("conversations", value, row)
        parts = value if isinstance(value, list) else [value]
        parts = [part.get("content") if isinstance(part, Mapping) else part for part in parts]
        if not all(part is None or isinstance(part, str) for part in parts):
            raise Broken(f"has no text as {name!r}")
        texts.append("\n\n".join(part for part in parts if part))
    return Row("texts", text=clean("\n\n".join(text for text in texts if text)))


def _preferred(row: Mapping) -> list:
    """Return the turns of a preference pair's prompt and its chosen reply."""
    chosen, prompt = row["chosen"], row.get("prompt", next((row[name] for name in TURNS if name in row), None))
    chosen = [chosen] if isinstance(chosen, Mapping) else chosen
    if _is_turns(chosen) and (prompt is None or _role(chosen[0]) in ("user", "system")):
        return chosen
    if prompt is None:
        raise Broken("has a chosen reply without a prompt")
    return [*_as_turns(prompt, "user"), *_as_turns(chosen, "assistant")]


def _as_turns(value: object, role: str) -> list:
    """Return turns as they are, a text as one turn of this role, and None as no turn."""
    if value is None or _is_turns(value):
        return value or []
    return [{"role": role, "content": value}]


def _column_of_turns(row: Mapping) -> str | None:
    """Return the column of a row that holds turns: of those with a usual name the first one, else the only one."""
    usual = [name for name in TURNS if name in row]
    of_pairs = {name for columns in PAIRS.values() for names in columns for name in names}
    others = [name for name in row if name not in of_pairs]
    found = [name for name in usual or others if _is_turns(row[name])]
    if len(found) > 1 and not usual:
        raise Broken(f"has turns in the columns {' and '.join(found)}")
    # An empty list, or null, under a usual name is a conversation without turns.
    return next(iter(found or [name for name in usual if not row[name]]), None)


def _is_turns(value: object) -> bool:
    turns = value if isinstance(value, list) else []
    return bool(turns) and all(isinstance(turn, Mapping) and turn.keys() & {"role", "from"} for turn in turns)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


def _role(turn: Mapping) -> str:
    name = turn.get("role") or turn.get("from")
    if not isinstance(name, str) or name not in ROLES:
        raise Broken(f"has a turn of {name!r}; roles are {', '.join(ROLES)}")
    return ROLES[name]


def _of_turns(kind: str, turns: Sequence[Mapping] | None, row: Mapping) -> Row:
    """Return the conversation of turns in any of the shapes; see `Chat`.

    It begins with the first turn that is not the assistant's, ends before the first one that is empty, and neighbours
    of one speaker are joined.
    """
    messages, mended = [], []
    if isinstance(row.get("system"), str) and row["system"].strip():
        messages.append({"role": "system", "content": clean(row["system"])})
    for turn in turns or ():
        message = message_of(turn)
        role, last = message["role"], messages[-1] if messages else {"role": None}
        if role == "assistant" and not any(one["role"] == "user" for one in messages):
            mended.append("without the reply that it began with")
        elif not message["content"] and role != "tool" and not message.keys() & {"tool_calls", "reasoning_content"}:
            if role != "system":
                mended.append("cut at an empty turn")
                break
        elif role == last["role"] and role in ("user", "assistant") and "tool_calls" not in last:
            texts = filter(None, (last["content"], message["content"]))
            messages[-1] = {**last, **message, "content": "\n\n".join(texts)}
            mended.append("with neighbouring turns of one speaker joined")
        else:
            messages.append(message)
    return Row(kind, Chat(messages, _tools(row.get("tools"))), mended=tuple(dict.fromkeys(mended)))


def message_of(turn: Mapping) -> dict:
    """Return a turn in OpenAI's shape, without keys that have no value."""
    turn = {key: value for key, value in turn.items() if value is not None}
    role, name = _role(turn), turn.pop("role", None) or turn.get("from")
    turn.pop("from", None)
    content = next((turn.pop(key) for key in ("content", "value", "text") if key in turn), "")
    if isinstance(content, list):
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            raise Broken("has a turn with content that is no text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Broken("has a turn whose content is no text")
    content = clean(content)
    if name in CALL_ROLES:
        turn["tool_calls"], content = [{"function": _parsed(content)}], ""
    if calls := turn.pop("tool_calls", None):
        if not isinstance(calls, list):
            raise Broken("has calls of tools that are no list")
        turn["tool_calls"] = [_call(call) for call in calls]
    if isinstance(turn.get("reasoning_content"), str):
        turn["reasoning_content"] = clean(turn["reasoning_content"])
    more = {key: turn[key] for key in KEPT if key in turn}
    return {"role": role, "content": content if content.strip() else "", **more}


def read_messages(messages: Sequence[Mapping]) -> Messages:
    """Return messages that somebody sent, as `message_of` does, beside what else they hold.

    Raises:
        UserError: says which one cannot be read, and why.
    """
    read = []
    for number, turn in enumerate(messages):
        try:
            read.append({**turn, **message_of(turn)})
            calls = read[-1].get("tool_calls") or ()
            if not all(isinstance(call["function"]["arguments"], Mapping) for call in calls):
                raise Broken("has a call of a tool whose arguments are no JSON text of an object")
            if read[-1]["role"] in ("system", "user") and not turn.keys() & {"content", "value", "text"}:
                raise Broken("has no content")
        except Broken as error:
            raise UserError(f"messages[{number}] {error}") from None
    return read


def _call(call: object) -> dict:
    """Return a call of a tool whose arguments are an object, which OpenAI sends as text and templates write as JSON."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Broken("has a call of a tool without a name")
    known = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": {**known, "arguments": _parsed(function.get("arguments")) or {}}}


def _tools(tools: object) -> list[dict] | None:
    tools = _parsed(tools)
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise Broken("has tools that are no list of JSON schemas")
    return tools or None


def _parsed(value: object) -> object:
    """Return what a text holds as JSON; what is none stays as it is."""
    try:
        return clean_all(json.loads(value) if isinstance(value, str) and value.strip() else value or None)
    except (ValueError, RecursionError):
        return clean_all(value)
