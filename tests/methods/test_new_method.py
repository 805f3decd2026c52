"""A new method is one file and one yaml: commands and the tests of every method then know it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
METHOD = '''"""Propose the last n tokens once more."""

import torch

from spectrain.decoding import Context, Drafter, DraftTree, to_device


def build(target, n: int = 4):
    return Echo(n)


class Echo(Drafter):
    def __init__(self, n: int):
        self.n = n

    def propose(self, context: Context) -> DraftTree:
        tails = [tail + [0] * (self.n - len(tail)) for tail in context.tail(self.n)]
        lengths = [min(self.n, n_tokens, room - 1) for n_tokens, room in zip(context.n_tokens, context.room)]
        drafted, lengths = (to_device(torch.tensor(values), context.device) for values in (tails, lengths))
        return DraftTree.chain(context.roots, drafted, lengths)
'''
YAML = """# python -m spectrain.generate method=echo prompt="..."
_target_: spectrain.methods.echo.build
n: 4   # tokens
"""


def test_a_method_of_one_file_and_one_yaml_is_found_and_benchmarked(tmp_path):
    for folder in ("spectrain", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder)  # with what is compiled
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    (tmp_path / "spectrain" / "methods" / "echo.py").write_text(METHOD)
    (tmp_path / "conf" / "method" / "echo.yaml").write_text(YAML)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "spectrain.bench", "method=echo", "method.n=3", "limit=1", "max_new_tokens=24"]
    done = subprocess.run([*command, "out=bench"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((tmp_path / "bench" / "results.json").read_text())
    assert results["methods"]["echo"]["lossless"] is True
