"""Answers from an OpenAI-compatible server: a real one on this machine, which fails in every way."""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from data_prep.answers import Answer, Answering, Prompt
from data_prep.openai_client import CompletionServer, PromptFailed, read_completion
from spectrain.decoding import Sampling
from spectrain.errors import UserError
from spectrain.stores.rows import open_responses
from tests.data_prep.fake_server import completion, serving

PROMPTS = [Prompt(i, f"q{i}", "c", [10 + i]) for i in range(4)]
EOS = 0
ASKED = Answering(Sampling(temperature=1.0), max_new_tokens=4)


@pytest.fixture(scope="module")
def target(made):
    """What reading an answer takes of a target."""
    return SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(made / "target"), vocab_size=300, eos_ids=(EOS,))


def read(body: object, target, asked: Answering = ASKED) -> Answer:
    return read_completion(json.dumps(body), target, asked)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"token_ids": [5, 6, EOS]}, Answer([5, 6, EOS], "eos")),
        ({"token_ids": [5, 6]}, Answer([5, 6, EOS], "eos")),  # a server that leaves it out of the ids as well
        ({"token_ids": [5, EOS, 6]}, Answer([5, EOS], "eos")),  # nothing after the first
        ({"token_ids": []}, Answer([EOS], "eos")),
        ({"token_ids": [5, 6, 7, 8], "finish_reason": "length"}, Answer([5, 6, 7, 8], "length")),
        ({"token_ids": [5, 6], "finish_reason": "length"}, Answer([5, 6], "length")),  # its context is full
        ({"token_ids": [5, 6, 7, 8, 9]}, Answer([5, 6, 7, 8], "length")),
        ({"token_ids": [5, 6, 7, 8]}, Answer([5, 6, 7, 8], "stop")),  # no room for the EOS
    ],
)
def test_finish_reasons_are_those_of_the_loop(target, choice, expected):
    assert read(completion(**choice), target) == expected


def test_with_stop_strings_a_stop_need_not_be_the_eos(target):
    asked = dataclasses.replace(ASKED, stop=("x",))
    assert read(completion(token_ids=[5, 6]), target, asked) == Answer([5, 6], "stop")
    assert read(completion(token_ids=[5, EOS]), target, asked) == Answer([5, EOS], "eos")


def test_text_alone_is_tokenised(target):
    ids = target.tokenizer("read(")["input_ids"]
    assert 0 < len(ids) < 4
    assert read(completion(text="read("), target) == Answer([*ids, EOS], "eos", retokenized=True)
    cut = read(completion(text="read(path" * 9), target)
    assert (len(cut.tokens), cut.finish_reason) == (4, "length")


NONSENSE = [
    ({"error": {"message": "busy"}}, "Field required, in .*busy"),
    ({"choices": []}, "List should have at least 1 item"),
    (completion(token_ids=[1], finish_reason="abort"), "Input should be 'stop' or 'length'"),
    (completion(token_ids=[1, 300]), "token id 300 is outside the target's vocabulary of 300"),
    (completion(token_ids=[-1]), "Input should be greater than or equal to 0"),
    (completion(text=None), "neither token_ids nor a text"),
    (completion(token_ids=[], finish_reason="length"), "no token at all"),
]


@pytest.mark.parametrize(("body", "message"), NONSENSE)
def test_nonsense_is_one_prompts_failure(target, body, message):
    with pytest.raises(PromptFailed, match=f"answers nonsense: .*{message}"):
        read(body, target)


@dataclass
class Kept:
    """Answers and failures by prompt id."""

    answers: dict[str, Answer] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    tokens: int = 0

    def add(self, prompt: Prompt, answer: Answer) -> None:
        self.answers[prompt.id] = answer

    def fail(self, prompt: Prompt, reason: str) -> None:
        self.failed[prompt.id] = reason

    def advance(self, prompts: int, tokens: int) -> None:
        self.tokens += tokens


def ask(server, target, **options) -> tuple[dict[str, Answer], dict[str, str]]:
    """Answers and failures by prompt id."""
    kept = Kept()
    asked = CompletionServer(server.address, **({"model": "tiny"} | options))
    asked.answer(PROMPTS, kept, target, ASKED)
    assert kept.tokens == sum(len(answer.tokens) for answer in kept.answers.values())
    return kept.answers, kept.failed


def test_retries_end_and_other_prompts_go_on(target):
    def reply(body, n):
        if body["prompt"] == [11]:
            return 503, {}, b'{"error": {"message": "no GPU"}}'
        if body["prompt"] == [12]:
            return 400, {}, b'{"error": {"message": "context is 8"}}'
        return completion(token_ids=[5, EOS])

    with serving(reply) as server:
        answers, failed = ask(server, target, retries=1)
    assert set(answers) == {"q0", "q3"}
    assert set(failed) == {"q1", "q2"}
    assert "the server says InternalServerError: Error code: 503" in failed["q1"]
    assert "context is 8" in failed["q2"]
    posted = [body["prompt"] for _, body in server.requests]
    assert (posted.count([11]), posted.count([12])) == (2, 1)


def test_a_hung_or_broken_answer_is_a_failure(target):
    def reply(body, n):
        if body["prompt"] == [10]:
            time.sleep(0.6)
        if body["prompt"] == [11]:
            return 200, {"content-encoding": "gzip"}, b"no gzip"
        if body["prompt"] == [12]:
            return 200, {"content-length": "999"}, b"{"
        return 200, {}, b"<html>busy</html>" if body["prompt"] == [13] else b"{}"

    with serving(reply) as server:
        answers, failed = ask(server, target, retries=0, timeout_s=0.3)
    assert not answers
    assert failed["q0"].startswith("no answer (ReadTimeout")
    assert failed["q1"].startswith("no answer (DecodingError")
    assert failed["q2"].startswith("no answer (")
    assert failed["q3"].startswith("answers nonsense: Invalid JSON")
    assert failed["q3"].endswith("in <html>busy</html>")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


