"""Continuous batching: requests join and leave at any time.

    engine = Engine(spectrain.load_target(), drafter, batch_size=8)
    engine.submit(Request(prompt, max_new_tokens=64))
    while engine.has_work:
        for emitted in engine.step(): ...

`generate` and `stream` (`generating.py`) continue a list of prompts by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from weakref import finalize

import torch

from spectrain.decoding.context import Context
from spectrain.decoding.drafter import Chooser, Drafter
from spectrain.decoding.generation import Clock, Ending
from spectrain.decoding.graph_capture import rehearse
from spectrain.decoding.loop import Batch, Emitted, Row
from spectrain.decoding.prefixes import TARGET, Known, Prefixes
from spectrain.decoding.sampling import Sampling, row_generator
from spectrain.decoding.verify import VERIFICATIONS
from spectrain.errors import UserError, check_choice, check_whole, shown
from spectrain.target.device import is_out_of_memory, out_of_memory_advice
from spectrain.target.kv_cache import KVCache
from spectrain.target.prefill import unread_parts
from spectrain.target.target import TargetModel, TargetOutput

MOST_NODES = 128  # of a step, for which the cache has room behind the text from the start
PIECE = {"cpu": 128, "cuda": 1024}  # tokens of a long prompt that are read between two steps of other rows
CACHE_BLOCK = 256
# The batch whose rows a drafter follows: an engine that begins one takes it from any other.
_BATCH_OF: dict[int, object] = {}  # by the drafter's id


@dataclass(frozen=True)
class Request:
    """A prompt to continue, and how."""

    prompt: Sequence[int]  # token ids
    max_new_tokens: int
    sampling: Sampling = Sampling()  # noqa: RUF009 - it is frozen
    seed: int = 0
    number: int = 0  # the request draws from a generator seeded by (seed, number)
    stop: tuple[str, ...] = ()  # the text ends with the token that completes one of them
    logprobs: int | None = None  # likeliest tokens whose log p are told beside those of its own; None: none are told


@dataclass
class _Reading:
    """Prompts that are being read."""

    rows: list[Row]
    pieces: Generator[None, None, TargetOutput]
    aside: KVCache | None  # where, if not in the cache of the batch, whose steps go on meanwhile
    seconds: float = 0.0


class Engine:
    """Continues requests with one method, in steps that their caller runs, all in one thread.

    Requests wait in order for a row, and for memory where that is bounded. A text follows the target's own
    distribution, whatever is drafted and whatever else is in the batch.

    Args:
        target: the model whose text this is.
        drafter: the method.
        batch_size: rows decoded together.
        memory: bytes for keys and values of running requests; None: as many as `batch_size` rows take. On a GPU
            they are taken at the first step, on a CPU as they are written.
        max_length: tokens of the longest text, prompt included; None: what target, method and memory allow.
        draws: "inverse" or "shared", how all requests draw; "auto": as the method gains from it. With "shared" a
            sample depends on target, prompt and seed alone.
        stop_token_ids: tokens that end a text; None: the target's EOS ids, (): none.
        verification: "block" or "token": how drafts that were drawn from a q are verified; see `verify`.
        prefixes: where texts are looked up that begin like a prompt; None: each prompt is read whole.
        reads_in_pieces: whether the steps of other rows go on while a long prompt is read.
        cache_block_tokens: the slots of a row in the caches are a multiple of this.

    Raises:
        UserError: batch_size is no whole number above 0, or the memory holds no text.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        batch_size: int = 1,
        *,
        memory: int | None = None,
        max_length: int | None = None,
        draws: str = "auto",
        stop_token_ids: Sequence[int] | None = None,
        verification: str = "block",
        prefixes: Prefixes | None = None,
        reads_in_pieces: bool = True,
        cache_block_tokens: int = CACHE_BLOCK,
    ) -> None:
        check_whole("batch_size", batch_size, 1)
        check_choice("verification", verification, VERIFICATIONS)
        self.target, self.drafter, self.batch_size = target, drafter, batch_size
        self.verification, self.prefixes, self.cache_block_tokens = verification, prefixes, cache_block_tokens
        self.draws = drafter.method.draws if draws == "auto" else draws
        self.piece = PIECE.get(target.device.type, PIECE["cuda"]) if reads_in_pieces else None
        self.max_tokens = None if memory is None else memory // target.token_bytes  # of running requests, in all
        most = [target.max_positions, drafter.method.max_positions]
        if self.max_tokens is not None:
            rows = 1 if target.device.type == "cpu" else batch_size  # which have slots for the longest text each
            most.append(self.max_tokens // rows - MOST_NODES)
        self.max_length = min([*most, *([] if max_length is None else [max_length])])
        if self.max_length < 2 and memory is not None:
            raise UserError(
                f"memory={memory / 2**30:.3g} GiB holds no text for {batch_size} rows; give more, or less batch_size"
            )
        eos_ids = frozenset(target.eos_ids)
        self._ending = Ending(eos_ids, eos_ids if stop_token_ids is None else frozenset(stop_token_ids), (), None)
        self._waiting: deque[Row] = deque()
        self._reading: _Reading | None = None
        self._batch: Batch | None = None
        self._cache: KVCache | None = None
        self._mark = object()  # of the batch; the method has another one where another engine has begun with it
        self._n_requests = 0
        self._told: list[Emitted] = []  # of a step that goes on
        self._unwanted: set[int] = set()

    @property
    def n_running(self) -> int:
        """Requests that have rows, or whose prompts are being read."""
        n_read = 0 if self._reading is None else len(self._reading.rows)
        return n_read + (0 if self._batch is None else len(self._batch.rows))

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return self.n_running > 0 or bool(self._waiting)

    def submit(self, request: Request) -> int:
        """Let a request wait for its row. Return its number, which `step` will name. Errors are those of `row_of`."""
        row = self.row_of(request)
        self.append(row)
        return row.request

    def append(self, row: Row) -> None:
        """Let what `row_of` made wait for its turn."""
        self._waiting.append(row)

    def row_of(self, request: Request) -> Row:
        """Check a request and give it a number. Of all methods this one may be called while others run.

        Raises:
            UserError: the prompt is empty, too long, or holds tokens outside the target's vocabulary.
        """
        check_whole("max_new_tokens", request.max_new_tokens, 1)
        check_prompt(self.target, request.prompt, request.max_new_tokens)
        if (n_tokens := len(request.prompt) + request.max_new_tokens) > self.max_length:
            is_drafters = self.max_length == self.drafter.method.max_positions
            room = "the draft model's context holds" if is_drafters else "there is memory for"
            other = "choose another drafter" if is_drafters else "give more memory"
            raise UserError(
                f"prompt and new tokens may reach {n_tokens}, but {room} {self.max_length}; shorten the prompt, lower "
                f"max_new_tokens or {other}"
            )
        if request.stop and self.target.tokenizer is None:
            raise UserError("stop needs the target's tokenizer; load the target with one, or use stop_token_ids")
        number, self._n_requests = self._n_requests, self._n_requests + 1
        ending = replace(self._ending, stop=tuple(request.stop), tokenizer=self.target.tokenizer)
        sampling = replace(Sampling() if request.sampling.greedy else request.sampling, draws=self.draws)
        generator = row_generator(request.seed, request.number)
        return Row(number, request.prompt, request.max_new_tokens, sampling, generator, ending, request.logprobs)

    def cancel(self, request: int) -> None:
        """Give a request up: the next `step` frees its row first. Nothing happens to one that has ended."""
        self._unwanted.add(request)

    def step(self, rehearses: bool = False) -> list[Emitted]:
        """Let waiting requests join, read a piece of their prompts, and run one step of all rows if none has joined.

        `rehearses`: on a GPU, steps of the first request's sampling are recorded before the batch begins.
        """
        if self.n_running and _BATCH_OF.get(id(self.drafter)) is not self._mark:
            raise UserError(
                "the method has begun other texts before these ended; give each a method of its own, or decode them in "
                "turns"
            )
        self._told += self._dropped()
        try:
            if self.n_running or self._waiting:
                self._told += self._gained(rehearses)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return self.fail(out_of_memory_advice(self.target.device, self.batch_size, self.max_length))
        told, self._told = self._told, []
        return told

    def _gained(self, rehearses: bool) -> list[Emitted]:
        if not self.n_running:
            self._begin(rehearses)
        if self._reading is None:
            self._admit()
        if self._reading is not None and (joined := self._read()):
            return joined  # nobody waits for a step to see a first token
        return self._batch.step() if self._batch.rows else []

    def fail(self, why: str) -> list[Emitted]:
        """After `step` has raised: end all running requests with this error. Those that wait go on.

        If none ran, no batch could begin, and the first request that waits is ended.
        """
        rows = [] if self._reading is None else self._reading.rows
        rows = rows + ([] if self._batch is None else [row for row in self._batch.rows if row not in rows])
        if not rows and self._waiting:
            rows = [self._waiting.popleft()]
        told, self._told, self._reading = self._told, [], None
        self.close()
        self.target.caches.drop()
        return told + [Emitted(row.request, [], [], error=why) for row in rows]

    def close(self) -> None:
        """Leave the cache to the next engine of the target."""
        if self._cache is not None:
            self.target.caches.keep(self._cache)
        self._cache = self._batch = None

    def _begin(self, rehearses: bool) -> None:
        """Begin a batch: the method learns of it, and forgets all rows of earlier ones."""
        if id(self.drafter) not in _BATCH_OF:
            finalize(self.drafter, _BATCH_OF.pop, id(self.drafter), None)
        _BATCH_OF[id(self.drafter)] = self._mark = object()
        # The steps of a batch in which one row draws take as long as if all did.
        first = next((row.sampling for row in self._waiting if not row.sampling.greedy), self._waiting[0].sampling)
        is_chooser = isinstance(self.drafter, Chooser)
        method = self.drafter.prepare(self.target, first, self.batch_size) if is_chooser else self.drafter.method
        target = self.target.with_capture(method.capture_layers)
        if self._cache is not None and not self._has_memory([_reach(self._waiting[0])]):
            self.close()
        if self._cache is None:
            self._cache = target.caches.new(self.batch_size, self.cache_block_tokens, self.max_length + MOST_NODES)
        self._cache.clear()
        stop_ids = [token for token in self._ending.stop_ids if 0 <= token < target.vocab_size]
        if rehearses and target.graphs is not None:
            rehearse(target, self.drafter, self._cache, self._waiting[0].sampling, stop_ids, self.verification)
        context = Context(Sampling(temperature=1.0, draws=self.draws), target.device, self.batch_size, stop_ids)
        with torch.inference_mode():
            self.drafter.start(target, self._cache)
        clock = Clock(target.device)
        self._batch = Batch(target, self.drafter, self._cache, context, self.verification, clock, self.prefixes)

    def _admit(self) -> None:
        """Take as many waiting requests as there are rows and memory for, and begin to read their prompts."""
        rows: list[Row] = []
        free, n_unread, known = self.batch_size - len(self._batch.rows), 0, None
        reaches = [_reach(row) for row in self._batch.rows]
        while len(rows) < min(free, len(self._waiting)) and known is None:
            row = self._waiting[len(rows)]
            reaches.append(_reach(row))
            if not self._has_memory(reaches):
                break
            of_row, n_own = self._known(row)
            is_long = self.piece is not None and n_unread + n_own > self.piece
            if rows and (of_row is not None or (is_long and self._batch.rows)):
                break  # it is read alone, after these
            rows.append(row)
            n_unread, known = n_unread + n_own, of_row
        if rows:
            goes_on = bool(self._batch.rows) and self.piece is not None and n_unread > self.piece
            goes_on = goes_on and self._has_memory(reaches[: len(self._batch.rows) + 1], len(rows[0].prompt))
            self._reading = self._reading_of(rows, known, goes_on)
            for _ in rows:
                self._waiting.popleft()

    def _has_memory(self, reaches: Sequence[int], aside: int = 0) -> bool:
        """Whether there is memory for rows that may have so many tokens in the end, and for some aside."""
        return self.max_tokens is None or self._cache.slots_taken(reaches) + aside <= self.max_tokens

    def _known(self, row: Row) -> tuple[tuple[Known, int] | None, int]:
        """Return what is known already of a prompt, where that is worth it, and how many of its tokens are unread."""
        n_tokens = len(row.prompt)
        found = None if self.prefixes is None else self.prefixes.longest(row.prompt)
        if found is None:
            return None, n_tokens
        wanted = self._wanted([n_tokens], *found) if self._batch.target.capture_layers else None
        if wanted is None and self._batch.target.capture_layers:
            return None, n_tokens  # the method reads all states
        n_unread = sum(stop - start for start, stop in unread_parts(wanted, found[1], n_tokens))
        return (found, n_unread) if n_unread < n_tokens else (None, n_tokens)

    def _wanted(self, lengths: Sequence[int], states: Known, n_known: int) -> torch.Tensor | None:
        """Return the positions of prompts whose states the method reads, given those of the only one's beginning."""
        for drafter, mark in self._cache.beside.items():
            drafter.begin_with(states.get(mark), n_known)
        with torch.inference_mode():
            return self.drafter.read_of_prompts(torch.tensor(lengths, device=self.target.device))

    @torch.inference_mode()
    def _reading_of(self, rows: list[Row], known: tuple[Known, int] | None, goes_on: bool) -> _Reading:
        target, lengths = self._batch.target, [len(row.prompt) for row in rows]
        longest = max(lengths)
        padded = [[*row.prompt, *[0] * (longest - len(row.prompt))] for row in rows]
        tokens = torch.tensor(padded).to(target.device)
        aside = KVCache(1, self.cache_block_tokens, longest + MOST_NODES) if goes_on else None
        cache, first = (self._cache, len(self._batch.rows)) if aside is None else (aside, 0)
        states, n_known = known or ({}, 0)
        rows[0].generation.cached_tokens = n_known
        if n_known:
            cache.restore(first, states[TARGET], n_known)
        read, chunk = self._wanted(lengths, states, n_known), self.piece if goes_on else None
        new = range(first, first + len(rows))
        return _Reading(rows, target.reading(tokens, lengths, cache, new, read, n_known, chunk), aside)

    @torch.inference_mode()
    def _read(self) -> list[Emitted]:
        """Read one piece, or all where the batch has to wait. Return the first tokens of prompts that were read."""
        reading, batch, output = self._reading, self._batch, None
        batch.clock.settle()
        began_s = batch.clock.now
        try:
            next(reading.pieces)
            while reading.aside is None and batch.rows:  # steps would write between the pieces
                next(reading.pieces)
        except StopIteration as stop:
            output = stop.value
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or not batch.rows:
                raise
            self._reading = None
            self.target.caches.drop()
            advice = out_of_memory_advice(self.target.device, len(reading.rows), max(map(_reach, reading.rows)))
            return [Emitted(row.request, [], [], error=advice) for row in reading.rows]
        if output is not None and reading.aside is not None:
            n_rows, n_tokens = len(batch.rows), reading.aside.lengths[0]
            self._cache.restore(n_rows, reading.aside.states_of(0, n_tokens), n_tokens)
            self._cache.join([n_tokens])
        batch.clock.lap(None)
        batch.clock.settle()
        reading.seconds += batch.clock.now - began_s
        if output is None:
            return []
        joined = batch.join(reading.rows, output, reading.seconds)
        self._reading = None
        return joined

    def _dropped(self) -> list[Emitted]:
        """Free the rows of requests that were given up."""
        unwanted, self._unwanted = self._unwanted, set()
        if not unwanted:
            return []
        gone = [row for row in self._waiting if row.request in unwanted]
        if self._reading is not None and any(row.request in unwanted for row in self._reading.rows):
            # Those beside it are read anew: a prompt is not taken out of the middle of a forward.
            self._waiting.extendleft(row for row in reversed(self._reading.rows))
            gone += [row for row in self._reading.rows if row.request in unwanted]
            self._reading.pieces.close()
            if self._reading.aside is None:
                for place, row in enumerate(self._reading.rows, len(self._batch.rows)):
                    self._cache.leave(place, len(row.prompt))
            self._reading = None
        self._waiting = deque(row for row in self._waiting if row.request not in unwanted)
        dropped = []
        for row in gone:
            row.generation.finish_reason = "cancelled"
            dropped.append(Emitted(row.request, [], [], row.generation))
        running = [] if self._batch is None else self._batch.rows
        for index in reversed(range(len(running))):
            if running[index].request in unwanted:
                dropped.append(self._batch.drop(index))
        return dropped


def _reach(row: Row) -> int:
    """Tokens that a row may have in the end."""
    return len(row.prompt) + row.max_new_tokens


def check_prompt(
    target: TargetModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    name: str = "the prompt",
    max_length: int | None = None,
) -> int:
    """Return by how many tokens these ids are continued: max_new_tokens, or fewer where max_length ends the text.

    Raises:
        UserError: the target cannot continue them so far, or max_length leaves no token.
    """
    if max_length is not None:
        max_new_tokens = min(max_new_tokens, max_length - len(prompt))
    if max_new_tokens < 1:
        raise UserError(f"{name} has {len(prompt)} tokens, which leave none of max_length={max_length}; raise it")
    if not len(prompt):
        raise UserError(f"{name} is empty; give at least one token")
    wrong = [token for token in (min(prompt), max(prompt)) if not 0 <= token < target.vocab_size]
    if wrong:
        raise UserError(
            f"{name} holds token id {shown(wrong[0])}, but the target's vocabulary has {target.vocab_size}; "
            "tokenize it with the target's tokenizer"
        )
    if len(prompt) + max_new_tokens > target.max_positions:
        raise UserError(
            f"{name} has {len(prompt)} tokens and max_new_tokens={max_new_tokens}, but the target's context holds "
            f"{target.limit}; shorten the prompt or lower max_new_tokens"
        )
    return max_new_tokens
