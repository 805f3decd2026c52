"""A server in this process, of a tiny target that chats."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
from openai import OpenAI

from spectrain import load_method, load_target
from spectrain.decoding import Sampling
from spectrain.methods.autoregressive import Autoregressive
from spectrain.serve import Server, bound, listen, port_of
from spectrain.serving.access import Access
from spectrain.serving.service import Limits, Service
from spectrain.serving.worker import open_worker

TEMPLATE = (
    "{% if tools %}tools {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}{{ raise_exception('no') if m['content'] == 'refuse' }}"
    "<{{ m['role'] }}>{{ m['content'] }}\n"
    "{% endfor %}<assistant>"
)
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
HELLO = [{"role": "user", "content": "Hello"}]
ROWS = 4


class Gate(Autoregressive):
    """Plain decoding, in steps that take long while the gate is closed."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def propose(self, context):
        self.open.wait(0.2)
        return super().propose(context)


@dataclass
class Served:
    """A running server, and what stands behind it."""

    service: Service
    url: str
    gate: Gate

    def client(self, **options) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **options})

    def http(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **options)

    def socket(self, content: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
        """Connect a client that reads little, and send this."""
        client = socket.socket()
        client.settimeout(10)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.bind((source, 0))
        client.connect(("127.0.0.1", int(self.url.rpartition(":")[2])))
        client.sendall(content)
        return client

    def chat(self, **fields):
        """Ask for a greedy answer of 40 tokens."""
        own = {name: fields.pop(name) for name in ("method", "annotate", "top_k", "min_p") if name in fields}
        asked = {"model": "tiny", "messages": HELLO, "max_tokens": 40, "temperature": 0, "extra_body": own} | fields
        return self.client().chat.completions.create(**asked)

    def complete(self, **fields):
        own = {name: fields.pop(name) for name in ("method", "return_token_ids") if name in fields}
        asked = {"model": "tiny", "prompt": "def read", "max_tokens": 40, "temperature": 0, "extra_body": own} | fields
        return self.client().completions.create(**asked)


@contextmanager
def serving(
    folder, limits: Limits | None = None, access: Access | None = None, traffic=None, send_buffer: int | None = None
) -> Iterator[Served]:
    """Serve the target of a folder by the methods plain, pld and gate.

    The system keeps `send_buffer` bytes for a client that does not read.
    """
    target, gate = load_target(folder), Gate()
    target.tokenizer.chat_template = TEMPLATE
    methods = {"plain": Autoregressive(), "pld": load_method("pld", target), "gate": gate}
    worker = open_worker(target, methods, ROWS, memory=0.2)
    traffic = traffic and traffic(target)
    service = Service(worker, target, "tiny", Sampling(temperature=1.0), limits or Limits(), traffic)
    listener = bound("127.0.0.1", 0)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    listen(listener, 0)
    url = f"http://127.0.0.1:{port_of(listener)}"
    server = Server(service, access or Access())
    thread = threading.Thread(target=server.run, args=[[listener]])
    thread.start()
    try:
        yield Served(service, url, gate)
    finally:
        gate.open.set()
        server.should_exit = True
        thread.join()
        worker.close()
        if traffic:
            traffic.close()


def asking(body: dict) -> bytes:
    """Return a request with the key "secret"."""
    content = json.dumps(body).encode()
    return POST + b"Authorization: Bearer secret\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)


@dataclass
class Stream:
    """What a stream said, put together."""

    text: str = ""
    parts: list[str] = field(default_factory=list)
    finish_reason: str | None = None


def read(chunks) -> Stream:
    """Read a chat's stream of one choice."""
    stream = Stream()
    for chunk in chunks:
        for choice in chunk.choices:
            stream.parts.append(choice.delta.content or "")
            stream.finish_reason = choice.finish_reason or stream.finish_reason
    stream.text = "".join(stream.parts)
    return stream
