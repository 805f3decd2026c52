"""Reads a row of a user's file as a conversation or as a plain text, whatever columns the row has.

    row = read_row({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]})
    row.kind, row.chat.messages

A row is of the first of these kinds that it fits: a preference pair, whose chosen reply counts; turns in `messages`,
`conversations`, `conversation` or the one other column that holds some; UltraChat's texts of a user and an assistant in
turns; Spec-Bench's `turns` of a user; Alpaca's instruction; a prompt and its completion; a question and its answer; a
plain text. What fits none is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from spectrain.data import known
from spectrain.data.turns import Broken, clean, content_of, mark_of, message_of, parsed, role_of
from spectrain.errors import UserError

BROKEN_SHARE = 0.1  # of the rows of a source, above which it is refused
SHOWN_BROKEN = 10  # rows that cannot be read are named
SHOWN_IGNORED = 8  # fields, likewise

Messages = list[dict]


@dataclass(frozen=True)
class Chat:
    """A conversation in OpenAI's shape.

    `messages` have a role (system | user | assistant | tool) and a text as content, and what else the row says, such as
    `tool_calls`, whose arguments are objects, or `reasoning_content`. No two neighbours are both users, nor both
    assistants who write text.
    """

    messages: Messages
    tools: list[dict] | None = None  # what the assistant may call, as JSON schemas
    unlearned: tuple[int, ...] = ()  # turns of the assistant, from 0, that are context alone

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
    rejected_by: str = ""  # the field that says that no reply of it is to be learned
    ignored: tuple[str, ...] = ()  # fields that are neither read nor metadata


@dataclass
class Tally:
    """Counts the rows of a source that are used and those that are left out, with the reasons."""

    source: str = ""  # its name
    advice: str = "mend or remove what cannot be read"  # where too much cannot
    kinds: Counter = field(default_factory=Counter)  # rows that were taken
    replies: int = 0  # turns of assistants in them
    unlearned: int = 0  # of these, those that the rows mark as not to be learned
    ignored: Counter = field(default_factory=Counter)  # fields, by the number of rows that have them
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
            self.unlearned += len(row.chat.unlearned)

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
            marked = f" (of which {self.unlearned:,} are marked as not to be learned)" if self.unlearned else ""
            parts.append(f"{self.replies:,} assistant turns{marked}")
        if self.skipped:
            parts.append(f"{self.skipped.total():,} skipped: {_counted(self.skipped)}")
        if self.n_broken:
            shown = "; ".join(self.broken) + ("; .." if self.n_broken > len(self.broken) else "")
            parts.append(f"{self.n_broken:,} that cannot be read: {shown}")
        if self.ignored:
            shown = [f"{name} in {count:,} rows" for name, count in self.ignored.most_common(SHOWN_IGNORED)]
            more = len(self.ignored) - len(shown)
            parts.append(f"ignored: {', '.join(shown)}" + (f" and {more} more fields" if more else ""))
        return f"{self.source}: {', '.join(parts) or 'nothing'}"

    @property
    def is_remarkable(self) -> bool:
        """Whether there is more to say than that files of text were read, some of them empty."""
        said = self.kinds.keys() - {"files"} or self.skipped.keys() - {"empty", "not UTF-8"}
        return bool(said or self.n_broken or self.ignored)


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
    given, row = row, {name: _turns_in(value) for name, value in row.items() if value is not None}
    if "chosen" in row and "rejected" in row:
        turns, used = _preferred(row)
        return _of_turns("preferences", turns, row, (*used, *known.PREFERENCES))
    if (column := _column_of_turns(row)) is not None:
        return _of_turns("conversations", row[column], row, (column,))
    if (column := next((name for name in known.ALTERNATING if _is_texts(row.get(name))), None)) is not None:
        return _of_turns("conversations", _alternating(row[column]), row, (column,))
    if isinstance(row.get("turns"), list):  # Spec-Bench's, which are asked one after the other
        if not row["turns"] or not all(isinstance(turn, str) and turn.strip() for turn in row["turns"]):
            raise Broken("has an empty turn, or none")
        others = _of_turns("questions", [], row, ("turns",))
        asked = [{"role": "user", "content": clean(turn)} for turn in row["turns"]]
        return replace(others, chat=replace(others.chat, messages=others.chat.messages + asked))
    for kind, (asked, answered) in known.PAIRS.items():
        reply = next((name for name in answered if name in row), None)
        column = next((name for name in asked if name in row and (name != "input" or reply)), None)
        if column is None or (reply is None and row.keys() & set(known.TEXTS)):
            continue
        turns, used = _question(row, column)
        return _of_turns(kind, turns + _replies(row, reply), row, (*used, reply, *known.ROW_THOUGHTS))
    if row.keys() & {"role", "from"}:
        raise Broken("is a turn, where conversations are expected; give rows with a list of turns")
    if (column := next((name for name in known.TURNS if name in row), None)) is not None:
        raise Broken(f"has something else than turns with roles in {column!r}")
    texts = [name for name, value in row.items() if isinstance(value, str)]
    column = next((name for name in known.TEXTS if name in texts), texts[0] if len(row) == len(texts) == 1 else None)
    if column is not None:
        return Row("texts", text=clean(row[column]), ignored=tuple(known.unread(row, (column,))))
    if given.keys() & set(known.TURNS):  # of null
        return Row("conversations", Chat([]))
    raise Broken(
        f"has the columns {', '.join(given) or '(none)'}, which are those of no conversation, question or text"
    )


def plain_text(messages: Messages) -> str:
    """Return the turns joined by blank lines, for a tokenizer without a chat template."""
    return "\n\n".join(message["content"] for message in messages if message["content"])


def _of_fields(row: Mapping, fields: Sequence[str]) -> Row:
    texts = []
    for name in fields:
        if name not in row:
            raise Broken(f"has no column {name!r} ({', '.join(row)})")
        value = _turns_in(row[name])
        if len(fields) == 1 and _is_turns(value):
            return _of_turns("conversations", value, row, row.keys() - known.OF_CONVERSATIONS)
        parts = value if isinstance(value, list) else [value]
        parts = [part.get("content") if isinstance(part, Mapping) else part for part in parts]
        if not all(part is None or isinstance(part, str) for part in parts):
            raise Broken(f"has no text as {name!r}")
        texts.append("\n\n".join(part for part in parts if part))
    return Row("texts", text=clean("\n\n".join(text for text in texts if text)))


def _preferred(row: Mapping) -> tuple[list, list[str]]:
    """Return the turns of a preference pair's prompt and its chosen reply, and the columns that say them."""
    chosen = [row["chosen"]] if isinstance(row["chosen"], Mapping) else row["chosen"]
    names = ("prompt", *known.TURNS, *(name for asked, _ in known.PAIRS.values() for name in asked))
    column = next((name for name in names if name in row), None)
    if _is_turns(chosen) and (column is None or role_of(chosen[0]) in ("user", "system")):
        return chosen, ["prompt"]
    if column is None:
        raise Broken("has a chosen reply without a prompt")
    asked, used = _question(row, column)
    return [*asked, *_as_turns(chosen, "assistant")], used


