"""Methods take turns on each question; turns of a conversation follow one another; failures stay where they are."""

import gc
from dataclasses import replace

import pytest
import torch

from spectrain.data.prompts import Question
from spectrain.decoding import generate
from spectrain.kernels import Graphs
from spectrain.measure.benchmark import Benchmark
from spectrain.methods.autoregressive import Autoregressive
from spectrain.target import TargetModel
from tests.conftest import tiny_model
from tests.models.test_artifacts import tiny_tokenizer


class Recorder:
    """Answers as autoregressive decoding does, and keeps what it was asked; fails on a prompt that holds `poison`."""

    def __init__(self, name: str, calls: list, target: TargetModel, poison: int | None = None, batch_size: int = 1):
        self.name, self.calls, self.target, self.poison, self.batch_size = name, calls, target, poison, batch_size

    def __call__(self, prompts, max_new_tokens, *, prompt_numbers):
        if any(self.poison in prompt for prompt in prompts):
            raise RuntimeError("poison")
        self.calls.append((self.name, list(prompt_numbers), max_new_tokens))
        options = {"prompt_numbers": prompt_numbers, "batch_size": self.batch_size}
        return generate(self.target, Autoregressive(), prompts, max_new_tokens, **options)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(tiny_model("llama"), tiny_tokenizer())


def ids(asked: Question, replies) -> list[int]:
    """Each turn is a number; replies stand between them."""
    turns = asked.turns[: len(replies) + 1]
    tokens = [int(turns[0])]
    for turn, reply in zip(turns[1:], replies, strict=True):
        tokens += [*reply, int(turn)]
    return tokens


def benchmark(target, questions, decoders, batch_size=1, n_new=4):
    return Benchmark(target, decoders, questions, ids, n_new, batch_size)


def question(name: str, *turns: str) -> Question:
    return Question(name, "any", turns)


def questions(n: int) -> list[Question]:
    return [question(f"q{i}", str(5 + i)) for i in range(n)]


def test_methods_take_turns_and_begin_in_turn(target):
    calls = []
    three = {name: Recorder(name, calls, target) for name in "abc"}
    rows = [row for group in benchmark(target, questions(3), three).groups(set()) for row in group]
    assert [(name, numbers) for name, numbers, _ in calls] == [
        *[("a", [0]), ("b", [0]), ("c", [0])],
        *[("b", [64]), ("c", [64]), ("a", [64])],
        *[("c", [128]), ("a", [128]), ("b", [128])],
    ]
    assert [(row.question_id, row.method) for row in rows][:4] == [("q0", "a"), ("q0", "b"), ("q0", "c"), ("q1", "b")]


def test_what_is_measured_is_not_measured_again(target):
    calls = []
    two = {name: Recorder(name, calls, target) for name in "ab"}
    done = {("q0", "a"), ("q1", "a"), ("q1", "b")}
    rows = [row for group in benchmark(target, questions(3), two).groups(done) for row in group]
    assert [(row.question_id, row.method) for row in rows] == [("q0", "b"), ("q2", "a"), ("q2", "b")]
    assert calls[0][1] == [0]  # the seed of a question is its own, whatever was skipped
    assert calls[1][1] == [128]


def test_turns_are_played_with_the_replies_before_them(target):
    calls = []
    asked = [question("two", "7", "9"), question("one", "8")]
    decoder = {"a": Recorder("a", calls, target)}
    ((two, one),) = benchmark(target, asked, decoder, batch_size=2).groups(set())
    assert [numbers for _, numbers, _ in calls] == [[0, 64], [1]]
    assert (two.turns, one.turns) == (2, 1)
    assert two.prompt_tokens == [1, 2 + len(two.replies[0])]
    assert two.n_tokens == len(two.replies[0]) + len(two.replies[1])


def test_batches_are_filled_from_groups_of_several(target):
    calls = []
    groups = list(benchmark(target, questions(10), {"a": Recorder("a", calls, target)}, batch_size=2).groups(set()))
    assert [len(group) for group in groups] == [8, 2]


def test_a_question_that_fails_is_recorded_and_the_others_are_answered(target):
    calls = []
    decoders = {"a": Recorder("a", calls, target, poison=6), "b": Recorder("b", calls, target)}
    rows = [row for group in benchmark(target, questions(3), decoders).groups(set()) for row in group]
    errors = {(row.question_id, row.method): row.error for row in rows}
    assert errors.pop(("q1", "a")) == "RuntimeError: poison"
    assert set(errors.values()) == {None}
    assert len(errors) == 5


