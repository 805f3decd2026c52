"""Perplexity: against one plain forward a document, and a slow loop of windows, whatever the batches."""

from __future__ import annotations

import json
import time

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from data_prep.openai_client import CompletionServer
from data_prep.select import Scoring, perplexities, read_scores, token_log_probs
from spectrain.errors import UserError
from spectrain.target import TargetModel
from tests.conftest import random_prompts, tiny_model
from tests.data_prep.fake_server import completion, serving
from tests.models.test_artifacts import tiny_tokenizer

LENGTHS = [2, 3, 17, 40, 40, 41, 5, 64]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(tiny_model("llama"), tiny_tokenizer())


def documents(lengths: list[int] = LENGTHS) -> list[np.ndarray]:
    return [np.array(ids, dtype=np.uint16) for ids in random_prompts(lengths)]


def by_hand(target: TargetModel, document: np.ndarray, bos_id: int | None = None) -> float:
    """One forward of the Hugging Face model, its own loss."""
    ids = torch.tensor([([] if bos_id is None else [bos_id]) + document.tolist()])
    with torch.inference_mode():
        return float(target.model(input_ids=ids, labels=ids).loss.exp())


def by_windows(target: TargetModel, document: np.ndarray, window: int, stride: int) -> float:
    """Token by token: the window in which a token is scored first decides what it sees."""
    ids = document.astype(np.int64)
    total = 0.0
    for position in range(1, len(ids)):
        start = 0
        while position >= start + window:
            start += stride
        assert position - start >= min(position, window - stride)
        with torch.inference_mode():
            logits = target.model(input_ids=torch.from_numpy(ids[None, start:position])).logits[0, -1]
        total += float(logits.log_softmax(-1)[ids[position]])
    return float(np.exp(-total / (len(ids) - 1)))


@pytest.mark.parametrize("bos_id", [None, 1])
def test_documents_within_the_window_equal_one_forward_each(target, bos_id):
    scoring = Scoring(window_tokens=128, stride_tokens=64, batch_tokens=100, bos_id=bos_id)
    expected = [by_hand(target, document, bos_id) for document in documents()]
    assert perplexities(target, documents(), scoring) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("window", "stride"), [(16, 8), (16, 15), (16, 1), (7, 3), (63, 10)])
def test_longer_documents_equal_a_slow_loop_of_windows(target, window, stride):
    few = documents([40, 16, 17, 64, 15])
    expected = [by_windows(target, document, window, stride) for document in few]
    assert perplexities(target, few, Scoring(window, stride, 90)) == pytest.approx(expected, rel=1e-4)
    if window < 40:  # windows matter here
        assert expected[0] != pytest.approx(by_hand(target, few[0]), rel=1e-3)


@pytest.mark.parametrize("batch_tokens", [1, 64, 333, 10_000])
def test_batches_do_not_change_scores(target, batch_tokens):
    many = documents([5, 90, 33, 34, 8, 61, 2, 90, 17] * 3)
    one_by_one = [perplexities(target, [document], Scoring(32, 16, 1))[0] for document in many]
    assert perplexities(target, many, Scoring(32, 16, batch_tokens)) == pytest.approx(one_by_one, rel=1e-4)


def test_a_document_without_a_token_to_score_has_infinite_perplexity(target):
    one = [np.array([5]), np.array([5, 6])]
    without = perplexities(target, one, Scoring(32, 16, 64))
    assert without[0] == np.inf
    assert np.isfinite(without[1])
    assert np.isfinite(perplexities(target, one, Scoring(32, 16, 64, bos_id=1))).all()
    assert perplexities(target, [], Scoring(32, 16, 64)).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_in_chunks_equal_log_softmax_in_float32(dtype, monkeypatch):
    monkeypatch.setattr("data_prep.select.CHUNK_LOGITS", {"cpu": 250})
    logits = (8 * torch.randn(3, 7, 100)).to(dtype)
    tokens = torch.randint(100, (3, 7))
    expected = logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(token_log_probs(logits, tokens), expected)


def echoed(target: TargetModel, body: dict) -> dict:
    """What a server of the target answers to a prompt with echo."""
    ids = torch.tensor([body["prompt"]])
    with torch.inference_mode():
        log_p = target.model(input_ids=ids[:, :-1]).logits[0].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return completion(finish_reason="length", logprobs={"token_logprobs": [None, *log_p.tolist()]})


def test_a_server_scores_as_its_target_does(target, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    many, n_scored, scoring = documents([12, 40, 1, 30]), [], Scoring(16, 8, 90, bos_id=1)
    until_s = time.monotonic() + 10

    def answer(body: dict, n: int) -> dict:
        while fake.most_open < 2 and time.monotonic() < until_s:  # the first one waits for another
            time.sleep(0.01)
        return echoed(target, body)

    with serving(answer) as fake:
        server = CompletionServer(fake.address, model="tiny", concurrency=3)
        found = perplexities(target, many, scoring, n_scored.append, server)
    assert found == pytest.approx(perplexities(target, many, scoring), rel=1e-4)
    assert sum(n_scored) == 12 + 40 + 1 + 30
    assert fake.most_open > 1
    asked = {name: fake.requests[0][1][name] for name in ("model", "echo", "logprobs", "max_tokens")}
    assert asked == {"model": "tiny", "echo": True, "logprobs": 1, "max_tokens": 0}


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (completion(), r"\(it answers .*; give another server, or remove base_url"),
        (completion(logprobs={"token_logprobs": [None, -1.0, None]}), "it answers 1 for a prompt of 3 tokens"),
        (completion(logprobs={"token_logprobs": [None, -1.0]}), "it answers 1 for a prompt of 3 tokens"),
        ((400, {}, b'{"error": {"message": "no echo"}}'), "no echo"),
    ],
)
def test_a_server_without_log_probabilities_of_prompts_is_refused(reply, said, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(lambda body, n: reply) as fake, pytest.raises(UserError, match=f"no log-probabilities of .*{said}"):
        CompletionServer(fake.address, model="tiny").score([[1, 2, 3]], lambda i, log_p: None)


TABLES = [
    ({"id": ["a", "b", "c"], "nll": [0.5, None, 9000.0]}, {"a": np.exp(0.5), "b": np.inf, "c": np.inf}),
    ({"id": [1, 2], "perplexity": [3.0, 1.0], "nll": [9.0, 9.0]}, {"1": 3.0, "2": 1.0}),
    ({"id": ["a", "b"], "nll": [0.5, np.nan]}, "has nll=nan for b; give a number of 0 or more"),
    ({"id": ["a"], "perplexity": [0.5]}, "has perplexity=0.5 for a; give a number of 1 or more"),
    ({"id": ["a"], "nll": ["low"]}, "has nll=low for a"),
    ({"id": ["a"], "score": [1]}, "has the columns id, score; give a .jsonl or .parquet file of id and perplexity"),
    (None, "cannot be read"),
]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize(("table", "expected"), TABLES)
def test_scores_are_read_from_a_file(table, expected, form, tmp_path):
    file = tmp_path / f"scores.{form}"
    if table and form == "parquet":
        parquet.write_table(pyarrow.table(table), file)
    elif table:
        file.write_text("".join(json.dumps(row) + "\n" for row in pyarrow.table(table).to_pylist()))
    if isinstance(expected, dict):
        assert read_scores(str(file)) == expected
    else:
        with pytest.raises(UserError, match=f"scores={file} (cannot be read|{expected})"):
            read_scores(str(file))
