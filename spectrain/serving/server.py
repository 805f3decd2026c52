"""The HTTP server: OpenAI's API over a `Worker`, and the page at `/`.

A request is checked and tokenized, and each of its choices becomes a request of the engine, whose steps come back over
a queue (`exchange`). A step is one event of a stream. Steps wait there for a slow client. If the unread bytes of all
clients exceed a limit, the client with the most of them among those that read nothing is disconnected.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from spectrain.data.turns import read_messages
from spectrain.decoding import Request
from spectrain.decoding.engine import check_prompt
from spectrain.decoding.text import chat_ids, is_one, prompt_ids
from spectrain.errors import UserError
from spectrain.serving.access import Access, Guard, refusal
from spectrain.serving.exchange import Exchange
from spectrain.serving.protocol import (
    COMPLETION_TOKENS,
    MOST_CHOICES,
    ApiError,
    ChatRequest,
    CompletionRequest,
    Fields,
    parsed,
)
from spectrain.serving.service import Service

log = logging.getLogger(__name__)

PAGE = Path(__file__).parent / "page"
BODY_S = 30.0  # for a client to send its request
LARGE_BYTES = 1 << 16  # of a body, beyond which few are held at the same time, and one thread parses and tokenizes them
TOKEN_CHARACTERS, EDGE_TOKENS = 16, 8  # longer than most tokens; tokens that cutting a text may add


class Endpoints:
    """What a server answers at its paths."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._thread = ThreadPoolExecutor(1, "large bodies")

    async def numbers(self, request: HttpRequest) -> Response:
        return Response(self.service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def health(self, request: HttpRequest) -> Response:
        if self.service.is_closing or not self.service.worker.is_alive:
            raise ApiError(503, "the server is closing")
        return JSONResponse({"status": "ok"})

    async def models(self, request: HttpRequest) -> Response:
        model = {"id": self.service.name, "object": "model", "created": self.service.created, "owned_by": "spectrain"}
        own = {"max_model_len": self.service.max_length, "methods": self.service.worker.methods}
        asked = request.path_params.get("name")
        if asked not in (None, self.service.name):
            raise ApiError(404, f"this server has the model {self.service.name} only", "model", "model_not_found")
        return JSONResponse(model | own if asked else {"object": "list", "data": [model | own]})

    async def answer(self, request: HttpRequest, kind: type[Fields]) -> Response:
        """Check a request, and hand its choices to the engine."""
        client = request.client.host if request.client else ""
        ends_s = asyncio.get_running_loop().time() + self.service.limits.timeout_s
        async with AsyncExitStack() as holding:
            body = await self._body(request, holding)
            thread = self._thread if len(body) > LARGE_BYTES else None
            read = partial(asyncio.get_running_loop().run_in_executor, thread)
            fields = await read(parsed, kind, body)
            if fields.model not in (None, self.service.name):
                raise ApiError(404, f"this server has the model {self.service.name} only", "model", "model_not_found")
            method, methods = fields.method or self.service.worker.methods[0], self.service.worker.methods
            if method not in methods:
                raise ApiError(400, f"method must be one of {', '.join(methods)}", "method")
            is_list = isinstance(fields, CompletionRequest) and not is_one(fields.prompt)
            if fields.n * (len(fields.prompt) if is_list else 1) > MOST_CHOICES:
                raise ApiError(400, f"a request may have {MOST_CHOICES} choices in all, prompts times n", "n")
            self.service.check_room(client, method)  # before its text is read
            try:
                asked = self._requests(fields, await read(self._prompts, fields))
            except UserError as error:
                raise ApiError(400, self.service.sentence(error)) from None
        if self.service.is_closing:
            raise ApiError(503, "the server is closing")
        self.service.check_room(client, method)
        return Exchange(self.service, fields, method, asked, client, ends_s)

    async def _body(self, request: HttpRequest, holding: AsyncExitStack) -> bytearray:
        """Return the body. Where it is a large one, `holding` lets others come when it is done with."""
        body, most = bytearray(), self.service.limits.max_body_bytes
        declared = request.headers.get("content-length", "0")
        n_declared = int(declared) if declared.isdecimal() else 0
        seconds, is_held, parts = min(BODY_S, self.service.limits.timeout_s), False, request.stream()
        try:
            async with asyncio.timeout(seconds):
                while max(len(body), n_declared) <= most:
                    if max(len(body), n_declared) > LARGE_BYTES and not is_held:
                        is_held = True
                        await holding.enter_async_context(self.service.large_bodies)
                    if (part := await anext(parts, None)) is None:
                        break
                    body += part
        except ClientDisconnect:
            raise ApiError(400, "the client has left") from None
        except TimeoutError:
            raise ApiError(408, f"the request was not received within {seconds:.0f} s") from None
        if max(len(body), n_declared) > most:
            raise ApiError(413, f"the body exceeds {most} bytes")
        return body

    def _prompts(self, fields: Fields) -> list[list[int]]:
        """Return the prompts as token ids."""
        tokenizer = self.service.target.tokenizer
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
        n_characters = TOKEN_CHARACTERS * self.service.max_length
        if not isinstance(text, str) or len(text) <= n_characters:
            return
        if len(prompt_ids(self.service.target.tokenizer, text[:n_characters])) > self.service.max_length + EDGE_TOKENS:
            sentence = (
                f"the context holds {self.service.max_length} tokens, and the prompt has more; shorten the prompt"
            )
            raise ApiError(400, sentence, code="context_length_exceeded")

    def _requests(self, fields: Fields, prompts: list[list[int]]) -> list[Request]:
        """Return what the engine is asked: n choices of each prompt."""
        name = "messages" if isinstance(fields, ChatRequest) else "prompt"
        sampling, seed = fields.sampling(self.service.sampling), fields.seed
        shared = {"sampling": sampling, "stop": fields.stops, "logprobs": fields.n_logprobs}
        shared["seed"] = secrets.randbits(32) if seed is None else seed
        wanted = fields.max_tokens
        if isinstance(fields, ChatRequest) and fields.max_completion_tokens is not None:
            wanted = fields.max_completion_tokens
        asked, most = [], self.service.max_length
        for prompt in prompts:
            room = most - len(prompt)
            default = COMPLETION_TOKENS if isinstance(fields, CompletionRequest) else self.service.limits.max_tokens
            n_new = min(default, room) if wanted is None else wanted
            if n_new < 1 or n_new > room:
                raise ApiError(
                    400,
                    f"the context holds {most} tokens, but the prompt has {len(prompt)} and max_tokens is "
                    f"{max(n_new, 1)}; shorten the prompt or lower max_tokens",
                    name,
                    "context_length_exceeded",
                )
            check_prompt(self.service.target, prompt, n_new)
            asked += [Request(prompt, n_new, number=number, **shared) for number in range(fields.n)]
        return asked


def make_app(service: Service, access: Access) -> FastAPI:
    """Return the application."""
    endpoints = Endpoints(service)
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
    pages = {"/health": endpoints.health, "/metrics": endpoints.numbers, "/v1/models": endpoints.models}
    pages["/v1/models/{name:path}"] = endpoints.models
    for path, endpoint in {"/": lambda _: FileResponse(PAGE / "index.html"), **pages}.items():
        app.add_route(path, endpoint)
    for path, fields in (("/v1/chat/completions", ChatRequest), ("/v1/completions", CompletionRequest)):
        app.add_route(path, partial(endpoints.answer, kind=fields), methods=["POST"])
    return app
