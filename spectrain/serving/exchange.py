"""One request of a client: its choices go to the worker, and what comes back is sent, whole or as a stream."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from spectrain.decoding import Emitted, Generation, Request, Source
from spectrain.decoding.text import TokenBytes
from spectrain.errors import UserError
from spectrain.serving.protocol import ApiError, ChatRequest, Fields, Shape, usage_of
from spectrain.serving.replies import AnswerText, chat_logprobs, completion_logprobs, statistics_of

if TYPE_CHECKING:
    from spectrain.serving.server import Service

log = logging.getLogger(__name__)

FAREWELL_S = 1.0  # for a client to take the error that ends its stream


class _Choice:
    """One choice of an answer while it is written."""

    def __init__(self, exchange: Exchange, index: int) -> None:
        fields, target = exchange.fields, exchange.service.target
        offers_tools = isinstance(fields, ChatRequest) and fields.offered is not None
        self.index, self.text = index, AnswerText(target.tokenizer, target.eos_ids, fields.stops, offers_tools)
        self.spelled = TokenBytes(target.tokenizer, target.eos_ids)  # of which log-probabilities are told
        self.first_s = self.last_s = 0.0  # when tokens came
        self.generation: Generation | None = None


class Gone(Exception):
    """The client has left."""


class Exchange(Response):
    """Hands the choices of a request to the worker, and sends what comes back, whole or as a stream."""

    def __init__(self, service: Service, fields: Fields, method: str, asked: list[Request]) -> None:
        super().__init__()
        self.service, self.fields, self.method, self.asked = service, fields, method, asked
        self.shape = Shape(isinstance(fields, ChatRequest), service.name)
        self.arrived_s = time.perf_counter()
        self.has_begun = False  # the answer

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        queue: asyncio.Queue[tuple[_Choice, Emitted] | None] = asyncio.Queue()
        choices, tickets = [_Choice(self, index) for index in range(len(self.asked))], []
        loop, worker = asyncio.get_running_loop(), self.service.worker
        self.service.n_open += len(choices)
        watching = asyncio.create_task(self._watch(receive, queue))
        try:
            for choice, request in zip(choices, self.asked, strict=True):
                deliver = partial(loop.call_soon_threadsafe, _put, queue, choice)
                tickets.append(worker.submit(request, deliver, self.method))
            async with asyncio.timeout(self.service.limits.timeout_s):
                steps = self._steps(queue, choices, tickets)
                await (self._stream(steps, choices, send) if self.fields.stream else self._whole(steps, choices, send))
        except Gone:
            log.debug("a client has left")
        except UserError as error:
            raise ApiError(400 if worker.is_alive else 503, self.service.sentence(error)) from None
        except TimeoutError:
            error = ApiError(504, f"the request took longer than {self.service.limits.timeout_s:.0f} s")
            await self._fail(error, send)
        except ApiError as error:
            await self._fail(error, send)
        finally:
            watching.cancel()
            self.service.n_open -= len(choices)
            for choice, ticket in zip(choices, tickets, strict=False):
                if choice.generation is None:
                    worker.cancel(ticket)
                    self.service.metrics.aborted(self.method)

    async def _watch(self, receive: Callable, queue: asyncio.Queue) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        queue.put_nowait(None)

    async def _fail(self, error: ApiError, send: Callable) -> None:
        """Tell the client, in the stream where there is one already."""
        if not self.has_begun:
            raise error
        with suppress(TimeoutError):  # a client that does not read
            async with asyncio.timeout(FAREWELL_S):
                body = b"data: %b\n\n" % json.dumps(error.body).encode()
                await send({"type": "http.response.body", "body": body})

    async def _steps(
        self, queue: asyncio.Queue, choices: list[_Choice], tickets: list
    ) -> AsyncIterator[tuple[_Choice, Emitted, list[tuple[str, int]]]]:
        """Yield each step with the pieces of text that it brought, until all choices have ended."""
        metrics, n_left = self.service.metrics, len(choices)
        while n_left:
            got = await queue.get()
            if got is None:
                raise Gone
            choice, step = got
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
                self.service.worker.cancel(tickets[choice.index])
            yield choice, step, pieces

    def _ended(self, choice: _Choice) -> None:
        generation, request = choice.generation, self.asked[choice.index]
        self.service.keep(request, generation, self.fields)
        if choice.text.has_stopped:
            generation.finish_reason = "stop"
        to_first_s, all_s = choice.first_s - self.arrived_s, choice.last_s - self.arrived_s
        reason, n_prompt = generation.finish_reason, len(request.prompt)
        self.service.metrics.ended(self.method, reason, n_prompt, generation, to_first_s, all_s)

    def _usage(self, choices: list[_Choice]) -> dict:
        """Count tokens; the choices of one prompt count it once."""
        own = [choice.generation for choice in choices]
        of_prompts = slice(None, None, self.fields.n)
        n_prompt = sum(len(request.prompt) for request in self.asked[of_prompts])
        n_cached = sum(generation.cached_tokens for generation in own[of_prompts])
        return usage_of(n_prompt, n_cached, sum(len(generation.tokens) for generation in own))

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

    async def _whole(self, steps: AsyncIterator, choices: list[_Choice], send: Callable) -> None:
        texts, found = [[] for _ in choices], [[] for _ in choices]
        async for choice, step, pieces in steps:
            texts[choice.index] += [text for text, _ in pieces]
            found[choice.index] += step.logprobs or ()
        bodies = []
        for choice in choices:
            tokens = choice.generation.tokens
            more: dict[str, Any] = {"logprobs": self._logprobs(choice, tokens, found[choice.index])}
            more["token_ids"] = tokens if self.fields.return_token_ids else None
            if self.shape.is_chat:
                calls = choice.text.tool_calls or ()
                calls = [{key: value for key, value in call.items() if key != "index"} for call in calls]
                more |= {"role": "assistant", "tool_calls": calls or None}
            text = "".join(texts[choice.index])
            bodies.append(self.shape.choice(choice.index, text, self._reason(choice), False, **more))
        body = self.shape.body(bodies, False, self._usage(choices), self._own(choices[0]))
        await self._begin("application/json", send, (b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, steps: AsyncIterator, choices: list[_Choice], send: Callable) -> None:
        async for choice, step, pieces in steps:
            if not self.has_begun:
                await self._begin("text/event-stream; charset=utf-8", send)
            body = self._events(choice, step, pieces)
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        usage = self.fields.stream_options is not None and self.fields.stream_options.include_usage
        body = self.shape.event([], self._usage(choices)) if usage else b""
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


def _put(queue: asyncio.Queue, choice: _Choice, step: Emitted) -> None:
    queue.put_nowait((choice, step))
