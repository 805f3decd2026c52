"""Hidden states of a target that another process owns: `python -m data_prep.activations serve=true` (docs/data.md).

    server = HiddenStates("127.0.0.1:7463", key(), timeout_s=300)
    features = server.features(tokens, starts, layers=(6, 7))

The server keeps nothing between two requests: a trainer, which owns the order of its rows, sends tokens and gets what
its own target would say of them. So a restart of either side can neither lose nor double a row. A connection has one
request under way, and each thread that reads rows has a connection.

After the challenges of `multiprocessing.connection`, by which both sides prove the key, messages are JSON objects and
raw values, never pickles:

    server: {"version", "target", "target_fingerprint", .., "memory": [pid, file, nonce]}
    client: {"shape": [B, L], "layers": [6, 7], "packed": false, "mapped": true}   tokens [B, L] int32 (and starts)
    server: {}   captured [B, L, C, D] bfloat16 (if C > 0), final_hidden [B, L, D] bfloat16      or {"error": sentence}

A client that can open the server's memory file is on the same machine, and reads the values there.

`features` is all that a training calls, so that an engine can stand behind it. vLLM's `extract_hidden_states` is near:
layer ids count as ours do (i is the input of block i, and n_layer the last block's output), and a request of a
document's ids with max_tokens=1 is answered with the path of a safetensors file, `hidden_states` [L, C, D]. An adapter
sends one request per packed document, reads that file, and applies the final norm, in front of which vLLM captures. The
server is started with the drafter's layers and without prefix caching, as cached tokens have no states.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import torch
from torch import Tensor

from spectrain.decoding.target import Features
from spectrain.errors import UserError
from spectrain.stores.signals import SIGNALS
from spectrain.training.data import RowBatch, TokenRows

log = logging.getLogger(__name__)

VERSION = 1
KEY = "SPECTRAIN_KEY"
HEADER_BYTES = 1 << 14  # the most of a JSON object
PIECE_BYTES = 1 << 20  # of values in one message
CONNECT_S = 10.0  # of a first connection, too: a server that is down when a training starts is reported within seconds
PAUSES_S = (0.1, 2.0)  # between two attempts, from the first to the longest
HOW_TO_SERVE = "python -m data_prep.activations serve=true target=..."


def key() -> bytes:
    """Return the key that server and trainers share, from the environment, where no process list shows it."""
    if not os.environ.get(KEY):
        raise UserError(f"the environment variable {KEY} is not set; set it to a secret that server and trainers share")
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


def read_object(connection: Connection) -> dict:
    """Read a JSON object. Raises ValueError for anything else, OSError for what says that it is too long."""
    values = json.loads(connection.recv_bytes(HEADER_BYTES))
    if not isinstance(values, dict):
        raise ValueError("a message is no JSON object")
    return values


def send_values(connection: Connection, values: Tensor) -> None:
    """Send a contiguous tensor of the CPU."""
    data = bytes_of(values)
    for start in range(0, len(data), PIECE_BYTES):
        connection.send_bytes(data[start : start + PIECE_BYTES])


def read_values(connection: Connection, out: Tensor) -> None:
    """Fill a contiguous tensor of the CPU. Raises ValueError or OSError where other sizes arrive."""
    data = bytes_of(out)
    for start in range(0, len(data), PIECE_BYTES):
        data[start : start + PIECE_BYTES] = connection.recv_bytes(PIECE_BYTES)


def bytes_of(values: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of the CPU."""
    return values.view(-1).view(torch.uint8).numpy().data


