"""Strangers on sockets: each ends at a limit, and nobody else waits for it."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress

import httpx
import pytest

from spectrain import serve
from spectrain.serving.access import Access
from spectrain.serving.connection import HEAD_BYTES
from spectrain.serving.service import Limits
from tests.serving.served import POST, asking, serving

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LARGE = {
    "prompt": "a",
    "temperature": 0,
    "max_tokens": 100,
    "n": 4,
    "logprobs": 20,
}  # whose answer no socket's buffers hold


@pytest.fixture
def quick(shared, monkeypatch):
    """A server with a key, which waits half a second for headers, and whose requests take three."""
    monkeypatch.setattr(serve, "KEEP_ALIVE_S", 0.5)
    monkeypatch.setattr(serve, "ENDING_S", 1.0)
    monkeypatch.setattr(serve, "MOST_CONNECTIONS", 16)
    with serving(shared / "target", Limits(timeout_s=3), Access("secret"), send_buffer=4096) as served:
        served.gate.open.set()
        yield served


def answer_to(served, *sent: bytes) -> bytes:
    """Return all that the server says until it closes the connection."""
    with served.socket() as client:
        with suppress(ConnectionError):
            for one in sent:
                client.sendall(one)
        return rest_of(client)


def rest_of(client: socket.socket) -> bytes:
    said = b""
    with suppress(ConnectionError):
        while part := client.recv(1 << 16):
            said += part
    return said


def is_well(served) -> bool:
    return served.http().get("/health", timeout=5).status_code == 200


def header(n_bytes: int) -> bytes:
    return GET + b"X: " + b"x" * n_bytes


@pytest.mark.parametrize(
    "sent",
    [
        [header(HEAD_BYTES), b"\r\n\r\n"],
        [GET, b"X:\r\n" * 1000, b"\r\n"],  # small ones, each of which takes more memory than bytes
        [header(0), *[b"x" * 2**16] * 100],  # no end of it, which the server reads to say why
        [b"GET /" + b"x" * HEAD_BYTES + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"],
        [CHUNKED + b"1;" + b"x" * HEAD_BYTES, b"x" * 2**16],  # an extension of a chunk
        [CHUNKED, *[b"1\r\nx\r\n" * 1000] * 30],  # tiny chunks
        [CHUNKED + b"0\r\nX: " + b"x" * HEAD_BYTES, b"x" * 2**16],  # trailers
    ],
)
def test_what_surrounds_a_body_is_limited_before_the_key_is_asked_for(quick, sent):
    said = answer_to(quick, *sent)
    assert b" 431 " in said or b" 401 " in said.split(b"\r\n")[0], said[:200]  # which the application may say first
    assert is_well(quick)


def test_long_headers_within_the_limit_are_read(quick):
    assert answer_to(quick, header(HEAD_BYTES - 200) + b"\r\nConnection: close\r\n\r\n").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"nonsense\r\n\r\n",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        CHUNKED.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer secret\r\n\r\n") + b"nonsense\r\n",
    ],
)
def test_what_is_no_http_is_told_so_in_openais_shape(quick, sent, caplog):
    head, _, body = answer_to(quick, sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["message"] == "this is no HTTP/1.1 that can be read"
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("sent", [b"", GET, GET + b"\r\n"])  # silent, half a header, nothing behind an answer
def test_a_connection_without_a_request_is_closed(quick, sent):
    began = time.monotonic()
    answer_to(quick, sent)
    assert time.monotonic() - began < 3


@pytest.mark.parametrize("sent", [GET, asking(LARGE)[:-9]])
def test_bytes_that_trickle_win_no_time(quick, sent):
    began = time.monotonic()
    with quick.socket(sent) as client, suppress(ConnectionError):
        while time.monotonic() < began + 8:
            client.sendall(b"x")
            time.sleep(0.05)
    assert time.monotonic() - began < 6


@pytest.mark.parametrize("sent", [b"", POST + b"Authorization: Bearer secret\r\nContent-Length: 9\r\n\r\n{"])
def test_a_new_connection_takes_the_place_of_the_one_that_waits_longest(quick, sent):
    with httpx.Client(base_url=quick.url, headers={"authorization": "Bearer secret"}, timeout=30) as client:
        body = {"prompt": "a", "max_tokens": 200, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            silent = [quick.socket(sent) for _ in range(40)]
            assert is_well(quick)
            assert [line for line in lines if line][-1] == "data: [DONE]"
    silent[0].settimeout(0.2)
    assert b"200" not in rest_of(silent[0])
    for one in silent:
        one.close()


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_is_not_read_ends_with_its_time(quick, stream):
    with quick.socket(asking(LARGE | {"stream": stream})) as client:
        began = time.monotonic()
        while quick.service.n_open == 0 and time.monotonic() < began + 5:
            time.sleep(0.01)
        while quick.service.n_open and time.monotonic() < began + 15:
            assert is_well(quick)
            time.sleep(0.1)
        assert time.monotonic() - began < 8
        time.sleep(1.2)
        said = rest_of(client)
    assert said.startswith(b"HTTP/1.1 200")
    assert b"DONE" not in said if stream else len(said) < int(said.split(b"content-length: ")[1].split(b"\r")[0])


def test_the_server_ends_while_an_answer_is_not_read(shared):
    with serving(shared / "target", Limits(timeout_s=1), send_buffer=4096) as served:
        client = served.socket(asking(LARGE))
        silent = served.socket(GET)
        time.sleep(0.5)
        began = time.monotonic()
    assert time.monotonic() - began < 8
    client.close()
    silent.close()


def test_a_few_requests_may_be_sent_ahead(quick):
    said = answer_to(quick, (GET + b"\r\n") * 3 + GET + b"Connection: close\r\n\r\n")
    assert said.count(b"HTTP/1.1 200") == 4
    assert answer_to(quick, (GET + b"\r\n") * 10_000).count(b"HTTP/1.1 200") < 100
    assert is_well(quick)
