"""scripts/bench_serving.py against a server whose times and faults are known; scripts/bench_engines.py by itself."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support.scripts import SCRIPTS, load_script

FIRST_S, GAP_S = 0.1, 0.04  # until the first chunk, and between two chunks; `auto` halves both


class Server(BaseHTTPRequestHandler):
    """Answers with `max_tokens` words, two to a chunk, and with whatever faults `wrong` names."""

    wrong = ""

    def do_GET(self) -> None:
        models = {"data": [{"id": "tiny", "methods": ["auto", "autoregressive"]}]}
        metrics = f'spectrain:num_requests_running{{model_name="tiny"}} {float(self.wrong == "stuck")}\n# HELP x'
        self.send({"/v1/models": json.dumps(models), "/metrics": metrics}.get(self.path, ""))

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["content-length"]))
        try:
            body = json.loads(sent)
            n_tokens, quick = body["max_tokens"], 2 if body["method"] == "auto" else 1
            assert n_tokens > 0
            assert body["temperature"] != "hot"
            assert not {"top_p", "response_format"} & body.keys()
        except (AssertionError, ValueError, TypeError, KeyError, RecursionError):
            return self.send("{}", 500 if self.wrong == "malformed" else 400)
        self.send("")
        for start in range(0, n_tokens, 2):
            time.sleep((GAP_S if start else FIRST_S) / quick)
            text = "other" if self.wrong == "text" and quick == 2 else f"{start} {start + 1} "
            done = "length" if start + 2 >= n_tokens and not (self.wrong == "broken" and quick == 2) else None
            self.say({"choices": [{"text": text, "finish_reason": done}]})
        self.say({"choices": [], "usage": {"completion_tokens": n_tokens}})

    def send(self, content: str, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content.encode())

    def say(self, chunk: dict) -> None:
        try:
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        except ConnectionError:  # the client has left
            self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Runs the script against such a server; returns its exit code and its results."""

    def call(*arguments: str, wrong: str = "") -> tuple[int, dict]:
        monkeypatch.setattr(ThreadingHTTPServer, "request_queue_size", 64)
        script, out = load_script("bench_serving"), tmp_path / "out.json"
        script.END_S = script.STAY_S = 0.1
        with ThreadingHTTPServer(("127.0.0.1", 0), type("Server", (Server,), {"wrong": wrong})) as server:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            shared = ["--base-url", f"http://127.0.0.1:{server.server_port}", "--completions", "--max-tokens", "8"]
            try:
                return script.main([*shared, *arguments, "--out", str(out)]), json.loads(out.read_text())
            finally:
                server.shutdown()

    return call


def test_times_are_those_of_the_server(measure):
    code, found = measure("--concurrency", "3", "--rate", "40", "--requests", "4", "--turns", "2")
    assert code == 0
    assert [(one["load"], one["method"]) for one in found["runs"][1:3]] == [("3", "autoregressive"), ("40.0/s", "auto")]
    for run in found["runs"]:
        quick = 2 if run["method"] == "auto" else 1
        for name, least_s in {"TTFT": FIRST_S, "ITL": GAP_S, "TPOT": 3 / 7 * GAP_S}.items():  # chunks of two tokens
            assert 990 * least_s / quick < run[name][1] < 9000 * least_s / quick  # a busy machine makes them longer
    assert [run["ratio"] > 1 for run in found["runs"][:2]] == [True, False]


def test_what_a_server_costs_is_told_by_the_same_work_without_one(measure):
    _, found = measure("--concurrency", "2", "--requests", "4", "--turns", "1", "--bare", "pystdlib-8l")
    *served, bare = found["runs"]
    assert bare["method"] == "without a server"
    assert bare["ratio"] == 1.0
    for run in served:
        assert run["ratio"] == pytest.approx(run["tokens/s"] / bare["tokens/s"], rel=0.01)


FAULTS = {"text": "not the target's own", "malformed": "malformed, but 500", "broken": "broke off (200)"}


@pytest.mark.parametrize(("wrong", "fault"), [("", ""), *FAULTS.items(), ("stuck", "left in rows or waiting")])
def test_a_soak_tells_each_fault(measure, wrong, fault):
    code, found = measure("--soak", "60", wrong=wrong)
    assert found["soak"]["faults"].keys() == ({fault} if fault else set())
    assert code == bool(fault)
    assert set(found["soak"]["requests"]) == {"whole", "leaving", "malformed", "stranger"}


@pytest.mark.slow
def test_engines_are_compared_on_the_same_prompts(tmp_path):
    out = tmp_path / "out.json"
    options = ["--target", "pystdlib-8l", "--methods", "autoregressive", "pld", "--limit", "2", "--new", "8"]
    subprocess.run([sys.executable, SCRIPTS / "bench_engines.py", *options, "--busy", "1", "--out", out], check=True)
    plain, lookup = json.loads(out.read_text())["rows"]
    assert plain[0] == "autoregressive, float32"
    assert plain[2:] == ["1.00 [1.00, 1.00]", "1.00"]
    assert (lookup[0], lookup[3]) == ("pld, float32", "1.00")


def test_engines_count_alike_what_a_call_of_the_target_gave():
    same = load_script("same_drafter")
    assert same.by_call(6, [2, 0]) == [1, 3, 1, 1]  # nothing was drafted for the last call
    assert same.by_call(6, [3, 1]) == [1, 4, 1]  # the text ended among the tokens of the last one
    assert same.joined([[5], [6, 7, 8]]) == ([5, 6, 7, 8], [1, 3])
    ends = {"1311": 4, "114": 3, "111111": 4}
    answers = {
        calls: {str(n): [(2.0, [([5, 6, 7, 8, 9, end], [int(c) for c in calls])])] * 2 for n in (1, 4)}
        for calls, end in ends.items()
    }
    found = {
        name: same.Measured(answers[calls], 3)
        for name, calls in {
            ("none", "spectrain"): "111111",
            ("none", "vLLM"): "111111",
            ("vanilla", "spectrain"): "1311",
            ("vanilla", "vLLM"): "114",
        }.items()
    }
    _, _, ours, theirs = (list(row.values()) for row in same.table(found))
    assert ours == [
        "vanilla",
        "spectrain",
        "1.667",
        "1.667",
        "1.000",
        "2 2 0 of 6",
        "3.0 (1.00)",
        "3.0 (1.00)",
        "4 of 4",
    ]
    assert theirs[2:6] == ["2.500", "2.500", "1.500", "2 2 2 of 4"]
    assert theirs[-1] == "0 of 4"
