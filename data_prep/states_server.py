"""A server of hidden states: one process owns the target, and trainings with data=served ask it (docs/data.md).

`spectrain.training.served` is the other side, and says what goes over a connection. A thread per connection reads
requests and writes answers, one at a time, so a slow reader holds back its own answer and nobody else's. The main
thread alone runs the target. A request is a forward of its own, whose result no other request can change: what a
training reads does not depend on how busy the server is.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import torch
from pydantic import BaseModel, NonNegativeInt, PositiveInt
from torch import Tensor

from data_prep.capture import autocast
from spectrain.errors import UserError
from spectrain.stores.environment import free_files
from spectrain.target import fingerprint
from spectrain.target.device import is_out_of_memory
from spectrain.target.loading import first_line
from spectrain.target.target import TargetModel
from spectrain.training.served import HEADER_BYTES, VERSION, address_of, opened, read_values, send_object, send_values

log = logging.getLogger(__name__)

WAIT_S = 60.0  # for a client that has begun a message, or does not read its answer
MOST_CONNECTIONS = 256  # of clients with the key, of which each may hold one answer in memory
MOST_STRANGERS = 64  # connections that have not proven the key yet
KEPT_FILES = 32
MOST_ROW_TOKENS = 1 << 20
ACCEPT_PAUSE_S = 0.1


class Request(BaseModel, strict=True):
    """Rows of which a client asks the states; their tokens follow."""

    shape: tuple[PositiveInt, PositiveInt]  # [B, L]
    layers: list[NonNegativeInt]  # blocks whose inputs are wanted
    packed: bool  # whether `starts` follow, too


@dataclass
class StatesServer:
    """Answers requests for the hidden states of a target, until the process is asked to end."""

    target: TargetModel
    name: str  # of the target
    precision: str  # of the forward, see `autocast`
    batch_tokens: int  # the most tokens of a request of several rows
    key: bytes
    _waiting: queue.Queue[tuple[tuple, Future]] = field(default_factory=queue.Queue)
    _strangers: dict[str, Connection] = field(default_factory=dict)  # by address, the oldest first
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._most = max(1, min(MOST_CONNECTIONS, free_files() - MOST_STRANGERS - KEPT_FILES))
        self._slots = threading.Semaphore(self._most)
        self.facts = {
            "version": VERSION,
            "target": self.name,
            "target_fingerprint": fingerprint(self.target.model, self.target.tokenizer),
            "target.dtype": str(self.target.dtype).removeprefix("torch."),
            "trainer.precision": self.precision,
            "hidden_size": self.target.unembedding.shape[-1],
            "batch_tokens": self.batch_tokens,
        }

    def run(self, listener: socket.socket) -> None:
        """Serve in this thread, which signals interrupt, and in daemons."""
        threading.Thread(target=self._accept, args=[listener], daemon=True).start()
        while True:
            request, answer = self._waiting.get()
            try:
                answer.set_result(self._states(*request))
            except Exception as error:  # of one request, whose client is told
                answer.set_exception(error)

    @torch.inference_mode()
    def _states(self, layers: list[int], tokens: Tensor, starts: Tensor | None = None) -> list[Tensor]:
        """Return the inputs [B, L, C, D] of blocks, if any, and the final states [B, L, D] of rows [B, L] int32."""
        target, device = self.target.with_capture(layers), self.target.device
        with autocast(device, self.precision):
            found = target.features(tokens.long().to(device), None if starts is None else starts.long().to(device))
        return [one for one in (found.captured, found.final_hidden) if one is not None]

    def _accept(self, listener: socket.socket) -> None:
        while listener.fileno() >= 0:
            try:
                connected, (host, port, *_) = listener.accept()
                connection = opened(connected, WAIT_S)
            except OSError:  # the client has left already, or this process has no file descriptor for it
                time.sleep(ACCEPT_PAUSE_S)
                continue
            peer = f"{host}:{port}"
            with self._lock:
                self._strangers[peer] = connection
                if len(self._strangers) > MOST_STRANGERS:  # the oldest one's place goes to the new one
                    oldest = self._strangers.pop(next(iter(self._strangers)))
                    with suppress(OSError), socket.socket(fileno=os.dup(oldest.fileno())) as ended:
                        ended.shutdown(socket.SHUT_RDWR)
            threading.Thread(target=self._attend, args=[connection, peer], daemon=True).start()

    def _attend(self, connection: Connection, peer: str) -> None:
        """Answer a client until it leaves, if it has the key and there is a place for it."""
        try:
            with connection:
                try:
                    deliver_challenge(connection, self.key)
                    answer_challenge(connection, self.key)
                finally:
                    with self._lock:
                        self._strangers.pop(peer, None)
                if not self._slots.acquire(blocking=False):
                    return send_object(connection, {"busy": f"all its {self._most} connections are taken"})
                try:
                    send_object(connection, self.facts)
                    while connection.poll(None):
                        self._answer(connection)
                finally:
                    self._slots.release()
        except (AuthenticationError, ValueError) as error:
            log.warning("%s is refused: %s", peer, first_line(error))
        except (OSError, EOFError, AssertionError) as error:  # AssertionError: of its challenge
            log.debug("%s has left: %s", peer, error)

    def _answer(self, connection: Connection) -> None:
        """Read a request and answer it. Raises ValueError for nonsense, and where the client is told what is wrong."""
        request = Request.model_validate_json(connection.recv_bytes(HEADER_BYTES))
        sent: list[Tensor] = []
        why = self._why_not(request)
        if why is None:
            sent = [torch.empty(request.shape, dtype=torch.int32) for _ in range(1 + request.packed)]
            for one in sent:
                read_values(connection, one)
            why = self._why_not_rows(*sent)
        if why is None:
            answer: Future[list[Tensor]] = Future()
            self._waiting.put(((request.layers, *sent), answer))
            try:
                states = torch.cat([one.bfloat16().cpu().flatten() for one in answer.result()])
            except Exception as error:
                why = f"a forward over {list(request.shape)} tokens failed ({first_line(error)})"
                if is_out_of_memory(error):
                    why += "; lower the server's batch_tokens, or data.row_tokens"
        if why is not None:
            send_object(connection, {"error": why})
            raise ValueError(why)
        send_object(connection, {})
        send_values(connection, states)

    def _why_not(self, request: Request) -> str | None:
        (n_rows, n_tokens), layers = request.shape, request.layers
        most = min(self.target.max_positions, MOST_ROW_TOKENS)
        if n_tokens > most or n_rows > max(1, self.batch_tokens // n_tokens):
            return f"{n_rows} rows of {n_tokens} tokens exceed batch_tokens={self.batch_tokens}, or {most} per row"
        if len(layers) > self.target.n_layer or max(layers, default=0) >= self.target.n_layer:
            return f"layers={layers} are no blocks of {self.name}, which has {self.target.n_layer}"
        return None

    def _why_not_rows(self, tokens: Tensor, starts: Tensor | None = None) -> str | None:
        if tokens.min() < 0 or tokens.max() >= self.target.vocab_size:
            return f"a token is outside the vocabulary of {self.target.vocab_size}"
        if starts is not None:  # each token's document begins with it, or where that of the token before does
            begins = starts == torch.arange(starts.shape[1])
            if not (begins[:, 0].all() and (begins[:, 1:] | (starts[:, 1:] == starts[:, :-1])).all()):
                return "`starts` are no beginnings of documents"
        return None


def listen_at(listen: str) -> socket.socket:
    """Return a socket that listens; UserError where it cannot."""
    try:
        return socket.create_server(address_of("listen", listen))
    except OSError as error:
        raise UserError(
            f"listen={listen} cannot be listened at ({error.strerror.split(' (')[0]}); give another host:port"
        ) from error
