"""Answers from an OpenAI-compatible server (vLLM, SGLang, llama.cpp, ...) in place of the decoding loop.

Prompts go to POST /v1/completions as token ids, `concurrency` at a time; as text where a server takes no ids. The
client of `openai` repeats a request after connection errors, 429 and 5xx. A prompt that the server does not answer has
failed, and the others go on. A server that cannot be reached any more ends the command.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from openai import APIConnectionError, APIStatusError, AsyncOpenAI, Omit, Timeout
from pydantic import BaseModel, Field, ValidationError

from data_prep.answers import Answer, Answering, Answers, Prompt
from spectrain.decoding import TargetModel
from spectrain.errors import UserError

log = logging.getLogger(__name__)

START_RETRIES = 2  # of the first request, so that a server that is down is reported within seconds
CONNECT_S = 10.0
EXCERPT_CHARACTERS = 160  # of a server's answer in a message


class PromptFailed(Exception):
    """The reason why one prompt has no answer."""


class Choice(BaseModel):
    """One answer, as far as it is read."""

    finish_reason: Literal["stop", "length"]
    token_ids: list[Annotated[int, Field(strict=True, ge=0)]] | None = None  # of vLLM and SGLang
    text: str | None = None


class Completion(BaseModel):
    """The body of an answer to POST /v1/completions."""

    choices: list[Choice] = Field(min_length=1)


@dataclass(frozen=True)
class CompletionServer:
    """A server and how it is asked; UserError where the address cannot be one."""

    base_url: str  # with or without /v1
    api_key: str | None = None
    model: str | None = None  # None: the only one it serves
    concurrency: int = 8  # requests at a time
    retries: int = 5  # of a request
    timeout_s: float = 120.0  # of a request

    def __post_init__(self) -> None:
        if not re.match(r"https?://[^/]", self.base_url):
            raise UserError(f"base_url={self.base_url} is no address of a server; give http://host:port")

    @property
    def root(self) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")

    def find_model(self) -> str:
        """Return the model to ask for, once the server has shown that it serves it; else raise UserError."""
        address, model = f"base_url={self.root}", self.model

        async def ask() -> Any:
            async with self._client(min(self.retries, START_RETRIES)) as client:
                return await self._ask(client.models.with_raw_response.list)

        try:
            response = asyncio.run(ask())
        except PromptFailed as failure:
            raise UserError(f"{address} does not work: {failure}; see to the server") from failure
        if response.status_code in (401, 403):
            raise UserError(f"{address} refuses ({_complaint(response)}); set OPENAI_API_KEY to its key")
        if response.status_code == 404 and model is not None:
            return model  # a server without this list
        try:
            served = [entry["id"] for entry in response.json()["data"]]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{address} is no OpenAI-compatible server ({_complaint(response)})") from None
        names = ", ".join(map(str, served))
        if model is None and len(served) != 1:
            raise UserError(f"{address} serves {names or 'no model'}; give model=<name>")
        if model is not None and model not in served:
            raise UserError(f"model={model} is not served by {self.root}; choose among {names}")
        return served[0] if model is None else model

    def answer(self, prompts: Sequence[Prompt], answers: Answers, target: TargetModel, answering: Answering) -> None:
        """Ask for all prompts, and keep each answer, or the reason why there is none, as it comes."""
        waiting, takes_ids = iter(prompts), True

        async def ask(client: AsyncOpenAI, prompt: Prompt) -> Any:
            nonlocal takes_ids
            create = client.completions.with_raw_response.create
            request = self._request(prompt, answering)
            if takes_ids:
                response = await self._ask(partial(create, **request))
                if not refuses_ids(response):
                    return response
            response = await self._ask(partial(create, **as_text(request, target)))
            if takes_ids and response.status_code == 200:
                log.info("%s takes no token ids; prompts are sent as text", self.root)
                takes_ids = False
            return response

        async def ask_in_turn(client: AsyncOpenAI) -> None:
            for prompt in waiting:
                try:
                    answer = read_completion(await ask(client, prompt), target, answering)
                except PromptFailed as failure:
                    answers.fail(prompt, str(failure))
                else:
                    answers.advance(0, len(answer.tokens))
                    answers.add(prompt, answer)

        async def ask_for_all() -> None:
            async with self._client(self.retries) as client, asyncio.TaskGroup() as group:
                for _ in range(min(self.concurrency, len(prompts))):
                    group.create_task(ask_in_turn(client))

        try:
            asyncio.run(ask_for_all())
        except ExceptionGroup as failed:  # the first that raised has cancelled the others
            raise failed.exceptions[0] from None

    def _request(self, prompt: Prompt, answering: Answering) -> dict[str, Any]:
        """`top_k`, `min_p` and `return_token_ids` are fields of vLLM and SGLang, not of OpenAI's."""
        sampling = answering.sampling
        mixed = hashlib.sha256(f"{answering.seed}:{prompt.number}".encode()).digest()
        own = {"return_token_ids": True, "top_k": sampling.top_k, "min_p": sampling.min_p}
        return {
            "model": self.model,
            "prompt": list(prompt.tokens),
            "max_tokens": answering.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": int.from_bytes(mixed[:4]) >> 1,  # one seed for all would correlate their samples
            "stream": False,
            "stop": list(answering.stop_strings) or Omit(),
            "extra_body": {name: value for name, value in own.items() if value},
        }

    async def _ask(self, send: Callable[[], Awaitable[Any]]) -> Any:
        """Send a request and return the HTTP response, whatever its status.

        PromptFailed is raised where it does not come, UserError where nobody is there.
        """
        try:
            return (await send()).http_response
        except APIStatusError as error:
            return error.response
        except APIConnectionError as error:
            kind = type(error.__cause__).__name__  # of whichever HTTP library the client uses
            reason = f"{kind}: {error.__cause__}".removesuffix(": ")
            if kind not in ("ConnectError", "ConnectTimeout"):
                raise PromptFailed(f"no answer ({reason})") from error
            raise UserError(
                f"base_url={self.root} cannot be reached ({reason}); start the server, or give its address"
            ) from error

    def _client(self, retries: int) -> AsyncOpenAI:
        timeout = Timeout(self.timeout_s, connect=min(CONNECT_S, self.timeout_s), pool=None)
        key = self.api_key or "none"
        return AsyncOpenAI(base_url=f"{self.root}/v1", api_key=key, timeout=timeout, max_retries=retries)


