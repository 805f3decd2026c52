"""One request of a client: its choices go to the worker, and what comes back is sent, whole or as a stream."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response

from spectrain.decoding import Emitted, Generation, Request
from spectrain.decoding.text import TokenBytes
from spectrain.errors import UserError
from spectrain.serving.protocol import ApiError, ChatRequest, Fields, Shape
from spectrain.serving.replies import AnswerText, chat_logprobs, completion_logprobs, statistics_of
from spectrain.serving.service import Service
from spectrain.serving.worker import Ticket
from spectrain.target import Source

log = logging.getLogger(__name__)

FAREWELL_S = 1.0  # for a client to take the error that ends its stream
NO_LOGPROBS = b'"logprobs":null'  # in an answer; a text cannot hold it, as its quotes are escaped
PIECE_BYTES = 1 << 16  # of an answer that are sent at a time
TOKEN_BYTES, LOGPROB_BYTES = 500, 110  # estimated memory of a queued token, and of each log-probability with it


class _Choice:
    """One choice of an answer while it is written."""

    def __init__(self, exchange: Exchange, index: int) -> None:
        fields, target = exchange.fields, exchange.service.target
        offers_tools = isinstance(fields, ChatRequest) and fields.offered is not None
        self.index, self.text = index, AnswerText(target.tokenizer, target.eos_ids, fields.stops, offers_tools)
        self.spelled = TokenBytes(target.tokenizer, target.eos_ids)  # of which log-probabilities are told
        self.first_s = self.last_s = 0.0  # when tokens came
        self.generation: Generation | None = None
        self.ticket: Ticket | None = None
        self.pieces: list[str] = []  # of a whole answer's text
        self.logprobs: dict[str, list[bytes]] = {}  # of a whole answer, by field; JSON takes a tenth of the objects


class Gone(Exception):
    """The client has left."""


class Exchange(Response):
    """Hands the choices of a request to the worker, and sends what comes back, whole or as a stream."""

    def __init__(
        self, service: Service, fields: Fields, method: str, asked: list[Request], client: str, ends_s: float
    ) -> None:
        super().__init__()
        self.service, self.fields, self.method, self.asked, self.client = service, fields, method, asked, client
        self.shape = Shape(isinstance(fields, ChatRequest), service.name)
        self.arrived_s = time.perf_counter()
        self.ends_s, self.has_begun = ends_s, False  # by the event loop's clock; the answer
        self.n_running = self.n_unread = 0  # choices that the engine has; bytes that the client has not taken
        self.took_s = 0.0  # when it took some, or there were none
        self._why = f"the request took longer than {service.limits.timeout_s:.0f} s"  # where it is given up
        self._choices: list[_Choice] = []  # that were handed to the worker; the others wait
        self._arrived: asyncio.Queue[tuple[_Choice, Emitted] | Exception] = asyncio.Queue()

    @property
    def n_waiting(self) -> int:
        """Choices that no engine has yet."""
        return len(self.asked) - len(self._choices)

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        service, self._loop = self.service, asyncio.get_running_loop()
        watching = asyncio.create_task(self._watch(receive))
        service.open.append(self)
        service.fill_rows(self.method)
        self._timeout = asyncio.timeout_at(self.ends_s)
        try:
            async with self._timeout:
                await (self._stream(send) if self.fields.stream else self._whole(send))
        except Gone:
            log.debug("a client has left")
        except UserError as error:
            await self._fail(ApiError(400 if service.worker.is_alive else 503, service.sentence(error)), send)
        except TimeoutError:
            await self._fail(ApiError(504, self._why), send)
        except ApiError as error:
            await self._fail(error, send)
        finally:
            watching.cancel()
            service.open.remove(self)
            for choice in self._choices:
                if choice.generation is None and choice.ticket is not None:
                    service.worker.cancel(choice.ticket)
                    service.metrics.aborted(self.method)
            for _ in range(self.n_waiting):
                service.metrics.aborted(self.method)
            self._arrived = asyncio.Queue()  # frames of errors may keep this object for long
            service.fill_rows(self.method)

    def submit(self) -> None:
        """Hand the next choice to the worker."""
        choice = _Choice(self, len(self._choices))
        self._choices.append(choice)
        self.n_running += 1

        def deliver(step: Emitted) -> None:
            with suppress(RuntimeError):  # the server has ended
                self._loop.call_soon_threadsafe(self._take, choice, step)

        try:
            choice.ticket = self.service.worker.submit(self.asked[choice.index], deliver, self.method)
        except UserError as error:
            self._arrived.put_nowait(error)

    def _take(self, choice: _Choice, step: Emitted) -> None:
        """Keep a step until the client takes it."""
        self._arrived.put_nowait((choice, step))
        self._hold(self._bytes_of(step))
        if step.generation is not None or step.error is not None:
            self.n_running -= 1
            self.service.fill_rows(self.method)

    def _hold(self, n_bytes: int) -> None:
        if not self.n_unread:
            self.took_s = self._loop.time()
        self.n_unread += n_bytes
        self.service.check_unread(self._loop.time())

    def _bytes_of(self, step: Emitted) -> int:
        return len(step.tokens) * (TOKEN_BYTES + LOGPROB_BYTES * (self.fields.n_logprobs or 0))

    def give_up(self) -> None:
        """End the request, whose client does not read."""
        self._why = "the answer was not read, and the server holds too many such answers"
        with suppress(RuntimeError):  # it is ending already
            self._timeout.reschedule(self._loop.time())

    async def _watch(self, receive: Callable) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._arrived.put_nowait(Gone())

    async def _fail(self, error: ApiError, send: Callable) -> None:
        """Tell the client, in the stream where there is one already."""
        if not self.has_begun:
            raise error
        if not self.fields.stream:  # which ends in the midst of its JSON
            return
        with suppress(TimeoutError):  # a client that does not read
            async with asyncio.timeout(FAREWELL_S):
                body = b"data: %b\n\n" % json.dumps(error.body).encode()
                await send({"type": "http.response.body", "body": body})

    async def _steps(self) -> AsyncIterator[tuple[_Choice, Emitted, list[tuple[str, int]]]]:
        """Yield each step with the pieces of text that it brought, until all choices have ended."""
        metrics, n_left = self.service.metrics, len(self.asked)
        while n_left:
            got = await self._arrived.get()
            if isinstance(got, Exception):
                raise got
            choice, step = got
            self.n_unread -= self._bytes_of(step)
            if step.error is not None:
                log.warning("a request failed: %s", step.error)
                raise ApiError(500, "the model failed at this request; the server's log says why")
            now_s = time.perf_counter()
            if step.tokens and not choice.first_s:
                choice.first_s = now_s
                metrics.observe("time_to_first_token_seconds", self.method, now_s - self.arrived_s)
            elif step.tokens:
                metrics.observe("inter_token_latency_seconds", self.method, now_s - choice.last_s)
            choice.last_s = now_s
            pieces = choice.text.add(step.tokens, step.sources)
            if step.generation is not None:
                choice.generation = step.generation
                n_left -= 1
                self._ended(choice)
                pieces += choice.text.end()
            elif choice.text.has_stopped:  # the engine looks in another text, that with special tokens
                self.service.worker.cancel(choice.ticket)
            yield choice, step, pieces

    def _ended(self, choice: _Choice) -> None:
        generation, request = choice.generation, self.asked[choice.index]
        self.service.keep(request, generation, self.fields)
        if choice.text.has_stopped:
            generation.finish_reason = "stop"
        to_first_s, all_s = choice.first_s - self.arrived_s, choice.last_s - self.arrived_s
        reason, n_prompt = generation.finish_reason, len(request.prompt)
        self.service.metrics.ended(self.method, reason, n_prompt, generation, to_first_s, all_s)

    def _usage(self) -> dict:
        """Count tokens; the choices of one prompt count it once."""
        own = [choice.generation for choice in self._choices]
        of_prompts = slice(None, None, self.fields.n)
        n_prompt = sum(len(request.prompt) for request in self.asked[of_prompts])
        n_cached = sum(generation.cached_tokens for generation in own[of_prompts])
        n_written = sum(len(generation.tokens) for generation in own)
        counts = {"prompt_tokens": n_prompt, "completion_tokens": n_written, "total_tokens": n_prompt + n_written}
        return counts | {"prompt_tokens_details": {"cached_tokens": n_cached}}

    def _reason(self, choice: _Choice) -> str:
        if choice.text.tool_calls:
            return "tool_calls"
        return "length" if choice.generation.finish_reason == "length" else "stop"

    def _own(self, choice: _Choice) -> dict | None:
        """Return the field `spectrain` of a choice that has ended."""
        seconds = choice.last_s - choice.first_s
        return statistics_of(choice.generation, self.method, seconds) if self.fields.annotate else None

    def _logprobs(self, choice: _Choice, tokens: Sequence[int], found: Sequence | None) -> dict | None:
        if self.fields.n_logprobs is None or not tokens:
            return None
        return (chat_logprobs if self.shape.is_chat else completion_logprobs)(choice.spelled, tokens, found)

    async def _whole(self, send: Callable) -> None:
        async for choice, step, pieces in self._steps():
            choice.pieces += [text for text, _ in pieces]
            for name, values in (self._logprobs(choice, step.tokens, step.logprobs) or {}).items():
                choice.logprobs.setdefault(name, []).append(to_json(values)[1:-1])
        parts = [*self._json()]
        self._hold(sum(map(len, parts)))
        await self._begin("application/json", send, (b"content-length", str(self.n_unread).encode()))
        for part in parts:
            for start in range(0, len(part), PIECE_BYTES):  # each is sent when the client has taken those before
                piece = part[start : start + PIECE_BYTES]
                await send({"type": "http.response.body", "body": piece, "more_body": len(piece) < self.n_unread})
                self.n_unread, self.took_s = self.n_unread - len(piece), self._loop.time()

    def _json(self) -> Iterator[bytes]:
        """Yield the parts of a whole answer."""
        bodies = []
        for choice in self._choices:
            more: dict[str, Any] = {"token_ids": choice.generation.tokens if self.fields.return_token_ids else None}
            if self.shape.is_chat:
                calls = choice.text.tool_calls or ()
                calls = [{key: value for key, value in call.items() if key != "index"} for call in calls]
                more |= {"role": "assistant", "tool_calls": calls or None}
            text = "".join(choice.pieces)
            bodies.append(self.shape.choice(choice.index, text, self._reason(choice), False, **more))
        body = self.shape.body(bodies, False, self._usage(), self._own(self._choices[0]))
        if self.fields.n_logprobs is None:
            return (yield body)
        first, *rest = body.split(NO_LOGPROBS)
        yield first
        for choice, part in zip(self._choices, rest, strict=True):
            fields = [b'"%b":[%b]' % (name.encode(), b",".join(parts)) for name, parts in choice.logprobs.items()]
            choice.logprobs.clear()
            yield b'"logprobs":{%b}' % b",".join(fields) if fields else NO_LOGPROBS
            yield part

    async def _stream(self, send: Callable) -> None:
        async for choice, step, pieces in self._steps():
            if not self.has_begun:
                await self._begin("text/event-stream; charset=utf-8", send)
            body = self._events(choice, step, pieces)
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
                self.took_s = self._loop.time()
        usage = self.fields.stream_options is not None and self.fields.stream_options.include_usage
        body = self.shape.event([], self._usage()) if usage else b""
        await send({"type": "http.response.body", "body": body + b"data: [DONE]\n\n"})

    def _events(self, choice: _Choice, step: Emitted, pieces: list[tuple[str, int]]) -> bytes:
        """Return the events of a step: what was gained, and the end."""
        fields, shape, text = self.fields, self.shape, "".join(text for text, _ in pieces)
        more: dict[str, Any] = {"logprobs": self._logprobs(choice, step.tokens, step.logprobs)}
        if fields.return_token_ids:
            more["token_ids"] = step.tokens
        if shape.is_chat and choice.first_s == choice.last_s:
            more["role"] = "assistant"
        events = b""
        if text or any(more.values()):
            own = None
            if fields.annotate:
                own = {"pieces": [[text, Source(source).name.lower()] for text, source in pieces]}
            events = shape.event([shape.choice(choice.index, text, None, True, **more)], own=own)
        if choice.generation is not None:
            calls = {"tool_calls": choice.text.tool_calls} if choice.text.tool_calls else {}
            end = shape.choice(choice.index, "", self._reason(choice), True, **calls)
            events += shape.event([end], own=self._own(choice))
        return events

    async def _begin(self, media_type: str, send: Callable, *more: tuple[bytes, bytes]) -> None:
        self.has_begun = True
        headers = [(b"content-type", media_type.encode()), *more]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
