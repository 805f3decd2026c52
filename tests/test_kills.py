"""kill -9 at random moments loses, doubles and half-writes nothing (scripts/kill_runs.py, which does twenty)."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.test_commands import small  # noqa: F401  a fixture

SCRIPT = Path(__file__).parent.parent / "scripts" / "kill_runs.py"


@pytest.fixture(scope="module")
def kill_runs():
    spec = importlib.util.spec_from_file_location("kill_runs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["kill_runs"] = module  # its dataclasses ask for it
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_three_kills_of_a_training_change_nothing(shared, small, tmp_path):  # noqa: F811
    options = ["max_steps=150", "checkpoint_s=0.3", "trainer.val_check_interval=40", "trainer.log_every_n_steps=5"]
    command = [sys.executable, "-m", "spectrain.train", "+exp=spire", f"target={shared / 'target'}", *small, *options]
    arguments = [sys.executable, str(SCRIPT), "--kills", "3", "--seed", "1", "--work", str(tmp_path), "--"]
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
    (folder / "runs" / "a" / "run.json").write_text(json.dumps({"id": "a", "attempts": [{"done_steps": 0}]}))
    save_file({"w": torch.full((2,), weight)}, folder / "model.safetensors")


def test_differences_are_found_and_named(kill_runs, tmp_path):
    for name, loss, weight in (("one", 1.5, 2.0), ("same", 1.5, 2.0), ("other", 1.5000001, 2.5)):
        write_run(tmp_path / name, loss, weight)
    (tmp_path / "other" / ".partial.ckpt").touch()
    assert kill_runs.differences(tmp_path / "one", tmp_path / "same") == []
    assert kill_runs.differences(tmp_path / "one", tmp_path / "other") == [
        "model.safetensors differs",
        "the curve of a differs at steps [9]",
        ".partial.ckpt was left behind",
    ]
