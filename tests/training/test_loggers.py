"""What a run logs: Weights & Biases offline, read back and compared with the CSV."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import wandb
from omegaconf import OmegaConf
from wandb.proto import wandb_internal_pb2

from spectrain.training.runs import read_csv
from tests.test_commands import small  # noqa: F401  a fixture

BLOCK = 2**15  # bytes


@pytest.fixture
def without_key(monkeypatch):
    """No key and no netrc: W&B must go offline by itself.

    Its own process writes below the folder in which it was started, so each test starts one of its own.
    """
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", "/dev/null")
    wandb.teardown()
    yield
    wandb.teardown()


def records(folder: Path) -> list[wandb_internal_pb2.Record]:
    """All records of the only .wandb file of an offline run, a LevelDB log: W&B has no reader of it in Python."""
    wandb.teardown()  # W&B's own process may still be writing
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, at, parts, found = file.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while at < len(data):
        if BLOCK - at % BLOCK < 7:  # no room for a header: the rest of the block is empty
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)  # checksum, bytes, 1 whole, 2 first, 3 middle, 4 last
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found


def items(rows) -> dict[str, object]:
    return {row.key or "/".join(row.nested_key): json.loads(row.value_json) for row in rows}


def test_an_offline_run_holds_what_the_csv_holds_and_the_drafter(run, small, without_key):  # noqa: F811
    options = ["logger=wandb", "logger.tags=[a,b]", "logger.group=g", "logger.name=n", "trainer.log_every_n_steps=2"]
    code, _, err = run("train", "+exp=spire", *small, *options, "run_dir=r", "out=made")
    assert code == 0, err
    (line,) = [line for line in err.splitlines() if "wandb sync " in line and "to upload it" in line]
    assert Path(line.split("wandb sync ")[1]).is_dir()

    found = records(Path("r"))
    assert [record.exit.exit_code for record in found if record.WhichOneof("record_type") == "exit"] == [0]
    history = [items(record.history.item) for record in found if record.WhichOneof("record_type") == "history"]
    logged = {row["trainer/global_step"]: row["train/loss"] for row in history if "train/loss" in row}
    curve = read_csv(Path("r/metrics/version_0/metrics.csv"))
    assert logged == {step: row["train/loss"] for step, row in curve.items() if "train/loss" in row}
    assert list(logged) == [1, 3, 5]
    names = {key for row in history for key in row}
    assert names >= {"eval/tau_expected", "eval/alpha_step_4"}
    assert {"plots/curve", "plots/acceptance"} <= {name.rsplit("/", 1)[0] for name in names}  # an image has parts

    begun = next(record.run for record in found if record.WhichOneof("record_type") == "run")
    assert (begun.project, begun.run_group, begun.display_name, list(begun.tags)) == ("spectrain", "g", "n", ["a", "b"])
    config = items(begun.config.update)
    resolved = OmegaConf.to_container(OmegaConf.load("r/config.yaml"))
    assert {key: config[key] for key in resolved} == resolved
    artifacts = [record.request.log_artifact.artifact for record in found if record.request.HasField("log_artifact")]
    artifacts += [record.artifact for record in found if record.WhichOneof("record_type") == "artifact"]
    (drafter,) = [artifact for artifact in artifacts if artifact.type == "drafter"]
    facts, exported = json.loads(drafter.metadata), json.loads(Path("made/spectrain.json").read_text())
    assert facts == exported
    assert {entry.path for entry in drafter.manifest.contents} == {file.name for file in Path("made").iterdir()}


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
