"""Answers and scores from an OpenAI-compatible server (vLLM, SGLang, llama.cpp, ...) in place of the target.

Prompts go to POST /v1/completions as token ids, `concurrency` at a time. The client of `openai` repeats a request after
connection errors, 429 and 5xx. A prompt that the server does not answer has failed, and the others go on. A server that
cannot be reached any more, or that cannot score a prompt, ends the command.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import textwrap
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

import numpy as np
import openai
from lightning import Fabric
from openai import APIConnectionError, APIStatusError, AsyncOpenAI, NotFoundError, Omit, OpenAIError, Timeout
from pydantic import BaseModel, Field, ValidationError

from data_prep.answers import Answer, Answering, Answers, Prompt
from data_prep.pipeline import decided
from spectrain.config.groups import Server
from spectrain.errors import UserError
from spectrain.target import TargetModel

START_RETRIES = 2  # of the first request, so that a server that is down is reported within seconds
CONNECT_S = 10.0
EXCERPT_CHARACTERS = 200  # of a server's answer in a message


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

        async def ask() -> list[str]:
            async with self._client(min(self.retries, START_RETRIES)) as client:
                return [model.id for model in (await client.models.list()).data]

        try:
            served = asyncio.run(ask())
        except APIConnectionError as error:
            raise self._unreachable(error) from error
        except (OpenAIError, AttributeError, TypeError) as error:  # the client hands on what is no list of models
            if isinstance(error, NotFoundError) and self.model is not None:
                return self.model  # a server without this list
            raise UserError(
                f"base_url={self.root} does not answer as an OpenAI-compatible server ({_excerpt(error)}); give another"
                " address, or set OPENAI_API_KEY to its key"
            ) from error
        names = ", ".join(served)
        if self.model is None and len(served) != 1:
            raise UserError(f"base_url={self.root} serves {names or 'no model'}; give model=<name>")
        if self.model not in (None, *served):
            raise UserError(f"model={self.model} is not served by {self.root}; choose among {names}")
        return self.model or served[0]

    def answer(self, prompts: Sequence[Prompt], answers: Answers, target: TargetModel, answering: Answering) -> None:
        """Ask for all prompts, and keep each answer, or the reason why there is none, as it comes."""

        async def ask(client: AsyncOpenAI, prompt: Prompt) -> None:
            try:
                body = await self._complete(client, self._request(prompt, answering))
                answer = read_completion(body, target, answering)
            except PromptFailed as failure:
                answers.fail(prompt, str(failure))
            else:
                answers.advance(0, len(answer.tokens))
                answers.add(prompt, answer)

        self._ask_for_all(prompts, ask)

    def score(self, prompts: Iterable[list[int]], keep: Callable[[int, np.ndarray], None]) -> None:
        """Ask for log p of prompts; `keep` gets the number of each and log p [n - 1] of all tokens but its first."""

        async def ask(client: AsyncOpenAI, numbered: tuple[int, list[int]]) -> None:
            number, tokens = numbered
            request = {"model": self.model, "prompt": tokens, "echo": True, "logprobs": 1, "max_tokens": 0}
            try:
                log_p = read_log_probs(await self._complete(client, request), len(tokens))
            except PromptFailed as failure:
                raise UserError(
                    f"base_url={self.root} gives no log-probabilities of prompts ({failure}); give another server, or "
                    "remove base_url"
                ) from failure
            keep(number, log_p)

        self._ask_for_all(enumerate(prompts), ask)

    def _ask_for_all(self, items: Iterable, ask: Callable[[AsyncOpenAI, Any], Awaitable[None]]) -> None:
        """Ask for each item, `concurrency` at a time."""
        waiting = iter(items)

        async def ask_in_turn(client: AsyncOpenAI) -> None:
            for item in waiting:
                await ask(client, item)

        async def ask_for_all() -> None:
            async with self._client(self.retries) as client, asyncio.TaskGroup() as group:
                for _ in range(self.concurrency):
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
            "stop": list(answering.stop) or Omit(),
            "extra_body": {name: value for name, value in own.items() if value},
        }

    async def _complete(self, client: AsyncOpenAI, request: dict[str, Any]) -> str:
        """Return the body of the answer; PromptFailed where there is none, UserError where nobody is there."""
        try:
            return (await client.completions.with_raw_response.create(**request)).http_response.text
        except APIStatusError as error:
            raise PromptFailed(f"the server says {_excerpt(error)}") from error
        except APIConnectionError as error:
            if type(error.__cause__).__name__ in ("ConnectError", "ConnectTimeout"):  # of the client's HTTP library
                raise self._unreachable(error) from error
            raise PromptFailed(f"no answer ({_excerpt(error.__cause__ or error)})") from error

    def _unreachable(self, error: APIConnectionError) -> UserError:
        return UserError(
            f"base_url={self.root} cannot be reached ({_excerpt(error.__cause__ or error)}); start the server, or give "
            "its address"
        )

    def _client(self, retries: int) -> AsyncOpenAI:
        timeout = Timeout(self.timeout_s, connect=min(CONNECT_S, self.timeout_s), pool=None)
        key = self.api_key or "none"
        host = urlsplit(self.root).hostname or ""
        is_here = host in ("localhost", "::1") or host.startswith("127.")  # to which no proxy leads
        try:
            http = openai.DefaultAsyncHttpxClient(trust_env=not is_here)
        except Exception as error:  # the HTTP library's own types
            if not proxy_bypass(host):
                raise UserError(
                    f"the proxy that the environment names cannot be used ({error}); set ALL_PROXY, HTTP_PROXY and "
                    f"HTTPS_PROXY to http://host:port, or add {host} to NO_PROXY"
                ) from error
            http = openai.DefaultAsyncHttpxClient(trust_env=False)
        options = {"timeout": timeout, "max_retries": retries, "http_client": http}
        return AsyncOpenAI(base_url=f"{self.root}/v1", api_key=key, **options)


def found_server(options: Server, fabric: Fabric) -> CompletionServer:
    """Return the server of a command's options, once it has answered; UserError where it does not."""
    for name in ("httpx", "httpx2", "openai"):
        logging.getLogger(name).setLevel(logging.WARNING)  # otherwise a line per request
    key, limits = os.environ.get("OPENAI_API_KEY"), (options.concurrency, options.retries, options.timeout_s)
    server = CompletionServer(options.base_url, key, options.model, *limits)
    return replace(server, model=decided(fabric, server.find_model))


