"""Conversations as token ids: the shapes in which corpora keep them, the chat template, and who wrote which token.

messages = messages_of([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}], "line 1 of chats.jsonl")
ids, is_assistant = chat_tokens(tokenizer, messages, "chats.jsonl:1")
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from spectrain.decoding.text import rendered
from spectrain.errors import UserError
from spectrain.stores.prompts import SURROGATE

COLUMNS = ("messages", "conversations")  # of OpenAI's shape and of ShareGPT's, as corpora name them
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")  # a template marks with it what the assistant writes
STAND_IN = "\ue000\ue001\ue000"  # a reply that shares no character with any text: private use

Messages = list[dict]


def conversation_column(row: Mapping, fields: Sequence[str] | None) -> str | None:
    """Return the column of a row that holds a conversation, where its text is to be taken from that column alone.

    Without `fields` it is the first of COLUMNS that holds one, else the only field. None: the row is a plain text.
    """
    names = COLUMNS if not fields else fields if len(fields) == 1 else ()
    return next((name for name in names if _is_conversation(row.get(name))), None)


def _is_conversation(value: object) -> bool:
    turns = value if isinstance(value, list) else []
    return bool(turns) and all(isinstance(t, Mapping) and ("role" in t or "from" in t) for t in turns)


def messages_of(turns: Sequence[Mapping], where: str) -> Messages:
    """Return a conversation in OpenAI's shape, {"role", "content"}, from that or ShareGPT's, {"from", "value"}.

    Keys without a value are left out, and content in several pieces of text is joined. Halves of characters become
    U+FFFD.

    Raises:
        UserError: a turn is neither, or its content is no text; `where` names the row.
    """
    found = []
    for number, turn in enumerate(turns, start=1):
        turn = {key: value for key, value in turn.items() if value is not None}
        role = turn.pop("role", None) or turn.pop("from", None)
        content = turn.pop("content", None) if "content" in turn else turn.pop("value", "")
        if isinstance(content, list) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
            content = "".join(str(piece.get("text", "")) for piece in content)
        if not isinstance(role, str) or not isinstance(content, str):
            raise UserError(f"{where} has a turn {number} without a role or a text; mend it, or set corpus.fields")
        content = SURROGATE.sub("\ufffd", content)
        found.append({"role": SHAREGPT_ROLES.get(role, role), "content": content, **turn})
    return found


def plain_text(messages: Messages) -> str:
    """Return the turns joined by blank lines, for a tokenizer without a chat template."""
    return "\n\n".join(message["content"] for message in messages if message["content"])


def has_assistant(messages: Messages) -> bool:
    """Return whether the assistant says anything."""
    return any(message["role"] == "assistant" and message["content"].strip() for message in messages)


def chat_tokens(tokenizer: PreTrainedTokenizerBase, messages: Messages, name: str) -> tuple[list[int], list[bool]]:
    """Return the token ids of a conversation by the chat template, and whether the assistant wrote each of them.

    A template that marks what the assistant writes ({% generation %}) is asked. With any other one, a reply is where
    the rendered text changes when another reply stands in its place; an end-of-text token that follows belongs to it.

    Raises:
        UserError: the template refuses the conversation `name`, or the tokenizer cannot say where tokens stand.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path} cannot say where its tokens stand in a text, so replies cannot "
            "be told from prompts; give corpus.fields of plain texts, or a target with a fast tokenizer"
        )
    if GENERATION.search(tokenizer.get_chat_template()):
        asked = {"return_dict": True, "return_assistant_tokens_mask": True}
        marked = _rendered(tokenizer, messages, name, **asked)
        return list(marked["input_ids"]), [bool(one) for one in marked["assistant_masks"]]
    text = _rendered(tokenizer, messages, name, tokenize=False)
    encoded = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
    ids, places = list(encoded["input_ids"]), encoded["offset_mapping"]
    is_assistant = [False] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or not message["content"].strip():
            continue
        start, end = _changed(text, _rendered(tokenizer, _with_stand_in(messages, i), name, tokenize=False))
        inside = [k for k, (first, last) in enumerate(places) if first < end and last > start]
        if inside and inside[-1] + 1 < len(ids) and ids[inside[-1] + 1] == tokenizer.eos_token_id:
            inside.append(inside[-1] + 1)
        for k in inside:
            is_assistant[k] = True
    return ids, is_assistant


def _with_stand_in(messages: Messages, number: int) -> Messages:
    return [{**m, "content": STAND_IN} if i == number else m for i, m in enumerate(messages)]


def _changed(text: str, other: str) -> tuple[int, int]:
    """Return where a text, from start to end, differs from another one."""
    start = _n_shared(text, other)
    return start, len(text) - _n_shared(text[start:][::-1], other[start:][::-1])


def _n_shared(a: str, b: str) -> int:
    """Return with how many equal characters two texts begin."""
    return next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Messages, name: str, **asked: object) -> object:
    advice = "mend or remove the conversation, or mend the template"
    return rendered(tokenizer, messages, f"the conversation {name}", advice, **asked)
