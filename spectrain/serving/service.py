"""What all requests of a server share: the worker, the limits, the open requests, and which of them is served next.

Clients share the rows of an engine: a free row goes to the client that has the fewest rows, and among that client's
requests to the one with the fewest. So one request with many choices holds up nobody.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spectrain.decoding import Generation, Request, Sampling
from spectrain.errors import UserError
from spectrain.serving.metrics import Metrics
from spectrain.serving.protocol import ApiError, ChatRequest, Fields
from spectrain.serving.request_log import TrafficLog
from spectrain.serving.worker import Worker
from spectrain.target import TargetModel

log = logging.getLogger(__name__)

LARGE_HELD = 4  # large bodies that are received at the same time
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
    open: list[Any] = field(default_factory=list)  # the `Exchange` of each request that has not ended, oldest first
    created: int = field(default_factory=lambda: int(time.time()))
    _joining: asyncio.Task | None = None

    def __post_init__(self) -> None:
        self.large_bodies = asyncio.Semaphore(LARGE_HELD)
        self.metrics = Metrics(self.worker, self.name, lambda: sum(one.n_waiting for one in self.open))

    @property
    def n_open(self) -> int:
        """Requests that have not ended."""
        return len(self.open)

    @property
    def max_length(self) -> int:
        return min(engine.max_length for engine in self.worker.engines.values())

    def check_room(self, client: str, method: str) -> None:
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
