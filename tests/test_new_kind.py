"""A kind of drafter is four files and one line (tests/support/toy), and every command knows it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from spectrain import load_method, load_target
from spectrain.decoding import generate
from spectrain.measure.halving import fastest_known
from spectrain.methods.autoregressive import Autoregressive
from tests.conftest import random_prompts
from tests.data_prep.conftest import caller, training_options
from tests.support import toy

pytestmark = pytest.mark.slow


@pytest.fixture
def call(tmp_path, monkeypatch, capfd):
    toy.install(monkeypatch, tmp_path / "package")
    (tmp_path / "here").mkdir()

    def call(command: str, *arguments: str) -> str:
        code, out, err = caller(f"spectrain.{command}", tmp_path / "here", monkeypatch, capfd)(*arguments)
        assert code == 0, err
        return out + err

    return call


def test_a_toy_is_trained_exported_decoded_measured_and_recommended(call, shared):
    target = f"target={shared / 'target'}"
    training = [one for one in training_options(shared) if one != "+exp=spire"]
    planned = call("train", "+exp=toy", *training, "plan=true")
    assert "memory of one rank" in planned
    said = call("train", "+exp=toy", *training, "k=3", "run_dir=run", "out=exported/toy")
    assert "exported to exported/toy" in said
    result = json.loads(Path("run/result.json").read_text())
    assert result["tau"]["toy"]
    assert "toy drafter" in Path("exported/toy/README.md").read_text()
    assert call("export", "run=run", "out=again")
    loaded = load_target(shared / "target", device="cpu")
    prompts = random_prompts([5, 9, 12])
    plain = [one.tokens for one in generate(loaded, Autoregressive(), prompts, 20, batch_size=3)]
    for source, options in (
        ("exported/toy", {"max_nodes": "auto"}),
        ("toy", {"drafter": "again", "gamma": 3}),
        ("spire_tree", {"tree": "toy", "drafter": "again", "max_nodes": 12}),
    ):
        method = load_method(source, loaded, **options)
        assert [one.tokens for one in generate(loaded, method, prompts, 20, batch_size=3)] == plain, source
    few = ["prompts=code", "limit=2", "max_new_tokens=8"]
    bench = call("bench", target, "methods=[toy]", "drafter=exported/toy", *few, "out=bench")
    assert re.search(r"^toy\b", bench, re.MULTILINE)
    assert "toy" in call("generate", target, "method=auto", "drafter=exported/toy", "prompt=a", "max_new_tokens=8")
    assert "toy" in fastest_known()
    asked = ["drafter=exported/toy", "methods=[toy]", "minutes=0.5", "max_new_tokens=8", "json=true", "batch_size=[1]"]
    recommended = call("recommend", target, *asked)
    assert "toy" in json.loads(recommended[recommended.index("{") :].splitlines()[0])["settings"][0]["methods"]
