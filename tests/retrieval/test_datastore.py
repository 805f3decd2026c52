"""The store's files: what is written is what is read, mapped and not loaded, and damage is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spectrain.errors import UserError
from spectrain.retrieval.datastore import Datastore, largest_datastore
from tests.retrieval.reference import make_store
from tests.retrieval.test_suffix_array import found_suffix

ROOT = Path(__file__).parents[2]
DOCUMENTS = [[1, 2, 3], [], [2, 2], [0]]


@pytest.mark.parametrize("n_shards", [1, 3])
def test_documents_come_back(tmp_path, n_shards):
    store = make_store(tmp_path, DOCUMENTS, 5, n_shards)
    assert [document.tolist() for document in store.documents()] == DOCUMENTS
    assert store.manifest.tokens == 6
    assert sum(shard.tokens for shard in store.manifest.shards) == 10  # a separator each
    store.verify()


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65535, np.uint16), (65536, np.uint32), (151936, np.uint32)])
def test_every_token_and_the_separator_fit_their_type(tmp_path, vocab_size, dtype):
    documents = [[vocab_size - 1, 0, vocab_size - 1], [vocab_size - 1]]
    store = make_store(tmp_path, documents, vocab_size)
    assert store.tokens[0].dtype == dtype
    assert [document.tolist() for document in store.documents()] == documents
    assert found_suffix(store, [5, vocab_size - 1], 1, 4)[1].tolist() == [[1, 4]]


def test_files_are_mapped_and_read_only(tmp_path):
    store = make_store(tmp_path, DOCUMENTS, 5)
    for arrays in (*store.index, store.offsets):
        assert isinstance(arrays[0].base, np.memmap)
        assert not arrays[0].flags.writeable
        assert type(arrays[0]) is np.ndarray  # numba is slow to recognise a memmap


def test_a_truncated_and_a_missing_file_are_named(tmp_path):
    make_store(tmp_path, DOCUMENTS, 5)
    file = tmp_path / "suffixes-00000.npy"
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    with pytest.raises(UserError, match=r"suffixes-00000\.npy is damaged: .*; run .*datastore again"):
        Datastore(tmp_path)
    file.unlink()
    with pytest.raises(UserError, match=r"lacks suffixes-00000\.npy"):
        Datastore(tmp_path)


def test_a_flipped_byte_is_found_by_its_checksum(tmp_path):
    make_store(tmp_path, DOCUMENTS, 5)
    file = tmp_path / "tokens-00000.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    store = Datastore(tmp_path)
    with pytest.raises(UserError, match=r"tokens-00000\.npy is damaged"):
        store.verify()


def test_another_tokenizer_is_refused(tmp_path):
    store = make_store(tmp_path, DOCUMENTS, 5, tokenizer="aaaa")
    store.check_fits("aaaa")
    with pytest.raises(UserError, match=r"^datastore=.* is of the tokenizer of a target, not of this target's; give"):
        store.check_fits("bbbb")


def test_the_newest_store_of_the_tokenizer_is_found(tmp_path):
    with pytest.raises(UserError, match="holds no datastore"):
        largest_datastore(tmp_path, "tok", "fp")
    make_store(tmp_path / "other", DOCUMENTS, 5, tokenizer="x")
    with pytest.raises(UserError, match="holds no datastore"):
        largest_datastore(tmp_path, "tok", "fp")
    make_store(tmp_path / "fits", DOCUMENTS, 5)
    assert largest_datastore(tmp_path, "tok", "another target of this tokenizer") == tmp_path / "fits"
    make_store(tmp_path / "larger", [[1] * 99], 5)
    make_store(tmp_path / "small", [[1]], 5)
    assert largest_datastore(tmp_path, "tok", "fp") == tmp_path / "larger"


def test_a_store_with_tokens_above_the_targets_is_refused(tmp_path):
    store = make_store(tmp_path, DOCUMENTS, 5)
    assert [store.holds_tokens_from(size) for size in (1, 3, 4, 5, 9)] == [True, True, False, False, False]
