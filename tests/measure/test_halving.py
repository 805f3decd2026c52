"""Halving on a scripted clock: slow methods leave, close ones are measured longest, and time is kept."""

from __future__ import annotations

from collections import Counter

import pytest

from spectrain.data.prompts import Question
from spectrain.decoding import Generation, Sampling
from spectrain.measure.benchmark import Benchmark
from spectrain.measure.halving import AUTO, FEWEST, Halving
from spectrain.methods.registry import BASELINE
from spectrain.target import TargetModel
from tests.conftest import tiny_model
from tests.models.test_artifacts import tiny_tokenizer

TOKENS = 40  # per reply; plain decoding writes one per second


class Machine:
    """Decodes at given speeds over plain decoding, and moves the clock on. `noise`: by which prompts change a speed."""

    def __init__(self, noise: float = 0.0, **speeds: float):
        self.noise, self.speeds, self.now, self.calls = noise, {BASELINE: 1.0, **speeds}, 0.0, Counter()

    def decoder(self, name: str):
        def decode(prompts, max_new_tokens, *, prompt_numbers):
            found = []
            for number in prompt_numbers:
                speed = self.speeds[name] * (1 + self.noise * (-1) ** (number // 64 + ord(name[0])))
                self.calls[name] += max_new_tokens == TOKENS  # not of warming up
                self.now += max_new_tokens / speed
                steps = [0 if name == BASELINE else 1] * (max_new_tokens // 2)
                found.append(Generation([5] * max_new_tokens, drafted=steps, prefill_s=max_new_tokens / speed))
            return found

        return decode

    def halving(self, until: float, n: int = 100, batch_size: int = 1, **decoders) -> Halving:
        decoders = {name: self.decoder(name) for name in self.speeds} | decoders
        asked = [Question(f"q{i}", "any", ("a",)) for i in range(n)]
        target = TargetModel(tiny_model(), tiny_tokenizer())
        benchmark = Benchmark(target, decoders, asked, lambda question, replies: [5], TOKENS, batch_size)
        halving = Halving(Sampling(), benchmark, lambda: self.now)
        halving.prepare(until, print)
        halving.run(until, print)
        return halving


EIGHT = {"a": 0.5, "b": 0.8, "c": 1.9, "d": 1.1, "e": 1.2, "f": 2.0, "g": 0.9, "h": 1.5, AUTO: 1.6}


def test_half_of_the_methods_leave_in_each_round_and_the_fastest_answers_most():
    machine = Machine(noise=0.1, **EIGHT)
    halving = machine.halving(until=4000)
    assert [set(left) - {BASELINE, AUTO} for left in halving.rounds] == [{*"cefh"}, {*"cf"}, {"f"}]
    calls = machine.calls
    assert calls[AUTO] == calls[BASELINE] == calls["f"] == calls["c"] > calls["h"] > calls["d"] == calls["a"] > 0
    assert halving.result()["recommended"] == "f"


def test_methods_that_are_surely_slower_leave_before_their_half():
    halving = Machine(a=2.0, b=1.2, c=1.1, d=1.0, auto=1.0).halving(until=3000)
    assert set(halving.rounds[0]) - {BASELINE, AUTO} == {"a"}


@pytest.mark.parametrize("batch_size", [1, 4])
def test_nothing_begins_when_the_time_is_over(batch_size):
    machine = Machine(**EIGHT)
    machine.halving(until=3000, batch_size=batch_size)
    longest = TOKENS / 0.5 / 0.98 * (1 if batch_size == 1 else 2 * batch_size)
    assert 2400 < machine.now < 3000 + longest


def test_it_ends_when_all_prompts_are_answered():
    machine = Machine(noise=0.3, a=2.0, b=1.9, c=1.8, d=1.7, auto=2.0)
    halving = machine.halving(until=1e9, n=10)
    assert machine.calls == dict.fromkeys(machine.speeds, 10)
    assert len(halving.rounds) == 1  # what says no more drops nobody
    assert halving.result()["prompts"] == 10


@pytest.mark.parametrize("until", [5, 100, 700])
def test_too_little_time_recommends_auto(until):
    found = Machine(**EIGHT).halving(until=until).result()
    assert (found["recommended"], found["prompts"] < FEWEST) == (AUTO, True)


@pytest.mark.parametrize(
    ("speeds", "best"),
    [
        ({"a": 1.5, AUTO: 1.48}, AUTO),  # nearly as fast, and right for other texts, too
        ({"a": 1.5, AUTO: 1.4}, "a"),
        ({"a": 1.02, AUTO: 1.02}, BASELINE),
        ({"a": 0.7, AUTO: 0.9}, BASELINE),
    ],
)
def test_what_is_recommended(speeds, best):
    assert Machine(**speeds).halving(until=3000).result()["recommended"] == best


def test_a_method_that_hardly_drafts_is_not_faster_than_plain_decoding():
    machine = Machine(auto=1.0)

    def lucky(prompts, max_new_tokens, *, prompt_numbers):
        return [Generation([5] * max_new_tokens, drafted=[0] * max_new_tokens, prefill_s=1.0) for _ in prompts]

    found = machine.halving(until=3000, n=20, lucky=lucky).result()
    assert (found["methods"]["lucky"]["no_speedup"], found["recommended"]) == ("did not draft", BASELINE)


def test_a_method_that_fails_leaves_and_the_others_go_on():
    def broken(prompts, max_new_tokens, *, prompt_numbers):
        raise RuntimeError("no memory")

    halving = Machine(a=1.5, auto=1.2).halving(until=3000, n=8, broken=broken)
    found = halving.result()
    assert (found["recommended"], found["prompts"]) == ("a", 8)
    assert "broken" not in halving.left
