"""A server of hidden states: one process owns the target, and trainings with data=served ask it (docs/data.md).

`spectrain.training.served` is the other side, and says what goes over a connection. A thread per connection reads
requests and writes answers, one at a time; the main thread alone runs the target, request by request as they come. A
request is one forward of its own, whose result no other request can change: what a training reads does not depend on
how busy the server is. A slow reader holds back its own answer and nobody else's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import socket
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import torch
from torch import Tensor

from data_prep.capture import autocast
from spectrain.decoding import fingerprint
from spectrain.decoding.loading import first_line
from spectrain.decoding.memory import is_out_of_memory
from spectrain.decoding.target import Features, TargetModel
from spectrain.errors import UserError
from spectrain.training.served import (
    VERSION,
    address_of,
    bytes_of,
    opened,
    read_object,
    read_values,
    send_object,
    send_values,
)

log = logging.getLogger(__name__)

WAIT_S = 60.0  # for a client that has begun a message, or does not read its answer
MOST_CONNECTIONS = 256  # of which each may hold one answer in memory
MOST_ROW_TOKENS = 1 << 20
ACCEPT_PAUSE_S = 0.1


@dataclass(frozen=True)
class Request:
    """Rows of which a client asks the states."""

    tokens: Tensor  # [B, L] int64
    starts: Tensor | None  # [B, L] int64
    layers: tuple[int, ...]
    mapped: bool  # whether the client reads the answer from memory


@dataclass
class StatesServer:
    """Answers requests for the hidden states of a target, until the process is asked to end."""

    target: TargetModel
    name: str  # of the target
    precision: str  # of the forward, see `autocast`
    batch_tokens: int  # the most tokens of a request of several rows
    key: bytes
    _waiting: queue.Queue[tuple[Request, Future]] = field(default_factory=queue.Queue)
    _connections: set[Connection] = field(default_factory=set)

    def __post_init__(self) -> None:
        target = self.target
        self.facts = {
            "version": VERSION,
            "target": self.name,
            "target_fingerprint": fingerprint(target.model, target.tokenizer),
            "target.dtype": str(target.dtype).removeprefix("torch."),
            "trainer.precision": self.precision,
            "hidden_size": target.unembedding.shape[-1],
            "batch_tokens": self.batch_tokens,
        }

    def run(self, listener: socket.socket) -> None:
        """Serve in this thread, which signals interrupt, and in daemons."""
        threading.Thread(target=self._accept, args=[listener], daemon=True).start()
        while True:
            request, answer = self._waiting.get()
            try:
                answer.set_result(self._features(request))
            except Exception as error:  # of one request, whose client is told
                answer.set_exception(error)

    @torch.inference_mode()
    def _features(self, request: Request) -> Features:
        target, device = self.target.with_capture(request.layers), self.target.device
        starts = None if request.starts is None else request.starts.to(device)
        with autocast(device, self.precision):
            return target.features(request.tokens.to(device), starts)

    def _accept(self, listener: socket.socket) -> None:
        while listener.fileno() >= 0:
            try:
                connected, (host, port, *_) = listener.accept()
                if len(self._connections) == MOST_CONNECTIONS:
                    connected.close()
                    continue
                connection = opened(connected, WAIT_S)
            except OSError:  # the client has left already, or this process has no file descriptor for it
                time.sleep(ACCEPT_PAUSE_S)
                continue
            self._connections.add(connection)
            threading.Thread(target=self._attend, args=[connection, f"{host}:{port}"], daemon=True).start()

    def _attend(self, connection: Connection, peer: str) -> None:
        """Answer a client until it leaves."""
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            with new_memory() as memory:
                nonce = secrets.token_bytes(16)
                os.pwrite(memory.fileno(), nonce, 0)
                send_object(connection, self.facts | {"memory": [os.getpid(), memory.fileno(), nonce.hex()]})
                log.debug("%s has connected", peer)
                while connection.poll(None):
                    self._answer(connection, memory.fileno())
        except (AuthenticationError, AssertionError, ValueError) as error:  # AssertionError: of its challenge
            log.warning("%s is refused: %s", peer, error)
        except (OSError, EOFError) as error:
            log.debug("%s has left: %s", peer, error)
        finally:
            self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: Connection, memory: int) -> None:
        request, answer = self._read(connection), Future()
        self._waiting.put((request, answer))
        try:
            features = answer.result()
        except Exception as error:
            said = f"a forward of {list(request.tokens.shape)} tokens failed ({first_line(error)})"
            if is_out_of_memory(error):
                said += "; lower the server's batch_tokens, or data.row_tokens"
            log.warning("%s", said)
            send_object(connection, {"error": said})
            return
        found = [
            one.bfloat16().cpu().contiguous() for one in (features.captured, features.final_hidden) if one is not None
        ]
        place = 0
        for values in found if request.mapped else ():
            data = bytes_of(values)
            while data:
                n_written = os.pwrite(memory, data, place)
                data, place = data[n_written:], place + n_written
        send_object(connection, {})
        for values in () if request.mapped else found:
            send_values(connection, values)

    def _read(self, connection: Connection) -> Request:
        """Read a request. One that cannot be answered is told so; then, and for nonsense, ValueError is raised."""
        values = read_object(connection)
        shape, layers, packed, mapped = (values.get(name) for name in ("shape", "layers", "packed", "mapped"))
        if not (are_whole(shape) and len(shape) == 2 and are_whole(layers)):
            raise ValueError("a request has no shape and layers")
        (n_rows, n_tokens), why = shape, None
        most = min(self.target.max_positions, MOST_ROW_TOKENS)
        if not (0 < n_tokens <= most and 0 < n_rows <= max(1, self.batch_tokens // n_tokens)):
            why = f"{n_rows} rows of {n_tokens} tokens exceed batch_tokens={self.batch_tokens} or its {most} positions"
        elif not (len(layers) <= self.target.n_layer and all(layer < self.target.n_layer for layer in layers)):
            why = f"layers={layers} are no blocks of {self.name}, which has {self.target.n_layer}"
        if why is None:
            sent = [torch.empty(shape, dtype=torch.int32) for _ in range(2 if packed else 1)]
            for one in sent:
                read_values(connection, one)
            tokens, *starts = (one.long() for one in sent)
            if tokens.min() < 0 or tokens.max() >= self.target.vocab_size:
                why = f"a token is outside the vocabulary of {self.target.vocab_size}"
            elif starts and not are_starts(*starts):
                why = "`starts` are no beginnings of documents"
        if why is not None:
            send_object(connection, {"error": why})
            raise ValueError(why)
        return Request(tokens, starts[0] if starts else None, tuple(layers), bool(mapped))


def listen_at(listen: str) -> socket.socket:
    """Return a socket that listens; UserError where it cannot."""
    try:
        return socket.create_server(address_of("listen", listen))
    except OSError as error:
        raise UserError(f"listen={listen} cannot be listened at ({error.strerror}); give another host:port") from error


def new_memory() -> contextlib.AbstractContextManager:
    """Return a file in memory, which has no name and ends with this process; a temporary one where there are none."""
    if not hasattr(os, "memfd_create"):
        return tempfile.TemporaryFile(buffering=0)
    return open(os.memfd_create("spectrain"), "r+b", buffering=0)


def are_whole(values: object) -> bool:
    """Return whether this is a list of whole numbers of at least 0."""
    return isinstance(values, list) and all(type(one) is int and one >= 0 for one in values)


def are_starts(starts: Tensor) -> bool:
    """Return whether [B, L] says where the document of each token begins: at itself, or where that before it does."""
    places = torch.arange(starts.shape[1]).expand_as(starts)
    begins = starts == places
    return bool(begins[:, 0].all() and (begins[:, 1:] | (starts[:, 1:] == starts[:, :-1])).all())
