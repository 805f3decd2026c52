"""Corpora: what is read, what is held out, how rows are packed."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import datasets
import pytest

from spectrain.config.groups import Corpus
from spectrain.data import tabular_files
from spectrain.data.chats import Tally
from spectrain.data.packing import pack
from spectrain.data.texts import Document, corpus_documents, is_held_out, is_remote, read_documents, train_tokenizer
from spectrain.errors import UserError


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([f"def f{i}(x):\n    return x + {i}\n" for i in range(50)], vocab_size=300)


def documents(n: int) -> list[Document]:
    return [Document(f"module_{i}.py", f"def f{i}(x):\n    return x + {i}\n" * 5) for i in range(n)]


def test_stdlib_gives_this_interpreter_s_sources_and_nothing_installed():
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for document in read_documents(None):
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
    for one, other in ((a.train, b.train), (a.held_out, b.held_out)):
        assert abs(len(one) - len(other)) <= 1
    for packed in (a, b):
        held_out_text = tokenizer.decode(packed.held_out.tokens.flatten())
        for i in range(60):
            inside = f"def f{i}(" in held_out_text
            assert inside <= is_held_out(f"module_{i}.py", 0.2)


def test_jsonl_fields_make_the_text(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"q": "one", "n": 1, "a": "two"}\n\n{"q": "three", "n": 2, "a": "four"}\n')
    assert [d.text for d in read_documents(str(file), ["q", "a"])] == ["one\n\ntwo", "three\n\nfour"]
    assert [d.text for d in read_documents(str(file), ["a"])] == ["two", "four"]
    file.write_text('{"q": "a line separator \u2028 and a next line \x85 inside"}\r\n')
    assert [d.text for d in read_documents(str(file))] == ["a line separator \u2028 and a next line \x85 inside"]


def test_wrong_corpora_are_named(tmp_path, tokenizer):
    with pytest.raises(UserError, match="does not exist"):
        list(read_documents(str(tmp_path / "nothing")))
    file = tmp_path / "a.jsonl"
    file.write_text('{"q": "one"}\n{"q": \n')
    with pytest.raises(UserError, match=r"line 2 of a\.jsonl is not JSON"):
        list(read_documents(str(file)))
    with pytest.raises(UserError, match=r"line 1 of a.jsonl has no column 'answer' \(q\)"):
        list(read_documents(str(file), ["answer"]))
    with pytest.raises(UserError, match="no held-out row of 16 tokens"):
        pack(documents(20), tokenizer, 16, held_out_share=0.0)
    with pytest.raises(UserError, match="no training row"):
        pack([], tokenizer, 16, held_out_share=0.5)


ROWS = [{"q": f"question {i}", "n": i, "a": f"answer {i}" if i != 1 else None} for i in range(3)]
TEXTS = ["question 0\n\nanswer 0", "question 1", "question 2\n\nanswer 2"]


def texts(path: Path | str, *arguments) -> list[str]:
    return [document.text for document in read_documents(str(path), *arguments)]


def test_parquet_saved_datasets_and_streamed_ones_give_the_same_texts(tmp_path, monkeypatch):
    table = datasets.Dataset.from_list(ROWS)
    for folder in ("pq", "saved", "splits"):
        (tmp_path / folder).mkdir()
    table.to_parquet(tmp_path / "pq" / "train-0.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table, "test": table.select([2])}).save_to_disk(tmp_path / "splits")
    monkeypatch.setattr(tabular_files, "BATCH_ROWS", 2)
    for folder in ("pq", "saved", "splits"):
        assert texts(tmp_path / folder, ["q", "a"]) == TEXTS, folder
        assert texts(tmp_path / folder, ["a"]) == ["answer 0", "answer 2"], folder
    assert texts(tmp_path / "splits", ["q", "a"], "test") == TEXTS[2:]
    streamed = tabular_files.hub_rows(str(tmp_path / "pq"), None, "train", ["q", "a"])
    assert list(streamed) == [(i + 1, {"q": row["q"], "a": row["a"]}) for i, row in enumerate(ROWS)]
    with pytest.raises(UserError, match="has no split dev; set corpus.split to one of train, test"):
        texts(tmp_path / "splits", None, "dev")
    for path in (tmp_path / "pq" / "train-0.parquet", tmp_path / "saved"):
        with pytest.raises(UserError, match=r"has no column 'x' \(q, n, a\)"):
            texts(path, ["x"])
        with pytest.raises(UserError, match=r"row 1 of \S+ has no text as 'n'"):
            texts(path, ["n"])
    with pytest.raises(UserError, match="no subset by default with a split dev"):
        list(tabular_files.hub_rows(str(tmp_path / "pq"), None, "dev"))
    file = tmp_path / "pq" / "train-0.parquet"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(UserError, match=r"train-0\.parquet cannot be read \(Arrow"):
        texts(tmp_path / "pq")


def test_documents_of_a_hub_dataset_are_numbered_within_their_split(monkeypatch):
    asked = []

    def stream(*arguments):
        asked.append(arguments)
        return iter([(1, {"text": "a"}), (2, {"text": " "}), (3, {"text": "b"})])

    monkeypatch.setattr("spectrain.data.texts.hub_rows", stream)
    tally = Tally()
    found = list(read_documents("owner/name", ["text"], "test", "small", tally))
    assert found == [Document("small:test:1", "a"), Document("small:test:3", "b")]
    assert asked == [("owner/name", "small", "test", ["text"])]
    assert tally.skipped == {"empty": 1}


def test_what_is_a_hub_dataset_and_what_a_wrong_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    assert [p for p in ("a/b", "wikitext", "here", "./a/b", "/a/b", "a/b/c", "a/b.jsonl", None) if is_remote(p)] == [
        "a/b",
        "wikitext",
    ]

    def unreachable(*arguments, **options):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(tabular_files.HfApi, "dataset_info", unreachable)
    with pytest.raises(UserError, match=r"a/b is no file or folder here.*no route\); give") as caught:
        texts("a/b")
    assert "\n" not in str(caught.value)


def test_lists_of_texts_are_texts(tmp_path):
    file = tmp_path / "a.jsonl"
    rows = [{"m": [{"content": "Hi"}, {"content": "Ho"}]}, {"m": ["a", "b"]}]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    assert texts(file, ["m"]) == ["Hi\n\nHo", "a\n\nb"]
    file.write_text(json.dumps({"m": [1]}))
    with pytest.raises(UserError, match="line 1 of a.jsonl has no text as 'm'"):
        texts(file, ["m"])
    file.write_text("[1]")
    with pytest.raises(UserError, match="line 1 of a.jsonl is no JSON object"):
        texts(file)


def test_source_files_are_read_and_what_is_skipped_is_counted(tmp_path):
    for name in ("a.c", "b.rs", "c.go", "d.java", "e.ts", "f.rst", "g.png", "sub/h.cpp", ".venv/i.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "latin.md").write_bytes("größe".encode("latin-1"))
    (tmp_path / "empty.py").write_text(" \n")
    tally = Tally()
    found = [d.id for d in read_documents(str(tmp_path), tally=tally)]
    assert found == ["a.c", "b.rs", "c.go", "d.java", "e.ts", "f.rst", "sub/h.cpp"]
    assert (tally.kinds, tally.skipped) == ({"files": 7}, {"not UTF-8": 1, "empty": 1})


def test_halves_of_characters_are_replaced(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"q": "a\\ud800b"}\n{"q": ["\\udfff", "\\ud83d\\ude00"]}\n')
    assert texts(file, ["q"]) == ["a\ufffdb", "\ufffd\n\n\U0001f600"]


def test_a_bad_byte_of_json_lines_is_named_by_its_line(tmp_path):
    rows = [b'{"text": "a"}', b'{"text": "b"}', b"", b'{"text": "\xff"}', b'{"text": "c"}']
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(rows))
    with pytest.raises(UserError, match=r"line 4 of rows.jsonl is not UTF-8 \(byte 11\); mend or remove"):
        list(read_documents(str(tmp_path / "rows.jsonl")))


def test_several_sources_are_read_in_turns_with_weights_and_limits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, n in (("a", 3), ("b", 40)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(n)))

    def read(**options) -> list[str]:
        corpus = Corpus(["a.jsonl", "b.jsonl"], **options)
        return [document.text for document in corpus_documents(corpus, Tally())]

    assert read(limits=[2, 3]) == ["a 0", "b 0", "a 1", "b 1", "b 2"]
    assert sorted(read()) == sorted([*(f"a {i}" for i in range(3)), *(f"b {i}" for i in range(40))])
    weighed = read(weights=[2, 0.5])
    assert weighed.count("a 1") == 2
    assert 10 < sum(text.startswith("b") for text in weighed) < 30
    documents = list(corpus_documents(Corpus(["a.jsonl", "b.jsonl"], weights=[2, 1]), Tally()))
    assert len({document.id for document in documents}) == len(documents) == 46
    copies = [document for document in documents if "a.jsonl:2" in document.id]
    assert {document.is_held_out(0.5) for document in copies} == {is_held_out("a.jsonl:2", 0.5)}  # as read alone
    for paths, options, sentence in (
        (["a.jsonl", "./a.jsonl"], {}, "corpus has the same rows twice"),
        (["a.jsonl", "."], {}, "corpus has the same rows twice"),
        (["a.jsonl", "b.jsonl"], {"weights": [1.0]}, "corpus.weights has 1 values for 2 sources"),
    ):
        with pytest.raises(UserError, match=sentence):
            list(corpus_documents(Corpus(paths, **options), Tally()))


def test_lines_of_files_end_alike(tmp_path):
    (tmp_path / "a.py").write_bytes(b"one\r\ntwo\n")
    assert texts(tmp_path) == ["one\ntwo\n"]
