"""Run folders: who goes on, who begins anew, and under which id."""

from __future__ import annotations

import pytest

from spectrain.errors import UserError
from spectrain.runs import RunFolder
from tests.test_cli import composed


def find(tmp_path, *overrides: str) -> RunFolder:
    return RunFolder.find(composed("train", "+exp=target", f"run_dir={tmp_path / 'run'}", *overrides))


def test_a_resumed_run_keeps_its_id_and_its_files(tmp_path):
    run = find(tmp_path)
    id_of_the_logger = run.id  # read before the folder is made
    run.begin()
    (run.path / "kept").touch()
    run.begin()
    resumed = find(tmp_path)
    resumed.begin()
    assert resumed.id == id_of_the_logger
    assert (run.path / "kept").is_file()


def test_fresh_replaces_a_finished_run_once_and_under_a_new_id(tmp_path):
    first = find(tmp_path)
    first.begin()
    (first.path / "old").touch()
    first.finish({})
    with pytest.raises(UserError, match="finished"):
        find(tmp_path)
    again = find(tmp_path, "fresh=true")
    again.begin()
    assert again.id != first.id
    assert not (again.path / "old").exists()
    (again.path / "tokenizer").touch()
    again.begin()  # as training a target does: before its tokenizer, and again before the fit
    assert (again.path / "tokenizer").is_file()


def test_another_config_is_refused_and_named(tmp_path):
    find(tmp_path).begin()
    with pytest.raises(UserError, match=r"another config \(differs in max_steps\)"):
        find(tmp_path, "max_steps=7")
