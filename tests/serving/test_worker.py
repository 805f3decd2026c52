"""One thread decodes for many: each request gets its own text, and what goes wrong ends one request, or one batch."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from spectrain.decoding import Emitted, Engine, Request
from spectrain.errors import UserError
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.pld import PromptLookup
from spectrain.serving.worker import CLOSED, INTERNAL_ERROR, Worker, open_worker
from spectrain.target import TargetModel
from tests.conftest import random_prompts, tiny_model
from tests.decoding.reference import all_greedy_by_full_forwards, greedy_by_full_forwards

N_NEW = 20


class Failing(PromptLookup):
    """Fails while a batch has two rows."""

    def propose(self, context):
        if context.n_rows == 2:
            raise ZeroDivisionError
        return super().propose(context)


@pytest.fixture
def worker():
    target = TargetModel(tiny_model("llama_gqa"))
    methods = {"pld": PromptLookup(max_nodes=8), "autoregressive": Autoregressive(), "failing": Failing(max_nodes=8)}
    worker = Worker({name: Engine(target, method, 2, stop_token_ids=()) for name, method in methods.items()})
    yield worker
    worker.close()


def answered(worker: Worker, request: Request, method: str | None = None, on_step=lambda ticket, step: None):
    """Wait for a request's end. Return its tokens and its last step."""
    steps, tokens = queue.Queue(), []
    ticket = worker.submit(request, steps.put, method)
    while True:
        step: Emitted = steps.get(timeout=60)
        tokens += step.tokens
        on_step(ticket, step)
        if step.generation is not None or step.error is not None:
            return tokens, step


def test_many_threads_get_their_own_texts_from_several_methods(worker):
    prompts = random_prompts([3, 12, 30, 7, 21, 5, 9, 16])
    requests = [Request(prompt, N_NEW) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: answered(worker, requests[i], ["pld", "autoregressive"][i % 2]), range(8)))
    expected = all_greedy_by_full_forwards(tiny_model("llama_gqa"), prompts, N_NEW)
    assert [tokens for tokens, _ in found] == expected
    assert (worker.n_running, worker.n_waiting) == (0, 0)


def test_a_wrong_request_is_refused_at_once_and_nobody_else_hears_of_it(worker):
    with pytest.raises(UserError, match="is empty"):
        worker.submit(Request([], N_NEW), print)
    with pytest.raises(UserError, match="method=nonsense is not loaded; choose among pld, autoregressive"):
        worker.submit(Request([5], N_NEW), print, "nonsense")
    assert answered(worker, Request([5, 6], N_NEW))[1].error is None


def test_a_failing_batch_ends_its_requests_and_the_next_one_is_answered(worker):
    prompts = random_prompts([4, 6])
    with ThreadPoolExecutor(2) as pool:
        long = [Request(prompt, 200) for prompt in prompts]
        found = list(pool.map(lambda request: answered(worker, request, "failing")[1].error, long))
    assert INTERNAL_ERROR in found
    tokens, last = answered(worker, Request(prompts[0], N_NEW), "failing")
    assert last.error is None
    assert tokens == greedy_by_full_forwards(tiny_model("llama_gqa"), prompts[0], N_NEW)


@pytest.mark.parametrize("place", ["start", "read_of_prompts", "prefill"])
def test_a_method_that_cannot_begin_ends_its_requests_and_nobody_waits(worker, place, monkeypatch):
    method = worker.engines["pld"].drafter

    def fail(*_):
        raise UserError("it does not fit")

    with monkeypatch.context() as broken:
        broken.setattr(method, place, fail)
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda i: answered(worker, Request([5 + i] * 3, N_NEW), "pld")[1].error, range(3)))
        assert found == ["it does not fit"] * 3
    assert answered(worker, Request([5, 6], N_NEW), "pld")[1].error is None


def test_a_worker_whose_thread_ends_answers_everybody(worker, monkeypatch):
    monkeypatch.setattr(worker.engines["failing"], "fail", lambda why: 1 / 0)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda i: answered(worker, Request([5 + i] * 3, 200), "failing")[1].error, range(2)))
    assert found == [INTERNAL_ERROR] * 2
    assert not worker.is_alive
    with pytest.raises(UserError, match=CLOSED):
        worker.submit(Request([5], 1), print)


def test_a_request_can_be_given_up_from_any_thread(worker):
    tokens, last = answered(
        worker, Request([7] * 5, 200), on_step=lambda ticket, step: worker.cancel(ticket) if step.tokens else None
    )
    assert last.generation.finish_reason == "cancelled"
    assert len(tokens) < 200


def test_a_client_that_raises_loses_its_request_only(worker):
    def gone(step: Emitted) -> None:
        raise ConnectionError

    worker.submit(Request([7] * 5, 200), gone)
    assert answered(worker, Request([5, 6], N_NEW))[1].error is None
    assert worker.n_running == 0


def test_closing_cancels_what_runs(worker):
    ends, ended = [], threading.Semaphore(0)

    def deliver(step: Emitted) -> None:
        if step.generation is not None:
            ends.append(step.generation.finish_reason)
            ended.release()

    for number in range(4):  # of which two wait
        worker.submit(Request([5 + number] * 3, 150), deliver)
    worker.close()
    assert len(ends) == 4
    assert "cancelled" in ends
    with pytest.raises(UserError, match=CLOSED):
        worker.submit(Request([5], 1), print)


def test_methods_are_opened_by_name_and_share_the_memory():
    target = TargetModel(tiny_model("llama_gqa"))
    worker = open_worker(target, {"pld": PromptLookup(8), "plain": Autoregressive()}, 4, memory=1000 * 2**-20)
    assert worker.methods == ["pld", "plain"]
    one, other = worker.engines.values()
    assert one.prefixes is other.prefixes
    assert one.prefixes.max_bytes + 2 * one.max_tokens * target.token_bytes <= 1000 * 1024
    worker.warm_up()
    worker.close()
