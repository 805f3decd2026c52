"""`python -m spectrain.export`: what a run trained, from its newest checkpoint, on a tiny target.

DeepSpeed's checkpoints are exported in tests/training/test_strategies.py, where ranks have written some.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from spectrain import export, train
from spectrain.cli import command
from spectrain.decoding import TargetModel, fingerprint, load_target
from spectrain.models.artifacts import load_spire

KINDS = {
    "spire": [],
    "vanilla": [],
    "target": [
        "model.vocab_size=300",
        "model.hidden_size=32",
        "model.intermediate_size=48",
        "model.num_hidden_layers=2",
    ],
}


@pytest.fixture(scope="module")
def trained(shared, tmp_path_factory) -> Path:
    """A folder with a finished run and its export of each kind, `<kind>` and `<kind>-exported`."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for kind, options in KINDS.items():
            arguments = [
                f"+exp={kind}",
                f"target={shared / 'target'}",
                f"corpus={shared / 'corpus'}",
                "data.row_tokens=64",
                "data.batch_size=2",
                "data.val_rows=2",
                "max_steps=2",
                "select.every=0",
                "tau.context_tokens=[16]",
                "tau.contexts=2",
                "tau.new_tokens=4",
                "tau.timed_contexts=1",
                f"run_dir={kind}",
                f"out={kind}-exported",
                *options,
            ]
            patch.setattr(sys, "argv", ["spectrain.train", *arguments])
            command("train")(train.main)()
    return folder


def exported(capfd, monkeypatch, *arguments: str) -> tuple[int, str]:
    """Runs the command; exit code and stderr."""
    monkeypatch.setattr(sys, "argv", ["spectrain.export", *arguments])
    try:
        command("export")(export.main)()
    except SystemExit as stop:
        return stop.code, capfd.readouterr().err
    return 0, capfd.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_exported_as_training_exported_it(trained, kind, tmp_path, capfd, monkeypatch):
    out = tmp_path / "out"
    code, err = exported(capfd, monkeypatch, f"run={trained / kind}", f"out={out}")
    assert code == 0, err
    ours, theirs = out, trained / f"{kind}-exported"
    assert {file.name for file in ours.iterdir()} == {file.name for file in theirs.iterdir()}
    mine, training = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    assert mine.keys() == training.keys()
    assert all(mine[name].equal(training[name]) for name in mine)
    if kind != "target":
        manifest = json.loads((out / "spectrain.json").read_text())
        assert (manifest["kind"], manifest["trained"]) == (kind, {"steps": 2})


def test_an_export_opens_as_any_other(trained, shared, tmp_path, capfd, monkeypatch):
    for kind in ("spire", "vanilla"):
        assert exported(capfd, monkeypatch, f"run={trained / kind}", f"out={tmp_path / kind}")[0] == 0
    target = load_target(shared / "target", device="cpu")
    load_spire(tmp_path / "spire", fingerprint(target.model, target.tokenizer))
    TargetModel(AutoModelForCausalLM.from_pretrained(tmp_path / "vanilla"))
    assert len(AutoTokenizer.from_pretrained(tmp_path / "vanilla")) == 300


def test_what_cannot_be_exported_is_said_and_nothing_is_written(trained, tmp_path, capfd, monkeypatch):
    def refused(run: Path, out: Path = tmp_path / "out") -> str:
        code, err = exported(capfd, monkeypatch, f"run={run}", f"out={out}")
        assert code == 2
        return err

    run = tmp_path / "run"
    assert "is no run of spectrain.train" in refused(tmp_path / "nowhere")
    shutil.copytree(trained / "spire", run)
    assert "exists already" in refused(run, run)

    config = OmegaConf.load(run / "config.yaml")
    OmegaConf.save(OmegaConf.merge(config, {"n_layer": 1}), run / "config.yaml")
    assert "does not hold what the run's config.yaml describes (differs in drafter.blocks.1" in refused(run)
    OmegaConf.save(config, run / "config.yaml")

    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(facts | {"target_fingerprint": "0" * 16}))
    assert "was begun with target 0000000000000000" in refused(run)
    (run / "run.json").write_text(json.dumps(facts))

    (checkpoint,) = (run / "checkpoints").glob("*.ckpt")
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    assert "cannot be read" in refused(run)
    checkpoint.unlink()
    assert "has no checkpoint yet" in refused(run)
    assert not (tmp_path / "out").exists()
