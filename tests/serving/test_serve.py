"""The command: what it prints, how it ends, and the examples of docs/serving.md against it."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from spectrain.serve import Server, bound, listen
from spectrain.serving.access import Access
from spectrain.stores.rows import open_responses
from tests.serving.served import serving

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", PAGE.read_text(), re.DOTALL)
EXAMPLES = [(kind, text) for kind, text in BLOCKS if "-m spectrain" not in text]


@contextmanager
def command(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """Run the command in a folder until it is ready; yield the process and its address."""
    options = ("port=0", "target=bundled", "methods=[pld,autoregressive]")
    typed = [sys.executable, "-m", "spectrain.serve", *options, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(typed, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes) as process:
        line = process.stdout.readline()
        try:
            yield process, re.search(r"answers at (\S+)/v1", line)[1]
        finally:
            process.kill()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    with command(folder, "log_responses=traffic") as (process, url):
        yield folder, process, url


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_examples_of_the_docs(running, number):
    kind, text = EXAMPLES[number]
    _, _, url = running
    text = text.replace("http://127.0.0.1:8000", url).replace("smollm2", "pystdlib-8l")
    if kind == "bash":
        lines = text.replace("curl ", "curl -sSf ")
        out = subprocess.run(["bash", "-e", "-c", lines], capture_output=True, text=True, check=True, timeout=60).stdout
        assert out.count("{") > 1
    else:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(text, {})
        assert "CompletionUsage" in printed.getvalue()


def test_a_second_server_on_the_port_and_other_wrong_options(running, typed, monkeypatch):
    port = running[2].rpartition(":")[2]
    code, _, error = typed("serve", f"port={port}")
    assert (code, error) == (2, f"error: port={port} is in use by another process; give another port\n")
    code, _, error = typed("serve", "host=nowhere.invalid")
    assert code == 2
    assert error.startswith("error: host=nowhere.invalid port=8000 cannot be listened at")
    monkeypatch.setenv("SPECTRAIN_KEY", "schlüssel")
    code, _, error = typed("serve")
    assert (code, error) == (
        2,
        "error: the server's key must be of ASCII characters, as headers are; give another api_key\n",
    )


def test_of_two_servers_that_start_together_one_gets_the_port():
    with bound("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bound("127.0.0.1", port) as second:
            listen(first, port)
            with pytest.raises(ValueError, match=f"port={port} is in use"):
                listen(second, port)


@pytest.mark.slow
def test_ctrl_c_finishes_what_runs_and_keeps_the_answers(running):
    folder, process, url = running
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked = {"model": "pystdlib-8l", "prompt": "def f(", "temperature": 0}
    stream = client.completions.create(**asked, max_tokens=500, stream=True)
    next(stream)
    process.send_signal(signal.SIGINT)
    *_, last = stream
    assert last.choices[0].finish_reason == "length"
    assert process.wait(30) == 130
    said = process.stderr.read()
    assert "finishing 1 requests" in said
    assert said.endswith("interrupted; run the same command again\n")
    assert len(open_responses(folder / "traffic").rows) >= 1
    assert [path.name for path in folder.iterdir()] == ["traffic"]
    with pytest.raises(openai.APIConnectionError):
        client.completions.create(**asked)


def test_a_second_signal_ends_at_once(shared, monkeypatch):
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with serving(shared / "target") as served:
        server = Server(served.service, Access())
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):  # a terminal may send one twice
            server.handle_exit(number, None)
            assert (server.should_exit, served.service.is_closing) == (True, True)
    assert codes == [143]
