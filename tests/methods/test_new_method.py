"""A new method is one file and one yaml: commands and the tests of every method then know it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from spectrain import config, methods
from spectrain.decoding import Drafter, Method
from spectrain.drafting.lookup import LookupDrafter
from spectrain.errors import UserError

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


def install(code: str, folder: Path, monkeypatch) -> None:
    shutil.copytree(config.conf_dir(), folder / "conf")
    (folder / "echo.py").write_text(code)
    (folder / "conf" / "method" / "echo.yaml").write_text(YAML)
    monkeypatch.setattr(config, "PACKAGE", folder / "spectrain")
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(folder)])
    vars(methods).pop("echo", None)  # of another test


def test_a_method_of_one_file_and_one_yaml_is_found_and_benchmarked(run, tmp_path, monkeypatch):
    install(METHOD, tmp_path, monkeypatch)
    (tmp_path / "asked.jsonl").write_text('{"prompt": "def read_config(path):"}')
    code, _, err = run("bench", "method=echo", "method.n=3", "prompts=asked.jsonl", "max_new_tokens=24", "out=bench")
    del sys.modules["spectrain.methods.echo"]
    assert code == 0, err
    results = json.loads((tmp_path / "bench" / "results.json").read_text())
    assert results["methods"]["echo"]["lossless"] is True


@pytest.mark.parametrize("place", ["the class", "the constructor", "a hook"])
def test_a_fact_that_nobody_would_read_is_refused_in_one_sentence(place, run, tmp_path, monkeypatch):
    name, fact = ("warning", "warns") if place == "a hook" else ("capture_layers", "capture_layers")
    before, after = {
        "the class": ("    def __init__", "    capture_layers = (1,)\n\n    def __init__"),
        "the constructor": ("        self.n = n", "        self.n, self.capture_layers = n, (1,)"),
        "a hook": ("    def __init__", "    def warning(self, *_):\n        pass\n\n    def __init__"),
    }[place]
    install(METHOD.replace(before, after, 1), tmp_path, monkeypatch)
    code, _, err = run("generate", "method=echo", "prompt=a")
    sys.modules.pop("spectrain.methods.echo", None)
    assert code == 2
    assert f"Echo.{name} is not read; give method = Method({fact}=...)" in err
    assert "Traceback" not in err


def test_a_record_is_of_its_own_object():
    class Own(Drafter):
        method = Method(joins_late=True)
        propose = None

    one = Own().describe(draws="shared", store="a store")
    assert (one.method.joins_late, one.method.draws, Own.method.draws) == (True, "shared", "inverse")
    one.store = "a store"
    assert one.describe(name="own").method.store == one.store
    one.store = "another"
    with pytest.raises(UserError, match="Own.store is not read"):
        one.describe()


def test_a_record_adds_to_that_of_the_class_that_is_extended():
    class Own(LookupDrafter):
        method = Method(drafts_chains=True)

    class Further(Own):
        method = Method(draws="shared")

    assert (Own.method.joins_late, Own.method.drafts_chains) == (True, True)
    assert (Further.method.joins_late, Further.method.drafts_chains, Further.method.draws) == (True, True, "shared")
    assert LookupDrafter.method == Method(joins_late=True)
