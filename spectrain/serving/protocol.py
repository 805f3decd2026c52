"""OpenAI's API as far as it is served: what a request may say, and how answers and errors look.

Fields that are not known are refused by name, as are those of `NEUTRAL` with a value that would change the answer.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, to_json

from spectrain.data.turns import clean
from spectrain.decoding import Sampling
from spectrain.errors import nearest

MOST_CHOICES = 128  # prompts times n of a request
MOST_PARTS = 1 << 14  # lists and objects of a request
MOST_STOPS = 4
STOP_CHARACTERS = 256
MOST_LOGPROBS = 20
MOST = 2**31 - 1  # of whole numbers
COMPLETION_TOKENS = 16  # of a completion that says no max_tokens, as in OpenAI's API
# Fields that we do not have, with the values that change nothing.
NEUTRAL: dict[str, tuple] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
}
WITHOUT_EFFECT = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "user")

STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # in JSON
SHOWN_CHARACTERS = 100  # of a name that a client made up

Whole = Annotated[int, Field(ge=1, le=MOST)]

StopText = Annotated[str, Field(min_length=1, max_length=STOP_CHARACTERS)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MOST)]], Field(min_length=1, fail_fast=True)]


class ApiError(Exception):
    """What a client is told, in OpenAI's shape."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.retry_s = status, retry_s
        kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Model(BaseModel):
    """An object without other fields, whose values are of the very types. A field that is null counts as left out."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, values: object) -> object:
        return {name: one for name, one in values.items() if one is not None} if isinstance(values, dict) else values


class StreamOptions(Model):
    include_usage: bool = False


class TextPart(Model):
    type: Literal["text"]
    text: str


class Message(Model):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None  # of an answer that a client sends back; without effect
    annotations: list | None = None  # likewise


class Function(Model):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None


class Tool(Model):
    type: Literal["function"]
    function: Function


class Fields(Model):
    """The fields of both kinds of request."""

    model: str | None = None
    max_tokens: Whole | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MOST)  # -1 and 0: off
    min_p: float | None = Field(None, ge=0, lt=1)
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    method: str | None = None  # ours, see docs/serving.md
    annotate: bool = False  # ours
    return_token_ids: bool = False  # as in vLLM

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, values: object) -> object:
        """Drop what has no effect, and refuse what would have one that we do not have."""
        if not isinstance(values, dict):
            return values
        values = {name: one for name, one in values.items() if one is not None and name not in WITHOUT_EFFECT}
        for name in [name for name in values if name not in cls.model_fields]:
            if name not in NEUTRAL:
                name = name[:SHOWN_CHARACTERS]
                advice = nearest(name, cls.model_fields) or "; leave it out"
                raise PydanticCustomError("unknown", f"unknown field: {{name}}{advice}", {"name": name or "''"})
            if values.pop(name) not in NEUTRAL[name]:
                raise PydanticCustomError("unsupported", "{name} is not supported; leave it out", {"name": name})
        return values

    @model_validator(mode="after")
    def _agree(self) -> Fields:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream", "stream_options is for stream=true", {"name": "stream_options"})
        if self.annotate and self.n > 1:
            raise PydanticCustomError("annotate", "annotate is for n=1", {"name": "annotate"})
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, default: Sampling) -> Sampling:
        """Return how tokens are chosen; `default` says what the request does not."""
        names = ("temperature", "top_p", "top_k", "min_p")
        chosen = {name: getattr(default if getattr(self, name) is None else self, name) for name in names}
        return Sampling(**chosen | {"top_k": max(chosen["top_k"], 0)})


class ChatRequest(Fields):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Whole | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto"] = "auto"

    @model_validator(mode="after")
    def _agree_on_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("logprobs", "top_logprobs is for logprobs=true", {"name": "top_logprobs"})
        return self

    @property
    def n_logprobs(self) -> int | None:
        """Likeliest tokens to name beside each token; None: no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered(self) -> list[dict] | None:
        """What the template is told that the assistant may call."""
        tools = self.tools if self.tool_choice == "auto" else None
        return [tool.model_dump(exclude_unset=True) for tool in tools] if tools else None