@dataclass
class HiddenStates:
    """The server at an address, for any number of threads.

    Raises:
        UserError: there is no such server, or it has another key; while it runs, it has been gone for `timeout_s`, has
            become another target's, or refuses a request.
    """

    address: str
    key: bytes
    timeout_s: float  # without an answer, until `features` gives up
    pinned: bool = False  # states lie in pinned memory, so that a GPU fetches them beside its work
    facts: dict = field(init=False)  # of the server, as it sends them
    _idle: list[tuple[Connection, FileIO | None]] = field(default_factory=list)  # with the server's memory
    _gone_s: float | None = None  # since when there is no answer
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        try:
            connection = self._connected()
        except (OSError, EOFError) as error:
            raise UserError(
                f"data.address={self.address} does not answer ({_said(error)}); start the server with {HOW_TO_SERVE}, "
                "or give its address"
            ) from error
        self._idle.append(connection)

    def features(self, tokens: Tensor, starts: Tensor | None = None, layers: Sequence[int] = ()) -> Features:
        """Return the inputs [B, L, C, D] of blocks and the final states [B, L, D], bfloat16, of rows of tokens.

        tokens, starts: [B, L] int64, see `TargetModel.features`. A server that is gone is asked again, with pauses.
        """
        width, pinned = self.facts["hidden_size"], self.pinned
        final = torch.empty(*tokens.shape, width, dtype=torch.bfloat16, pin_memory=pinned)
        captured = final.new_empty(*tokens.shape, len(layers), width, pin_memory=pinned) if len(layers) else None
        n_rows = max(1, self.facts["batch_tokens"] // tokens.shape[1])
        for start in range(0, len(tokens), n_rows):
            rows = slice(start, start + n_rows)
            sent = [one[rows].int().contiguous() for one in (tokens, starts) if one is not None]
            self._ask(sent, layers, [one[rows] for one in (captured, final) if one is not None])
        return Features(captured, final)

    def _ask(self, sent: list[Tensor], layers: Sequence[int], out: list[Tensor]) -> None:
        """Fill tensors with what the server answers, however often it must be asked."""
        pause_s, longest_s = PAUSES_S
        while True:
            with self._lock:
                connected = self._idle.pop() if self._idle else None
            try:
                connected = connected or self._connected()
                self._exchange(*connected, sent, layers, out)
            except (OSError, EOFError) as error:
                self._lost(error)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
                continue
            with self._lock:
                self._idle.append(connected)
                if self._gone_s is not None:
                    self._gone_s = None
                    log.info("%s answers again", self.address)
            return

    def _exchange(
        self,
        connection: Connection,
        memory: FileIO | None,
        sent: list[Tensor],
        layers: Sequence[int],
        out: list[Tensor],
    ) -> None:
        shape, mapped = list(sent[0].shape), memory is not None
        send_object(connection, {"shape": shape, "layers": list(layers), "packed": len(sent) > 1, "mapped": mapped})
        for values in sent:
            send_values(connection, values)
        answer = read_object(connection)
        if "error" in answer:
            raise UserError(f"the server at {self.address} refuses rows: {answer['error']}")
        place = 0
        for values in out:
            if memory is None:
                read_values(connection, values)
                continue
            data, done = bytes_of(values), 0
            while done < len(data):
                n_read = os.preadv(memory.fileno(), [data[done:]], place + done)
                if not n_read:
                    raise EOFError("its memory is too short")
                done += n_read
            place += done

    def _connected(self) -> tuple[Connection, FileIO | None]:
        """Return a new connection, with the server's memory where it is on this machine."""
        connected = socket.create_connection(address_of("data.address", self.address), CONNECT_S)
        connection = opened(connected, self.timeout_s)
        try:
            answer_challenge(connection, self.key)
            deliver_challenge(connection, self.key)
            facts = read_object(connection)
        except AuthenticationError as error:
            raise UserError(f"the server at {self.address} has another key; give its {KEY}") from error
        except (AssertionError, ValueError) as error:  # as the challenge is read
            raise UserError(
                f"data.address={self.address} is no server of data_prep.activations; give another"
            ) from error
        memory = _mapped(facts.pop("memory", None))
        if facts.get("version") != VERSION:
            raise UserError(f"the server at {self.address} is of another version of spectrain; use the same one")
        before = getattr(self, "facts", facts)
        if before["target_fingerprint"] != facts["target_fingerprint"]:
            raise UserError(f"the server at {self.address} now has another target, {facts['target']}; start the former")
        self.facts = facts
        return connection, memory

    def _lost(self, error: Exception) -> None:
        """Note that the server is gone; UserError where it has been for too long, or this process is to end."""
        with self._lock:
            self._idle.clear()
            if self._gone_s is None:
                self._gone_s = time.monotonic()
                log.warning("%s does not answer (%s); asked again for %g s", self.address, _said(error), self.timeout_s)
            gone_s = time.monotonic() - self._gone_s
        if gone_s > self.timeout_s or SIGNALS.first is not None:
            raise UserError(
                f"data.address={self.address} has not answered for {gone_s:.0f} s; start the server again, then give "
                "the same command"
            ) from error


@dataclass(frozen=True, kw_only=True)
class ServedRows(TokenRows):
    """Rows of tokens, whose states a server computes when they are read."""

    server: HiddenStates
    layers: tuple[int, ...]  # blocks of the target whose inputs are read

    def __getitem__(self, places: list[int]) -> RowBatch:
        batch = super().__getitem__(places)
        features = self.server.features(batch.tokens, batch.starts, self.layers)
        batch.captured, batch.final_hidden = features.captured, features.final_hidden
        return batch


def _mapped(memory: Sequence | None) -> FileIO | None:
    """Return the server's memory file, opened; None: the server is on another machine, or hides it."""
    try:
        pid, number, nonce = memory
        found = FileIO(f"/proc/{pid:d}/fd/{number:d}", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))
        return found if os.pread(found.fileno(), HEADER_BYTES, 0) == bytes.fromhex(nonce) else None
    except (OSError, TypeError, ValueError):
        return None


def _said(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
