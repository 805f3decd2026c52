"""Reads one turn of a conversation, in any of the shapes that turns have."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from spectrain.data import known
from spectrain.errors import UserError

SURROGATE = re.compile("[\ud800-\udfff]")  # half a character: JSON can name it, UTF-8 and tokenizers cannot


class Broken(ValueError):
    """A row that cannot be read; the message says why, and is the same for all rows that fail alike."""


def role_of(turn: Mapping) -> str:
    name = turn.get("role") or turn.get("from")
    if not isinstance(name, str) or name not in known.ROLES:
        raise Broken(f"has a turn of {name!r}; roles are {', '.join(known.ROLES)}")
    return known.ROLES[name]


def content_of(value: object, name: str) -> str:
    """Return the text of a content: a text, or parts that each hold one."""
    value = value.get("parts", [value]) if isinstance(value, Mapping) else value
    parts = value if isinstance(value, list) else [{"text": value}]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise Broken(f"has {name} that is no text")
    return clean("".join(texts))


def message_of(turn: Mapping) -> dict:
    """Return a turn in OpenAI's shape, without keys that have no value."""
    turn = {key: value for key, value in turn.items() if value is not None}
    name = turn.get("role") or turn.get("from")
    role, content = role_of(turn), next((turn[key] for key in known.CONTENT if key in turn), "")
    content = content_of(content, "a turn with content")
    more = {key: turn[key] for key in known.KEPT if key in turn}
    calls = turn.get("tool_calls") or ([turn["function_call"]] if "function_call" in turn else [])
    if name in known.CALL_ROLES:
        found = parsed(content)
        calls, content = found if isinstance(found, list) else [found], ""
    if not isinstance(calls, list):
        raise Broken("has calls of tools that are no list")
    if calls:
        more["tool_calls"] = [_call(call) for call in calls]
    if thoughts := [content_of(turn[key], "a turn with thoughts") for key in known.THOUGHTS if key in turn]:
        more["reasoning_content"] = "\n\n".join(dict.fromkeys(thoughts))
    return {"role": role, "content": content if content.strip() else "", **more}


def read_messages(messages: Sequence[Mapping]) -> list[dict]:
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
            if read[-1]["role"] in ("system", "user") and not turn.keys() & set(known.CONTENT):
                raise Broken("has no content")
        except Broken as error:
            raise UserError(f"messages[{number}] {error}") from None
    return read


def mark_of(turn: Mapping, role: str) -> tuple[bool, list[str]]:
    """Return whether a turn is marked as not to be learned, and which of its fields are ignored."""
    marks = {name: known.is_off(name, turn[name]) for name in known.MARKS if turn.get(name) is not None}
    ignored = [f"{name} of turns" for name in known.unread(turn, known.OF_TURNS | marks.keys())]
    if ignored and not turn.keys() & known.OF_TURNS - {*known.SPEAKER}:
        raise Broken(f"has a turn without content, but with {', '.join(turn)}")
    if role != "assistant":
        return False, ignored + [f"`{name}` of others' turns" for name, is_off in marks.items() if is_off is False]
    if name := next((name for name in known.PARTIAL if turn.get(name)), ""):
        raise Broken(f"has a turn of which only a part is to be learned ({name}); give train: true or false")
    if name := next((name for name, is_off in marks.items() if is_off is None), ""):
        raise Broken(f"has a turn with the {name} {turn[name]!r}; give 0 or 1, or true or false")
    return any(marks.values()), ignored


def _call(call: object) -> dict:
    """Return a call of a tool whose arguments are an object, which OpenAI sends as text and templates write as JSON."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Broken("has a call of a tool without a name")
    given = {key: value for key, value in function.items() if value is not None}
    called = {"id": call["id"]} if call.get("id") is not None else {}
    return {**called, "type": "function", "function": {**given, "arguments": parsed(function.get("arguments")) or {}}}


def clean(text: str) -> str:
    """Return a text without halves of characters."""
    return SURROGATE.sub("\ufffd", text)


def clean_all(value: object, of_arrow: bool = True) -> object:
    """Return a value with all its texts cleaned, and without the nulls that Arrow puts for names that a row lacks."""
    if isinstance(value, Mapping):
        kept = {key: one for key, one in value.items() if one is not None or not of_arrow}
        return {clean(key): clean_all(one, of_arrow) for key, one in kept.items()}
    if isinstance(value, list):
        return [clean_all(one, of_arrow) for one in value]
    return clean(value) if isinstance(value, str) else value


def parsed(value: object) -> object:
    """Return what a text holds as JSON, where a null is meant; what is none stays as it is."""
    try:
        is_text = isinstance(value, str) and value.strip()
        return clean_all(json.loads(value), of_arrow=False) if is_text else clean_all(value or None)
    except (ValueError, RecursionError):
        return clean_all(value)
