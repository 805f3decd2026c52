"""Hidden states of a target that another process owns: `python -m data_prep.activations serve=true` (docs/data.md).

    server = HiddenStates("127.0.0.1:7463", key(), timeout_s=300)
    features = server.features(tokens, starts, layers=(6, 7))

The server keeps nothing between two requests: a training, which owns the order of its rows, sends tokens and gets what
its own target would say of them. So a restart of either side can neither lose nor double a row. After the challenges of
`multiprocessing.connection`, by which both sides prove the key, messages are JSON objects and raw values, no pickles:

    server: {"version", "target", "target_fingerprint", ..}    or {"busy": sentence}
    client: {"shape": [B, L], "layers": [6, 7], "packed": false}    tokens [B, L] int32 (and starts)
    server: {}    captured [B, L, C, D] bfloat16 and final_hidden [B, L, D] bfloat16      or {"error": sentence}

`features` is all that a training calls, so that an engine can stand behind it: `served_vllm` asks a vLLM.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TypeVar

import torch
from torch import Tensor

from spectrain.errors import UserError
from spectrain.stores.signals import SIGNALS
from spectrain.target.hidden_states import Features
from spectrain.training.data import RowBatch, TokenRows

log = logging.getLogger(__name__)

T = TypeVar("T")

VERSION = 2
KEY = "SPECTRAIN_KEY"
HEADER_BYTES = 1 << 14  # the most of a JSON object
PIECE_BYTES = 1 << 20  # of values in one message
CONNECT_S = 10.0  # for a connection; for the first one in all
BAD_LENGTH = "bad message length"  # as `Connection` says it of what no server of ours sends
PAUSES_S = (0.1, 2.0)  # between two attempts, from the first to the longest
ADVICE = "start the server with spectrain activations serve=true target=..., or give its address"


def key() -> bytes:
    """Return the key that server and trainings share, from the environment, where no list of processes shows it."""
    if not os.environ.get(KEY):
        raise UserError(
            f"the environment variable {KEY} is not set; set it to a secret that server and trainings share"
        )
    return os.environ[KEY].encode()


def address_of(option: str, value: str) -> tuple[str, int]:
    """Return host and port of an option; UserError where they cannot be some."""
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"{option}={value} is no address; give host:port, such as 127.0.0.1:7463")
    return host, int(port)


def opened(connected: socket.socket, wait_s: float) -> Connection:
    """Return a connection whose reads and writes fail where the other side does nothing for so many seconds."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", max(1, round(wait_s)), 0))
    return Connection(connected.detach())


def send_object(connection: Connection, values: Mapping) -> None:
    connection.send_bytes(json.dumps(values).encode())


def send_values(connection: Connection, values: Tensor) -> None:
    """Send a contiguous tensor of the CPU."""
    for piece in _pieces(values):
        connection.send_bytes(piece)


def read_values(connection: Connection, out: Tensor) -> None:
    """Fill a contiguous tensor of the CPU. Raises ValueError or OSError where other sizes arrive."""
    for piece in _pieces(out):
        piece[:] = connection.recv_bytes(PIECE_BYTES)


def _pieces(values: Tensor) -> list[memoryview]:
    data = values.view(-1).view(torch.uint8).numpy().data
    return [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]


@dataclass
class Patience:
    """Repeats calls until a server answers, from any number of threads, and says once that it does not."""

    address: str
    timeout_s: float  # without an answer, until it gives up
    advice: str  # what to do then
    forget: Callable[[], None] = lambda: None  # called where there is no answer
    reached: bool = False  # whether it has ever answered; until then it is not waited for as long
    _gone_s: float | None = None  # since when there is no answer
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def retried(self, call: Callable[[], T]) -> T:
        """Return what a call does, which is repeated, after pauses that double, until it finds the server.

        Raises:
            UserError: there is none for `timeout_s`, or this process is to end.
        """
        (pause_s, longest_s), began_s = PAUSES_S, time.monotonic()
        while True:
            try:
                found = call()
            except (OSError, EOFError) as error:
                self._lost(error, began_s)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
                continue
            with self._lock:
                self.reached = True
                if self._gone_s is not None:
                    self._gone_s = None
                    log.info("%s answers again", self.address)
            return found

    def _lost(self, error: Exception, began_s: float) -> None:
        """Note that the server is gone since `began_s`; UserError where that is too long, or this process is to end."""
        limit_s = self.timeout_s if self.reached else min(CONNECT_S, self.timeout_s)
        why = getattr(error, "strerror", None) or "it has ended"
        self.forget()
        with self._lock:
            if self._gone_s is None:
                self._gone_s = began_s
                log.warning("%s does not answer (%s); it is asked again for %g s", self.address, why, limit_s)
            gone_s = time.monotonic() - self._gone_s
        if gone_s > limit_s or SIGNALS.first is not None:
            raise UserError(
                f"data.address={self.address} has not answered for {gone_s:.0f} s ({why}); {self.advice}"
            ) from error


