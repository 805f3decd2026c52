"""A new method is one file and one yaml: commands, `load_method` and the tests of every method then know it."""

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


def build(target, n=4):
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
SCRIPT = """
import sys
import pytest
from spectrain import load_method, load_target
from spectrain.bench import main
from spectrain.cli import command

assert load_method("echo", load_target(), n=3).generate("a = 1", 8).drafted > 0
every = ["tests/decoding/test_law.py", "tests/decoding/test_loop.py", "tests/test_conf.py"]
one_family = "echo and not (llama_gqa or qwen3 or gpt_neox or gemma)"  # what each costs is its own slow texts
assert pytest.main([*every, "-k", one_family, "-p", "no:cacheprovider"]) == 0
sys.argv = ["spectrain.bench", "methods=[echo]", "limit=2", "max_new_tokens=24", "out=bench"]
command("bench")(main)()
"""


def test_a_method_of_one_file_and_one_yaml_is_found_benchmarked_and_tested(tmp_path):
    for folder in ("spectrain", "data_prep", "conf", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    (tmp_path / "spectrain" / "methods" / "echo.py").write_text(METHOD)
    (tmp_path / "conf" / "method" / "echo.yaml").write_text(YAML)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    # Greedy text of 1 of the 5 families at 2 batch sizes, 1 sampling distribution, and 3 checks of the yaml.
    assert "7 passed" in done.stdout, done.stdout
    results = json.loads((tmp_path / "bench" / "results.json").read_text())
    assert results["methods"]["echo"]["lossless"] is True
