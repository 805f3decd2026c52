"""Corpora: what is read, what is held out, how rows are packed."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from data_prep.corpus import Document, file_documents, is_held_out, pack, stdlib_documents, train_tokenizer
from spectrain.errors import UserError


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([f"def f{i}(x):\n    return x + {i}\n" for i in range(50)], vocab_size=300)


def documents(n: int) -> list[Document]:
    return [Document(f"module_{i}.py", f"def f{i}(x):\n    return x + {i}\n" * 5) for i in range(n)]


def test_stdlib_gives_this_interpreter_s_sources_and_nothing_installed():
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for document in stdlib_documents():
        found.append(document.id)
        if len(found) == 150:
            break
    assert "argparse.py" in found
    assert not any("site-packages" in name for name in found)
    assert all((root / name).is_file() for name in found)


def test_tokenizer_reads_back_any_text(tokenizer):
    text = "def größe(x):\n\treturn '日本' # \x00 ok\r\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == 0
    assert len(tokenizer) == 300


def test_held_out_documents_are_whole_and_the_same_in_any_order(tokenizer):
    forwards, backwards = documents(60), documents(60)[::-1]
    a, b = (pack(d, tokenizer, 16, held_out_share=0.2) for d in (forwards, backwards))
    assert a.train.tolist() == b.train.tolist()
    assert a.held_out.tolist() == b.held_out.tolist()
    held_out_text = tokenizer.decode(a.held_out.flatten())
    for i in range(60):
        inside = f"def f{i}(" in held_out_text
        assert inside <= is_held_out(f"module_{i}.py", 0.2)


def test_documents_are_closed_by_the_end_of_text(tokenizer):
    rows = pack(documents(40), tokenizer, 16, held_out_share=0.2)
    text = tokenizer.decode(rows.train.flatten())
    assert text.count("<|endoftext|>") > 20
    assert "<|endoftext|>def f" in text


def test_share_of_held_out_documents_is_about_what_was_asked():
    share = sum(is_held_out(f"{i}.py", 0.05) for i in range(10_000)) / 10_000
    assert 0.04 < share < 0.06


def test_jsonl_fields_make_the_text(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"q": "one", "n": 1, "a": "two"}\n\n{"q": "three", "n": 2, "a": "four"}\n')
    assert [d.text for d in file_documents(str(file))] == ["one\n\ntwo", "three\n\nfour"]
    assert [d.text for d in file_documents(str(file), ["a"])] == ["two", "four"]
    file.write_text('{"q": "a line separator \u2028 and a next line \x85 inside"}\r\n')
    assert [d.text for d in file_documents(str(file))] == ["a line separator \u2028 and a next line \x85 inside"]


def test_folder_is_read_with_its_subfolders_and_what_is_not_utf8_is_left_out(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("b")
    (tmp_path / "a.py").write_text("a")
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "d.bin").write_bytes(b"d")
    assert [(d.id, d.text) for d in file_documents(str(tmp_path))] == [("a.py", "a"), ("sub/b.txt", "b")]


def test_wrong_corpora_are_named(tmp_path, tokenizer):
    with pytest.raises(UserError, match="does not exist"):
        list(file_documents(str(tmp_path / "nothing")))
    file = tmp_path / "a.jsonl"
    file.write_text('{"q": "one"}\n{"q": \n')
    with pytest.raises(UserError, match=r"a\.jsonl line 2 is not JSON"):
        list(file_documents(str(file)))
    with pytest.raises(UserError, match="line 1 has no text field 'answer'"):
        list(file_documents(str(file), ["answer"]))
    with pytest.raises(UserError, match="no held-out row of 16 tokens"):
        pack(documents(20), tokenizer, 16, held_out_share=0.0)
    with pytest.raises(UserError, match="no training row"):
        pack([], tokenizer, 16, held_out_share=0.5)