def _question(row: Mapping, column: str) -> tuple[list, list[str]]:
    """Return the turns up to a question, and the columns that say them."""
    question, beside = row[column], [name for name in known.BESIDE if row.get(name) and name != column]
    earlier = _history(row.get("history"))
    if _is_turns(question):  # as in conversational prompt-completion sets
        return [*earlier, *question], [column, "history"]
    texts = []
    for name in (column, *beside):
        texts += row[name] if _is_texts(row[name]) and name != column else [row[name]]
        if not isinstance(texts[-1], str):
            raise Broken(f"has no text as {name!r}")
    text = "\n".join(part for part in texts if part.strip())
    return [*earlier, *_as_turns(text, "user")], [column, *beside, "history"]


def _history(value: object) -> list:
    """Return earlier turns: as they are, pairs of a question and its reply, or texts in turns."""
    history = parsed(value)
    if not history or _is_turns(history):
        return history or []
    if isinstance(history, list) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in history):
        history = [text or "" for pair in history for text in pair]
    if not _is_texts(history):
        raise Broken("has a history that is no list of pairs of a question and its reply")
    return [turn for turn in _alternating(history) if turn["content"].strip()]


def _replies(row: Mapping, column: str | None) -> list:
    """Return the turns of a reply, with the thoughts that have a column of their own."""
    turns = _as_turns(row.get(column), "assistant")
    thoughts = {name: row[name] for name in known.ROW_THOUGHTS if name in row}
    return [{**turns[0], **thoughts}, *turns[1:]] if turns else []


def _alternating(texts: Sequence[str]) -> list:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def _as_turns(value: object, role: str) -> list:
    """Return turns as they are, a text as one turn of this role, and None as no turn."""
    if value is None or _is_turns(value):
        return value or []
    return [{"role": role, "content": value}]


