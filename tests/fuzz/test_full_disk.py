"""A few runs on disks that are too small; scripts/fill_disk.py tries many more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "fill_disk.py"


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_the_same_command_ends_once_there_is_room(tmp_path):
    command = [sys.executable, str(SCRIPT), "sizes=3", "of=datastore,export", f"work={tmp_path}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    if "needs root" in done.stderr:
        pytest.skip("disks cannot be mounted here")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:] + (tmp_path / "faults.jsonl").read_text()
