"""Answers from an OpenAI-compatible server (vLLM, SGLang, llama.cpp, ..) in place of the decoding loop.

    server = CompletionServer(Endpoint("http://127.0.0.1:8000"))
    server.answer(prompts, payload, reader, on_answer, on_failure)

Prompts go to POST /v1/completions as token ids, `concurrency` at a time. Connection errors, 429 and 5xx are tried again
with exponential back-off, or after what Retry-After asks for. What a prompt cannot be answered with is that prompt's
failure; a server that cannot be reached any more ends the command.
"""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import httpx
from transformers import PreTrainedTokenizerBase

from data_prep.response_work import Answer, Job, Prompt
from spectrain.decoding.errors import UserError

log = logging.getLogger(__name__)

START_RETRIES = 2  # of the first request: a server that is down is said within seconds
MAX_BACKOFF_S = 60.0
MAX_RETRY_AFTER_S = 600.0  # who asks for more is asked again after this
CONNECT_S = 10.0
EXCERPT = 160  # characters of a server's answer in a message


class PromptFailed(Exception):
    """Why one prompt has no answer."""


@dataclass(frozen=True)
class Endpoint:
    """A server and how it is asked."""

    base_url: str  # with or without /v1
    api_key: str | None = None
    model: str | None = None  # None: the only one it serves
    concurrency: int = 8  # requests at a time
    retries: int = 5  # of a request
    timeout_s: float = 120.0  # of a request
    backoff_s: float = 1.0  # before the first retry; doubles

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.base_url)
        except (httpx.InvalidURL, TypeError) as error:
            raise UserError(f"base_url={self.base_url} is no address ({error}); give http://host:port") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise UserError(f"base_url={self.base_url} is no address of a server; give http://host:port")
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise UserError("OPENAI_API_KEY has a character that no key has; set it anew, without line breaks")

    @property
    def root(self) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass(frozen=True)
class AnswerReader:
    """Makes an answer of what the server sends, as the loop would have written it."""

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_new_tokens: int
    stop_strings: tuple[str, ...] = ()

    def read(self, body: object) -> Answer:
        """Reads the JSON of a completion.

        `token_ids` are taken as they are; without them the text is tokenised. Servers leave the EOS out of the text,
        and some out of the ids: where nothing else can have stopped the answer, it is appended.

        Raises:
            PromptFailed: it is no completion of the target's.
        """
        choices = body.get("choices") if isinstance(body, dict) else None
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise PromptFailed(f"answers nonsense: no choices in {_excerpt(body)}")
        reason = choices[0].get("finish_reason")
        if reason not in ("stop", "length"):
            raise PromptFailed(f"answers nonsense: finish_reason is {_excerpt(reason)}, neither stop nor length")
        ids = choices[0].get("token_ids")
        answer = self._of_text(choices[0].get("text")) if ids is None else self._of_ids(ids)
        return self._ended(answer, stopped=reason == "stop")

    def _of_ids(self, ids: object) -> Answer:
        if not isinstance(ids, list) or any(type(token) is not int for token in ids):
            raise PromptFailed(f"answers nonsense: token_ids are {_excerpt(ids)}, no list of whole numbers")
        outside = [token for token in ids if not 0 <= token < self.vocab_size]
        if outside:
            raise PromptFailed(
                f"answers nonsense: token id {_excerpt(outside[0])} is outside the target's vocabulary of "
                f"{self.vocab_size}"
            )
        return Answer(ids, "length")

    def _of_text(self, text: object) -> Answer:
        try:
            text.encode()
        except (AttributeError, UnicodeEncodeError):  # no string, or half a character
            raise PromptFailed(f"answers nonsense: neither token_ids nor a text, but {_excerpt(text)}") from None
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return Answer(list(ids), "length", retokenized=True)

    def _ended(self, answer: Answer, stopped: bool) -> Answer:
        tokens = answer.tokens
        end = next((i for i, token in enumerate(tokens) if token in self.eos_ids), None)
        if end is not None and end < self.max_new_tokens:
            return replace(answer, tokens=tokens[: end + 1], finish_reason="eos")
        if len(tokens) > self.max_new_tokens:
            return replace(answer, tokens=tokens[: self.max_new_tokens], finish_reason="length")
        if stopped and not self.stop_strings and self.eos_ids and len(tokens) < self.max_new_tokens:
            own = self.tokenizer.eos_token_id
            eos = own if own in self.eos_ids else self.eos_ids[0]
            return replace(answer, tokens=[*tokens, eos], finish_reason="eos")
        if not tokens:
            raise PromptFailed("answers nonsense: no token at all")
        return replace(answer, finish_reason="stop" if stopped else "length")


