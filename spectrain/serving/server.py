"""The HTTP server: OpenAI's API over a `Worker`, and the page at `/`.

A request is checked and tokenized, and each of its choices becomes a request of the engine, whose steps come back over
a queue (`exchange`). A step is one event of a stream. Steps wait there for a slow client. If the unread bytes of all
clients exceed a limit, the client with the most of them among those that read nothing is disconnected.

Clients share the rows of an engine: a free row goes to the client that has the fewest rows, and among that client's
requests to the one with the fewest. So one request with many choices holds up nobody.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from spectrain.decoding import Generation, Request, Sampling, TargetModel
from spectrain.decoding.engine import check_prompt
from spectrain.decoding.text import chat_ids, is_one, prompt_ids
from spectrain.errors import UserError
from spectrain.serving.access import Access, Guard, refusal
from spectrain.serving.exchange import Exchange
from spectrain.serving.metrics import Metrics
from spectrain.serving.protocol import (
    COMPLETION_TOKENS,
    MOST_CHOICES,
    ApiError,
    ChatRequest,
    CompletionRequest,
    Fields,
    parsed,
)
from spectrain.serving.traffic import TrafficLog
from spectrain.serving.worker import Worker
from spectrain.stores.turns import read_messages

log = logging.getLogger(__name__)

PAGE = Path(__file__).parent / "page"
BODY_S = 30.0  # for a client to send its request
LARGE_BYTES = 1 << 16  # of a body, beyond which few are held at the same time, and one thread parses and tokenizes them
LARGE_HELD = 4
TOKEN_CHARACTERS, EDGE_TOKENS = 16, 8  # longer than most tokens; tokens that cutting a text may add
RETRY_S = 1  # after which a client that found the queue full should ask again
AHEAD = 2  # choices in the engine's own queue, so that a row that becomes free is filled at once
UNREAD_BYTES = 8 << 20  # of all answers together
STUCK_S = 2.0  # beyond UNREAD_BYTES, a client that has read nothing for so long may be disconnected


@dataclass(frozen=True)
class Limits:
    """What one client cannot take from the others."""

    max_body_bytes: int = 1 << 20
    max_waiting: int = 64  # requests that may be open beyond the rows of an engine
    max_tokens: int = 1024  # of an answer whose request does not say
    timeout_s: float = 600.0  # of a request


@dataclass
class Service:
    """Everything that requests share."""

    worker: Worker
    target: TargetModel
    name: str  # of the target, for clients
    sampling: Sampling  # for what a request does not say
    limits: Limits
    traffic: TrafficLog | None = None
    is_closing: bool = False
    open: list[Exchange] = field(default_factory=list)  # the oldest first
    created: int = field(default_factory=lambda: int(time.time()))
    _joining: asyncio.Task | None = None

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.worker, self.name, lambda: sum(one.n_waiting for one in self.open))
        self._held, self._thread = asyncio.Semaphore(LARGE_HELD), ThreadPoolExecutor(1, "large bodies")

    @property
    def n_open(self) -> int:
        """Requests that have not ended."""
        return len(self.open)

    @property
    def max_length(self) -> int:
        return min(engine.max_length for engine in self.worker.engines.values())

    async def numbers(self, request: HttpRequest) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def health(self, request: HttpRequest) -> Response:
        if self.is_closing or not self.worker.is_alive:
            raise ApiError(503, "the server is closing")
        return JSONResponse({"status": "ok"})

    async def models(self, request: HttpRequest) -> Response:
        model = {"id": self.name, "object": "model", "created": self.created, "owned_by": "spectrain"}
        own = {"max_model_len": self.max_length, "methods": self.worker.methods}
        asked = request.path_params.get("name")
        if asked not in (None, self.name):
            raise ApiError(404, f"this server has the model {self.name} only", "model", "model_not_found")
        return JSONResponse(model | own if asked else {"object": "list", "data": [model | own]})

    async def answer(self, request: HttpRequest, kind: type[Fields]) -> Response:
        """Check a request, and hand its choices to the engine."""
        client = request.client.host if request.client else ""
        ends_s = asyncio.get_running_loop().time() + self.limits.timeout_s
        async with AsyncExitStack() as holding:
            body = await self._body(request, holding)
            thread = self._thread if len(body) > LARGE_BYTES else None
            read = partial(asyncio.get_running_loop().run_in_executor, thread)
            fields = await read(parsed, kind, body)
            if fields.model not in (None, self.name):
                raise ApiError(404, f"this server has the model {self.name} only", "model", "model_not_found")
            method, methods = fields.method or self.worker.methods[0], self.worker.methods
            if method not in methods:
                raise ApiError(400, f"method must be one of {', '.join(methods)}", "method")
            is_list = isinstance(fields, CompletionRequest) and not is_one(fields.prompt)
            if fields.n * (len(fields.prompt) if is_list else 1) > MOST_CHOICES:
                raise ApiError(400, f"a request may have {MOST_CHOICES} choices in all, prompts times n", "n")
            self._check_room(client, method)  # before its text is read
            try:
                asked = self._requests(fields, await read(self._prompts, fields))
            except UserError as error:
                raise ApiError(400, self.sentence(error)) from None
        if self.is_closing:
            raise ApiError(503, "the server is closing")
        self._check_room(client, method)
        return Exchange(self, fields, method, asked, client, ends_s)

    def _check_room(self, client: str, method: str) -> None:
        """Raise ApiError where the queue is full, unless this client has less than its share of it."""
        most = self.limits.max_waiting + self.worker.engines[method].batch_size
        clients = Counter(one.client for one in self.open if one.n_running or one.n_waiting)  # not those only unread
        if clients.total() >= most and clients[client] * len({*clients, client}) >= most:
            raise ApiError(429, "too many requests wait; try again", code="rate_limit_exceeded", retry_s=RETRY_S)

    def fill_rows(self, method: str) -> None:
        """Hand choices that wait to an engine that has rows for them."""
        asking = [one for one in self.open if one.method == method]
        held = Counter()
        for one in asking:
            held[one.client] += one.n_running
        most = self.worker.engines[method].batch_size + AHEAD
        while held.total() < most and (waiting := [one for one in asking if one.n_waiting]):
            first = min(waiting, key=lambda one: (held[one.client], one.n_running))
            first.submit()
            held[first.client] += 1

    def check_unread(self, now_s: float) -> None:
        """Where all together leave too many bytes unread, give up who leaves the most of those that take none."""
        stuck = [one for one in self.open if one.n_unread and now_s - one.took_s > STUCK_S]
        if stuck and sum(one.n_unread for one in self.open) > UNREAD_BYTES:
            max(stuck, key=lambda one: one.n_unread).give_up()

    async def _body(self, request: HttpRequest, holding: AsyncExitStack) -> bytearray:
        """Return the body. Where it is a large one, `holding` lets others come when it is done with."""
        body, most = bytearray(), self.limits.max_body_bytes
        declared = request.headers.get("content-length", "0")
        n_declared = int(declared) if declared.isdecimal() else 0
        seconds, is_held = min(BODY_S, self.limits.timeout_s), n_declared > LARGE_BYTES
        parts = request.stream()
        try:
            async with asyncio.timeout(seconds):
                if is_held and n_declared <= most:
                    await holding.enter_async_context(self._held)
                while n_declared <= most and len(body) <= most and (part := await anext(parts, None)) is not None:
                    body += part
                    if len(body) > LARGE_BYTES and not is_held:
                        is_held = True
                        await holding.enter_async_context(self._held)
        except ClientDisconnect:
            raise ApiError(400, "the client has left") from None
        except TimeoutError:
            raise ApiError(408, f"the request was not received within {seconds:.0f} s") from None
        if max(len(body), n_declared) > most:
            raise ApiError(413, f"the body exceeds {most} bytes")
        return body

    def _prompts(self, fields: Fields) -> list[list[int]]:
        """Return the prompts as token ids."""
        tokenizer = self.target.tokenizer
        if isinstance(fields, ChatRequest):
            messages = read_messages([message.model_dump(exclude_unset=True) for message in fields.messages])
            texts = ["\n".join(message["content"] for message in messages)]  # as `conversation_ids` does
        else:
            texts = [fields.prompt] if is_one(fields.prompt) else fields.prompt
        for text in texts:
            self._check_beginning(text)
        if isinstance(fields, ChatRequest) and tokenizer.chat_template is not None:
            return [chat_ids(tokenizer, messages, fields.offered)]
        return [prompt_ids(tokenizer, text) for text in texts]

    def _check_beginning(self, text: str | list[int]) -> None:
        """Raise ApiError where so little of a long text is too long already that the rest need not be tokenized."""
        n_characters = TOKEN_CHARACTERS * self.max_length
        if not isinstance(text, str) or len(text) <= n_characters:
            return
        if len(prompt_ids(self.target.tokenizer, text[:n_characters])) > self.max_length + EDGE_TOKENS:
            sentence = f"the context holds {self.max_length} tokens, and the prompt has more; shorten the prompt"
            raise ApiError(400, sentence, code="context_length_exceeded")

    def _requests(self, fields: Fields, prompts: list[list[int]]) -> list[Request]:
        """Return what the engine is asked: n choices of each prompt."""
        name = "messages" if isinstance(fields, ChatRequest) else "prompt"
        sampling, seed = fields.sampling(self.sampling), fields.seed
        shared = {"sampling": sampling, "stop": fields.stops, "logprobs": fields.n_logprobs}
        shared["seed"] = secrets.randbits(32) if seed is None else seed
        wanted = fields.max_tokens
        if isinstance(fields, ChatRequest) and fields.max_completion_tokens is not None:
            wanted = fields.max_completion_tokens
        asked = []
        for prompt in prompts:
            room = self.max_length - len(prompt)
            default = COMPLETION_TOKENS if isinstance(fields, CompletionRequest) else self.limits.max_tokens
            n_new = min(default, room) if wanted is None else wanted
            if n_new < 1 or n_new > room:
                raise ApiError(
                    400,
                    f"the context holds {self.max_length} tokens, but the prompt has {len(prompt)} and max_tokens is "
                    f"{max(n_new, 1)}; shorten the prompt or lower max_tokens",
                    name,
                    "context_length_exceeded",
                )
            check_prompt(self.target, prompt, n_new)
            asked += [Request(prompt, n_new, number=number, **shared) for number in range(fields.n)]
        return asked

    def sentence(self, error: Exception) -> str:
        """Return an error's sentence without the path of the target."""
        return str(error).replace(str(self.target.tokenizer.name_or_path), self.name)

    def keep(self, request: Request, generation: Generation, fields: Fields) -> None:
        """Log an answered request, where that is asked for."""
        if self.traffic is None:
            return
        if isinstance(fields, ChatRequest):
            first = next((n for n, one in enumerate(fields.messages) if one.role == "user"), 0)
            conversation = json.dumps([one.model_dump(exclude_unset=True) for one in fields.messages[: first + 1]])
        else:
            conversation = str(list(request.prompt))
        is_time = self.traffic.add(request, generation, conversation)
        if is_time and (self._joining is None or self._joining.done()):
            self.traffic.end_file()
            self._joining = asyncio.create_task(self._join(sorted(self.traffic.work.glob("rows-*.jsonl"))))

    async def _join(self, files: list[Path]) -> None:
        try:
            await asyncio.to_thread(self.traffic.join, files)
        except (UserError, OSError) as error:  # the files stay
            log.warning("answers are kept in %s: %s", self.traffic.work, error)


def make_app(service: Service, access: Access) -> FastAPI:
    """Return the application."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.mount("/static", StaticFiles(directory=PAGE))
    app.add_middleware(Guard, access=access)
    if access.origins:
        allowed = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        app.add_middleware(CORSMiddleware, allow_origins=access.origins, **allowed)

    async def explain(request: HttpRequest, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            error = ApiError(error.status_code, str(error.detail))
        is_known, error.__traceback__ = isinstance(error, ApiError), None  # its frames would keep the body in memory
        return refusal(error if is_known else ApiError(500, "the server failed at this request; its log says why"))

    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, explain)
    pages = {"/health": service.health, "/metrics": service.numbers, "/v1/models": service.models}
    pages["/v1/models/{name:path}"] = service.models
    for path, endpoint in {"/": lambda _: FileResponse(PAGE / "index.html"), **pages}.items():
        app.add_route(path, endpoint)
    for path, fields in (("/v1/chat/completions", ChatRequest), ("/v1/completions", CompletionRequest)):
        app.add_route(path, partial(service.answer, kind=fields), methods=["POST"])
    return app