def _column_of_turns(row: Mapping) -> str | None:
    """Return the column of a row that holds turns: of those with a usual name the first one, else the only one."""
    usual = [name for name in known.TURNS if name in row]
    found = [name for name in usual or (name for name in row if name not in known.OF_PAIRS) if _is_turns(row[name])]
    if len(found) > 1 and not usual:
        raise Broken(f"has turns in the columns {' and '.join(found)}")
    # An empty list, or null, under a usual name is a conversation without turns.
    return next(iter(found or [name for name in usual if not row[name]]), None)


def _turns_in(value: object) -> object:
    """Return the turns that a cell of a table holds as JSON; any other value as it is."""
    found = parsed(value) if isinstance(value, str) and value.lstrip().startswith("[") else None
    return found if _is_turns(found) else value


def _is_turns(value: object) -> bool:
    turns = value if isinstance(value, list) else []
    return bool(turns) and all(isinstance(turn, Mapping) and turn.keys() & {"role", "from"} for turn in turns)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


def _of_turns(kind: str, turns: Sequence[Mapping] | None, row: Mapping, used: Collection[str | None]) -> Row:
    """Return the conversation of turns in any of the shapes; see `Chat`. `used` are the columns that they are from.

    It begins with the first turn that is not the assistant's, ends before the first one that is empty, and neighbours
    of one speaker are joined.
    """
    if (name := next((name for name in known.MEDIA if row.get(name) and name not in used), None)) is not None:
        raise Broken(f"has {name}, which cannot be read")
    messages, mended, ignored, are_off = _system(row), [], [], []
    for turn in turns or ():
        message = message_of(turn)
        role, last = message["role"], messages[-1] if messages else {"role": None}
        is_off, unread = mark_of(turn, role)
        ignored += unread
        if role == "assistant" and not any(one["role"] == "user" for one in messages):
            mended.append("without the reply that it began with")
        elif not message["content"] and role != "tool" and not message.keys() & {"tool_calls", "reasoning_content"}:
            if role != "system":
                mended.append("cut at an empty turn")
                break
        elif _is_one_turn(last, message) and (role != "assistant" or is_off == are_off[-1]):
            said = f"\n\n{message['content'].strip()}\n\n" in f"\n\n{last['content'].strip()}\n\n"
            if role != "system" or not said:
                texts = filter(None, (last["content"], message["content"]))
                messages[-1] = {**last, **message, "content": "\n\n".join(texts)}
                mended.append("with neighbouring turns of one speaker joined")
        else:
            messages.append(message)
            are_off += [is_off] if role == "assistant" else []
    chat = Chat(messages, _tools(row), tuple(number for number, is_off in enumerate(are_off) if is_off))
    marks = {name: known.is_off(name, row.get(name)) for name in (*known.LABELS, *known.MARKS) if name not in used}
    rejected_by = next((name for name, is_off in marks.items() if is_off), "")
    read = {*used, *known.SYSTEM, *known.TOOLS, *(name for name, is_off in marks.items() if is_off is not None)}
    ignored = known.unread(row, read, [message["content"] for message in messages]) + ignored
    return Row(kind, chat, "", tuple(dict.fromkeys(mended)), rejected_by, tuple(dict.fromkeys(ignored)))


def _is_one_turn(last: Mapping, message: Mapping) -> bool:
    """Return whether a message goes on with the one before it, and says nothing else in another way."""
    if message["role"] != last["role"] or message["role"] == "tool" or "tool_calls" in last:
        return False
    return all(last[key] == message[key] for key in last.keys() & message.keys() - {"content"})


def _system(row: Mapping) -> Messages:
    """Return the message of the columns that say what the system says."""
    texts = [content_of(row[name], repr(name)) for name in known.SYSTEM if row.get(name)]
    text = "\n\n".join(dict.fromkeys(text for text in texts if text.strip()))
    return [{"role": "system", "content": text}] if text else []


def _tools(row: Mapping) -> list[dict] | None:
    tools, functions = (parsed(row.get(name)) for name in known.TOOLS)
    for found in (tools, functions):
        if found and not (isinstance(found, list) and all(isinstance(tool, Mapping) for tool in found)):
            raise Broken("has tools that are no list of JSON schemas")
    return [*(tools or ()), *({"type": "function", "function": one} for one in functions or ())] or None
