"""Clients that misbehave, each kind in a way of its own, in a process of their own.

    python scripts/strangers.py http://127.0.0.1:8000 "half of the headers" 64 40

sends 64 of a kind for 40 s and prints what they got. scripts/bench_serving.py does it for all (--strangers, --soak). A
kind sends pieces of bytes with pauses, and reads or does not. It leaves when the server closes the connection, or
after a given time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from random import Random
from urllib.parse import urlsplit

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
PIECE = b"x" * 2**16
TRICKLE_S = 0.25
SEEN_BYTES = 4096  # of an answer, that are kept


@dataclass(frozen=True)
class Stranger:
    """What a kind of client sends, of which None is the end of its side."""

    sent: Callable[[], Iterable[bytes | None]]
    pause_s: float = 0.0  # after each piece but the first
    reads: bool = True
    reads_bytes: int | None = None  # after which it leaves


@cache
def posted(item: bytes, count: int) -> bytes:
    return posting(b'{"prompt":[' + b",".join([item] * count) + b"]}")


def asking(**fields: object) -> bytes:
    return posting(json.dumps({"prompt": "def f(", "temperature": 0, **fields}).encode())


def posting(body: bytes) -> bytes:
    return POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def endless(first: bytes, piece: bytes) -> Callable[[], Iterable[bytes]]:
    return lambda: itertools.chain([first], itertools.repeat(piece))


LARGE = {"max_tokens": 900, "logprobs": 20}  # nearly 2 MB
STRANGERS = {
    "silent": Stranger(lambda: []),
    "half of the headers": Stranger(lambda: [GET]),
    "headers that trickle": Stranger(endless(GET + b"X: ", b"x"), TRICKLE_S),
    "headers of 30 MiB": Stranger(lambda: [GET + b"X: ", *[PIECE] * 480]),
    "many small headers": Stranger(endless(GET, b"a:\r\n" * 4096)),
    "body that trickles": Stranger(endless(POST + b"Content-Length: 1000000\r\n\r\n" + PIECE * 14, b" "), TRICKLE_S),
    "chunked body without an end": Stranger(endless(CHUNKED, b"10000\r\n" + PIECE + b"\r\n")),
    "tiny chunks": Stranger(endless(CHUNKED, b"1\r\nx\r\n" * 4096)),
    "chunk extension": Stranger(endless(CHUNKED + b"1;", PIECE)),
    "trailers": Stranger(endless(CHUNKED + b"0\r\n", b"a: b\r\n" * 4096)),
    "two lengths": Stranger(lambda: [POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx"]),
    "negative length": Stranger(lambda: [POST + b"Content-Length: -1\r\n\r\n"]),
    "garbage": Stranger(lambda: [Random(0).randbytes(2**16)]),
    "TLS": Stranger(lambda: [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + Random(0).randbytes(512)]),
    "websocket": Stranger(lambda: [GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n", PIECE]),
    "pipelined requests": Stranger(endless(b"", (GET + b"\r\n") * 1024)),
    "250,000 prompts": Stranger(lambda: [posted(b'"a"', 250_000)]),
    "260,000 lists": Stranger(lambda: [posted(b"[1]", 260_000)]),
    "prompt of 1 MB": Stranger(lambda: [asking(prompt="a b " * 250_000)]),
    "n=80": Stranger(lambda: [asking(n=80, max_tokens=64)]),
    "half-closes": Stranger(lambda: [asking(max_tokens=32), None]),
    "leaves within an answer": Stranger(lambda: [asking(stream=True, max_tokens=256)], reads_bytes=1000),
    "does not read a stream": Stranger(lambda: [asking(stream=True, **LARGE)], reads=False),
    "does not read an answer": Stranger(lambda: [asking(**LARGE)], reads=False),
}


async def meet(url: str, kind: str, seconds: float) -> str:
    """Be a client of this kind. Return what the server did."""
    stranger, address, began, seen = STRANGERS[kind], urlsplit(url), time.monotonic(), bytearray()
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=2**14)

    async def send() -> None:
        for number, piece in enumerate(stranger.sent()):
            if piece is None:
                writer.write_eof()
            else:
                writer.write(piece)
                await writer.drain()
            await asyncio.sleep(stranger.pause_s * (number > 0))

    async def read() -> None:
        n_read = 0
        while part := await reader.read(2**16):
            n_read += len(part)
            seen.extend(part[: SEEN_BYTES - len(seen)])
            if n_read >= (stranger.reads_bytes or float("inf")):
                return

    sending, reading = (
        asyncio.create_task(send()),
        asyncio.create_task(read() if stranger.reads else asyncio.sleep(1e6)),
    )
    done, _ = await asyncio.wait([reading], timeout=seconds)
    for task in (sending, reading):
        task.cancel()
    await asyncio.gather(sending, reading, return_exceptions=True)
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()
    status = bytes(seen[9:12]).decode() if seen.startswith(b"HTTP/1.1 ") else "nothing"
    return f"{status}, {'closed' if done else 'open'} after {round((time.monotonic() - began) / 5) * 5} s"


async def meet_many(url: str, kind: str, count: int, seconds: float) -> list[str]:
    return await asyncio.gather(*[meet(url, kind, seconds) for _ in range(count)])


async def meet_elsewhere(url: str, kind: str, count: int, seconds: float) -> list[str]:
    """Be so many of them in another process, which keeps nobody here from measuring."""
    typed = [sys.executable, __file__, url, kind, str(count), str(seconds)]
    process = await asyncio.create_subprocess_exec(*typed, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    return json.loads(said)


if __name__ == "__main__":
    url, kind, count, seconds = sys.argv[1:]
    print(json.dumps(asyncio.run(meet_many(url, kind, int(count), float(seconds)))))
