"""All cases that once failed and a few dozen new ones in each run of the tests; scripts/fuzz.py runs thousands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz.py"


def test_wrong_options_damaged_files_and_pairs_are_one_sentence(tmp_path):
    """In a process of its own, which may fork."""
    command = [sys.executable, str(SCRIPT), "cases=25", "jobs=2", "seed=1", f"out={tmp_path}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:] + (tmp_path / "faults.jsonl").read_text()
