"""Rows of packed documents: what is learned, where documents begin, and responses as they were written."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from spectrain.data import packing
from spectrain.data.packing import PackedRows, RowWriter, TokenDocument, Tokeniser, open_rows, pack
from spectrain.data.texts import Document, is_held_out, read_documents, train_tokenizer
from spectrain.errors import UserError
from spectrain.stores.rows import write_responses
from spectrain.target import tokenizer_fingerprint
from tests.stores.test_responses import ROWS, manifest

EOS = 0


def document(tokens: list[int], n_prompt: int | None = None) -> TokenDocument:
    is_response = None if n_prompt is None else np.arange(len(tokens)) >= n_prompt
    return TokenDocument("x", np.array(tokens, np.int32), is_response)


@pytest.fixture
def rows_of(tmp_path):
    """Packs documents into rows of a length."""

    def call(documents: list[TokenDocument], row_tokens: int, document_mask: bool = False) -> PackedRows:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        writer = RowWriter(folder, EOS, row_tokens, document_mask)
        for one in documents:
            writer.add(one)
        writer.finish()
        return open_rows(folder, writer.n_rows, row_tokens)

    return call


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["one two three\n" * 9], 280)


@pytest.fixture
def stores(tmp_path, tokenizer) -> list[Path]:
    """Two draws of four prompts."""
    facts = manifest(tokenizer_fingerprint=tokenizer_fingerprint(tokenizer))
    folders = [tmp_path / "a", tmp_path / "b"]
    for draw, folder in enumerate(folders):
        rows = [{**row, "prompt": [1, 2, 3], "response": [20 + draw] * (i + 3) + [EOS]} for i, row in enumerate(ROWS)]
        write_responses(folder, rows, facts)
    return folders


def test_rows_by_hand(rows_of):
    """A text, an answer that ends by itself and one that was cut, in rows of six; the end of row 1 is a prompt."""
    rows = rows_of([document([5, 6, 7]), document([8, 9, 10, EOS], 2), document([11, 12, 13, 14], 3)], 6, True)
    assert rows.tokens.tolist() == [[5, 6, 7, EOS, 8, 9], [10, EOS, 11, 12, 13, 14]]
    assert rows.is_response.tolist() == [[True] * 4 + [False] * 2, [True] * 2 + [False] * 3 + [True]]
    assert rows.starts.tolist() == [[0, 0, 0, 0, 4, 4], [0, 0, 2, 2, 2, 2]]


def test_an_end_that_the_target_did_not_write_is_not_learned(rows_of):
    rows = rows_of([document([5, 6, 7], 1)], 4)
    assert rows.tokens.tolist() == [[5, 6, 7, EOS]]
    assert rows.is_response.tolist() == [[False, True, True, False]]
    assert rows.starts is None


def test_texts_alone_are_learned_as_a_whole_and_rows_without_a_response_are_left_out(rows_of):
    assert rows_of([document([5, 6, 7])], 2).is_response is None
    rows = rows_of([document([5, 6, 7, 8, 9], 4), document([10, 11, 12], 1)], 3)
    assert rows.tokens.tolist() == [[8, 9, EOS], [10, 11, 12]]  # not [5, 6, 7], the beginning of a prompt
    first_alone = rows_of([document([5, 6], 1), document([7], 0), document([8, 9], 1)], 3, document_mask=True)
    assert first_alone.tokens.tolist() == [[5, 6, EOS]]  # of [7, EOS, 8] nothing is predicted
    assert len(rows_of([], 3, document_mask=True)) == 0


def test_rows_are_the_same_however_many_are_written_at_once(rows_of, monkeypatch):
    documents = [document(list(range(5, 5 + n)), n // 2 if n % 3 else None) for n in range(1, 40)]
    expected = rows_of(documents, 7, document_mask=True)
    monkeypatch.setattr(packing, "WRITTEN_ROWS", 2)
    found = rows_of(documents, 7, document_mask=True)
    assert all(torch.equal(a, b) for a, b in zip(vars(found).values(), vars(expected).values(), strict=True))
    assert len(found) > 80


def test_of_many_documents_few_are_read(tokenizer):
    read = []

    def documents():
        for i in range(20_000):
            read.append(i)
            yield Document(f"a.jsonl:{i}", "one two three\n")

    packed = pack(documents(), tokenizer, 4, held_out_share=0.3, max_documents=200)
    assert len(read) <= 1000
    assert len(packed.train) + len(packed.held_out) > 100


def test_responses_are_documents_as_the_target_wrote_them(stores, tokenizer):
    found = list(Tokeniser(tokenizer).tokens(read_documents(f"responses:{stores[0]}", tokenizer=tokenizer)))
    assert [d.id for d in found] == ["q0", "q1", "q2", "q3"]
    assert [d.tokens.tolist() for d in found] == [[1, 2, 3, *[20] * (i + 3), EOS] for i in range(4)]
    assert [d.is_response.tolist() for d in found] == [[False] * 3 + [True] * (i + 4) for i in range(4)]


def test_all_draws_of_a_prompt_are_held_out_or_none(stores, tokenizer):
    found = list(read_documents(f"responses:{stores[0]}:{stores[1]}", tokenizer=tokenizer))
    assert [d.id for d in found] == [f"{name}:q{i}" for name in "ab" for i in range(4)]
    assert [d.is_held_out(0.5) for d in found] == [is_held_out(f"q{i}", 0.5) for i in range(4)] * 2
    packed = pack(found, tokenizer, 4, held_out_share=0.5)
    both = [set(side.tokens.flatten().tolist()) & {20, 21} for side in (packed.train, packed.held_out)]
    assert both == [{20, 21}, {20, 21}]
    assert pack(found, tokenizer, 4, 0.5, loss_on="all").train.is_response is None


def test_a_store_of_another_tokenizer_is_refused(stores, tokenizer):
    other = train_tokenizer(["four five six\n" * 9], 280)
    with pytest.raises(UserError, match=r"a is of the tokenizer of the target, not of this target's"):
        list(read_documents(f"responses:{stores[0]}", tokenizer=other))
    with pytest.raises(UserError, match="does not exist; make one with spectrain responses"):
        list(read_documents("responses:nothing", tokenizer=tokenizer))
    (stores[0].parent / ".traffic.partial").mkdir()
    (stores[0].parent / ".traffic.partial" / "rows-1.jsonl").touch()
    with pytest.raises(UserError, match="traffic has no answers yet: a server keeps its first ones in .*.traffic.part"):
        list(read_documents(f"responses:{stores[0].parent}/traffic", tokenizer=tokenizer))
    with pytest.raises(UserError, match="must name different folders made by spectrain responses, separated by colons"):
        list(read_documents(f"responses:{stores[0]}:{stores[0]}", tokenizer=tokenizer))
    with pytest.raises(UserError, match=r"\+exp=target is to train; give a text corpus"):
        list(read_documents(f"responses:{stores[0]}"))


def test_tokens_that_the_target_does_not_know_are_refused(tokenizer):
    texts = [Document(str(i), "one two three") for i in range(30)]
    with pytest.raises(UserError, match=r"the corpus has the token 2\d\d, but the target knows 100"):
        pack(texts, tokenizer, 2, held_out_share=0.3, vocab_size=100)
    packed = pack(texts, tokenizer, 2, held_out_share=0.3, vocab_size=280)
    assert dataclasses.astuple(packed.train)[1:] == (None, None)
