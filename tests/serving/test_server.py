"""The server as clients meet it: the `openai` package, plain HTTP, and sockets that misbehave."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from data_prep.answers import Answering, Prompt
from data_prep.openai_client import CompletionServer, read_completion
from spectrain import serve
from spectrain.decoding import Sampling, generate
from spectrain.methods.autoregressive import Autoregressive
from spectrain.serving import server, service
from spectrain.serving.access import Access
from spectrain.serving.service import Limits
from tests.serving.served import HELLO, POST, ROWS, asking, read, serving

NONSENSE = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture(scope="module")
def served(shared):
    with serving(shared / "target") as served:
        yield served


def own_text(served, messages=HELLO, n_new=40, sampling=None, seed=0) -> str:
    """What the loop writes, without server or engine of its own."""
    target = served.service.target
    ids = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    (found,) = generate(target, Autoregressive(), [ids], n_new, sampling, seed=seed)
    return target.tokenizer.decode(found.tokens, skip_special_tokens=True)


def wait_until(holds, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not become so"
        time.sleep(0.01)


@pytest.mark.parametrize("method", ["plain", "pld"])
def test_a_greedy_answer_is_the_targets_own_whole_and_streamed(served, method):
    answer = served.chat(method=method)
    assert answer.choices[0].message.content == own_text(served)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 40
    stream = read(served.chat(method=method, stream=True))
    assert (stream.text, stream.finish_reason) == (own_text(served), "length")
    assert len(stream.parts) > 5


def test_completions_take_texts_and_tokens_and_several_prompts(served):
    tokenizer = served.service.target.tokenizer
    text = served.complete().choices[0].text
    ids = tokenizer("def read")["input_ids"]
    assert served.complete(prompt=ids).choices[0].text == text
    both = served.complete(prompt=["def read", "import"], n=2, return_token_ids=True)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [choice.text == text for choice in both.choices] == [True, True, False, False]
    assert both.usage.prompt_tokens == len(ids) + len(tokenizer("import")["input_ids"])
    assert tokenizer.decode(both.choices[0].token_ids) == text
    assert served.complete(prompt=[ids, ids], max_tokens=openai.omit).usage.completion_tokens == 2 * 16
    assert "".join(chunk.choices[0].text for chunk in served.complete(stream=True)) == text


def test_prompts_that_no_engine_can_take(served):
    for prompt, sentence in (([300], "holds token id 300"), ([], "prompt must"), ("", "the prompt is empty")):
        with pytest.raises(openai.BadRequestError, match=sentence):
            served.complete(prompt=prompt)


def test_data_prep_can_ask_our_own_server(served):
    """It wants the very tokens, the end of the text included."""
    server, target = CompletionServer(served.url), served.service.target
    model = server.find_model()
    answering = Answering(Sampling(0.9, 50), 40, seed=3, stop=("zq",))
    prompt = Prompt(5, "five", "", target.tokenizer("def read")["input_ids"])
    asked = replace(server, model=model)._request(prompt, answering)
    body = asked.pop("extra_body") | {name: one for name, one in asked.items() if not isinstance(one, openai.Omit)}
    answer = read_completion(served.http().post("/v1/completions", json=body).text, target, answering)
    assert (len(answer.tokens), answer.finish_reason, answer.retokenized) == (40, "length", False)


def test_a_seed_reproduces_at_any_load_and_choices_differ(served):
    def ask(seed, method="plain"):
        answer = served.chat(temperature=0.9, top_p=0.95, top_k=50, min_p=0.001, seed=seed, n=2, method=method)
        return [choice.message.content for choice in answer.choices]

    alone = ask(5)
    with ThreadPoolExecutor(8) as pool:
        crowded = list(pool.map(ask, [5, 1, 2, 5, 3, 4, 5, 2**40]))
    assert crowded[0] == crowded[3] == crowded[6] == alone == ask(5, "pld")
    assert alone[0] != alone[1]
    assert len({tuple(texts) for texts in crowded}) == 6
    assert len({tuple(ask(None)) for _ in range(3)}) == 3  # without a seed each is another
    sampling = Sampling(0.9, 50, 0.95, 0.001, draws="shared")
    assert alone[0] == own_text(served, sampling=sampling, seed=5)
    greedy = served.chat(n=2)
    assert greedy.choices[0].message.content == greedy.choices[1].message.content == own_text(served)


def test_stop_strings_across_tokens_end_the_text_and_are_never_shown(served):
    text = own_text(served)
    stop = text[20:26]
    before = text[: text.find(stop)]
    answer = served.chat(stop=["never this", stop])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (before, "stop")
    stream = read(served.chat(stop=stop, stream=True))
    assert (stream.text, stream.finish_reason) == (before, "stop")
    shown = ""
    for part in stream.parts:
        shown += part
        assert before.startswith(shown)


def test_logprobs_are_those_of_the_target(served, shared):
    tokenizer = served.service.target.tokenizer
    model = AutoModelForCausalLM.from_pretrained(shared / "target").eval()
    ids = tokenizer("def read")["input_ids"]
    answer = served.complete(logprobs=2, return_token_ids=True, temperature=0.7, seed=3).choices[0]
    with torch.no_grad():
        logits = model(torch.tensor([ids + answer.token_ids])).logits[0, len(ids) - 1 : -1]
    expected = logits.log_softmax(-1)
    own = expected.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    assert answer.logprobs.token_logprobs == pytest.approx(own.tolist(), abs=1e-4)
    names = [name.removeprefix("bytes:") for name in answer.logprobs.tokens]
    said = [bytes.fromhex(name.replace("\\x", "")) if "\\x" in name else name.encode() for name in names]
    assert b"".join(said).decode(errors="replace") == answer.text
    assert answer.logprobs.text_offset == sorted(answer.logprobs.text_offset)
    for name, place in zip(answer.logprobs.tokens, answer.logprobs.text_offset, strict=True):
        assert name.startswith("bytes:") or answer.text[place:].startswith(name)
    chunks = served.complete(logprobs=0, stream=True, temperature=0.7, seed=3)
    places = [place for chunk in chunks if (found := chunk.choices[0].logprobs) for place in found.text_offset]
    assert places == answer.logprobs.text_offset
    best = max(answer.logprobs.top_logprobs[0].values())
    assert best == pytest.approx(expected[0].max().item(), abs=1e-4)
    chat = served.chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(chat) == 40
    assert all(len(one.top_logprobs) == 3 and one.top_logprobs[0].logprob == one.logprob for one in chat)  # greedy
    chunks = [chunk.choices[0].logprobs for chunk in served.chat(logprobs=True, top_logprobs=3, stream=True)]
    assert [one for found in chunks if found for one in found.content] == chat
    assert (
        bytes(byte for one in chat for byte in one.bytes).decode(errors="replace")
        == served.chat().choices[0].message.content
    )


def test_usage_counts_what_was_known_of_the_prompt_and_the_metrics_agree(served):
    def tokens_of(name: str) -> float:
        text = served.http().get("/metrics").text
        return sum(map(float, re.findall(rf"^spectrain:{name}{{.*}} (\S+)$", text, re.MULTILINE)))

    names = ("prompt_tokens_total", "generation_tokens_total", "request_success_total")
    before = [tokens_of(name) for name in names]
    messages = [{"role": "user", "content": "x" * 80}]
    first = served.chat(messages=messages)
    messages += [first.choices[0].message.to_dict(), {"role": "user", "content": "and then?"}]
    *_, last = served.chat(messages=messages, max_tokens=9, stream=True, stream_options={"include_usage": True})
    assert (first.usage.prompt_tokens_details.cached_tokens, last.choices) == (0, [])
    assert last.usage.prompt_tokens_details.cached_tokens > 40
    prompts = first.usage.prompt_tokens + last.usage.prompt_tokens
    assert [tokens_of(name) - old for name, old in zip(names, before, strict=True)] == [prompts, 49, 2]
    assert tokens_of("num_requests_running") == tokens_of("num_requests_waiting") == 0
    assert tokens_of("time_to_first_token_seconds_count") == tokens_of("e2e_request_latency_seconds_count") > 1


def test_annotated_pieces_are_the_text_and_statistics_come_last(served):
    text, chunks = "", list(served.chat(method="pld", annotate=True, stream=True))
    for chunk in chunks[:-1]:
        pieces = chunk.spectrain["pieces"]
        assert "".join(piece for piece, _ in pieces) == chunk.choices[0].delta.content
        assert {source for _, source in pieces} <= {"root", "input"}
        text += chunk.choices[0].delta.content
    assert text == own_text(served)
    assert chunks[-1].choices[0].finish_reason == "length"
    own = chunks[-1].spectrain
    assert (own["method"], own["tokens"]) == ("pld", 40)
    assert own["accepted"] == sum(own["accepted_by_position"])
    assert own["drafted_by_position"][: len(own["accepted_by_position"])] >= own["accepted_by_position"]
    assert served.chat(annotate=True).spectrain["drafted"] == 0


def test_tools_go_to_the_template_unless_none_is_chosen(served):
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    told = [{"role": "user", "content": "Hello"}]
    with_tools = served.chat(tools=[tool]).usage.prompt_tokens
    assert (
        with_tools
        > served.chat(tools=[tool], tool_choice="none").usage.prompt_tokens
        == served.chat().usage.prompt_tokens
    )
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"a": 1}'}}
    told += [{"role": "assistant", "content": None, "tool_calls": [call]}]
    told += [{"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "42"}]}]
    assert served.chat(messages=told).choices[0].message.content == own_text(
        served, [HELLO[0], {"role": "assistant", "content": ""}, {"role": "tool", "content": "42"}]
    )


def called(arguments: str) -> dict:
    """Return a turn of the assistant with a call, whose arguments are given as JSON."""
    function = {"name": "look_up", "arguments": json.loads(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


REFUSED = {
    "temperature": ({"temperature": 3}, 400, "temperature must be less than or equal to 2"),
    "unknown": ({"tempratur": 0}, 400, "unknown field: tempratur; did you mean temperature?"),
    "penalty": ({"presence_penalty": 0.5}, 400, "presence_penalty is not supported"),
    "format": ({"response_format": {"type": "json_object"}}, 400, "response_format is not supported"),
    "bias": ({"logit_bias": {"5": 1}}, 400, "logit_bias is not supported"),
    "choice": ({"tools": [], "tool_choice": "required"}, 400, "tool_choice must be 'none' or 'auto'"),
    "content": ({"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content must be a valid string or a"),
    "role": ({"messages": [{"role": "king", "content": ""}]}, 400, "messages.0.role must be 'system', 'developer'"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content"),
    "template": ({"messages": [{"role": "user", "content": "refuse"}]}, 400, "template of tiny cannot render"),
    "none": ({"messages": []}, 400, "messages must have at least 1 item"),
    "missing": ({"messages": None}, 400, "messages must be there"),
    "length": ({"max_tokens": 1000}, 400, "the context holds 256 tokens, but the prompt has"),
    "prompt": ({"messages": [{"role": "user", "content": "x y" * 400}]}, 400, "shorten the prompt"),
    "stops": ({"stop": ["a"] * 5}, 400, "stop must have at most 4 items"),
    "stop": ({"stop": ""}, 400, "stop must have at least 1 character"),
    "empty stop": ({"stop": ["a", ""]}, 400, "stop must have at least 1 character"),
    "empty name": ({"": 1}, 400, "unknown field: ''; leave it out"),
    "top_k": ({"top_k": 10**308}, 400, "top_k must be less than or equal to 2147483647"),
    "max_tokens": ({"max_tokens": 10**308}, 400, "max_tokens must be less than or equal to 2147483647"),
    "arguments": (
        {"messages": [*HELLO, called('"{"')]},
        400,
        "messages[1] has a call of a tool whose arguments are no",
    ),
    "list": ({"messages": [*HELLO, called('"[1]"')]}, 400, "messages[1] has a call of a tool whose arguments are no"),
    "nothing": ({"messages": [{"role": "user"}]}, 400, "messages[0] has no content"),
    "method": ({"method": "magic"}, 400, "method must be one of plain, pld, gate"),
    "model": ({"model": "gpt-5"}, 404, "this server has the model tiny only"),
    "annotate": ({"annotate": True, "n": 2}, 400, "annotate is for n=1"),
    "tops": ({"top_logprobs": 2}, 400, "top_logprobs is for logprobs=true"),
    "options": ({"stream_options": {"include_usage": True}}, 400, "stream_options is for stream=true"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_named_in_openais_shape(served, case):
    fields, status, sentence = REFUSED[case]
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 4} | fields
    answer = served.http().post("/v1/chat/completions", json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"].find(sentence) >= 0, error
    assert error.keys() == {"message", "type", "param", "code"}
    assert str(Path(served.service.target.tokenizer.name_or_path)) not in answer.text
    with pytest.raises(openai.NotFoundError if status == 404 else openai.BadRequestError):
        served.client().post("/chat/completions", body=body, cast_to=object)


def test_fields_without_effect_are_taken(served):
    more = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "presence_penalty": 0.0}
    more |= {"response_format": {"type": "text"}, "logit_bias": {}, "top_p": None, "stop": None}
    body = {"messages": HELLO, "max_completion_tokens": 40, "temperature": 0, **more}
    answer = served.http().post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": own_text(served)}


def test_halves_of_characters_are_replaced_wherever_they_stand(served):
    """JSON can name them, as Python's `json.dumps` does."""
    whole = served.http().post(
        "/v1/chat/completions", json={"max_tokens": 2, "messages": [{"role": "user", "content": "\ufffd"}]}
    )
    for messages in ([{"role": "user", "content": "\ud800"}], [*HELLO, called(json.dumps('{"\udc00": "\\ud800"}'))]):
        answer = served.http().post("/v1/chat/completions", content=json.dumps({"max_tokens": 2, "messages": messages}))
        assert answer.status_code == 200, answer.text
        assert len(messages) > 1 or answer.json()["usage"]["prompt_tokens"] == whole.json()["usage"]["prompt_tokens"]


