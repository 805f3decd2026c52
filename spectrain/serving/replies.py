"""What a continuation says, in the shapes of OpenAI's API: text in pieces, calls of tools, log-probabilities."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from spectrain.data.turns import clean
from spectrain.decoding import Generation
from spectrain.decoding.loop import TokenLogprobs
from spectrain.decoding.text import Pieces, TokenBytes
from spectrain.stores.files import parse_json

OPENER = "<tool_call>"
TOOL_CALL = re.compile(rf"{OPENER}\s*(\{{.*?\}})\s*</tool_call>\s*", re.DOTALL)


class AnswerText:
    """The text of an answer, in pieces with the source of each.

    If the request offers tools, everything from the first call on is held back, because only the whole can be read. So
    is a text that begins as JSON.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, dropped: Iterable[int], stop: Sequence[str], offers_tools: bool
    ) -> None:
        self.offers_tools, self.tool_calls = offers_tools, None  # the calls, once the text has ended
        self._pieces = Pieces(tokenizer, dropped, (*stop, OPENER) if offers_tools else stop)
        self._plain = Pieces(tokenizer, dropped, stop)  # with the calls
        self._rest, self._held = "", []  # of the text, behind what was shown, and pieces of it
        self._has_begun = False

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string has come."""
        return (self._plain if self.offers_tools else self._pieces).stopped

    def add(self, tokens: Sequence[int], sources: Sequence[int]) -> list[tuple[str, int]]:
        """Return the pieces of text that can be shown now."""
        if self.offers_tools:
            self._rest += "".join(map(self._plain.add, tokens))
        added = [(self._pieces.add(token), source) for token, source in zip(tokens, sources, strict=True)]
        if self.offers_tools and not self._has_begun and (self._rest.lstrip() or "{")[0] in "{[":  # a call, perhaps
            self._held += added
            return []
        added, self._held, self._has_begun = self._held + added, [], True
        return self._shown(added)

    def end(self) -> list[tuple[str, int]]:
        """Return what was held back, after the last token. Calls of tools become `tool_calls`."""
        if not self.offers_tools:
            return self._shown([(self._pieces.end(), 0)])
        self._rest += self._plain.end()
        self.tool_calls = read_tool_calls(self._rest)
        return [] if self.tool_calls or not self._rest else [(self._rest, 0)]

    def _shown(self, pieces: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        shown = [(text, source) for text, source in pieces if text]
        self._rest = self._rest[sum(len(text) for text, _ in shown) :]
        return shown


def read_tool_calls(text: str) -> list[dict] | None:
    """Return the calls that a text is made of, in OpenAI's shape; None: it is something else.

    They stand between tags, as Hermes and Qwen write them, or the text is one call in JSON, as Llama's, or a list of
    calls, as Mistral's.
    """
    found, rest = TOOL_CALL.findall(text), TOOL_CALL.sub("", text).strip()
    try:
        read = [{"parameters": {}, **parse_json(one)} for one in found] or parse_json(rest)
        calls = [{"index": n, **_call(one)} for n, one in enumerate(read if isinstance(read, list) else [read])]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return None if found and rest else calls or None


def _call(call: dict) -> dict:
    """Return a call, whose arguments may be an object or JSON text of one. Raises where it is none."""
    call = call.get("function", call) if isinstance(call.get("function"), dict) else call
    arguments = call["arguments"] if "arguments" in call else call["parameters"]
    arguments = {} if arguments in (None, "") else arguments
    arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(call["name"], str) or not call["name"] or not isinstance(arguments, dict):
        raise ValueError("a call has a name, and its arguments are an object")
    function = {
        "name": clean(call["name"]),
        "arguments": clean(json.dumps(arguments, ensure_ascii=False, allow_nan=False)),
    }
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def chat_logprobs(spelled: TokenBytes, tokens: Sequence[int], found: Sequence[TokenLogprobs]) -> dict:
    """Return the log-probabilities of tokens, which come next in the text that is spelled, as chats have them."""

    def entry(token: int, logprob: float) -> dict:
        return {"token": _name(spelled, token), "logprob": logprob, "bytes": list(spelled.of(token))}

    content = []
    for token, one in zip(tokens, found, strict=True):
        content.append({**entry(token, one.logprob), "top_logprobs": [entry(*pair) for pair in one.top]})
        spelled.add(token)
    return {"content": content}


def completion_logprobs(spelled: TokenBytes, tokens: Sequence[int], found: Sequence[TokenLogprobs]) -> dict:
    """Return the log-probabilities of tokens as completions have them; see `chat_logprobs`."""
    names, tops, offsets = [], [], []
    for token, one in zip(tokens, found, strict=True):
        names.append(_name(spelled, token, "bytes:"))
        tops.append({_name(spelled, other, "bytes:"): logprob for other, logprob in one.top})
        offsets.append(spelled.add(token))
    logprobs = [one.logprob for one in found]
    return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def _name(spelled: TokenBytes, token: int, of_bytes: str = "") -> str:
    """Return the text of a token, or its name where it has none. Parts of characters are "\\xe2\\x80", as OpenAI's."""
    try:
        return spelled.of(token).decode() or spelled.tokenizer.decode([token])
    except UnicodeDecodeError:
        return of_bytes + "".join(f"\\x{byte:02x}" for byte in spelled.of(token))


def accepted_by_position(generation: Generation) -> list[int]:
    """Return how many steps accepted a token at each position of the draft."""
    steps = generation.accepted
    return [sum(accepted > position for accepted in steps) for position in range(max(steps, default=0))]


def statistics_of(generation: Generation, method: str, seconds: float) -> dict:
    """Return what the page shows of a continuation, whose tokens behind the first took so many seconds."""
    forwards, accepted, behind = generation.target_forwards, sum(generation.accepted), len(generation.tokens) - 1
    return {
        "method": method,
        "tokens": len(generation.tokens),
        "tokens_per_s": round(behind / seconds, 1) if behind > 0 and seconds > 0 else None,
        "tau": round((accepted + forwards) / forwards, 3) if forwards else None,
        "drafted": sum(generation.drafted),
        "accepted": accepted,
        "drafted_by_position": generation.steps_by_depth,
        "accepted_by_position": accepted_by_position(generation),
    }