def read_completion(body: str, target: TargetModel, answering: Answering) -> Answer:
    """Read a completion as the decoding loop would have written it.

    `token_ids` are taken as they are; without them the text is tokenised. Servers leave the EOS out of the text, and
    some out of the ids: where nothing else can have stopped the answer, it is appended. PromptFailed is raised for
    what is no completion of the target's.
    """
    try:
        choice = Completion.model_validate_json(body).choices[0]
    except ValidationError as error:
        raise PromptFailed(f"answers nonsense: {_excerpt(error.errors()[0]['msg'])}, in {_excerpt(body)}") from None
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
    if reason == "stop" and not answering.stop and eos_ids and len(tokens) < most:
        return Answer([*tokens, own_eos if own_eos in eos_ids else eos_ids[0]], "eos", retokenized=ids is None)
    if not tokens:
        raise PromptFailed("answers nonsense: no token at all")
    return Answer(tokens, reason, retokenized=ids is None)


def read_log_probs(body: str, n_tokens: int) -> np.ndarray:
    """Read log p [n_tokens - 1] of a prompt's tokens but the first. Raise PromptFailed where they are not there."""
    try:
        log_p = np.array(json.loads(body)["choices"][0]["logprobs"]["token_logprobs"][1:], dtype=float)
    except (ValueError, LookupError, TypeError):
        raise PromptFailed(f"it answers {_excerpt(body)}") from None
    if len(log_p) != n_tokens - 1 or not np.isfinite(log_p).all():
        raise PromptFailed(f"it answers {np.isfinite(log_p).sum()} for a prompt of {n_tokens} tokens")
    return log_p


def _excerpt(said: object) -> str:
    """Return a message or an answer on one line, shortened; of an exception also its type."""
    text = f"{type(said).__name__}: {said}".removesuffix(": ") if isinstance(said, Exception) else str(said)
    return textwrap.shorten(text, EXCERPT_CHARACTERS, placeholder="..")
