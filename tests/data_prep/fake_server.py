"""An OpenAI-compatible server in a thread, which answers as a test wants."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODELS = {"object": "list", "data": [{"id": "tiny"}]}


def completion(**choice) -> dict:
    return {"object": "text_completion", "choices": [{"text": "", "finish_reason": "stop", **choice}]}


class FakeServer(ThreadingHTTPServer):
    """`reply(body, n)` answers the n-th POST of this prompt, n from 0: a JSON value, or (status, headers, bytes)."""

    daemon_threads = True

    def __init__(self, reply: Callable[[dict, int], object], models: object = MODELS):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply, self.models = reply, models
        self.requests: list[tuple[float, dict]] = []  # when, what was posted
        self.headers: list[dict] = []
        self.lock = threading.Lock()
        self.open = self.most_open = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send(self.server.models if self.path == "/v1/models" else (404, {}, b"not found"))

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with server.lock:
            earlier = sum(posted["prompt"] == body["prompt"] for _, posted in server.requests)
            server.requests.append((time.monotonic(), body))
            server.headers.append({name.lower(): value for name, value in self.headers.items()})
            server.open += 1
            server.most_open = max(server.most_open, server.open)
        answer = server.reply(body, earlier) if self.path == "/v1/completions" else (404, {}, b"not found")
        with server.lock:
            server.open -= 1
        self.send(answer)

    def send(self, answer: object) -> None:
        given = answer if isinstance(answer, tuple) else (200, {}, json.dumps(answer).encode())
        status, headers, content = given
        self.send_response(status)
        for name, value in ({"content-length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def serving(reply: Callable[[dict, int], object], models: object = MODELS):
    """A running FakeServer."""
    server = FakeServer(reply, models)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