STARTS = {
    "html": ((200, {}, b"<html>hello</html>"), {}, "does not answer as an OpenAI-compatible server"),
    "no list": ({"data": 3}, {}, "does not answer as an OpenAI-compatible server"),
    "refused": (
        (401, {}, b'{"detail": "no key"}'),
        {},
        "AuthenticationError.*; give another address, or set OPENAI_API",
    ),
    "none": ({"data": []}, {}, "serves no model"),
    "two": ({"data": [{"id": "a"}, {"id": "b"}]}, {}, "serves a, b; give model="),
    "another": ({"data": [{"id": "a"}]}, {"model": "b"}, "model=b is not served by .*; choose among a"),
}


@pytest.mark.parametrize("case", STARTS)
def test_what_is_no_server_is_said_at_the_start(case):
    models, options, message = STARTS[case]
    with serving(lambda body, n: None, models) as server, pytest.raises(UserError, match=message):
        CompletionServer(server.address, retries=0, **options).find_model()


def test_the_model_is_found_with_or_without_v1():
    with serving(lambda body, n: None) as server:
        for address in (server.address, f"{server.address}/", f"{server.address}/v1", f"{server.address}/v1/"):
            assert CompletionServer(address).find_model() == "tiny"
    with serving(lambda body, n: None, (404, {}, b"")) as server:
        assert CompletionServer(server.address, model="named").find_model() == "named"


PROXIES = ["socks5://127.0.0.1:9", "http://127.0.0.1:9", "::", "no://where", "http://[::1"]


@pytest.mark.parametrize("proxy", PROXIES)
def test_no_proxy_leads_to_this_machine_and_one_of_no_use_is_said(proxy, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", proxy)
    with serving(lambda body, n: None) as server:
        assert CompletionServer(server.address).find_model() == "tiny"
    works = proxy.startswith("http://1")
    said = "cannot be reached" if works else "the proxy that the environment names cannot be used"
    with pytest.raises(UserError, match=said):
        CompletionServer("http://nowhere.invalid", retries=0).find_model()
    monkeypatch.setenv("NO_PROXY", "nowhere.invalid")
    with pytest.raises(UserError, match=r"nowhere.invalid cannot be reached \("):
        CompletionServer("http://nowhere.invalid", retries=0).find_model()


@pytest.mark.parametrize("address", ["localhost:8000", "http://"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(UserError, match="give http://host:port"):
        CompletionServer(address)


@pytest.fixture
def served(made, tmp_path) -> list[str]:
    rows = [{"question_id": i, "category": "c", "turns": [f"def read_{i}("]} for i in range(5)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["prompts=p.jsonl", f"target={made / 'target'}", "source=server", "max_new_tokens=6", "retries=0", "out=r"]


def echo(body, n):
    return completion(token_ids=[*body["prompt"][:3], EOS])


def test_the_command_stores_what_the_server_says(respond, served, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serving(echo) as server:
        code, out, err = respond(*served, f"base_url={server.address}", "sampling=t08", "sampling.min_p=0.1", "seed=3")
    assert code == 0, err
    store = open_responses("r")
    assert [row["response"] for row in store.rows] == [[*row["prompt"][:3], EOS] for row in store.rows]
    assert set(store.rows["finish_reason"]) == {"eos"}
    body = server.requests[0][1]
    seeds = {posted["seed"] for _, posted in server.requests}
    assert len(seeds) == 5
    assert {key: body[key] for key in body.keys() - {"prompt", "seed"}} == {
        "model": "tiny",
        "max_tokens": 6,
        "temperature": 0.8,
        "top_p": 1.0,
        "top_k": 50,
        "min_p": 0.1,
        "stream": False,
        "return_token_ids": True,
    }
    assert server.headers[0]["authorization"] == "Bearer secret"
    assert store.manifest.config["model"] == "tiny"
    assert not any(b"secret" in file.read_bytes() for file in Path("r").iterdir())
    assert "ended by eos │ 100%" in out


def test_a_server_that_is_down_is_one_sentence_and_leaves_nothing(respond, served):
    code, out, err = respond(*served, f"base_url=http://127.0.0.1:{free_port()}")
    assert (code, out) == (2, "")
    assert err.startswith("error: base_url=http://127.0.0.1:")
    assert "cannot be reached (ConnectError" in err
    assert err.count("\n") == 1
    assert [path.name for path in Path().iterdir()] == ["p.jsonl"]


def test_a_server_that_goes_down_midway_loses_nothing(respond, served):
    def reply(body, n):
        if len(server.requests) == 3:
            server.socket.close()  # nobody listens any more
            return 500, {}, b""
        return echo(body, n)

    with serving(reply) as server:
        arguments = [*served, "concurrency=1", "retries=1"]
        code, _, err = respond(*arguments, f"base_url={server.address}")
    assert code == 2
    assert "cannot be reached" in err
    assert len(Path(".r.partial/rows-0.jsonl").read_text().splitlines()) == 2
    with serving(echo) as server:
        assert respond(*arguments, f"base_url={server.address}")[0] == 0
        assert len(server.requests) == 3
    assert len(open_responses("r").rows) == 5