def test_the_model_is_found_by_its_name(served):
    (listed,) = served.client().models.list().data
    assert served.client().models.retrieve("tiny") == listed
    for name in ("other", "some/other", "tiny/"):
        answer = served.http().get(f"/v1/models/{name}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_a_request_of_http_1_0_needs_no_host(served):
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=10) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert b" 200 " in connection.recv(1000)


def test_paths_that_are_not_served(served):
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
    ):
        answer = served.http().request(method, path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")
    assert served.http().get("/static/../server.py").status_code == 404
    assert served.http().get("/static/%2e%2e/server.py").status_code == 404


@pytest.mark.parametrize(
    "body", [NONSENSE, NONSENSE[:-1], b"", b"[]", b"7", b'{"messages": ' + b"[" * 10000, b'{"a":"\\ud800"}']
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_nonsense_and_deep_json_are_refused(served, path, body):
    answer = served.http().post(path, content=body)
    assert answer.status_code == 400
    assert len(answer.text) < 400
    deep = b'{"prompt": "a", "messages": [{"role": "user", "content": "", "tool_calls": [' + b'{"a":' * 10000
    assert served.http().post(path, content=deep + b"1" + b"}" * 10000).status_code == 400


def test_a_body_is_limited_before_it_is_read(served):
    def parts():
        for _ in range(40):
            yield b"x" * 2**16

    assert served.http().post("/v1/completions", content=NONSENSE + b"x").status_code == 413
    assert served.http().post("/v1/completions", content=parts()).status_code == 413  # without a length
    assert served.http().get("/health").json() == {"status": "ok"}


def test_many_wrong_items_cost_little(served):
    for body in ({"prompt": [None] * 200_000}, {"messages": [{}] * 200_000}, {str(n): n for n in range(50_000)}):
        began = time.monotonic()
        assert served.http().post("/v1/completions", json=body).status_code == 400
        assert time.monotonic() - began < 5


def test_the_page_and_what_a_browser_may_do_with_answers(served):
    page = served.http().get("/")
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    assert page.headers["cache-control"] == "no-cache"
    for name in re.findall(r'(?:src|href)="(static/[^"]+)"', page.text):
        assert served.http().get(f"/{name}").headers["x-content-type-options"] == "nosniff"
    assert "static/page.js" in page.text
    assert (
        "access-control-allow-origin"
        not in served.http(headers={"origin": "http://evil.example"}).get("/v1/models").headers
    )
    (model,) = served.http().get("/v1/models").json()["data"]
    assert (model["id"], model["methods"], model["max_model_len"]) == ("tiny", ["plain", "pld", "gate"], 256)
    assert [one.id for one in served.client().models.list()] == ["tiny"]


def test_foreign_hosts_and_origins_are_refused(served):
    port = served.url.rpartition(":")[2]
    for host, status in (
        ("evil.example", 403),
        (f"localhost:{port}", 200),
        ("[::1]", 200),
        ("10.0.0.7:80", 200),
        ("[", 400),
    ):
        assert served.http(headers={"host": host}).get("/health").status_code == status, host
    body = {"prompt": "a", "max_tokens": 1}
    for origin, status in (("http://evil.example", 403), ("null", 403), (served.url, 200), ("http://[", 400)):
        answer = served.http(headers={"origin": origin}).post("/v1/completions", json=body)
        assert answer.status_code == status, origin


def test_a_key_and_named_origins(shared):
    access = Access("secret", ("models.example",), ("http://pages.example",))
    with serving(shared / "target", access=access) as served:
        for key in ("x", "secre", "secret2", "sécret"):
            answer = served.http(headers={"authorization": f"Bearer {key}".encode()}).get("/v1/models")
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert served.http().get("/metrics").status_code == 401
        assert served.http().get("/health").status_code == served.http().get("/").status_code == 200
        with pytest.raises(openai.AuthenticationError):
            served.chat()
        assert [one.id for one in served.client(api_key="secret").models.list()] == ["tiny"]
        allowed = {"origin": "http://pages.example", "host": "models.example"}
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        preflight = served.http(headers=allowed | asks).options("/v1/completions")
        assert preflight.headers["access-control-allow-origin"] == "http://pages.example"
        answer = served.http(headers=allowed | {"authorization": "Bearer secret"}).get("/v1/models")
        assert answer.headers["access-control-allow-origin"] == "http://pages.example"
        assert served.http(headers={**asks, "origin": "http://evil.example"}).options("/v1/models").status_code == 400


@pytest.fixture
def small(shared):
    """A server whose queue holds one request."""
    with serving(shared / "target", Limits(max_waiting=1)) as served:
        yield served


@contextmanager
def sending(served, body: dict, source: str = "127.0.0.1") -> Iterator[socket.socket]:
    """Send a request, and leave its answer unread."""
    n_open = served.service.n_open
    with served.socket(asking(body), source) as client:
        wait_until(lambda: served.service.n_open > n_open)
        yield client


def test_a_full_queue_says_when_to_come_back_and_leaving_frees_rows(small, monkeypatch):
    worker = small.service.worker
    body = {"prompt": "def read", "temperature": 0, "method": "gate", "max_tokens": 200, "stream": True}
    with ExitStack() as stack:
        for _ in range(ROWS + 1):
            stack.enter_context(sending(small, body))
        with monkeypatch.context() as unread:
            unread.setattr(server.Endpoints, "_prompts", None)  # no text is read
            with pytest.raises(openai.RateLimitError) as caught:
                small.complete(method="gate")
        assert caught.value.response.headers["retry-after"] == "1"
        assert caught.value.body["code"] == "rate_limit_exceeded"
        stack.enter_context(sending(small, body, "127.0.0.2"))  # another client, which has nothing of the queue
    small.gate.open.set()  # the clients have left
    wait_until(lambda: worker.n_running == small.service.n_open == 0)
    assert small.complete(method="gate").choices[0].finish_reason == "length"
    left = f'finished_reason="abort",method="gate",model_name="{small.service.name}"}} {ROWS + 2}.0'
    assert left in small.http().get("/metrics").text


def test_a_request_of_many_choices_leaves_rows_to_others(small):
    body = {"prompt": "a", "temperature": 0, "method": "gate", "max_tokens": 12, "n": 40}
    with ThreadPoolExecutor(1) as pool:
        many = pool.submit(small.http().post, "/v1/completions", json=body)
        wait_until(lambda: small.service.worker.n_running == ROWS)
        assert small.complete(method="gate", max_tokens=2).choices[0].finish_reason == "length"
        assert not many.done()
        assert small.service.open[0].n_waiting > 20
        metrics = small.http().get("/metrics").text
        assert float(re.search(r"num_requests_waiting{.*} (\S+)", metrics)[1]) > 20
        small.gate.open.set()
        answer = many.result().json()
    assert [choice["index"] for choice in answer["choices"]] == [*range(40)]
    assert len({choice["text"] for choice in answer["choices"]}) == 1


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"prompt":[' + b",".join([b'"a"'] * 250_000) + b"]}", "may have 128 choices in all, prompts times n"),
        (b'{"prompt":[' + b",".join([b"[1]"] * 260_000) + b"]}", "may have 16384 lists and objects in all"),
        (b'{"prompt":"a","n":64,"prompt":["a","b","c"]}', "may have 128 choices in all"),
    ],
)
def test_counts_are_checked_before_a_text_is_read(served, monkeypatch, body, sentence):
    monkeypatch.setattr(server.Endpoints, "_prompts", None)
    answer = served.http().post("/v1/completions", content=body)
    assert (answer.status_code, sentence in answer.text) == (400, True)


def test_brackets_within_texts_are_no_parts(served):
    text = '[{"\\' * 20_000
    answer = served.http().post("/v1/chat/completions", json={"messages": [{"role": "user", "content": text}]})
    assert "the context holds 256 tokens" in answer.text


def test_large_bodies_wait_for_each_other_and_small_ones_for_none(shared, monkeypatch):
    monkeypatch.setattr(service, "LARGE_HELD", 1)
    with serving(shared / "target") as served, served.socket(POST + b"Content-Length: 200000\r\n\r\n") as slow:
        slow.sendall(b" " * 150_000)
        wait_until(lambda: served.service.large_bodies.locked())
        assert served.complete().choices[0].finish_reason == "length"
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(served.http().post, "/v1/completions", content=b" " * 100_000)
            time.sleep(0.3)
            assert not waits.done()
            slow.shutdown(socket.SHUT_RDWR)
            assert waits.result().status_code == 400


def test_the_client_that_leaves_most_unread_is_given_up(shared, monkeypatch):
    monkeypatch.setattr(service, "UNREAD_BYTES", 1_200_000)
    monkeypatch.setattr(service, "STUCK_S", 0)
    body = {"prompt": "a", "temperature": 0, "max_tokens": 200, "logprobs": 20, "stream": True, "method": "gate"}
    with serving(shared / "target", send_buffer=4096) as served:
        served.gate.open.set()
        with sending(served, body), sending(served, body | {"n": 4}) as client:
            wait_until(lambda: served.service.n_open == 1, 20)
            assert served.service.open[0].fields.n == 1
            assert b"DONE" not in client.recv(1 << 20)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_reads_may_have_an_answer_of_any_size(served, monkeypatch, stream):
    monkeypatch.setattr(service, "UNREAD_BYTES", 1000)
    body = {"prompt": "a", "temperature": 0, "max_tokens": 200, "logprobs": 20, "n": 4, "stream": stream}
    text = served.http().post("/v1/completions", json=body).text
    assert len(text) > 200_000
    assert "was not read" not in text


def test_a_request_that_takes_too_long_is_ended(small, monkeypatch):
    monkeypatch.setattr(small.service, "limits", Limits(timeout_s=1.0))
    with pytest.raises(openai.InternalServerError) as caught:
        small.complete(method="gate", max_tokens=200)
    assert caught.value.status_code == 504
    with pytest.raises(openai.APIError, match="took longer than 1 s"):
        list(small.complete(method="gate", stream=True, max_tokens=200))
    small.gate.open.set()
    wait_until(lambda: small.service.worker.n_running == small.service.n_open == 0)


def test_a_client_that_does_not_read_costs_nothing_but_its_row(small):
    body = json.dumps({"prompt": "a", "max_tokens": 200, "n": 4, "stream": True, "logprobs": 20, "method": "gate"})
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.connect(("127.0.0.1", int(small.url.rpartition(":")[2])))
        slow.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        small.gate.open.set()
        assert small.chat().choices[0].finish_reason == "length"  # meanwhile
        wait_until(lambda: small.service.worker.n_running == small.service.n_open == 0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_wrong_prompt_behind_many_is_refused_before_any_is_decoded(served, stream):
    body = {"prompt": [[5]] * 20 + [[999_999]], "stream": stream, "max_tokens": 2}
    assert served.http().post("/v1/completions", json=body).status_code == 400


def test_a_whole_answer_that_is_read_too_slowly_is_cut_and_holds_nothing_else(shared, caplog):
    body = {"prompt": "a", "temperature": 0, "max_tokens": 200, "n": 8, "logprobs": 20}
    with serving(shared / "target", Limits(timeout_s=4), send_buffer=4096) as served, sending(served, body) as client:
        said, until = b"", time.monotonic() + 4.3
        while part := client.recv(2048 if time.monotonic() < until else 1 << 16):
            said += part
            time.sleep(0.01 if time.monotonic() < until else 0)
    assert b"200 OK" in said
    assert b"error" not in said


def test_a_client_that_sent_two_requests_and_leaves_frees_both(small):
    body = {"prompt": "a", "temperature": 0, "max_tokens": 200, "method": "gate"}
    with small.socket(asking(body) * 2):
        wait_until(lambda: small.service.n_open)
        time.sleep(0.3)  # for the second one to arrive
    wait_until(lambda: not small.service.n_open)


def test_a_request_that_arrives_slowly_has_the_time_that_is_left(shared, monkeypatch):
    monkeypatch.setattr(serve, "ENDING_S", 2.0)
    sent = asking({"prompt": "a", "max_tokens": 200, "method": "gate"})
    with serving(shared / "target", Limits(timeout_s=3.0)) as served, served.socket(sent[:-1]) as client:
        time.sleep(2.5)
        client.sendall(sent[-1:])
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 504")


def test_choices_that_still_wait_when_their_client_leaves_are_counted(small):
    with sending(small, {"prompt": "a", "temperature": 0, "max_tokens": 200, "method": "gate", "n": 12}):
        wait_until(lambda: small.service.worker.n_running == ROWS)
    wait_until(lambda: not small.service.n_open)
    left = f'finished_reason="abort",method="gate",model_name="{small.service.name}"}} 12.0'
    assert left in small.http().get("/metrics").text


def test_requests_that_are_never_finished_or_cut_off_leave_nothing_behind(served):
    port = int(served.url.rpartition(":")[2])
    for sent in (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{", NONSENSE):
        with socket.socket() as client, suppress(ConnectionError):
            client.connect(("127.0.0.1", port))
            client.sendall(sent)
    assert served.chat().choices[0].finish_reason == "length"
    wait_until(lambda: served.service.n_open == 0)


def test_a_failure_of_the_model_or_the_server_is_told_without_its_reason(served, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("/secret/path and a prompt")

    with monkeypatch.context() as patched:
        patched.setattr(served.service.worker.engines["pld"].drafter, "propose", fail)
        body = {"prompt": "a", "method": "pld", "stream": True, "temperature": 0}
        answer = served.http().post("/v1/completions", json=body)
        assert "server_error" in answer.text
        assert "secret" not in answer.text
        patched.setattr(server.Endpoints, "_prompts", fail)
        answer = served.http().post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"] == "the server failed at this request; its log says why"
    assert served.complete(method="pld").choices[0].finish_reason == "length"


def test_a_closing_server_takes_no_new_requests(served, monkeypatch):
    monkeypatch.setattr(served.service, "is_closing", True)
    for answer in (served.http().get("/health"), served.http().post("/v1/completions", json={"prompt": "a"})):
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
