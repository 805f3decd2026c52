"""Disk: what a build is estimated to need, and when that is said."""

from __future__ import annotations

import re
import shutil
from collections import namedtuple

import pytest

from data_prep.documents import store_bytes
from data_prep.select import Selection
from data_prep.tokenise import Corpus
from spectrain.retrieval.suffix_array import MAX_SHARD_TOKENS


@pytest.fixture
def needed(run, small, monkeypatch, tmp_path):
    """Runs the command on a disk of 2 kB; returns how many kB it says that it needs, before anything is read."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10, 8, 2000))
    monkeypatch.setattr(Corpus, "write_parts", lambda *arguments: pytest.fail("read"))

    def call(*arguments: str) -> float:
        code, _, err = run(*small, "out=store", *arguments)
        assert code == 2
        found = re.search(r"has 2.0 kB free, but this build needs about ([\d.]+) kB", err)
        assert found, err
        assert not any(tmp_path.iterdir())
        return float(found[1])

    return call


def test_too_small_a_disk_is_said_before_anything_is_written(needed):
    assert needed() > 2


def test_the_first_documents_alone_need_less(needed):
    counts = [needed("keep=null", f"corpus.max_documents={n}") for n in (4, 12, 43, 10_000)]
    assert counts[0] < counts[1] < counts[2] <= counts[3] == needed("keep=null")


def test_fewer_kept_documents_need_less(needed):
    assert needed("keep=2") < needed("keep=0.5") < needed("keep=1000") == needed("keep=null")


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"keep": 10}, 200),  # documents of 20 tokens
        ({"keep": 1000}, 1000),
        ({"keep": 0.5}, 500),
        ({"keep": None}, 1000),
        ({"keep": 10, "keep_tokens": 30}, 30),
        ({"keep": None, "keep_tokens": 5000}, 1000),
    ],
)
def test_a_store_takes_ten_bytes_a_kept_token_and_a_table(options, kept):
    # uint16: a token, its suffix in 4 bytes, the two behind it; a first-token table of V + 2 int64
    assert store_bytes(Selection(**options), 300, MAX_SHARD_TOKENS, 1000, 20.0) == kept * (2 + 4 + 4) + 302 * 8