class CompletionRequest(Fields):
    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    @property
    def n_logprobs(self) -> int | None:
        return self.logprobs


def parsed(kind: type[Fields], body: bytes | bytearray) -> Any:
    """Read the body of a request. Raises ApiError, whose message holds nothing of what was sent but names."""
    if n_parts(body) > MOST_PARTS and n_parts(STRING.sub(b"", body)) > MOST_PARTS:  # whose check would take seconds
        raise ApiError(400, f"the body may have {MOST_PARTS} lists and objects in all")
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        if (whole := _without_halves(body)) != body:
            return parsed(kind, whole)
        errors = error.errors(include_url=False, include_input=False)
        first = errors[0]
        if named := first.get("ctx", {}).get("name"):
            raise ApiError(400, first["msg"], named) from None
        if first["type"] == "json_invalid":
            raise ApiError(400, "the body is no JSON that can be read") from None
        if not first["loc"]:
            raise ApiError(400, "the body must be a JSON object") from None
        of = [one for one in errors if one["loc"][0] == first["loc"][0]]  # several, where types are given a choice of
        shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*(one["loc"] for one in of), strict=False))
        param = ".".join(str(parts[0]) for parts in shared)[:SHOWN_CHARACTERS]
        of = [one for one in of if not one["type"].endswith("_type")] or of  # of the type that was meant
        words = " or ".join(dict.fromkeys(re.sub("^[A-Z][a-z]+ should", "must", one["msg"]) for one in of))
        words = "must be there" if first["type"] == "missing" else words.replace(" or must be", " or")
        raise ApiError(400, f"{param} {words}" if words.startswith("must") else f"{param}: {words}", param) from None


def _without_halves(body: bytes) -> bytes:
    """Return a body in which U+FFFD replaces halves of characters, which JSON can name and pydantic does not read."""
    if b"\\ud" not in body.lower() and b"\xed" not in body:
        return body
    try:
        return clean(json.dumps(json.loads(body), ensure_ascii=False)).encode()
    except (ValueError, RecursionError):
        return body


def n_parts(json: bytes | bytearray) -> int:
    return json.count(b"[") + json.count(b"{")


@dataclass(frozen=True)
class Shape:
    """How the answer to one request looks, whole or in events of a stream."""

    is_chat: bool
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def choice(self, index: int, text: str, finish_reason: str | None, in_stream: bool, **more: object) -> dict:
        """Return a choice, or what it gained. `more` are its logprobs, token_ids, role and tool_calls, if any."""
        more = {name: one for name, one in more.items() if one is not None}
        ends = {"index": index, "logprobs": more.pop("logprobs", None), "finish_reason": finish_reason}
        ends |= {"token_ids": more.pop("token_ids")} if "token_ids" in more else {}
        if not self.is_chat:
            return {"text": text, **ends}
        if in_stream:
            return {"delta": more | ({"content": text} if text or "role" in more else {}), **ends}
        return {"message": {**more, "content": None if "tool_calls" in more and not text else text}, **ends}

    def event(self, choices: Sequence[dict], usage: dict | None = None, own: dict | None = None) -> bytes:
        """Return an event of a stream; see `body`."""
        return b"data: %b\n\n" % self.body(choices, True, usage, own)

    def body(self, choices: Sequence[dict], in_stream: bool, usage: dict | None, own: dict | None) -> bytes:
        """Return the JSON of an answer or an event. `own` is the field `spectrain`."""
        of_chat = "chat.completion.chunk" if in_stream else "chat.completion"
        body = {
            "id": ("chatcmpl-" if self.is_chat else "cmpl-") + self.id,
            "object": of_chat if self.is_chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        body |= {"usage": usage} if usage else {}
        return to_json(body | ({"spectrain": own} if own else {}))
