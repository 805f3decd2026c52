"""Runs of 13 tokens: what training text shares with the questions of a benchmark."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from spectrain.config.groups import Corpus
from spectrain.data import overlap
from spectrain.data.overlap import RUN, Sample, found_in, question_runs, runs, seen_questions, shares_any
from spectrain.data.packing import pack
from spectrain.data.prompts import Question
from spectrain.data.row_cache import corpus_rows
from spectrain.data.texts import train_tokenizer
from spectrain.target import TargetModel
from tests.conftest import tiny_model

WORDS = [f"word{i}" for i in range(14)]


def sentence(seed: int, n: int = 30) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, n))


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([sentence(seed, 200) for seed in range(20)], 400)


def test_a_run_is_found_wherever_it_stands_and_no_shorter_one():
    text = np.random.default_rng(0).integers(0, 50_000, 200)
    known = np.sort(runs(text[50 : 50 + RUN]))
    assert len(known) == 1
    assert np.flatnonzero(found_in(runs(text), known)).tolist() == [50]
    assert len(runs(text[: RUN - 1])) == 0
    assert not shares_any(text[51:], known)
    assert len(np.unique(runs(np.arange(2**16) % 5000))) == 5000
    swapped = text[50 : 50 + RUN].copy()
    swapped[:2] = swapped[1::-1]
    assert not shares_any(swapped, known)


def test_a_sample_keeps_few_runs_of_much_text_and_still_tells(tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr(overlap, "MOST_SAMPLED", 500)
    texts = [np.array(tokenizer(sentence(seed, 300))["input_ids"]) for seed in range(40)]
    sample = Sample.of(texts)
    assert 200 < len(sample.hashes) <= 500
    assert sample.zeros > 2
    sample.save(tmp_path)
    loaded = Sample.load(tmp_path)
    asked = [Question(str(seed), "", (sentence(seed, 300),)) for seed in (3, 7, 100, 101)]
    assert seen_questions(asked, tokenizer, loaded) == seen_questions(asked, tokenizer, texts) == ["3", "7"]
    assert Sample.load(tmp_path / "none") is None


def test_documents_that_hold_a_question_are_left_out_of_rows(tokenizer, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    Path("asked.jsonl").write_text("".join(json.dumps({"prompt": sentence(seed)}) + "\n" for seed in (3, 4)))
    rows = [{"text": f"before it {sentence(seed)} and behind"} for seed in range(60)]
    Path("corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = TargetModel(tiny_model(vocab_size=400), tokenizer)
    whole, cleaned = Corpus("corpus.jsonl", held_out_share=0.3), Corpus("corpus.jsonl", held_out_share=0.3)
    cleaned.decontaminate = "asked.jsonl"
    with caplog.at_level(logging.INFO):
        both = [corpus_rows(corpus, target, 32) for corpus in (whole, cleaned)]
    known = question_runs([Question("q", "", (sentence(3), sentence(4)))], tokenizer)
    assert [shares_any(one.all_rows().tokens.flatten().numpy(), known) for one in both] == [True, False]
    assert "2 documents that share 13 tokens with the prompts are left out" in caplog.text


def test_rows_are_made_once_and_again_where_the_corpus_changes(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target, corpus = TargetModel(tiny_model(vocab_size=400), tokenizer), Corpus("c.jsonl", held_out_share=0.3)
    Path("c.jsonl").write_text("".join(json.dumps({"text": sentence(seed)}) + "\n" for seed in range(60)))
    made = []
    monkeypatch.setattr("spectrain.data.row_cache.pack", lambda *a: made.append(0) or pack(*a))
    first = corpus_rows(corpus, target, 32)
    again = corpus_rows(corpus, target, 32)
    assert (len(made), again.digest) == (1, first.digest)
    with Path("c.jsonl").open("a") as file:
        file.write(json.dumps({"text": sentence(99)}) + "\n")
    assert corpus_rows(corpus, target, 32).digest != first.digest
    tokenizer.chat_template, target.tokenizer.chat_template = "{{ messages }}", "{{ messages }}"
    corpus_rows(corpus, target, 32)
    assert len(made) == 3
    tokenizer.chat_template = None
