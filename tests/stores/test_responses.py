"""The format of a store of responses, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import datasets
import pytest

from spectrain.errors import UserError
from spectrain.retrieval.datastore import largest_datastore
from spectrain.stores.rows import (
    RESPONSE_COLUMNS,
    ResponseManifest,
    newest_responses,
    open_responses,
    write_responses,
)
from tests.retrieval.reference import make_store

SAMPLING = {"temperature": 0.5, "top_k": 3, "top_p": 1.0, "min_p": 0.25}
COUNTS = {"prompts": 5, "responses": 4, "failed": 1, "tokens": 6}
ROWS = [
    {
        "id": f"q{i}",
        "category": "é [x]",
        "prompt": [1, 2, 300_000 + i],
        "response": [7] * i,
        "finish_reason": "eos",
        "sampling": SAMPLING,
        "seed": 2**40,
        "number": i,
    }
    for i in range(4)
]


def manifest(**changes) -> ResponseManifest:
    facts = ResponseManifest(
        target="the target",
        target_fingerprint="a" * 16,
        tokenizer_fingerprint="b" * 16,
        sampling=SAMPLING,
        max_new_tokens=9,
        config={"seed": 0},
        counts=COUNTS,
        failed=[{"id": "q9", "reason": "too long"}],
    )
    return dataclasses.replace(facts, **changes)


@pytest.fixture
def folder(tmp_path) -> Path:
    write_responses(tmp_path / "store", iter(ROWS), manifest())
    return tmp_path / "store"


def test_what_is_written_is_read(folder, tmp_path):
    store = open_responses(str(folder))
    assert store.rows.to_list() == ROWS
    assert store.rows.features == RESPONSE_COLUMNS
    assert datasets.load_from_disk(str(folder)).features == RESPONSE_COLUMNS
    assert dataclasses.replace(store.manifest, files={}) == manifest()
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_equal_rows_give_equal_bytes(folder, tmp_path):
    write_responses(tmp_path / "again", ROWS, manifest())
    for file in folder.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_a_store_is_not_overwritten_and_half_a_store_never_seen(folder, tmp_path):
    with pytest.raises(UserError, match="exists already"):
        write_responses(folder, ROWS, manifest())
    with pytest.raises(KeyError):
        write_responses(tmp_path / "half", [*ROWS, {"id": "x"}], manifest())
    with pytest.raises(UserError, match="no response to write"):
        write_responses(tmp_path / "none", [], manifest())
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_another_target_is_refused_by_name(folder):
    store = open_responses(folder)
    store.check_fits("a" * 16, "the target")
    with pytest.raises(UserError, match=r"of the target the target \(a{16}\), not of other \(c{16}\); give that"):
        store.check_fits("c" * 16, "other")


def change(folder: Path, **values) -> None:
    file = folder / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


REFUSED = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "has no manifest.json"),
    "no json": (lambda f: (f / "manifest.json").write_text("{"), "manifest.json cannot be read"),
    "unknown field": (lambda f: change(f, more=1), "manifest.json cannot be read"),
    "version": (lambda f: change(f, version=2), "'responses' of format version 2, not of 'responses' of version 1"),
    "kind": (lambda f: change(f, kind="datastore"), "is a store of 'datastore'"),
    "one bit": (lambda f: damage(next(f.glob("*.arrow"))), "is damaged: it is not what the manifest says"),
    "a lost file": (lambda f: next(f.glob("*.arrow")).unlink(), "lacks data-00000-of-00001.arrow"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_whole_store_is_refused(folder, case):
    spoil, message = REFUSED[case]
    spoil(folder)
    with pytest.raises(UserError, match=message):
        open_responses(folder)


def test_the_newest_of_this_target_is_found_among_other_stores(folder, tmp_path, caplog):
    write_responses(tmp_path / "newer", ROWS, manifest())
    write_responses(tmp_path / "other", ROWS, manifest(target_fingerprint="c" * 16))
    os.utime(folder / "manifest.json", (1, 1))
    make_store(tmp_path / "datastore", [[1, 2]], 9, tokenizer="b" * 16)
    assert newest_responses(tmp_path, "a" * 16) == tmp_path / "newer"
    assert largest_datastore(tmp_path, "b" * 16, "a" * 16) == tmp_path / "datastore"
    assert not caplog.records
    (tmp_path / "newer" / "manifest.json").write_text("{")
    assert newest_responses(tmp_path, "a" * 16) == folder
    assert "passed over" in caplog.text
    with pytest.raises(UserError, match="holds no responses of this target; run spectrain responses"):
        newest_responses(tmp_path, "d" * 16)