@dataclass(frozen=True)
class CompletionServer:
    """Asks one server."""

    endpoint: Endpoint

    def find_model(self) -> str:
        """The model to ask for, once the server has shown that it is one.

        Raises:
            UserError: it cannot be reached, is no such server, refuses, or serves several models and none is named.
        """
        return asyncio.run(self._find_model())

    async def _find_model(self) -> str:
        address, model = self.endpoint.root, self.endpoint.model
        async with self._client() as client:
            try:
                retries = min(self.endpoint.retries, START_RETRIES)
                response = await self._ask(client, "GET", "/v1/models", None, retries)
            except PromptFailed as failure:
                raise UserError(f"base_url={address} does not work: {failure}; see to the server") from failure
        if response.status_code in (401, 403):
            raise UserError(f"base_url={address} refuses ({_complaint(response)}); set OPENAI_API_KEY to its key")
        if response.status_code == 404 and model is not None:
            return model  # a server without this list
        try:
            served = [entry["id"] for entry in response.json()["data"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(
                f"base_url={address} answers nonsense to GET /v1/models ({_complaint(response)}); give the address of "
                "an OpenAI-compatible server"
            ) from None
        if model is None and len(served) != 1:
            raise UserError(f"base_url={address} serves {', '.join(map(str, served)) or 'no model'}; give model=<name>")
        if model is not None and model not in served:
            raise UserError(f"model={model} is not served by {address}; choose among {', '.join(map(str, served))}")
        return served[0] if model is None else model

    def answer(
        self,
        prompts: Sequence[Prompt],
        payload: Callable[[Prompt], Mapping],
        reader: AnswerReader,
        on_answer: Callable[[Prompt, Answer], None],
        on_failure: Callable[[Prompt, str], None],
    ) -> None:
        """Asks for all prompts and hands each answer or failure on as it comes.

        Raises:
            UserError: the server cannot be reached any more.
        """
        asyncio.run(self._answer(prompts, payload, reader, on_answer, on_failure))

    async def _answer(self, prompts, payload, reader, on_answer, on_failure) -> None:
        waiting = iter(prompts)
        async with self._client() as client:

            async def work() -> None:
                for prompt in waiting:
                    try:
                        answer = await self._complete(client, payload(prompt), reader)
                    except PromptFailed as failure:
                        on_failure(prompt, str(failure))
                    else:
                        on_answer(prompt, answer)

            try:
                async with asyncio.TaskGroup() as group:  # the first that raises cancels the others
                    for _ in range(min(self.endpoint.concurrency, len(prompts))):
                        group.create_task(work())
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None

    async def _complete(self, client: httpx.AsyncClient, payload: Mapping, reader: AnswerReader) -> Answer:
        response = await self._ask(client, "POST", "/v1/completions", payload, self.endpoint.retries)
        if response.status_code != 200:
            raise PromptFailed(f"the server says {_complaint(response)}")
        try:
            body = response.json()
        except (ValueError, RecursionError):
            raise PromptFailed(f"answers nonsense: no JSON but {_excerpt(response.text)}") from None
        return reader.read(body)

    async def _ask(
        self, client: httpx.AsyncClient, method: str, path: str, payload: Mapping | None, retries: int
    ) -> httpx.Response:
        """The server's answer, whatever its status, once it is none that passes.

        Raises:
            PromptFailed: it does not come, also when asked again.
            UserError: nobody is there.
        """
        failure: Exception | None = None
        for wait_s in [*self._waits(retries), None]:
            try:
                response = await client.request(method, f"{self.endpoint.root}{path}", json=payload)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = UserError(
                    f"base_url={self.endpoint.root} cannot be reached ({_name(error)}); start the server, or give its "
                    "address"
                )
            except httpx.TransportError as error:
                failure = PromptFailed(f"no answer ({_name(error)})")
            except httpx.RequestError as error:  # an answer that cannot be decoded
                raise PromptFailed(f"answers nonsense: {_name(error)}") from error
            else:
                if response.status_code != 429 and response.status_code < 500:
                    return response
                failure = PromptFailed(f"the server says {_complaint(response)}")
                if wait_s is not None:
                    wait_s = _retry_after_s(response) or wait_s
            if wait_s is not None:
                log.debug("%s; again in %.1f s", failure, wait_s)
                await asyncio.sleep(wait_s)
        raise failure

    def _waits(self, retries: int) -> Iterator[float]:
        return (min(self.endpoint.backoff_s * 2.0**attempt, MAX_BACKOFF_S) for attempt in range(retries))

    def _client(self) -> httpx.AsyncClient:
        endpoint = self.endpoint
        return httpx.AsyncClient(
            headers={"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {},
            timeout=httpx.Timeout(endpoint.timeout_s, connect=min(CONNECT_S, endpoint.timeout_s)),
            limits=httpx.Limits(max_connections=endpoint.concurrency),
        )


def completion_payload(prompt: Prompt, job: Job) -> dict[str, object]:
    """What is posted. `top_k`, `min_p` and `return_token_ids` are fields of vLLM and SGLang, not of OpenAI's."""
    sampling = job.sampling
    mixed = hashlib.sha256(f"{job.seed}:{prompt.number}".encode()).digest()
    payload = {
        "model": job.served_model,
        "prompt": list(prompt.tokens),
        "max_tokens": job.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": int.from_bytes(mixed[:4]) >> 1,  # one seed for all would correlate their samples
        "stream": False,
        "return_token_ids": True,
    }
    if sampling.top_k:
        payload["top_k"] = sampling.top_k
    if sampling.min_p:
        payload["min_p"] = sampling.min_p
    if job.stop_strings:
        payload["stop"] = list(job.stop_strings)
    return payload


def _retry_after_s(response: httpx.Response) -> float | None:
    """Seconds that the server asks to wait, given as such or as a date; None where it does not say."""
    value = response.headers.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return min(seconds, MAX_RETRY_AFTER_S) if seconds > 0 else None


def _complaint(response: httpx.Response) -> str:
    """A status and the server's own words, as far as it has any."""
    try:
        said = response.json()
        for key in ("error", "message", "detail"):
            said = said.get(key, said) if isinstance(said, dict) else said
    except (ValueError, RecursionError):
        said = response.text
    return f"{response.status_code}: {_excerpt(said)}"


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _excerpt(value: object) -> str:
    """On one line, shortened."""
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text.split())
    return repr(text if len(text) <= EXCERPT else f"{text[:EXCERPT]}..") if isinstance(value, str) else text[:EXCERPT]
