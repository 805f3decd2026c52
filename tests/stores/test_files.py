"""Files appear whole or not at all, and a full disk is one sentence."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from spectrain.stores.files import is_disk_full, write_whole
from spectrain.stores.folder import write_folder


def test_what_cannot_be_written_leaves_the_file_of_before_and_nothing_beside_it(tmp_path):
    file = tmp_path / "a.txt"
    write_whole(file, "before")

    def fail(out):
        out.write(b"half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_whole(file, fail)
    assert file.read_text() == "before"
    assert os.listdir(tmp_path) == ["a.txt"]
    write_whole(file, "after")
    assert file.read_text() == "after"


def test_a_file_behind_a_link_is_replaced_and_the_link_stays(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/real")
    for text in ("first", "second"):
        write_whole(tmp_path / "link", text)
        assert (tmp_path / "there" / "real").read_text() == text
    assert (tmp_path / "link").is_symlink()
    assert len(list(tmp_path.rglob("*"))) == 3


def test_new_names_are_on_disk_before_the_writer_returns(tmp_path, monkeypatch):
    """The folder is forced to disk after each rename; its last state is what a failure of the machine leaves."""
    known, fsync = {}, os.fsync

    def and_note(handle):
        fsync(handle)
        known[os.readlink(f"/proc/self/fd/{handle}")] = os.listdir(handle) if os.path.isdir(handle) else None

    monkeypatch.setattr("os.fsync", and_note)
    write_whole(tmp_path / "a.txt", "text")
    assert known[str(tmp_path)] == ["a.txt"]
    write_folder(tmp_path / "b", lambda folder: write_whole(folder / "c.txt", "text"))
    assert sorted(known[str(tmp_path)]) == ["a.txt", "b"]


def test_tensors_are_as_readable_as_other_files(tmp_path):
    tensors = {"a": torch.arange(3)}
    write_whole(tmp_path / "a.safetensors", lambda out: save_file(tensors, out.name))
    write_whole(tmp_path / "a.txt", b"text")
    assert torch.equal(load_file(tmp_path / "a.safetensors")["a"], tensors["a"])
    modes = {file.stat().st_mode for file in tmp_path.iterdir()}
    assert len(modes) == 1
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("save", [np.save, lambda out, array: torch.save(torch.from_numpy(array), out)])
def test_libraries_that_find_no_room_are_understood(save):
    with pytest.raises((OSError, RuntimeError)) as caught, open("/dev/full", "wb", buffering=0) as out:
        save(out, np.zeros(100_000))
    assert is_disk_full(caught.value)
