"""Ranks that die end the others with their own error last; machines that are lost come back (scripts/train.slurm)."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from spectrain.training.checkpoints import BestFolder, CheckpointFolder
from tests import ranks
from tests.conftest import SMALL_TRAINING
from tests.support import forks
from tests.training.test_strategies import largest_difference

LINES = {
    "early": "rows=3 must be even; give rows=4",
    "wrong": "rows=3 must be even; give rows=4",
    "broken": "RuntimeError: shapes differ",
    "full": "out of memory on rank 1: lower data.batch_size=2",
    "killed": "Signal 9 (SIGKILL) received",
}


@pytest.fixture
def options(shared) -> list[str]:
    of_text = [f"target={shared / 'target'}", f"corpus={shared / 'corpus'}", "corpus.held_out_share=0.3"]
    return ["+exp=spire", *of_text, *SMALL_TRAINING, "trainer.accelerator=cpu", "max_steps=40", "checkpoint_s=0"]


@pytest.mark.slow
@pytest.mark.parametrize("dies", LINES)
def test_a_rank_that_dies_ends_the_others_in_seconds_and_its_error_stands_last(options, dies, tmp_path):
    job = {"arguments": [*options, "trainer=ddp", "run_dir=run"], "dies": dies}
    (tmp_path / "jobs.json").write_text(json.dumps([job]))
    done = ranks.torchrun(2, tmp_path, "tests.ranks", "jobs.json")
    assert done.returncode == 1
    assert time.time() - (tmp_path / "dead").stat().st_mtime < 25
    *_, last = (line for line in done.stderr.splitlines() if line.strip("="))
    assert LINES[dies] in last


@pytest.mark.slow
def test_a_lost_machine_comes_back_and_the_training_ends_as_if_nothing_had_happened(options, tmp_path):
    """Two machines run the job script, on this one: `srun` starts what it is given, and both are called 127.0.0.1."""
    for name, script in {"srun": 'shift; exec "$@"', "scontrol": "echo 127.0.0.1"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    job = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"
    }  # else torch 2.13 tells a machine that is new where ranks meet no more
    job["PYTHON_EXEC"] = os.environ.get(
        forks.PYTHON, sys.executable
    )  # of the ranks; each torchrun is a process of its own
    job |= {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1"}
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", ranks.ROOT / "scripts/train.slurm", *options, "trainer=ddp", "run_dir=lost", "out=lost-out"]

    def machine() -> psutil.Popen:
        return psutil.Popen(command, cwd=tmp_path, env={**os.environ, **ranks.ENVIRONMENT, **job, "PATH": path})

    def lose(one: psutil.Popen) -> None:
        for process in [*one.children(recursive=True), one]:  # with torchrun and its rank
            process.kill()
        one.wait()

    stays = machine()  # where ranks meet
    while not any(process.net_connections() for process in stays.children(recursive=True)):
        assert stays.poll() is None
        time.sleep(0.1)
    comes_back = machine()
    try:
        while not CheckpointFolder(tmp_path / "lost/checkpoints").newest():
            assert stays.poll() is comes_back.poll() is None
            time.sleep(0.1)
        lose(comes_back)
        comes_back = machine()
        assert (stays.wait(), comes_back.wait()) == (0, 0)
    finally:
        for one in (stays, comes_back):
            if one.poll() is None:
                lose(one)
    undisturbed = ["spectrain.train", *options, "trainer=ddp", "run_dir=whole", "out=whole-out"]
    assert ranks.torchrun(2, tmp_path, *undisturbed).returncode == 0
    assert len(json.loads((tmp_path / "lost/run.json").read_text())["attempts"]) == 2
    weights = [BestFolder(tmp_path / name / "checkpoints/best").weights() for name in ("lost", "whole")]
    assert largest_difference(*weights) == 0
