"""Seconds of forwards are timed once for a machine, a target and a number of rows, and kept."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from spectrain.decoding import TargetModel
from spectrain.stores import forward_times as module
from spectrain.stores.forward_times import NODES, ForwardTimes, forward_times, rising, timed_forwards


@pytest.fixture
def timings(monkeypatch):
    """Count timings, which give made-up seconds; each test begins as a new process would."""
    asked: list[int] = []

    def timed(target, n_rows):
        asked.append(n_rows)
        return ForwardTimes([1, 2, 4], [1.0, 1.5, 2.0 + n_rows])

    monkeypatch.setattr(module, "timed_forwards", timed)
    monkeypatch.setattr(module, "_of_process", module.WeakKeyDictionary())
    return asked


def new_process(monkeypatch) -> None:
    monkeypatch.setattr(module, "_of_process", module.WeakKeyDictionary())


def test_forwards_are_timed_once_and_read_by_the_next_process(llama_target, tmp_path, timings, monkeypatch):
    first = forward_times(llama_target, 1, tmp_path)
    assert forward_times(llama_target, 1, tmp_path) is first
    new_process(monkeypatch)
    assert forward_times(llama_target, 1, tmp_path) == first
    assert timings == [1]
    assert forward_times(llama_target, 3, tmp_path).seconds[-1] == 5.0
    assert timings == [1, 3]
    new_process(monkeypatch)
    assert [forward_times(llama_target, n, tmp_path).seconds[-1] for n in (1, 3)] == [3.0, 5.0]
    assert timings == [1, 3]
    assert len([*tmp_path.iterdir()]) == 1


@pytest.mark.parametrize("what", ["nothing", "threads", "dtype", "engine"])
def test_other_threads_dtype_or_engine_have_times_of_their_own(llama_target, tmp_path, timings, monkeypatch, what):
    first = forward_times(llama_target, 1, tmp_path)
    other = {
        "dtype": lambda: TargetModel(llama_target.model, dtype=torch.bfloat16),
        "engine": lambda: TargetModel(llama_target.model, engine="transformers"),
    }.get(what, lambda: llama_target)()
    if what == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 97)
    for is_new_process in (False, True):
        if is_new_process:
            new_process(monkeypatch)
        assert forward_times(other, 1, tmp_path) == first  # the seconds are made up
        assert len(timings) == len([*tmp_path.iterdir()]) == (1 if what == "nothing" else 2)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:40],
        lambda text: "{}",
        lambda text: text.replace(f'"schema": {module.SCHEMA}', '"schema": 99'),
        lambda text: text.replace("1.5", "-1.5"),
        lambda text: text.replace("1.5", '"fast"'),
        lambda text: text.replace('"threads"', '"yarns"'),
    ],
)
def test_a_damaged_file_is_timed_again_and_said_in_the_log(
    llama_target, tmp_path, timings, monkeypatch, caplog, damage
):
    before = forward_times(llama_target, 1, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(damage(file.read_text()))
    new_process(monkeypatch)
    assert forward_times(llama_target, 1, tmp_path) == before
    assert timings == [1, 1]
    assert f"{file} cannot be used" in caplog.text
    assert json.loads(file.read_text())["rows"]["1"]["seconds"] == [1.0, 1.5, 3.0]


def test_a_folder_that_cannot_be_written_costs_the_timing_only(llama_target, tmp_path, timings, caplog):
    (tmp_path / "file").write_text("")
    assert forward_times(llama_target, 1, tmp_path / "file" / "below").seconds[0] == 1.0
    assert "could not be written" in caplog.text


def test_all_sizes_of_a_small_target_are_timed_and_its_cache_is_given_back(llama_target):
    found = timed_forwards(llama_target, 2)
    assert list(found.nodes) == list(NODES[: len(found.nodes)])
    assert len(found.nodes) >= 3
    assert all(one > 0 for one in found.seconds)


def test_times_never_fall_and_go_on_beyond_what_was_timed():
    times = ForwardTimes([1, 2, 4, 8], [1.0, 3.0, 2.0, 4.0])
    assert times.up_to(10).tolist() == [1.0, 1.0, 2.5, 2.5, 2.5, 2.875, 3.25, 3.625, 4.0, 4.375, 4.75]


@pytest.mark.parametrize(
    ("given", "expected"), [([1, 2, 3], [1, 2, 3]), ([3, 2, 1], [2, 2, 2]), ([1, 4, 2, 5], [1, 3, 3, 5]), ([1], [1])]
)
def test_rising_takes_the_mean_of_neighbours_that_fall(given, expected):
    np.testing.assert_allclose(rising(given), expected)


@pytest.mark.parametrize(("nodes", "seconds"), [([2, 4], [1, 2]), ([1, 2], [1]), ([1, 2], [0, 1]), ([1], [1])])
def test_times_that_make_no_sense_are_refused(nodes, seconds):
    with pytest.raises(ValueError, match="must"):
        ForwardTimes(nodes, seconds)


def test_timing_leaves_the_random_numbers_alone(llama_target):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    timed_forwards(llama_target, 1)
    assert torch.equal(before, torch.get_rng_state())