def test_a_conversation_too_long_for_the_target_leaves_its_batch_alone(target):
    calls = []
    asked = [question("short", "5"), question("grows", "6", "7"), question("long", "8")]

    def long_ids(asked, replies) -> list[int]:
        return [8] * 300 if "8" in asked.turns or replies else [int(asked.turns[0])]

    decoders = {"a": Recorder("a", calls, target)}
    bench = Benchmark(target, decoders, asked, long_ids, 4, batch_size=4)
    ((short, grows, long),) = bench.groups(set())
    assert calls == [("a", [0, 64], 4)]  # one call for all that fit
    assert short.error is None
    assert "has 300 tokens and max_new_tokens=4, but the target's context holds 256" in grows.error
    assert grows.error == long.error
    assert grows.replies == []
    (rows,) = replace(bench, max_length=300).groups(set())
    assert ["leave none of max_length=300" in (row.error or "") for row in rows] == [False, True, True]


def test_what_fails_in_a_batch_fails_for_its_group(target):
    decoders = {"a": Recorder("a", [], target, poison=6)}
    (rows,) = benchmark(target, questions(3), decoders, batch_size=3).groups(set())
    assert [row.error for row in rows] == ["RuntimeError: poison"] * 3


def test_warm_up_is_short_and_not_counted(target):
    calls = []
    benchmark(target, questions(2), {"a": Recorder("a", calls, target)}, n_new=50).warm_up()
    assert calls == [("a", [0], 50)] * 2  # 64 tokens, but no more than are asked for


def test_answers_are_not_interrupted_by_a_search_for_garbage_in_what_was_loaded_before(target, tmp_path):
    frozen = []

    class Watched(Recorder):
        def __call__(self, *arguments, **options):
            frozen.append(gc.get_freeze_count())
            return super().__call__(*arguments, **options)

    benchmark(target, questions(2), {"a": Watched("a", [], target)}).run(tmp_path / "questions.jsonl")
    warm_ups, answers = frozen[:2], frozen[2:]
    assert warm_ups == [0, 0]
    assert len(answers) == 2
    assert min(answers) > 10_000
    assert gc.get_freeze_count() == 0


class Recording(Recorder):
    """Records a graph in its first `n` answers, as a shape does that was not prepared."""

    def __init__(self, *arguments, n: int):
        super().__init__(*arguments)
        self.left, self.graphs = n, Graphs(record=lambda function: function)

    def __call__(self, prompts, *arguments, **options):
        self.left -= 1
        for _ in range(2 if self.left >= 0 else 0):  # the second call with a key records
            self.graphs.run(("step", self.left), torch.neg, torch.zeros(1))
        return super().__call__(prompts, *arguments, **options)


@pytest.mark.parametrize("strict", [True, False])
def test_an_answer_in_which_a_graph_is_recorded_fails_on_a_gpu_and_is_noted_elsewhere(target, strict):
    decoders = {"a": Recording("a", [], target, n=1)}
    bench = replace(benchmark(target, questions(2), decoders), strict=strict)
    (first,), (second,) = bench.groups(set())
    assert (first.prepared, second.prepared, second.error) == (2, 0, None)  # a first call and a recording
    assert (first.error or "").startswith("compiled inside the answer; 2 ") == strict
    assert bool(first.replies) != strict


def test_a_strict_benchmark_warms_up_with_the_longest_that_fit_until_nothing_is_prepared(target):
    def long_ids(asked: Question, replies) -> list[int]:
        return [5] * len(asked.turns[0])

    calls, asked = [], [question(str(n), "x" * n) for n in (3, 7, 300, 5, 4)]
    decoders = {"a": Recording("a", calls, target, n=3)}
    Benchmark(target, decoders, asked, long_ids, 50, batch_size=2, strict=True).warm_up()
    assert calls == [("a", [64, 192], 50)] * 4  # all 50 tokens of the two longest, without the one that is too long


def test_no_group_is_smaller_than_a_batch_if_there_are_several(target):
    for n, sizes in ((9, [9]), (10, [8, 2]), (17, [8, 9]), (1, [1])):
        todo = benchmark(target, questions(n), {"a": None}, batch_size=2).todo(set())
        assert [len(numbers) for _, numbers in todo] == sizes


def test_batch_sizes_share_a_file_and_each_is_measured_once(target, tmp_path):
    file, calls = tmp_path / "questions.jsonl", []
    decoders = {"a": Recorder("a", calls, target, poison=6)}  # the question of the number 6 fails
    for size in (1, 2, 1):
        bench = Benchmark(target, decoders, questions(2), ids, 4, size)
        rows = bench.run(file)
    assert [(row.batch_size, row.question_id, row.error is None) for row in rows] == [
        *[(1, "q0", True), (2, "q0", False), (2, "q1", False)],
        (1, "q1", False),  # again
    ]
    assert rows[0].steps == rows[0].target_forwards == 3
