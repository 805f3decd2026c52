"""`LLM`: a target and a method that drafts for it, ready to answer in scripts, threads and asyncio (docs/python.md).

    llm = LLM("smollm2", method="auto")
    print(llm.chat("Name three colours.").text)

All requests of one `LLM`, from whichever thread or task they come, are batched continuously.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from numbers import Integral
from pathlib import Path
from queue import SimpleQueue
from typing import TypedDict, TypeVar, Unpack, overload

import numpy as np
import torch

from spectrain import compiled
from spectrain.data.turns import clean, read_messages
from spectrain.decoding import Drafter, Emitted, Request, Sampling
from spectrain.decoding.sampling import DRAWS
from spectrain.decoding.text import Pieces, Prompt, Reply, chat_ids, is_one, prompt_ids
from spectrain.errors import UserError, check_choice, check_number, check_whole, shown
from spectrain.methods.registry import load_method, name_of
from spectrain.models.packages import default_target, dtype_of, target_path
from spectrain.serving.worker import Ticket, check_not_forked, open_worker
from spectrain.target import TargetModel, load_target
from spectrain.target.tree import Source
from spectrain.terminal import speaking, stage

BYTES = bytes | bytearray | memoryview  # sequences of numbers, which are no token ids
NEW_TOKENS = 512  # of a continuation, where max_new_tokens is not given
S = TypeVar("S", bound="_Continuation")


class Options(TypedDict, total=False):
    """How a prompt is continued."""

    max_new_tokens: int | None  # None: 512, or as many as the context has room for
    temperature: float  # 0, the default: greedy
    top_k: int  # 0: off
    top_p: float  # 1: off
    min_p: float  # 0: off
    seed: int  # of the draws; prompt i of a list draws by (seed, i)
    stop: str | Sequence[str]  # texts that end the continuation, and are no part of it
    logprobs: int | None  # log-probabilities of each token, and of so many of the likeliest ones


class Piece(str):
    """A piece of text. `source` says where its last token came from."""

    source: Source


class _Continuation:
    """A request, and what has come of it so far. One that nobody waits for any more is cancelled."""

    reply: Reply | None = None  # the whole, once it has ended
    _ticket: Ticket | None = None

    def __init__(self, llm: LLM, request: Request, deliver: Callable[[Emitted], None]) -> None:
        self._ready: deque[Piece] = deque()
        self._text, self._logprobs = "", []
        self._error: str | None = None  # why it failed
        self._pieces = Pieces(llm.target.tokenizer, llm.target.eos_ids, request.stop)
        self._llm = llm  # which closes when it is forgotten
        self._ticket = llm._worker.submit(request, deliver)

    def cancel(self) -> None:
        """End the text, whose row is free before the next step. What was written until then is still given out."""
        if self.reply is None and self._ticket is not None:
            self._llm._worker.cancel(self._ticket)

    __del__ = cancel

    def _take(self, step: Emitted) -> None:
        texts = [self._pieces.add(token) for token in step.tokens]
        texts += [self._pieces.end()] if step.generation else []
        for text, source in zip(texts, [*step.sources, Source.ROOT], strict=False):
            if text:
                self._text += text
                self._ready.append(Piece(text))
                self._ready[-1].source = Source(source)
        self._logprobs += step.logprobs or []
        if step.error is not None:
            self._ticket, self._error = None, step.error
            raise UserError(step.error)
        if self._pieces.stopped and step.generation is None:
            self.cancel()  # the engine looks for it in the text with special tokens
        elif step.generation is not None:
            step.generation.finish_reason = "stop" if self._pieces.stopped else step.generation.finish_reason
            self.reply = Reply(self._text, step.generation, self._logprobs or None)


class Stream(_Continuation, Iterator[Piece]):
    """The pieces of a text while it is written. Behind the last one, `reply` is the whole."""

    def __init__(self, llm: LLM, request: Request) -> None:
        self._steps: SimpleQueue[Emitted] = SimpleQueue()
        super().__init__(llm, request, self._steps.put)

    def __next__(self) -> Piece:
        while not self._ready:
            if self.reply is not None or self._error is not None:
                raise StopIteration
            check_not_forked()
            try:
                self._take(self._steps.get())
            except KeyboardInterrupt:
                self.cancel()
                raise
        return self._ready.popleft()


class AsyncStream(_Continuation, AsyncIterator[Piece]):
    """The same for `async for`. Cancelling the task that waits for it cancels the request."""

    def __init__(self, llm: LLM, request: Request) -> None:
        loop, steps = asyncio.get_running_loop(), asyncio.Queue()

        def deliver(step: Emitted) -> None:  # it must not hold this object, whose end cancels the request
            with suppress(RuntimeError):  # the event loop was closed meanwhile
                loop.call_soon_threadsafe(steps.put_nowait, step)

        self._steps: asyncio.Queue[Emitted] = steps
        super().__init__(llm, request, deliver)

    async def __anext__(self) -> Piece:
        while not self._ready:
            if self.reply is not None or self._error is not None:
                raise StopAsyncIteration
            check_not_forked()
            try:
                self._take(await self._steps.get())
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self._ready.popleft()


class LLM:
    """A target and a method, ready to answer. Threads may share it. `close` it, or use it as a context manager.

    Args:
        target: smollm2, a bundled checkpoint, a Hugging Face folder, an id on the hub, or a target that is loaded.
            None: smollm2, or where it cannot be had the bundled target.
        method: a name of conf/method/, an exported folder, or a method of `load_method(..., target)`.
        batch_size: texts that are written at the same time; others wait in order.
        memory: GiB for keys and values; None: a share of what is free.
        draws: shared: a sample depends on target, prompt and seed alone, with any method and whatever else is written
            meanwhile; auto: as the method has the most tokens accepted.
        dtype: float32, bfloat16 or float16; auto: the checkpoint's on a GPU, float32 on a CPU.
        device: auto takes a GPU where there is one.
        quiet: log nothing below errors. Otherwise the log goes to stderr where the program has set up no logging.
        progress: called with what is being done while this opens, and how much of it is done (0 to 1; None: unknown).
        **method_options: as `load_method` takes them: `gamma=4`, `drafter="exported/spire"`, ...

    Raises:
        UserError: says in one sentence what is missing or unsupported.
    """

    def __init__(
        self,
        target: str | Path | TargetModel | None = None,
        method: str | Path | Drafter = "auto",
        *,
        batch_size: int = 8,
        memory: float | None = None,
        draws: str = "shared",
        dtype: str = "auto",
        device: str = "auto",
        quiet: bool = False,
        progress: Callable[[str, float | None], None] | None = None,
        **method_options: object,
    ) -> None:
        check_not_forked()
        check_choice("draws", draws, DRAWS)
        if memory is not None:
            check_number("memory", memory, "(0, inf)")
        dtype, device = name_of("dtype", dtype), name_of("device", device)
        compiled.begin()
        with speaking(quiet, progress):
            if not isinstance(target, TargetModel):
                path = target_path(default_target() if target is None else name_of("target", target))
                chosen = {"path": path, "dtype": dtype, "device": device}
                with stage(f"loading {path}"):
                    target = load_target(path, dtype_of(chosen, torch.cuda.is_available()), device)
            elif (dtype, device) != ("auto", "auto"):
                raise UserError("dtype and device belong to load_target(...) where a loaded target is given")
            if target.tokenizer is None:
                raise UserError("the target has no tokenizer; load it by load_target(...)")
            if not isinstance(method, Drafter):
                with stage("opening the method"):
                    method = load_method(method, target, **method_options)
            elif method_options:
                one = next(iter(method_options))
                raise UserError(f"{one} belongs to load_method(...) where a loaded method is given")
            self.target = target
            self._worker = open_worker(target, {"llm": method}, batch_size, memory=memory, draws=draws)
        self._close = weakref.finalize(self, self._worker.close)  # when it is forgotten, and when Python ends

    @property
    def max_length(self) -> int:
        """Tokens of the longest text, prompt included."""
        return self._worker.engines["llm"].max_length

    def chat(self, messages: str | Sequence[Mapping[str, str]], system: str = "", **options: Unpack[Options]) -> Reply:
        """Answer by the target's chat template what the user says, or a list of turns with role and content.

        `system` is what the system says before them. Errors are those of `generate`; also if there is no template.
        """
        return self.generate(self._chat_ids(messages, system), **options)

    @overload
    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Reply: ...
    @overload
    def generate(self, prompt: Sequence[Prompt], **options: Unpack[Options]) -> list[Reply]: ...
    def generate(self, prompt, **options):
        """Continue a prompt, or each one of a list: a text as it is, token ids, or messages by the chat template.

        Raises:
            UserError: a prompt is empty or too long, or an option is wrong.
        """
        prompt = _plain(prompt)
        with self._opened(Stream, prompt, options) as streams:
            for stream in streams:
                deque(stream, maxlen=0)
        return streams[0].reply if is_one(prompt) else [stream.reply for stream in streams]

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Continue one prompt as `generate` does, and yield its text piece by piece, as tokens are accepted."""
        return Stream(self, self._request(prompt, **options))

    async def achat(self, messages: str | Sequence[Mapping], system: str = "", **options: Unpack[Options]) -> Reply:
        """`chat`, awaited."""
        return await self.agenerate(self._chat_ids(messages, system), **options)

    @overload
    async def agenerate(self, prompt: Prompt, **options: Unpack[Options]) -> Reply: ...
    @overload
    async def agenerate(self, prompt: Sequence[Prompt], **options: Unpack[Options]) -> list[Reply]: ...
    async def agenerate(self, prompt, **options):
        """`generate`, awaited."""
        prompt = _plain(prompt)
        with self._opened(AsyncStream, prompt, options) as streams:
            for stream in streams:
                async for _ in stream:
                    pass
        return streams[0].reply if is_one(prompt) else [stream.reply for stream in streams]

    def astream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """`stream` for `async for`; call it where an event loop runs."""
        return AsyncStream(self, self._request(prompt, **options))

    def close(self) -> None:
        """Cancel what still runs, and free the memory of keys and values."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _chat_ids(self, messages: str | Sequence[Mapping[str, str]], system: str) -> list[int]:
        if not isinstance(system, str):
            raise UserError(f"system={shown(system)} must be a text")
        if self.target.tokenizer.chat_template is None:
            raise UserError("the target's tokenizer has no chat template; use generate, which continues a text")
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        if not isinstance(turns, list | tuple) or not turns or not isinstance(turns[0], Mapping):
            raise UserError(f"messages={shown(turns)} must be a text, or a list of turns with role and content")
        return chat_ids(self.target.tokenizer, _checked(turns), system=clean(system))

    @contextmanager
    def _opened(self, kind: type[S], prompt: Prompt | Sequence[Prompt], options: Options) -> Iterator[list[S]]:
        """Begin to continue each prompt; what has not ended when the block does is cancelled."""
        prompts = enumerate([prompt] if is_one(prompt) else prompt)
        requests = [self._request(one, number, **options) for number, one in prompts]
        streams = [kind(self, request) for request in requests]
        try:
            yield streams
        finally:
            for stream in streams:
                stream.cancel()

    def _request(
        self,
        prompt: Prompt,
        number: int = 0,
        /,
        *,
        max_new_tokens: int | None = None,
        seed: int = 0,
        stop: str | Sequence[str] | None = (),
        logprobs: int | None = None,
        **sampling: float,
    ) -> Request:
        stop = (stop,) if isinstance(stop, str) else () if stop is None else stop
        if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
            raise UserError(f"stop={shown(stop)} must be texts that are not empty")
        if "draws" in sampling:
            raise UserError("draws is chosen for all texts; give LLM(..., draws=...)")
        check_whole("seed", seed, 0, 2**32 - 1)
        if logprobs is not None:
            check_whole("logprobs", logprobs, 0, self.target.vocab_size)
        ids = prompt_ids(self.target.tokenizer, _checked(prompt))
        most = max(1, min(NEW_TOKENS, self.max_length - len(ids))) if max_new_tokens is None else max_new_tokens
        return Request(ids, most, Sampling.from_options(sampling), seed, number, tuple(stop), logprobs)


def _plain(prompt: object) -> object:
    """Return a tensor or an array as a list, and everything else as it is."""
    return prompt.tolist() if isinstance(prompt, torch.Tensor | np.ndarray) else prompt


def _checked(prompt: object) -> Prompt:
    """Return a prompt of what somebody gave as one. Raise UserError where it is none."""
    prompt = _plain(prompt)
    if isinstance(prompt, str):
        return clean(prompt)
    parts = list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, BYTES) else [None]
    if all(isinstance(part, Integral) and not isinstance(part, bool) for part in parts):
        return parts
    if not all(isinstance(part, Mapping) for part in parts):
        raise UserError(f"{shown(prompt)} is no prompt; give a text, a list of messages, or a list of token ids")
    return read_messages(parts)
