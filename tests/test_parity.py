"""`python -m spectrain.parity run=...` on runs that training made."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from spectrain import train
from spectrain.cli import command
from spectrain.stores.folder import locked


@pytest.fixture(scope="module")
def trained(shared, tmp_path_factory) -> Path:
    """A folder with a finished run of each kind, and one that has only begun."""
    folder = tmp_path_factory.mktemp("trained")
    options = [
        f"target={shared / 'target'}",
        f"corpus={shared / 'corpus'}",
        "corpus.held_out_share=0.3",
        "data.row_tokens=64",
        "data.batch_size=2",
        "data.val_rows=2",
        "max_steps=2",
        "select.every=0",
        "tau.context_tokens=[16]",
        "tau.contexts=2",
        "tau.new_tokens=4",
        "tau.timed_contexts=1",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for kind in ("spire", "vanilla"):
            patch.setattr(sys, "argv", ["train", f"+exp={kind}", *options, f"run_dir={kind}", f"out={kind}-exported"])
            command("train")(train.main)()
    (folder / "begun").mkdir()
    (folder / "begun/config.yaml").write_text((folder / "spire/config.yaml").read_text())
    (folder / "begun/run.json").write_text((folder / "spire/run.json").read_text())
    return folder


@pytest.fixture
def call(trained, monkeypatch, typed):
    monkeypatch.chdir(trained)
    return partial(typed, "parity")


SHORT = ("contexts=3", "context_tokens=16", "new_tokens=12")


@pytest.mark.parametrize("kind", ["spire", "vanilla"])
def test_all_sides_of_a_run_are_compared(call, trained, tmp_path, kind):
    code, out, err = call(f"run={kind}", *SHORT, f"out={tmp_path / 'p'}")
    assert code == 0, err
    assert "the loop" in out
    found = json.loads((tmp_path / "p/parity.json").read_text())
    assert (tmp_path / "p/parity.png").stat().st_size > 1000
    assert found["kind"] == "parity"
    assert found["drafter_kind"] == kind
    metrics = json.loads((trained / kind / "result.json").read_text())["metrics"]
    logged = found["rows"]["T=1, validation"]["acceptance"]
    assert [a["value"] for a in logged] == [metrics[f"eval/alpha_step_{i}"] for i in found["positions"]]
    loop, ours = found["rows"]["greedy, the loop"], found["rows"]["greedy, computed, steps"]
    assert loop == ours
    assert loop["steps"] > 0
    assert ("greedy, assisted (HF)" in found["rows"]) == (kind == "vanilla")
    if kind == "vanilla":
        assert found["rows"]["greedy, assisted (HF)"] == loop
    assert "equal in all" in out


def test_drafts_of_another_length_have_no_logged_side(call, tmp_path):
    code, _, err = call("run=spire", *SHORT, "gamma=2", f"out={tmp_path / 'p'}")
    assert code == 0, err
    found = json.loads((tmp_path / "p/parity.json").read_text())
    assert found["positions"] == [1, 2]
    assert not any("validation" in name for name in found["rows"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run=nowhere"], "is no run"),
        (["run=begun"], "no checkpoint yet"),
        (["run=spire", "context_tokens=65"], "the longest held-out row has 64 tokens; lower context_tokens=65"),
        (["run=spire", "context_tokens=250"], "exceed the target's context"),
        (["run=spire", "contexts=0"], "contexts=0"),
        (["run=spire", "gamma=99"], "gamma=99"),
        (["run=spire", "gamma=0"], "gamma=0"),
        (["run=spire", "temperatures=[]"], "temperatures"),
        (["run=spire", "temperatures=[-1.0]"], "temperatures=-1.0 must be a number in [0, inf)"),
        (["run=spire", "out=spire"], "exists already"),
        (["run=spire", "out=spire", "fresh=true"], "exists already"),
        ([], "run is missing"),
    ],
)
def test_bad_input_is_one_sentence(call, trained, arguments, said):
    code, _, err = call(*arguments)
    assert code == 2
    assert said in err
    assert "Traceback" not in err
    assert not list(trained.glob("runs/*"))


def test_a_parity_is_replaced_only_when_asked(call, tmp_path):
    arguments = ["run=spire", *SHORT, "temperatures=[0.0]", f"out={tmp_path / 'p'}"]
    assert call(*arguments)[0] == 0
    assert call(*arguments)[0] == 2
    assert call(*arguments, "fresh=true")[0] == 0


def test_a_folder_in_use_is_refused_and_what_the_other_writes_stays(call, tmp_path):
    theirs = tmp_path / ".p.new" / "drafter"
    theirs.mkdir(parents=True)
    with locked(tmp_path / "p"):
        code, _, err = call("run=spire", *SHORT, f"out={tmp_path / 'p'}")
    assert code == 2
    assert "p is in use by another process; wait for its end, or give another out" in err
    assert theirs.is_dir()
