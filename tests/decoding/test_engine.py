"""Requests that join, leave, fail and share beginnings get the target's own text, as if they were alone."""

import random
from functools import lru_cache, partial
from itertools import product

import numpy as np
import pytest
import torch

from spectrain.decoding import Engine, Prefixes, Request, Sampling, generate
from spectrain.decoding import engine as engine_module
from spectrain.decoding import prefixes as prefixes_module
from spectrain.errors import UserError
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.registry import method_names
from spectrain.target import KVCache, TargetModel
from tests.conftest import EOS_ID, random_prompts, tiny_model
from tests.decoding.reference import greedy_by_full_forwards
from tests.decoding.test_graphs import target_with_graphs
from tests.decoding.test_loop import EVERY_SORT, OF_EACH_ENGINE, artifacts, drafter_of

N_NEW = 12
MEMORY = 1 << 22  # bytes, of kept texts


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    monkeypatch.setitem(engine_module.PIECE, "cpu", 8)
    monkeypatch.setattr(prefixes_module, "LEAST_TOKENS", 4)
    monkeypatch.setattr("spectrain.target.prefill.NEAR", 2)


@lru_cache
def texts_of(family: str) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, of which some begin like earlier ones, are one, or go on with its answer; and what the target writes."""
    model, shared = tiny_model(family), random_prompts([30], seed=7)[0]
    prompts, texts = [], []
    for number, prompt in enumerate(random_prompts([5, 33, 2, 14, 50, 9, 26, 1, 40, 7], seed=8)):
        prompt = shared + prompt if number % 3 == 1 else prompt
        prompt = prompts[-2] + texts[-2] + prompt[:5] if number in (5, 8) else prompt
        prompt = prompts[4] if number == 9 else prompt
        prompts.append(prompt)
        texts.append(greedy_by_full_forwards(model, prompt, N_NEW, (EOS_ID,)))
    return prompts, texts


def target_of(family: str) -> TargetModel:
    return TargetModel(tiny_model(family), artifacts(family).target.tokenizer, prefill_chunk=16)


def run(engine: Engine, arrivals: list, on_step=lambda engine, steps: None) -> dict[int, list]:
    """Run until all requests have ended; each comes before the step that it is given with. Return what each gained."""
    gained, n_steps = {}, 0
    while engine.has_work or n_steps <= max(when for when, _ in arrivals):
        for when, request in arrivals:
            if when == n_steps:
                gained[engine.submit(request)] = []
        steps = engine.step()
        for step in steps:
            gained[step.request].append(step)
        on_step(engine, steps)
        n_steps += 1
        assert n_steps < 2000
    return gained


def tokens_of(steps: list) -> list[int]:
    return [token for step in steps for token in step.tokens]


# Every method meets one engine, and the other one a method of each sort; the other pairs are slow.
METHODS_AND_ENGINES = [
    pytest.param(name, family, marks=() if family == "llama_gqa" or name in EVERY_SORT else pytest.mark.slow)
    for name, family in product(method_names(), OF_EACH_ENGINE)
]


@pytest.mark.parametrize(("name", "family"), METHODS_AND_ENGINES)
def test_requests_that_come_and_go_get_the_targets_own_text(name, family, monkeypatch):
    monkeypatch.setattr("spectrain.methods.auto.Auto._rests", lambda *_: False)  # all of its drafters follow all texts
    prompts, texts = texts_of(family)
    chooser = random.Random(name)
    engine = Engine(target_of(family), drafter_of(name, family), 3, prefixes=Prefixes(MEMORY), cache_block_tokens=8)
    arrivals = [
        (when, Request(p, N_NEW)) for when, p in zip((0, 0, 3, 60, 60, 60, 80, 81, 82, 82), prompts, strict=True)
    ]
    left = {}

    def sometimes_leave(engine: Engine, steps: list) -> None:
        if chooser.random() < 0.05 and (running := [s.request for s in steps if s.generation is None]):
            left[running[0]] = engine.n_running
            engine.cancel(running[0])

    gained = run(engine, arrivals, sometimes_leave)
    assert [*gained] == [*range(10)]
    for number, text in enumerate(texts):
        found, last = tokens_of(gained[number]), gained[number][-1].generation
        if number in left and last.finish_reason == "cancelled":
            assert found == text[: len(found)]
        else:
            assert found == last.tokens == text
        assert all(step.generation is None for step in gained[number][:-1])
    read = sum(steps[-1].generation.cached_tokens for steps in gained.values())
    assert read > 20  # the drafters' own needs included, some beginnings were not read again


WHOLE = [name for name in method_names() if name.startswith(("eagle3", "dflash"))]  # whose drafters see whole texts
WAYS = ("programs", "torch", "graphs")  # to run a drafter


def drafting_target(way: str, monkeypatch) -> TargetModel:
    if way != "programs":
        monkeypatch.setattr("spectrain.drafting.runtime.can_fuse", lambda *_: False)
    return target_with_graphs() if way == "graphs" else target_of("llama_gqa")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*WHOLE, "auto"])
def test_kept_texts_have_the_keys_that_drafters_would_make_of_them_alone(name, way, monkeypatch):
    """Though they begin with keys that were kept, rows move, and methods of `auto` take turns."""
    monkeypatch.setattr("spectrain.methods.auto.Auto._rests", lambda *_: False)
    prompts, texts = texts_of("llama_gqa")
    target, method = drafting_target(way, monkeypatch), drafter_of(name, "llama_gqa")
    engine = Engine(target, method, 3, prefixes=Prefixes(MEMORY), cache_block_tokens=8)
    n_new = (N_NEW, 1, 5)  # a text may end before anything is drafted
    arrivals = [(4 * i, Request(prompt, n_new[i % 3])) for i, prompt in enumerate([*prompts, *prompts])]
    gained = run(engine, arrivals)
    assert [tokens_of(steps) for steps in gained.values()] == [
        t[: n_new[i % 3]] for i, t in enumerate([*texts, *texts])
    ]
    assert sum(steps[-1].generation.cached_tokens for steps in gained.values()) > 200
    for tokens, known in engine.prefixes._texts.values():
        text, marks = torch.tensor(tokens)[None], known.keys() - {prefixes_module.TARGET}
        assert {type(mark().config).__name__ for mark in marks} == {
            "eagle3": {"Eagle3Config"},
            "dflash": {"DFlashConfig"},
            "auto": {"Eagle3Config", "DFlashConfig"},
        }[name.split("_")[0]]
        for mark in marks:
            drafter, n_valid = mark(), len(tokens) - mark().pairs
            captured = target.with_capture(drafter.config.captured_layers).features(text).captured
            memories, _ = drafter.read_target(captured, text.roll(-1, 1) if drafter.pairs else None)
            rope = drafter.rope(torch.arange(len(tokens))[None])
            for block, memory, kept in zip(drafter.blocks, memories, known[mark], strict=True):
                expected = block.keys_values(memory, rope)
                for own, one in zip(kept, (expected.keys, expected.values), strict=True):
                    torch.testing.assert_close(own[:, :n_valid], one[0, :, :n_valid], atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WHOLE)
def test_drafts_behind_a_kept_beginning_are_those_behind_one_that_was_read(name, way, monkeypatch):
    drafts, cached = [], []
    for prefixes in (None, Prefixes(MEMORY)):
        method = drafter_of(name, "llama_gqa", draft_dtype="float32")  # 8 bits round by 5e-4, and near ties turn
        drafts.append([])
        monkeypatch.setattr(method, "propose", partial(_noted, method.propose, drafts[-1]))
        engine = Engine(drafting_target(way, monkeypatch), method, 1, prefixes=prefixes)
        gained = run(engine, [(0, Request(prompt, N_NEW)) for prompt in texts_of("llama_gqa")[0]])
        cached.append(sum(steps[-1].generation.cached_tokens for steps in gained.values()))
    assert drafts[0] == drafts[1]
    assert cached[0] == 0 < 20 < cached[1]


def _noted(propose, drafts: list, context):
    tree = propose(context)
    drafts.append((tree.tokens.tolist(), tree.parents.tolist()))
    return tree


@pytest.mark.parametrize("family", OF_EACH_ENGINE)
def test_rows_go_on_while_a_long_prompt_is_read(family):
    target, together = target_of(family), []
    engine = Engine(target, Autoregressive(), 2, stop_token_ids=())
    prompts = random_prompts([3, 70], seed=3)
    gained = run(
        engine,
        [(0, Request(prompts[0], 20)), (1, Request(prompts[1], 4))],
        lambda engine, steps: together.append([step.request for step in steps]),
    )
    joined = together.index([1])
    assert 2 <= joined <= 10  # 70 tokens in pieces of 8, or in programs of 64 tokens
    assert together[1:joined] == [[0]] * (joined - 1)
    for number, n_new in ((0, 20), (1, 4)):
        assert tokens_of(gained[number]) == greedy_by_full_forwards(tiny_model(family), prompts[number], n_new)


def test_a_long_prompt_is_read_in_place_where_memory_holds_no_copy_of_it(monkeypatch):
    monkeypatch.setattr(engine_module, "MOST_NODES", 8)
    target, waited = target_of("llama_gqa"), []
    for tokens in (110, 180):
        engine, together = Engine(target, Autoregressive(), 2, memory=tokens * target.token_bytes), []
        requests = [(0, Request([3] * 5, 20)), (1, Request([5] * 70, 5))]
        run(engine, requests, lambda engine, steps, seen=together: seen.append([step.request for step in steps]))
        waited.append([step for step in together if step].index([1]) == 1)
    assert waited == [True, False]


@pytest.mark.parametrize("name", ["spire", "speculative", "sssd", "auto"])
def test_with_shared_noise_a_sample_depends_on_its_seed_alone(name):
    prompts, _ = texts_of("llama_gqa")
    target = target_of("llama_gqa")
    samplings = [Sampling(), Sampling(0.8, draws="shared"), Sampling(1.0, top_p=0.9, draws="shared")]
    alone = [
        generate(target, Autoregressive(), [prompt], N_NEW, samplings[i % 3], seed=i)[0].tokens
        for i, prompt in enumerate(prompts)
    ]
    engine = Engine(target, drafter_of(name, "llama_gqa"), 4, draws="shared", prefixes=Prefixes(MEMORY))
    requests = [(2 * i, Request(prompt, N_NEW, samplings[i % 3], seed=i)) for i, prompt in enumerate(prompts)]
    gained = run(engine, requests)
    assert [tokens_of(steps) for steps in gained.values()] == alone


@pytest.mark.parametrize("when", ["waiting", "reading", "running"])
def test_a_request_that_is_given_up_frees_its_row_within_a_step(when):
    prompts, texts = texts_of("llama_gqa")
    engine, long = Engine(target_of("llama_gqa"), Autoregressive(), 2 if when != "waiting" else 1), prompts[4]
    first = engine.submit(Request(prompts[0], N_NEW))
    before = engine.step()
    second = engine.submit(Request(long if when == "reading" else prompts[2], N_NEW))
    before += engine.step()
    third = engine.submit(Request(prompts[3], N_NEW))
    engine.cancel(second)
    steps = engine.step()
    ended = next(step for step in steps if step.request == second)
    assert ended.generation.finish_reason == "cancelled"
    assert (ended.generation.tokens != []) == (when == "running")
    assert engine.n_running + engine.n_waiting == 2
    found = {first: [], third: []}
    for step in [*before, *steps, *(step for _ in range(40) for step in engine.step())]:
        if step.request in found:
            found[step.request] += step.tokens
    assert found == {first: texts[0], third: texts[3]}


def test_memory_admits_requests_in_order():
    target = target_of("llama_gqa")
    engine = Engine(target, Autoregressive(), 4, memory=200 * target.token_bytes, max_length=60, stop_token_ids=())
    assert engine.max_length == 60
    running, began = [], []

    def watch(engine: Engine, steps: list) -> None:
        running.append(engine.n_running)
        began.extend(step.request for step in steps if step.request not in began)

    run(engine, [(0, Request([5 + i] * 10, reach - 10)) for i, reach in enumerate((60, 60, 60, 60, 20))], watch)
    assert max(running) == 3  # 20 tokens more than 180 would fit, but the last request may not overtake
    assert began == [0, 1, 2, 3, 4]
    with pytest.raises(UserError, match="there is memory for 60"):
        engine.submit(Request([5] * 41, 20))
    with pytest.raises(UserError, match="holds no text"):
        Engine(target, Autoregressive(), 4, memory=100 * target.token_bytes)


def test_an_unknown_rule_of_verification_is_refused():
    with pytest.raises(UserError, match="verification=blocks must be one of token, block"):
        Engine(TargetModel(tiny_model()), Autoregressive(), 1, verification="blocks")


def test_memory_counts_what_rows_once_held(monkeypatch):
    target, chance, held, taken = target_of("llama_gqa"), random.Random(3), {}, []
    monkeypatch.setattr(engine_module, "MOST_NODES", 8)
    engine = Engine(target, Autoregressive(), 4, memory=160 * target.token_bytes, stop_token_ids=())
    reaches = [chance.choice((20, 60)) for _ in range(30)] + [150]  # which needs a new cache

    def watch(engine: Engine, steps: list) -> None:
        own = held.setdefault(engine._cache, [0] * 4)
        for row, length in enumerate(engine._cache.lengths):
            own[row] = max(own[row], length)
        taken.append(sum(own))

    gained = run(engine, [(4 * i, Request([5 + i] * 10, reach - 10)) for i, reach in enumerate(reaches)], watch)
    assert max(taken) <= 160
    texts = [[token for step in steps for token in step.tokens] for steps in gained.values()]
    assert [10 + len(text) for text in texts] == reaches


def test_memory_counts_what_was_read_of_a_prompt_that_was_given_up(processor):
    engine = Engine(target_of("llama_gqa"), Autoregressive(), 2)
    number = engine.submit(Request([3] * 150, 9))  # more than any processor reads at a time
    assert engine.step() == []  # nobody else waits, so it is read in place
    engine.cancel(number)
    engine.step()
    assert engine._cache.slots_taken([]) == 150


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_method_that_has_begun_other_texts_is_not_asked_for_the_earlier_ones(gives_up):
    prompts, texts = texts_of("llama_gqa")
    method = drafter_of("spire", "llama_gqa")
    first, second = (Engine(target_of("llama_gqa"), method, 2) for _ in range(2))
    for engine in (first, second):
        for prompt in prompts[:2]:
            engine.submit(Request(prompt, N_NEW))
        engine.step()
    if gives_up:
        first.cancel(0)
    with pytest.raises(UserError, match="the method has begun other texts before these ended; give each"):
        first.step()
    assert [step.error for step in first.fail("over")] == ["over", "over"]
    ended = [step.generation for _ in range(99) for step in second.step() if step.generation is not None]
    assert sorted(one.tokens for one in ended) == sorted(texts[:2])


def test_a_prompt_that_does_not_fit_fails_alone(monkeypatch):
    prompts, texts = texts_of("llama_gqa")
    engine, reading = Engine(target_of("llama_gqa"), Autoregressive(), 2), TargetModel.reading

    def full(target, tokens, *given):
        yield
        if tokens.shape[1] == 50:
            raise torch.OutOfMemoryError
        return (yield from reading(target, tokens, *given))

    monkeypatch.setattr(TargetModel, "reading", full)
    gained = run(engine, [(0, Request(prompts[0], N_NEW)), (2, Request([3] * 50, 9)), (3, Request(prompts[3], N_NEW))])
    assert "out of memory" in gained[1][-1].error
    assert [tokens_of(gained[number]) for number in (0, 2)] == [texts[0], texts[3]]


def test_logprobs_are_those_of_the_targets_own_logits():
    prompts, texts = texts_of("llama_gqa")
    target = target_of("llama_gqa")
    engine = Engine(target, drafter_of("sssd", "llama_gqa"), 2)
    hot = Sampling(1.3, top_k=5)
    gained = run(
        engine, [(0, Request(prompts[0], N_NEW, logprobs=3)), (1, Request(prompts[3], N_NEW, hot, logprobs=0))]
    )
    for number, n_top in ((0, 3), (1, 0)):
        prompt, told = prompts[3 * number], [one for step in gained[number] for one in step.logprobs]
        tokens = tokens_of(gained[number])
        log_p = target.forward(torch.tensor([prompt + tokens])).logits[0].detach().log_softmax(-1)[len(prompt) - 1 : -1]
        assert len(told) == len(tokens)
        for place, one in enumerate(told):
            assert one.logprob == pytest.approx(float(log_p[place, tokens[place]]), abs=1e-4)
            values, ids = log_p[place].topk(n_top)
            assert [token for token, _ in one.top] == ids.tolist()
            assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_kept_texts_stay_within_their_memory_and_the_oldest_go(monkeypatch):
    target = target_of("llama_gqa")
    cache = KVCache(1)
    texts = [np.array([number] * 10) for number in range(1, 5)]
    kept = Prefixes(3 * 10 * target.token_bytes)
    for number, text in enumerate(texts):
        target.prefill(torch.tensor(text[None]), [10], cache, range(1))
        kept.add(text, cache, 0)
        cache.clear()
        assert kept.longest([1] * 12) is not None or number == 3  # which makes the first the youngest again
        assert kept.bytes <= kept.max_bytes
    assert [kept.longest([number] * 12) is not None for number in (1, 2, 3, 4)] == [True, False, True, True]
    states, n_tokens = kept.longest([3] * 6 + [9] * 9)
    assert n_tokens == 6
    assert states[prefixes_module.TARGET][0][0].shape[1] == 10
    assert kept.longest([3, 3, 3, 9]) is None  # too few
    target.prefill(torch.tensor([[3] * 10 + [4]]), [11], cache, range(1))
    kept.add(np.array([3] * 10 + [4]), cache, 0)  # instead of its own beginning
    assert len(kept._texts) == 2
    kept.add(np.array([3] * 10), cache, 0)  # is part of it
    assert len(kept._texts) == 2
    monkeypatch.setattr(prefixes_module, "MOST_TEXTS", 2)
    kept.add(np.array([9] * 10), cache, 0)
    assert len(kept._texts) == 2
    assert kept.longest([9] * 12) is not None


class Beside:
    """Keys of a drafter, which are as long as the text and all one number."""

    def __init__(self, number: float) -> None:
        self.number = number

    def states_of(self, row: int, n_tokens: int) -> list:
        return [(torch.full((2, n_tokens, 3), self.number), torch.full((2, n_tokens, 3), self.number))]


def test_a_text_keeps_the_keys_of_all_drafters_that_followed_it_or_its_beginning():
    target, cache = target_of("llama_gqa"), KVCache(1)
    target.prefill(torch.tensor([[3] * 20]), [20], cache, range(1))
    kept = Prefixes(20 * (target.token_bytes + 2 * 2 * 2 * 3 * 4))  # one text of 20 tokens, with keys of two drafters

    def marks(n_tokens: int, *beside: str) -> dict:
        cache.beside = {Beside(float(i)): mark for i, mark in enumerate(beside)}
        kept.add(np.array([3] * n_tokens), cache, 0)
        assert len(kept._texts) == 1
        states, _ = kept.longest([3] * 30)
        sizes = {mark: (float(pairs[0][0].max()), pairs[0][0].shape[1]) for mark, pairs in states.items() if mark}
        assert kept.bytes == n_tokens * target.token_bytes + sum(n * 2 * 2 * 3 * 4 for _, n in sizes.values())
        return sizes

    assert marks(10) == {}
    assert marks(10, "a", "a") == {"a": (0.0, 10)}  # one of two methods with the same drafter
    assert marks(10) == {"a": (0.0, 10)}
    assert marks(15, "b") == {"a": (0.0, 10), "b": (0.0, 15)}
    assert marks(20, "b", "a") == {"a": (1.0, 20), "b": (0.0, 20)}
    cache.beside = {Beside(0.0): mark for mark in "abc"}
    kept.add(np.array([3] * 20), cache, 0)  # there is no memory for a third
    assert kept.longest([3] * 30)[0].keys() == {prefixes_module.TARGET, "a", "b"}


def test_a_drafter_reads_whole_what_others_wrote_and_then_what_is_new():
    """It goes on from the text that it followed, though plain decoding has taken it further."""
    target, eagle3, kept = target_of("llama_gqa"), drafter_of("eagle3", "llama_gqa"), Prefixes(MEMORY)
    prompts, texts = texts_of("llama_gqa")
    text, cached = prompts[0] + texts[0], []
    for method, prompt in (
        (Autoregressive(), text),
        (eagle3, text),
        (eagle3, text),
        (Autoregressive(), text + [5] * 9),
        (eagle3, text + [5] * 5),
        (drafter_of("eagle3", "llama_gqa"), text + [5] * 5),
    ):
        gained = run(Engine(target, method, 1, prefixes=kept), [(0, Request(prompt, 1))])
        cached.append(gained[0][-1].generation.cached_tokens)
    n = len(text)
    assert cached == [0, 0, n - 1, n, n + 4, 0]
