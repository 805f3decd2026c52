"""`LLM`: texts are the target's own, from whichever thread or task they are asked for, and leaving frees a row."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import spectrain
from spectrain import LLM, load_method, load_target
from spectrain.decoding import Engine, Sampling, generate
from spectrain.errors import UserError
from spectrain.methods.autoregressive import Autoregressive
from spectrain.serving.llm import Options
from spectrain.target import Source
from spectrain.terminal import speaking
from tests.conftest import TEMPLATE

PROMPT = "def read_config(path):"
PROMPTS = [PROMPT, "import os", "class Reader:", "for line in"]
LONG = {"max_new_tokens": 900}


@pytest.fixture(scope="module")
def target():
    return load_target()


@pytest.fixture(scope="module")
def llm(target):
    with LLM(target, "pld", batch_size=4, max_nodes=6) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(target):
    """Texts by plain decoding, one after the other."""

    def text(prompt: str, n_new: int, sampling: Sampling | None = None, **options) -> str:
        ids = target.tokenizer(prompt)["input_ids"]
        (found,) = generate(target, Autoregressive(), [ids], n_new, sampling, **options)
        return target.tokenizer.decode(found.tokens, skip_special_tokens=True)

    return text


def is_idle(llm: LLM) -> bool:
    """Whether all rows are free within a second."""
    end_s = time.monotonic() + 1
    while (llm._worker.n_running or llm._worker.n_waiting) and time.monotonic() < end_s:
        time.sleep(0.01)
    return not llm._worker.n_running + llm._worker.n_waiting


def test_the_text_is_the_targets_own_and_says_how_it_came_about(llm, plain):
    reply = llm.generate(PROMPT, max_new_tokens=40)
    assert reply.text == str(reply) == plain(PROMPT, 40)
    steps = reply.generation.target_forwards
    assert reply.accepted + steps + 1 == len(reply.generation.tokens) == 40
    assert reply.acceptance_length == pytest.approx(39 / steps)
    assert 0 < reply.accepted <= reply.drafted
    assert (reply.finish_reason, reply.logprobs) == ("length", None)
    assert reply.tokens_per_s > 0
    assert llm.generate(llm.target.tokenizer(PROMPT)["input_ids"], max_new_tokens=40).text == reply.text


def test_many_prompts_and_one_are_sampled_alike_by_seed(llm, plain):
    options = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 3}
    replies = llm.generate(PROMPTS * 2, max_new_tokens=24, **options)
    sampling = Sampling(0.9, 20, 0.9, 0.01, draws="shared")
    expected = [plain(prompt, 24, sampling, seed=3, prompt_numbers=[i]) for i, prompt in enumerate(PROMPTS * 2)]
    assert [reply.text for reply in replies] == expected
    assert llm.generate(PROMPT, max_new_tokens=24, **options).text == expected[0]
    assert llm.generate(PROMPT, max_new_tokens=24, **{**options, "seed": 4}).text != expected[0]
    assert llm.generate([]) == []


@pytest.mark.parametrize("n_new", [1, 40])
def test_pieces_of_a_stream_are_the_text_with_their_sources(llm, plain, n_new):
    stream = llm.stream(PROMPT, max_new_tokens=n_new)
    pieces = list(stream)
    assert "".join(pieces) == stream.reply.text == plain(PROMPT, n_new)
    if n_new > 1:
        assert len(pieces) > 5
        assert {piece.source for piece in pieces} == {Source.ROOT, Source.INPUT}


def test_stop_texts_end_a_text_and_are_no_part_of_it(llm, plain):
    text = plain(PROMPT, 60)
    stop = text[37:43]  # across tokens
    expected = text[: text.index(stop)]
    for stops in (stop, [stop, "absent"]):
        reply = llm.generate(PROMPT, max_new_tokens=60, stop=stops)
        assert (reply.text, reply.finish_reason) == (expected, "stop")
        assert "".join(llm.stream(PROMPT, max_new_tokens=60, stop=stops)) == expected


def test_logprobs_are_of_each_token(llm):
    reply = llm.generate(PROMPT, max_new_tokens=12, logprobs=2)
    assert len(reply.logprobs) == 12
    for token, told in zip(reply.generation.tokens, reply.logprobs, strict=True):
        assert told.top[0] == (token, told.logprob)  # greedy
        assert len(told.top) == 2


def test_the_next_turn_of_a_chat_reads_only_what_is_new(llm, monkeypatch):
    with pytest.raises(UserError, match="has no chat template; use generate"):
        llm.chat("import os")
    monkeypatch.setattr(llm.target.tokenizer, "chat_template", TEMPLATE, raising=False)
    turns = [{"role": "user", "content": "write a function that reads a file and returns what it holds " * 3}]
    first = llm.chat(turns, system="be short", max_new_tokens=40)
    user = f"<system>be short\n<user>{turns[0]['content']}\n<assistant>"
    assert first.text == llm.generate(user, max_new_tokens=40).text
    assert "".join(llm.stream([{"role": "system", "content": "be short"}, *turns], max_new_tokens=40)) == first.text
    turns += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "and another one"}]
    second = llm.chat(turns, system="be short", max_new_tokens=12)
    assert second.cached_tokens > len(llm.target.tokenizer(user)["input_ids"]) - 2
    assert llm.chat("x", max_new_tokens=3).text == llm.generate("<user>x\n<assistant>", max_new_tokens=3).text
    monkeypatch.setattr(llm.target.tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match=r"template of .* cannot render these messages \(roles must alternate\)"):
        llm.chat("x")


def test_threads_share_it(llm, plain):
    expected = {prompt: plain(prompt, 30) for prompt in PROMPTS}
    with ThreadPoolExecutor(6) as pool:
        asked = PROMPTS * 6
        replies = list(pool.map(lambda prompt: llm.generate(prompt, max_new_tokens=30), asked))
    assert [reply.text for reply in replies] == [expected[prompt] for prompt in asked]


def test_several_take_turns_at_a_target(target, llm, plain, monkeypatch):
    step, inside, most = Engine.step, [], []

    def watched(engine, **options):
        inside.append(engine)
        most.append(len(inside))
        try:
            return step(engine, **options)
        finally:
            inside.remove(engine)

    monkeypatch.setattr(Engine, "step", watched)
    with LLM(target, "logitspec", batch_size=4) as other, ThreadPoolExecutor(4) as pool:
        asked = [(one, prompt) for prompt in PROMPTS for one in (llm, other)]
        replies = list(pool.map(lambda pair: pair[0].generate(pair[1], max_new_tokens=30), asked))
    assert [reply.text for reply in replies] == [plain(prompt, 30) for _, prompt in asked]
    assert max(most) == 1


def test_leaving_a_stream_frees_its_row(llm, plain):
    stream = llm.stream(PROMPT, **LONG)
    first = next(stream)
    assert llm._worker.n_running == 1
    del stream
    assert is_idle(llm)
    assert plain(PROMPT, 40).startswith(first)
    for _ in llm.stream(PROMPT, **LONG):
        break
    assert is_idle(llm)
    stream = llm.stream(PROMPT, **LONG)
    text = next(stream)
    stream.cancel()
    text += "".join(stream)
    assert stream.reply.finish_reason == "cancelled"
    assert stream.reply.text == text
    assert len(stream.reply.generation.tokens) < 900


def test_ctrl_c_cancels_what_is_waited_for(llm):
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, **LONG)
    assert is_idle(llm)


def test_tasks_are_batched_and_cancelling_one_frees_its_row(llm, plain):
    async def texts():
        replies = await asyncio.gather(*(llm.agenerate(prompt, max_new_tokens=30) for prompt in PROMPTS))
        assert [reply.text for reply in await llm.agenerate(PROMPTS, max_new_tokens=30)] == [r.text for r in replies]
        assert "".join([piece async for piece in llm.astream(PROMPT, max_new_tokens=30)]) == replies[0].text
        return [reply.text for reply in replies]

    async def reading():
        stream = llm.astream(PROMPT, **LONG)
        async for _ in stream:
            pass

    async def leaving():
        async for _ in llm.astream(PROMPT, **LONG):
            break
        assert is_idle(llm)
        for task in map(asyncio.create_task, (llm.agenerate(PROMPTS, **LONG), reading())):
            began = time.monotonic()
            while not llm._worker.n_running and time.monotonic() < began + 30:  # a busy machine begins late
                await asyncio.sleep(0.05)
            assert llm._worker.n_running
            task.cancel()
            with pytest.raises(asyncio.CancelledError) as kept:  # with the frames of the task
                await task
            assert is_idle(llm), kept
        llm.astream(PROMPT, **LONG)  # whose loop ends before it does

    assert asyncio.run(texts()) == [plain(prompt, 30) for prompt in PROMPTS]
    asyncio.run(leaving())
    assert is_idle(llm)


WRONG = [
    ({"tempratur": 1}, "unknown sampling option: tempratur"),
    ({"draws": "shared"}, "draws is chosen for all texts"),
    ({"temperature": -1}, "temperature=-1 must be a number"),
    ({"max_new_tokens": 0}, "max_new_tokens=0 must be"),
    ({"max_new_tokens": 5000}, "shorten the prompt or lower max_new_tokens"),
    ({"seed": -1}, "seed=-1 must be"),
    ({"stop": [""]}, "must be texts that are not empty"),
    ({"logprobs": True}, "logprobs=True must be"),
]


@pytest.mark.parametrize(("options", "sentence"), WRONG)
def test_what_is_wrong_is_said_before_anything_is_decoded(llm, options, sentence):
    for ask in (llm.stream, llm.generate, lambda prompt, **options: llm.generate([prompt, prompt], **options)):
        with pytest.raises(UserError) as said:
            ask("x", **options)
        assert sentence in str(said.value)
    assert is_idle(llm)


def test_wrong_models_are_refused(target):
    for arguments, options, sentence in (
        (("no/where",), {}, "no/where"),
        ((target, "magic"), {}, "magic"),
        ((target, "pld"), {"gama": 3}, "gama is not an option"),
        ((target, "pld"), {"dtype": "float32"}, "load_target"),
        ((target, load_method("pld", target)), {"max_nodes": 3}, "load_method"),
        ((target, "pld"), {"batch_size": 0}, "batch_size=0"),
    ):
        with pytest.raises(UserError, match=sentence):
            LLM(*arguments, **options)


PROMPT_LIKE = [
    *([], ["a"], [[3]], (3, 4), range(3), np.array([3, 4]), torch.tensor([3, 4]), torch.tensor([[3], [4]])),
    *([torch.tensor([3, 4])], "\ud800", "a\0b", [{"role": "user", "content": "x"}]),
]
NO_PROMPTS = [
    *(None, "", b"abc", bytearray(b"a"), memoryview(b"a"), True, False, 0, -1, 3, 0.5, math.nan, math.inf, -math.inf),
    *(
        10**400,
        10**5000,
        -(10**400),
        1e300,
        [None],
        [""],
        [b"a"],
        [True],
        [0.5],
        [10**400],
        {},
        {3},
        ["a", 3],
        "x" * 5000,
    ),
    *({"role": "user"}, [{"role": "user"}], [{"role": 5, "content": "x"}], [{"role": "user", "content": 5}]),
    [{"role": "user", "content": "x"}, 5],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    *(np.array([0.5]), np.array([True]), np.array(3), np.int64(3), np.float32(0.5), torch.tensor([0.5])),
    *(torch.tensor(3), object(), print, iter([3])),
]
LONG_NAMES = ["é" * 200, "a" * 300 + "/b", "a/" * 3000]  # as files, and as their folders; they are good prompts


@pytest.mark.parametrize("value", PROMPT_LIKE + LONG_NAMES[:2] + NO_PROMPTS, ids=lambda value: type(value).__name__)
def test_whatever_is_given_works_or_is_a_mistake_in_one_sentence(llm, target, monkeypatch, value):
    monkeypatch.setattr(target.tokenizer, "chat_template", TEMPLATE, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = {}

    async def astream():
        return [piece async for piece in llm.astream(value, max_new_tokens=2)]

    calls = {
        "prompt": lambda: llm.generate(value, max_new_tokens=2),
        "stream": lambda: list(llm.stream(value, max_new_tokens=2)),
        "astream": lambda: asyncio.run(astream()),
        "messages": lambda: llm.chat(value, max_new_tokens=2),
        "system": lambda: llm.chat("a", value, max_new_tokens=2),
    }
    for name in (*Options.__annotations__, "draws", "unknown", "number"):
        calls[name] = partial(llm.generate, "import os", **{"max_new_tokens": 2, name: value})
    for name in ("method", "batch_size", "memory", "draws", "max_nodes", "unknown", "drafter", "head", "datastore"):
        calls[f"LLM({name})"] = partial(LLM, **{"target": target, "method": "pld", name: value})
    for name in ("target", "dtype", "device"):
        calls[f"LLM({name})"] = partial(LLM, **{"target": "nowhere/at-all", name: value})
    for name, call in calls.items():
        try:
            done = call()
        except UserError as error:
            said[name] = str(error)
        else:
            if isinstance(done, LLM):
                done.close()
    assert ("prompt" in said) == any(value is one for one in NO_PROMPTS)
    assert not any("\n" in sentence or len(sentence) > 600 for sentence in said.values())
    assert "".join(said.values()).encode()  # which a terminal can print
    if isinstance(value, bytes | bytearray | memoryview | np.ndarray | torch.Tensor | bool | float):
        assert said.keys() >= {"system", "messages", "stop", "seed", "logprobs", "max_new_tokens"}


def test_tensors_and_arrays_of_token_ids_are_prompts(llm):
    ids = llm.target.tokenizer(PROMPT)["input_ids"]
    expected = llm.generate(ids, max_new_tokens=5).text
    for prompt in (torch.tensor(ids), np.array(ids), np.array(ids, dtype=np.uint16), tuple(ids)):
        assert llm.generate(prompt, max_new_tokens=5).text == expected
        assert "".join(llm.stream(prompt, max_new_tokens=5)) == expected
    for prompts in (torch.tensor([ids, ids]), [np.array(ids), torch.tensor(ids)]):
        assert [reply.text for reply in llm.generate(prompts, max_new_tokens=5)] == [expected] * 2


def test_a_long_prompt_gets_what_room_is_left(llm):
    ids = llm.target.tokenizer(PROMPT * 300)["input_ids"][: llm.max_length - 7]
    assert len(llm.generate(ids).generation.tokens) <= 7
    with pytest.raises(UserError, match="the prompt is empty"):
        llm.generate("")


def test_one_that_is_closed_or_forgotten_ends(target):
    llm = LLM(target, "autoregressive")
    stream = llm.stream(PROMPT, **LONG)
    thread = llm._worker._thread
    llm.close()
    list(stream)  # ends
    assert stream.reply.finish_reason == "cancelled"
    assert not thread.is_alive()
    with pytest.raises(UserError):
        llm.generate(PROMPT)
    forgotten = weakref.ref(llm := LLM(target, "autoregressive"))
    thread = llm._worker._thread
    del llm
    gc.collect()
    assert forgotten() is None
    assert not thread.is_alive()


def test_importing_the_package_imports_no_torch_and_says_its_types():
    subprocess.run([sys.executable, "-c", "import spectrain, sys; assert 'torch' not in sys.modules"], check=True)
    assert spectrain.__getattr__("LLM") is LLM  # which is imported where it is asked for
    assert "LLM" not in vars(spectrain)
    assert Path(spectrain.__file__).with_name("py.typed").exists()


def test_it_says_what_it_does_unless_quiet(shared, capfd, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # a program that has set up no logging
    told = []
    LLM(shared / "target", "pld", progress=lambda *step: told.append(step)).close()
    assert [f"loading {shared / 'target'}", "opening the method"] == [what for what, done in told if done is None]
    logging.getLogger("spectrain.methods").info("said by nobody")
    assert "said by nobody" not in capfd.readouterr().err
    ours = logging.getLogger("spectrain")
    with speaking(False, None):
        ours.info("said")
    assert capfd.readouterr().err == "said\n"
    try:
        LLM(shared / "target", "pld", quiet=True, progress=lambda *step: told.append(step)).close()
        ours.warning("said by nobody")
        assert (len(told), capfd.readouterr().err) == (2, "")
    finally:
        ours.setLevel(logging.NOTSET)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # newer Pythons warn of forks beside threads
def test_a_forked_child_is_told_what_to_do(llm, target):
    begun, (told, tell) = llm.stream(PROMPT, **LONG), multiprocessing.Pipe(duplex=False)
    next(begun)
    calls = {
        "generate": lambda: llm.generate(PROMPT, max_new_tokens=4),
        "stream": lambda: deque(begun, maxlen=0),
        "achat": lambda: asyncio.run(llm.agenerate(PROMPT, max_new_tokens=4)),
        "anew": lambda: LLM("pystdlib-8l"),
        "same target": lambda: LLM(target, "pld"),
    }

    def child() -> None:
        for name, call in calls.items():
            with pytest.raises(UserError, match="was forked from one that has loaded an LLM"):
                call()
            tell.send(name)
        begun.cancel()
        llm.close()
        tell.send("closed")

    process = multiprocessing.get_context("fork").Process(target=child)
    with llm._worker._wanted:  # a child of such a moment could wait for the lock
        process.start()
    try:
        for name in (*calls, "closed"):
            assert told.poll(30), name
            assert told.recv() == name
    finally:
        process.kill()
        begun.cancel()
