"""A new method is one file and one yaml: commands and the tests of every method then know it."""

from __future__ import annotations

import json
import shutil
import sys

from spectrain import config, methods

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


def test_a_method_of_one_file_and_one_yaml_is_found_and_benchmarked(run, tmp_path, monkeypatch):
    shutil.copytree(config.conf_dir(), tmp_path / "conf")
    (tmp_path / "echo.py").write_text(METHOD)
    (tmp_path / "conf" / "method" / "echo.yaml").write_text(YAML)
    (tmp_path / "asked.jsonl").write_text('{"prompt": "def read_config(path):"}')
    monkeypatch.setattr(config, "PACKAGE", tmp_path / "spectrain")
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    code, _, err = run("bench", "method=echo", "method.n=3", "prompts=asked.jsonl", "max_new_tokens=24", "out=bench")
    del sys.modules["spectrain.methods.echo"]
    assert code == 0, err
    results = json.loads((tmp_path / "bench" / "results.json").read_text())
    assert results["methods"]["echo"]["lossless"] is True