def refuses_ids(response: Any) -> bool:
    """Whether a server wants its prompt as text: FastAPI's refusal, which llama-cpp-python's server sends as a 500."""
    return response.status_code == 422 or (response.status_code == 500 and "valid string" in response.text)


def as_text(request: dict[str, Any], target: TargetModel) -> dict[str, Any]:
    """Return a request with its prompt as text, for llama-cpp-python's server, whose defaults cut the distribution.

    PromptFailed is raised where the text would not be read as the same tokens.
    """
    tokens, tokenizer = request["prompt"], target.tokenizer
    text = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if tokenizer(text, add_special_tokens=False)["input_ids"] != tokens:
        raise PromptFailed("the server takes text only, and this prompt as text has other tokens")
    defaults = {"top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}
    return request | {"prompt": text, "extra_body": defaults | request["extra_body"]}


def read_completion(response: Any, target: TargetModel, answering: Answering) -> Answer:
    """Read a completion as the decoding loop would have written it.

    `token_ids` are taken as they are; without them the text is tokenised. Servers leave the EOS out of the text, and
    some out of the ids: where nothing else can have stopped the answer, it is appended. PromptFailed is raised for
    what is no completion of the target's.
    """
    if response.status_code != 200:
        raise PromptFailed(f"the server says {_complaint(response)}")
    try:
        choice = Completion.model_validate_json(response.text).choices[0]
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"])) or "body"
        raise PromptFailed(f"answers nonsense: {where}: {wrong['msg']}, not {_excerpt(wrong['input'])}") from None
    ids, reason = choice.token_ids, choice.finish_reason
    if ids is None and choice.text is None:
        raise PromptFailed("answers nonsense: neither token_ids nor a text")
    tokens = target.tokenizer(choice.text, add_special_tokens=False)["input_ids"] if ids is None else ids
    if max(tokens, default=0) >= target.vocab_size:
        vocabulary = f"the target's vocabulary of {target.vocab_size}"
        raise PromptFailed(f"answers nonsense: token id {max(tokens)} is outside {vocabulary}")
    most, eos_ids, own_eos = answering.max_new_tokens, target.eos_ids, target.tokenizer.eos_token_id
    end = next((i for i, token in enumerate(tokens[:most]) if token in eos_ids), None)
    if end is not None:
        return Answer(tokens[: end + 1], "eos", retokenized=ids is None)
    if len(tokens) > most:
        return Answer(tokens[:most], "length", retokenized=ids is None)
    if reason == "stop" and not answering.stop_strings and eos_ids and len(tokens) < most:
        return Answer([*tokens, own_eos if own_eos in eos_ids else eos_ids[0]], "eos", retokenized=ids is None)
    if not tokens:
        raise PromptFailed("answers nonsense: no token at all")
    return Answer(tokens, reason, retokenized=ids is None)


def _complaint(response: Any) -> str:
    """Return a status and the server's own words, as far as it has any."""
    try:
        said = response.json()
        for key in ("error", "message", "detail"):
            said = said.get(key, said) if isinstance(said, dict) else said
    except ValueError:
        said = response.text
    return f"{response.status_code}: {_excerpt(said)}"


def _excerpt(value: object) -> str:
    """Return a value on one line, shortened."""
    text = repr(" ".join(value.split()) if isinstance(value, str) else value)
    return text if len(text) <= EXCERPT_CHARACTERS else f"{text[:EXCERPT_CHARACTERS]}.."
