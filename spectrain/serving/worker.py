"""A thread that decodes for everybody: chats, servers and scripts hand it requests from threads of their own."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from spectrain.decoding import Drafter, Emitted, Engine, Prefixes, Request, Sampling
from spectrain.errors import UserError
from spectrain.stores.environment import free_memory
from spectrain.target import TargetModel

log = logging.getLogger(__name__)

INTERNAL_ERROR = "an internal error ended this request; the log says which"
CLOSED = "nothing is decoded any more"
FORKED = (
    "this process was forked from one that has loaded an LLM, whose threads a child does not have; load it in the "
    "child alone, or start processes by multiprocessing.get_context('spawn')"
)
MEMORY_SHARE = {"cpu": 0.25, "cuda": 0.8}  # of what is free, for keys and values
PREFIX_SHARE = 0.25  # of these, for texts that have ended
MOST_GIB = 2**20
WARM_TOKENS = 8
WARM_SAMPLINGS = Sampling(), Sampling(temperature=1.0)

Deliver = Callable[[Emitted], None]

_processes: set[int] = set()  # that have started workers: this one, or one from which it was forked
_turns: WeakKeyDictionary[PreTrainedModel, threading.Lock] = WeakKeyDictionary()  # of workers that have one model


def is_forked() -> bool:
    """Return whether this process was forked from one with workers: it has none of their threads to wait for."""
    return bool(_processes - {os.getpid()})


def check_not_forked() -> None:
    if is_forked():
        raise UserError(FORKED)


@dataclass(frozen=True)
class Ticket:
    """A request that was handed in."""

    method: str
    number: int  # of the engine's


class Worker:
    """Runs engines of one target in a thread of its own, in turns. Its methods may be called from any thread.

    Args:
        engines: by the name of their method. The first is the default.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        _processes.add(os.getpid())
        self.engines = dict(engines)
        self.target = next(iter(self.engines.values())).target
        self._turn = _turns.setdefault(self.target.model, threading.Lock())
        self._deliver: dict[Ticket, Deliver] = {}
        self._calls: deque[Callable[[], None]] = deque()  # that the thread makes before its next step
        self._wanted = threading.Condition()
        self._is_closing = False
        self._is_warming = False
        self._thread = threading.Thread(target=self._run, name="spectrain worker", daemon=True)
        self._thread.start()

    @property
    def methods(self) -> list[str]:
        return [*self.engines]

    @property
    def n_running(self) -> int:
        return sum(engine.n_running for engine in self.engines.values())

    @property
    def n_waiting(self) -> int:
        return sum(engine.n_waiting for engine in self.engines.values()) + len(self._calls)

    def submit(self, request: Request, deliver: Deliver, method: str | None = None) -> Ticket:
        """Hand a request in. `deliver` is called in the worker's thread with what it gains, and must not block.

        Raises:
            UserError: there is no such method, the engine cannot take the request, or the worker is closed or forked.
        """
        check_not_forked()
        name = self.methods[0] if method is None else method
        if name not in self.engines:
            raise UserError(f"method={name} is not loaded; choose among {', '.join(self.methods)}")
        with self._wanted:
            if self._is_closing:
                raise UserError(CLOSED)
            row = self.engines[name].row_of(request)
            ticket = Ticket(name, row.request)
            self._deliver[ticket] = deliver
            self._calls.append(partial(self.engines[name].append, row))
            self._wanted.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Give a request up: its row is free before the next step. Nothing happens to one that has ended."""
        if is_forked():
            return
        with self._wanted:
            if ticket in self._deliver:
                self._calls.append(partial(self.engines[ticket.method].cancel, ticket.number))
                self._wanted.notify()

    def warm_up(self) -> None:
        """Run each method once, greedy and sampled, so that no request waits for what is compiled once."""
        length = max(1, min(engine.max_length for engine in self.engines.values()) - WARM_TOKENS)
        prompt, self._is_warming = [1 % self.target.vocab_size] * min(WARM_TOKENS, length), True
        for name in self.methods:
            for sampling in WARM_SAMPLINGS:
                steps: SimpleQueue[Emitted] = SimpleQueue()
                self.submit(Request(prompt, WARM_TOKENS, sampling), steps.put, name)
                while (step := steps.get()).error is None and step.generation is None:
                    pass
                if step.error is not None:
                    raise UserError(f"method={name} cannot decode here: {step.error}")
        self._is_warming = False

    def close(self) -> None:
        """Cancel running and waiting requests, and end the thread."""
        if is_forked():
            return
        with self._wanted:
            self._is_closing = True
            self._wanted.notify()
        if threading.current_thread() is not self._thread:  # where the last reference is dropped by chance
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_closing

    def _run(self) -> None:
        try:
            self._decode()
        except BaseException:
            log.exception("the worker has ended")
            self._is_closing = True
            for ticket, deliver in [*self._deliver.items()]:
                with suppress(Exception):
                    deliver(Emitted(ticket.number, [], [], error=INTERNAL_ERROR))

    def _decode(self) -> None:
        while True:
            with self._wanted:
                while not (self._calls or self._is_closing or any(one.has_work for one in self.engines.values())):
                    self._wanted.wait()
                if self._is_closing:
                    self._calls += [partial(self.engines[one.method].cancel, one.number) for one in self._deliver]
                calls, self._calls = self._calls, deque()
                closing = self._is_closing
            for call in calls:
                call()
            for name, engine in self.engines.items():
                if engine.has_work or calls:
                    self._deliver_all(name, self._stepped(engine))
            if closing and not self._calls and not any(engine.has_work for engine in self.engines.values()):
                for engine in self.engines.values():
                    engine.close()
                return

    def _stepped(self, engine: Engine) -> list[Emitted]:
        try:
            with self._turn:
                return engine.step(rehearses=self._is_warming)
        except Exception as error:
            if not isinstance(error, UserError):
                log.exception("a step failed")
            return engine.fail(str(error) if isinstance(error, UserError) else INTERNAL_ERROR)

    def _deliver_all(self, name: str, steps: Sequence[Emitted]) -> None:
        for step in steps:
            ticket = Ticket(name, step.request)
            has_ended = step.generation is not None or step.error is not None
            deliver = self._deliver.pop(ticket, None) if has_ended else self._deliver.get(ticket)
            if deliver is None:
                continue
            try:
                deliver(step)
            except Exception:  # of a client that is gone
                log.exception("what a request gained could not be delivered")
                self._deliver.pop(ticket, None)
                self.engines[name].cancel(step.request)


def open_worker(
    target: TargetModel,
    methods: Mapping[str, Drafter],
    batch_size: int = 1,
    *,
    memory: float | None = None,
    max_length: int | None = None,
    draws: str = "shared",
) -> Worker:
    """Start a worker for some methods, which share the memory for keys and values.

    Args:
        methods: by name; the first is the default.
        batch_size: rows of each that are decoded together.
        memory: GiB for keys and values of all; None: a share of what is free.
        max_length: tokens of the longest text, prompt included; None: what target, methods and memory allow.
        draws: see `Engine`. With "shared" a request's sample depends on its seed alone, at any load.
    """
    share = MEMORY_SHARE.get(target.device.type, MEMORY_SHARE["cpu"])
    free = int(share * free_memory(target.device) if memory is None else min(memory, MOST_GIB) * 2**30)
    prefixes = Prefixes(int(PREFIX_SHARE * free))
    own = (free - prefixes.max_bytes) // len(methods)
    options = {"memory": own, "max_length": max_length, "draws": draws, "prefixes": prefixes}
    return Worker({name: Engine(target, drafter, batch_size, **options) for name, drafter in methods.items()})
