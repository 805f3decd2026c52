"""kill -9 at random moments loses, doubles and half-writes nothing (scripts/kill_runs.py, which does a thousand)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.fuzz.compare import differences
from tests.test_commands import small  # noqa: F401  a fixture

SCRIPT = Path(__file__).parent.parent / "scripts" / "kill_runs.py"


@pytest.mark.slow
def test_three_kills_of_a_training_change_nothing(shared, small, tmp_path):  # noqa: F811
    options = ["max_steps=150", "checkpoint_s=0.3", "trainer.val_check_interval=40", "trainer.log_every_n_steps=5"]
    command = [sys.executable, "-m", "spectrain.train", "+exp=spire", f"target={shared / 'target'}", *small, *options]
    arguments = [sys.executable, str(SCRIPT), "kills=3", "seed=1", f"work={tmp_path}", "--"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parent.parent)}
    done = subprocess.run([*arguments, *command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all equal to the uninterrupted one" in done.stdout
    assert len(re.findall(r"^kill \d after", done.stdout, re.M)) == 3
    assert list((tmp_path / "killed").glob("checkpoints/*/model.safetensors"))


def write_run(folder: Path, loss: float, weight: float) -> None:
    metrics = folder / "runs" / "a" / "metrics" / "version_0" / "metrics.csv"
    metrics.parent.mkdir(parents=True)
    metrics.write_text(f"step,train/loss,train/tokens_per_s\n9,{loss},{os.urandom(2)[0]}\n")
    facts = {"id": "a", "attempts": [{"started": "2026-01-01", "done_steps": 0}]}
    (folder / "runs" / "a" / "run.json").write_text(json.dumps(facts))
    save_file({"w": torch.full((2,), weight)}, folder / "model.safetensors")


def test_differences_are_found_and_named(tmp_path):
    for name, loss, weight in (("one", 1.5, 2.0), ("same", 1.5, 2.0), ("other", 1.5000001, 2.5)):
        write_run(tmp_path / name, loss, weight)
    (tmp_path / "other" / ".partial.ckpt").touch()
    assert differences(tmp_path / "one", tmp_path / "same") == []
    assert [(one.kind, one.what) for one in differences(tmp_path / "one", tmp_path / "other")] == [
        ("different", "model.safetensors differs"),
        ("different", "the curve of a differs at steps [9]"),
        ("left behind", ".partial.ckpt was left behind"),
    ]


def test_rows_are_compared_by_what_names_them(tmp_path):
    row = {"question_id": "a", "method": "pld", "replies": [[1, 2]], "seconds": 1.0}
    others = [row | {"question_id": "b"}, row | {"method": "rest"}]
    for name, rows in (
        ("whole", [row, *others]),
        ("clocks", [*others, row | {"seconds": 2.0}]),
        ("wrong", [row, row, others[0] | {"replies": [[1]]}]),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert differences(tmp_path / "whole", tmp_path / "clocks") == []
    found = differences(tmp_path / "whole", tmp_path / "wrong")
    assert [one.kind for one in found] == ["doubled", "different", "lost"]
    assert found[2].what == "questions.jsonl lacks ('a', 'rest')"


@pytest.mark.slow
def test_jobs_end_rightly_whatever_kills_or_meets_them(tmp_path):
    asked = ["kills=6", "starts=4", "of=sampled,activations,parity,export", f"work={tmp_path}"]
    done = subprocess.run([sys.executable, str(SCRIPT), *asked], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "faults.jsonl").read_text()
    assert "0 faults" in done.stdout
    killed, started = re.findall(r"^all +(\d+) +(\d+) +(\d+)", done.stdout, re.M)
    assert int(killed[1]) >= 6
    assert (started[0], started[2]) == ("4", "4")