@dataclass
class HiddenStates:
    """The server at an address, for any number of threads, each of which has one request under way.

    Raises:
        UserError: there is no such server, or it has another key; it is gone for `timeout_s`, has become another
            target's, or refuses a request.
    """

    address: str
    key: bytes
    timeout_s: float  # without an answer, until `features` gives up
    pinned: bool = False  # states lie in pinned memory, so that a GPU fetches them beside its work
    facts: dict = field(default_factory=dict)  # of the server, as it sends them
    _idle: list[Connection] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._patience = Patience(self.address, self.timeout_s, ADVICE, self._forget)
        self._idle.append(self._patience.retried(self._connected))

    def features(self, tokens: Tensor, starts: Tensor | None = None, layers: Sequence[int] = ()) -> Features:
        """Return the inputs [B, L, C, D] of blocks and the final states [B, L, D], bfloat16, of rows of tokens.

        tokens, starts: [B, L] int64, see `TargetModel.features`. A server that is gone is asked again, with pauses.
        """
        n_rows = max(1, self.facts["batch_tokens"] // tokens.shape[1])
        sent = zip(*[one.int().split(n_rows) for one in (tokens, starts) if one is not None], strict=True)
        found = [self._patience.retried(partial(self._ask, rows, list(layers))) for rows in sent]
        captured, final = (one[0] if len(one) == 1 else torch.cat(one) for one in zip(*found, strict=True))
        return Features(captured if len(layers) else None, final)

    def _forget(self) -> None:
        """Drop the idle connections, because their server is gone."""
        with self._lock:  # another thread may be about to take one
            self._idle.clear()

    def _ask(self, sent: Sequence[Tensor], layers: list[int]) -> tuple[Tensor, Tensor]:
        """Return captured and final states of rows, on a connection that is idle or new."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        connection = connection or self._connected()
        shape, width = list(sent[0].shape), self.facts["hidden_size"]
        send_object(connection, {"shape": shape, "layers": layers, "packed": len(sent) > 1})
        for values in sent:
            send_values(connection, values.contiguous())
        answer = json.loads(connection.recv_bytes(HEADER_BYTES))
        if "error" in answer:
            raise UserError(f"the server at {self.address} refuses rows: {answer['error']}")
        sizes = [sent[0].numel() * width * n for n in (len(layers), 1)]
        states = torch.empty(sum(sizes), dtype=torch.bfloat16, pin_memory=self.pinned)
        read_values(connection, states)
        with self._lock:
            self._idle.append(connection)
        captured, final = states.split(sizes)
        return captured.view(*shape, len(layers), width), final.view(*shape, width)

    def _connected(self) -> Connection:
        """Return a new connection, whose server has proven the key."""
        connected = socket.create_connection(address_of("data.address", self.address), CONNECT_S)
        connection = opened(connected, self.timeout_s)
        try:
            answer_challenge(connection, self.key)
            deliver_challenge(connection, self.key)
            facts = json.loads(connection.recv_bytes(HEADER_BYTES))
            if "busy" in facts:
                raise OSError(errno.EBUSY, facts["busy"])
        except AuthenticationError as error:
            raise UserError(f"the server at {self.address} has another key; give its {KEY}") from error
        except (AssertionError, ValueError, OSError) as error:  # as the challenge is read
            if isinstance(error, OSError) and BAD_LENGTH not in str(error):
                raise
            raise UserError(
                f"data.address={self.address} is no server of spectrain activations; give another"
            ) from error
        if facts["version"] != VERSION:
            raise UserError(f"the server at {self.address} is of another version of spectrain; use the same one")
        if self.facts and self.facts["target_fingerprint"] != facts["target_fingerprint"]:
            raise UserError(f"the server at {self.address} now has another target, {facts['target']}; start the former")
        self.facts = facts
        return connection


@dataclass(frozen=True, kw_only=True)
class ServedRows(TokenRows):
    """Rows of tokens, whose states a server computes when they are read."""

    server: HiddenStates  # or a `VllmStates`
    layers: tuple[int, ...]  # blocks of the target whose inputs are read

    def __getitem__(self, places: list[int]) -> RowBatch:
        batch = super().__getitem__(places)
        features = self.server.features(batch.tokens, batch.starts, self.layers)
        batch.captured, batch.final_hidden = features.captured, features.final_hidden
        return batch
