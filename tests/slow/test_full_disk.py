"""A command on a disk that is too small ends in one sentence, and the same command resumes once there is room."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from tests.slow.commands import jobs, run
from tests.slow.compare import differences

LARGE_BYTES = 2**30
SIZES = 2  # disks per command


@contextmanager
def disk(folder: Path, size_bytes: int) -> Iterator[None]:
    """Make a folder with a disk of its own."""
    folder.mkdir()
    if mount(folder, f"size={size_bytes}").returncode:
        pytest.skip("a disk of its own needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


def mount(folder: Path, options: str) -> subprocess.CompletedProcess:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train, spire", "responses", "activations", "datastore", "bench", "export"])
def test_a_full_disk_is_one_sentence_and_the_same_command_resumes(name, inputs, tmp_path, monkeypatch):
    job, chance = jobs(inputs)[name], Random(name)
    whole, small = tmp_path / "whole", tmp_path / "small"
    whole.mkdir()
    outcome = run(job, whole)
    assert outcome.code == 0, outcome.output
    n_bytes = sum(file.stat().st_size for file in whole.rglob("*") if file.is_file())
    n_refused = 0
    for _ in range(SIZES):
        with disk(small, max(4096, int(n_bytes * chance.uniform(0, 0.9)))):
            outcome = run(job, small)
            assert outcome.fault is None, outcome
            if outcome.code == 2:
                n_refused += 1
                assert "disk" in outcome.output or "free" in outcome.output, outcome.output
                assert mount(small, f"remount,size={LARGE_BYTES}").returncode == 0
                outcome = run(job, small)
            assert outcome.code == 0, outcome.output
            assert differences(whole, small) == []
    assert n_refused
