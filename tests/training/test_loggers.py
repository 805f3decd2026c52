"""What a run logs: Weights & Biases offline, read back and compared with the CSV; sweeps as the agent starts them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import wandb
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from wandb.proto import wandb_internal_pb2
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

from spectrain.config import conf_dir
from spectrain.errors import UserError
from spectrain.measure.plots import training_pictures
from spectrain.training.curves import read_csv
from tests.test_cli import composed
from tests.test_commands import small  # noqa: F401  a fixture

BLOCK = 2**15  # bytes
SWEEPS = sorted((conf_dir() / "sweep").glob("*.yaml"))


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
    assert names >= {"eval/tau", "eval/alpha_step_4"}
    assert {"plots/curve", "plots/acceptance"} <= {name.rsplit("/", 1)[0] for name in names}  # an image has parts

    begun = next(record.run for record in found if record.WhichOneof("record_type") == "run")
    assert (begun.project, begun.run_group, begun.display_name, list(begun.tags)) == ("spectrain", "g", "n", ["a", "b"])
    config = items(begun.config.update)
    resolved = OmegaConf.to_container(OmegaConf.load("r/config.yaml"))
    assert {key: config[key] for key in resolved} == resolved
    files = [item.path for record in found for item in record.files.files]
    assert "config.yaml" in files
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


def test_a_run_that_failed_is_no_finished_one(run, small, without_key, monkeypatch, tmp_path):  # noqa: F811
    def refuse(*_):
        raise UserError("no")

    monkeypatch.setattr("spectrain.train.publish", refuse)
    code, _, _ = run("train", "+exp=vanilla", *small, "max_steps=2", "logger=wandb", f"run_dir={tmp_path}/r")
    assert code == 2
    (exited,) = [record.exit for record in records(tmp_path / "r") if record.WhichOneof("record_type") == "exit"]
    assert exited.exit_code == 1


def test_pictures_show_the_curve_without_weights_and_biases(run, small):  # noqa: F811
    assert run("train", "+exp=spire", *small, "max_steps=2", "tau.temperatures=[0.0]", "run_dir=r")[0] == 0
    assert all(Path(f"r/{name}.png").stat().st_size > 5000 for name in ("curve", "acceptance"))
    assert not Path("r/wandb").exists()


def test_acceptance_is_read_in_the_order_of_positions():
    row = {f"eval/alpha_step_{i}": i / 20 for i in (10, 2, 1, 3, 4, 5, 6, 7, 8, 9)}
    (line,) = training_pictures({4: row, 5: {"train/loss": 1.0}})["acceptance"].axes[0].lines
    assert list(line.get_ydata()) == [i / 20 for i in range(1, 11)]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_value_of_a_sweep_composes_as_the_agent_would_give_it(path):
    sweep = yaml.safe_load(path.read_text())
    fixed = [part for part in sweep["command"][4:] if not part.startswith("${")]
    assert sweep["command"][:4] == ["${env}", "python", "-m", "spectrain.train"]
    assert sweep["command"][-1] == "${args_no_hyphens}"
    for name, values in sweep["parameters"].items():
        for value in values["values"]:
            given = create_sweep_command_args({"args": {name: {"value": value}}})["args_no_hyphens"]
            cfg = composed("train", *fixed, *given)
            assert cfg.logger._target_.endswith("wandb")
            if not name.startswith("+"):
                assert OmegaConf.select(cfg, name) == value


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_sweep_and_its_multirun_are_the_same_grid(path):
    text = path.read_text()
    (multirun,) = [line for line in text.splitlines() if "spectrain.train -m " in line]
    overrides = OverridesParser.create().parse_overrides(multirun.split("-m spectrain.train -m ")[1].split())
    grid = {o.input_line.split("=")[0]: list(o.sweep_string_iterator()) for o in overrides if o.is_sweep_override()}
    wanted = {name: values["values"] for name, values in yaml.safe_load(text)["parameters"].items()}
    assert grid == {name: [str(value) for value in values] for name, values in wanted.items()}


def test_the_sweep_of_ablations_knows_every_ablation_and_each_changes_one_thing():
    sweep = yaml.safe_load((conf_dir() / "sweep" / "spire_ablations.yaml").read_text())
    names = sweep["parameters"]["+ablation"]["values"]
    assert sorted(names) == sorted(path.stem for path in (conf_dir() / "ablation").glob("*.yaml"))
    plain = composed("train", "+exp=spire")
    for name in names:
        cfg = composed("train", "+exp=spire", f"+ablation={name}")
        changed = {key for key in plain if cfg[key] != plain[key]}
        assert len(changed) == {"none": 0, "no_target_activations": 2, "tied_input": 2}.get(name, 1), (name, changed)
