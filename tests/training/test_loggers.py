"""What a run logs: what Weights & Biases is given offline, compared with the CSV."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lightning.pytorch.loggers import WandbLogger
from omegaconf import OmegaConf

from spectrain.training.runs import read_csv
from tests.test_commands import small  # noqa: F401  a fixture


@pytest.fixture
def without_key(monkeypatch):
    """No key and no netrc: W&B must go offline by itself.

    Its own process writes below the folder in which it was started, so each test starts one of its own.
    """
    import wandb  # here, as it takes seconds

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", "/dev/null")
    wandb.teardown()
    yield wandb
    wandb.teardown()


def test_a_run_of_wandb_gets_what_the_csv_holds_and_the_drafter(run, small, without_key, monkeypatch):  # noqa: F811
    begun, logged, artifacts = [], {}, []
    begin, log = WandbLogger.__init__, WandbLogger.log_metrics

    def noted(logger, **options):
        begun.append(options)
        begin(logger, **options)

    def log_noted(logger, metrics, step=None):
        logged.setdefault(step, {}).update(metrics)
        log(logger, metrics, step)

    monkeypatch.setattr(WandbLogger, "__init__", noted)
    monkeypatch.setattr(WandbLogger, "log_metrics", log_noted)
    monkeypatch.setattr(without_key.Run, "log_artifact", lambda run, artifact: artifacts.append(artifact))
    options = ["logger=wandb", "logger.tags=[a,b]", "logger.group=g", "logger.name=n", "trainer.log_every_n_steps=2"]
    code, _, err = run("train", "+exp=spire", *small, *options, "run_dir=r", "out=made")
    assert code == 0, err
    (line,) = [line for line in err.splitlines() if "wandb sync " in line and "to upload it" in line]
    assert Path(line.split("wandb sync ")[1]).is_dir()

    curve = read_csv(Path("r/metrics/version_0/metrics.csv"))
    assert [step for step, row in curve.items() if "train/loss" in row] == [1, 3, 5]
    assert {step: row.keys() & curve[step].keys() for step, row in logged.items()} == {
        s: curve[s].keys() for s in curve
    }
    assert all(logged[step][name] == pytest.approx(value) for step, row in curve.items() for name, value in row.items())
    (drafter,) = artifacts
    assert (drafter.type, drafter.metadata) == ("drafter", json.loads(Path("made/spectrain.json").read_text()))
    files = [file for file in Path("made").rglob("*") if file.is_file()]
    assert set(drafter.manifest.entries) == {str(file.relative_to("made")) for file in files}
    told = {"project": "spectrain", "group": "g", "name": "n", "tags": ["a", "b"]}
    told["config"] = OmegaConf.to_container(OmegaConf.load("r/config.yaml"))
    assert {name: begun[0][name] for name in told} == told


def test_a_resumed_offline_run_is_synced_with_all_its_attempts(run, small, without_key, monkeypatch):  # noqa: F811
    def die(*_):
        raise KeyboardInterrupt

    arguments = ["+exp=vanilla", *small, "max_steps=2", "logger=wandb", "run_dir='k=1,loss=[hard]'"]
    with monkeypatch.context() as patch:
        patch.setattr("spectrain.train.publish", die)
        assert run("train", *arguments)[0] == 130
    code, _, err = run("train", *arguments)
    assert code == 0, err
    (line,) = [line for line in err.splitlines() if "to upload it: " in line]
    folders = [Path(name) for name in line.split("wandb sync ")[1].split()]
    assert sorted(folders) == sorted(Path("k=1,loss=[hard]/wandb").glob("offline-run-*"))
    assert len(folders) == 2
