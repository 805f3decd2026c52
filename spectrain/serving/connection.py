"""A connection of a client, and what it may cost: bytes, time and a place among all connections.

Whatever a stranger does ends at one of these limits, before the key is checked or after it. One timer runs until the
headers of the next request are complete. A second one runs until the client has taken the answer. Arriving bytes extend
neither.
"""

from __future__ import annotations

import asyncio
from collections import deque

from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from spectrain.serving.protocol import ApiError

HEAD_BYTES = 1 << 16  # of headers; what surrounds a body (sizes of chunks, trailers) may exceed the body by as much
MOST_HEADERS = 256
PIECE_BYTES = 64  # average size that chunks of a body must have, after about the first 1,000 chunks
MOST_PIPELINED = 4  # requests that are sent before the first one is answered
UNREADABLE = ApiError(400, "this is no HTTP/1.1 that can be read")
TOO_LONG = ApiError(431, f"the headers exceed {HEAD_BYTES} bytes or {MOST_HEADERS} lines, or chunks are too small")
LINGER_S = 2.0  # for a client to stop sending and read why it is refused


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits.

    Args:
        request_s: from complete headers until the answer was taken.
        most: connections of the server. A new one beyond them takes the place of that which has waited the longest
            without a whole request.
    """

    def __init__(self, *args: object, request_s: float, most: int, **options: object) -> None:
        super().__init__(*args, **options)
        self.request_s, self.most = request_s, most
        self._why = UNREADABLE  # of the next refusal
        self._n_around = self._n_body = self._n_pieces = 0  # bytes around a message's body, its own, and its pieces
        self._is_refused = False
        self._waits_since = 0.0
        self._cycles: deque[RequestResponseCycle] = deque()  # whose answers are not complete
        self._end: asyncio.TimerHandle | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether no request is being answered."""
        return self._is_refused or self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._end_within(self.timeout_keep_alive)
        others = [one for one in self.connections if not one.transport.is_closing()]
        if len(others) > self.most:
            waiting = [one for one in others if one.is_waiting or one.cycle.more_body]
            min(waiting, key=lambda one: one._waits_since).transport.abort()  # perhaps this one

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.cancel()
        for cycle in self._cycles:  # of which uvicorn tells the last only
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._n_around += len(data)
        super().data_received(data)
        if self._n_around > HEAD_BYTES + self._n_body and not self._is_refused:
            self._refuse(TOO_LONG)

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MOST_PIPELINED:
            raise ValueError  # which refuses the connection, as other errors of the parser do
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MOST_HEADERS:
            self._why = TOO_LONG
            raise ValueError

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > HEAD_BYTES:
            self._why = TOO_LONG
            raise ValueError
        was_waiting = self.is_waiting
        super().on_headers_complete()
        self._cycles.append(self.cycle)
        if was_waiting:
            self._end_within(self.request_s)

    def on_body(self, body: bytes) -> None:
        self._n_around -= len(body)
        self._n_body += len(body)
        self._n_pieces += 1
        if self._n_pieces * PIECE_BYTES > HEAD_BYTES + self._n_body:
            self._why = TOO_LONG
            raise ValueError
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._n_around = self._n_body = self._n_pieces = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        is_read = not self.cycle.more_body
        self._cycles.popleft()
        super().on_response_complete()
        waiting_s = self.timeout_keep_alive if is_read else LINGER_S
        self._end_within(waiting_s if self.is_waiting else self.request_s)

    def shutdown(self) -> None:
        super().shutdown()
        if self.is_waiting:  # perhaps for the client to read the rest of an answer
            self._end_within(LINGER_S)

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._why)

    def _refuse(self, error: ApiError) -> None:
        """Say why nothing more is read. What still arrives is dropped, so that the client comes to read this."""
        self._is_refused, is_answering = True, self.pipeline or (self.cycle and self.cycle.response_started)
        if is_answering and not self.cycle.response_complete:  # another answer cannot begin
            return self.transport.abort()
        if self.cycle is not None:  # which the application takes for a client that has left
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = to_json(error.body)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.write_eof()
        self.flow.resume_reading()
        self._end_within(LINGER_S)

    def _end_within(self, seconds: float) -> None:
        """Close the connection after this time, whether the client has taken all bytes or not."""
        if self._end is not None:
            self._end.cancel()
        self._waits_since = self.loop.time()
        self._end = self.loop.call_later(seconds, self.transport.abort)
