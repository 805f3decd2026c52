"""Run folders: who goes on, who begins anew, and under which id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from spectrain.errors import UserError
from spectrain.stores import environment
from spectrain.stores.folder import locked
from spectrain.training import fit as fitting
from spectrain.training import runs
from spectrain.training.curves import merged
from spectrain.training.runs import RunFolder
from tests.training.trainers import config_of


def find(tmp_path, *overrides: str) -> RunFolder:
    return RunFolder.find(config_of("+exp=target", f"run_dir={tmp_path / 'run'}", *overrides))


def test_a_resumed_run_keeps_its_id_and_its_files(tmp_path):
    run = find(tmp_path)
    id_of_the_logger = run.id  # read before the folder is made
    run.begin()
    (run.path / "kept").touch()
    run.begin()
    resumed = find(tmp_path)
    resumed.begin()
    assert resumed.id == id_of_the_logger
    assert (run.path / "kept").is_file()


def test_fresh_replaces_a_finished_run_once_and_under_a_new_id(tmp_path):
    first = find(tmp_path)
    first.begin()
    (first.path / "old").touch()
    first.finish({})
    with pytest.raises(UserError, match="finished"):
        find(tmp_path)
    again = find(tmp_path, "fresh=true")
    again.begin()
    assert again.id != first.id
    assert not (again.path / "old").exists()
    (again.path / "tokenizer").touch()
    again.begin()  # as training a target does: before its tokenizer, and again before the fit
    assert (again.path / "tokenizer").is_file()


def test_a_finished_run_is_left_out_on_all_ranks_or_on_none(tmp_path, monkeypatch):
    """Ranks of torchrun go through a sweep side by side: one that trained alone would wait for the others forever."""
    run = find(tmp_path)
    run.begin()
    run.note_attempt(0, {})
    monkeypatch.setattr(runs.rank_zero_only, "rank", 1)
    assert find(tmp_path).path == run.path  # not finished yet
    monkeypatch.setattr(runs.rank_zero_only, "rank", 0)
    run.finish({})
    monkeypatch.setattr(runs.rank_zero_only, "rank", 1)
    with pytest.raises(runs.FinishedRun):
        find(tmp_path)
    find(tmp_path, "fresh=true")


def test_a_run_is_trained_by_one_process_at_a_time(tmp_path, monkeypatch):
    config = config_of("+exp=target", f"run_dir={tmp_path / 'run'}")
    with RunFolder.claim(config) as run:  # before the folder is made
        assert not run.path.exists()
        with (
            pytest.raises(UserError, match="run is in use by another process; wait for its end"),
            RunFolder.claim(config),
        ):
            pass
        monkeypatch.setattr(runs.rank_zero_only, "rank", 1)
        with RunFolder.claim(config):  # another rank of the same training
            pass
        monkeypatch.setattr(runs.rank_zero_only, "rank", 0)
        run.begin()
    with RunFolder.claim(config) as again:
        assert again.id == run.id


def test_another_config_is_refused_and_named(tmp_path):
    find(tmp_path).begin()
    with pytest.raises(UserError, match=r"another config \(differs in max_steps\)"):
        find(tmp_path, "max_steps=7")


def test_each_start_is_noted_with_where_and_with_what_it_ran(tmp_path):
    run = find(tmp_path)
    run.begin("f" * 16)
    for done_steps in (0, 40):
        facts = {"code": environment.commit_of(fitting.PACKAGE), "environment": environment.environment(2)}
        find(tmp_path).note_attempt(done_steps, facts)
    facts = json.loads((run.path / "run.json").read_text())
    assert facts["target_fingerprint"] == "f" * 16
    assert [attempt["done_steps"] for attempt in facts["attempts"]] == [0, 40]
    attempt = facts["attempts"][1]
    assert attempt["started"] >= facts["attempts"][0]["started"]
    assert attempt["environment"]["torch"] == torch.__version__
    assert attempt["environment"].keys() >= {"python", "lightning", "transformers", "deepspeed", "cuda", "devices"}
    assert (attempt["environment"]["ranks"], bool(attempt["environment"]["host"])) == (2, True)


@pytest.mark.parametrize("moment", ["config", "facts", "rename", "removal"])
def test_a_kill_while_a_run_begins_leaves_nothing_or_all(tmp_path, monkeypatch, moment):
    """A folder with half of it would be neither a run nor empty, and every later start would refuse it."""
    find(tmp_path).begin()
    OmegaConf.update(config := OmegaConf.load(tmp_path / "run/config.yaml"), "max_steps", 5)
    OmegaConf.save(config, tmp_path / "run/config.yaml")  # another run stands there

    class Killed(BaseException):
        """Nothing is tidied up after kill -9."""

    def die(*_, **__):
        raise Killed

    def remove(folder: Path, **_) -> None:
        if moment == "removal" and (folder / "config.yaml").is_file():
            (folder / "config.yaml").unlink()
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", remove)
        where = {"config": (OmegaConf, "save"), "facts": (runs, "write_json"), "rename": (Path, "rename")}.get(moment)
        run = find(tmp_path, "fresh=true")
        if where:
            patch.setattr(*where, die)
        with pytest.raises(Killed):
            run.begin()
    again = find(tmp_path, "fresh=true")
    again.begin()
    assert OmegaConf.load(again.path / "config.yaml").max_steps == 1800
    assert again.attempts == []
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_later_attempt_replaces_the_curve_from_where_it_went_on(tmp_path):
    def attempt(name: str, *rows: str) -> Path:
        file = tmp_path / name
        file.write_text("\n".join(["step,train/loss,eval/loss", *rows]))
        return file

    first = attempt("0", "9,1.0,", "19,2.0,", "19,,7.0", "29,3.0,", "39,4.0,\n49,4.0,4e-")  # the last line is cut short
    third = attempt("2", "29,30.0,", "29,,70.0", "")
    curve = merged([(0, first), (30, tmp_path / "died before its first line"), (20, third)])
    assert curve == {
        9: {"train/loss": 1.0},
        19: {"train/loss": 2.0, "eval/loss": 7.0},
        29: {"train/loss": 30.0, "eval/loss": 70.0},
    }


def test_an_export_waits_for_no_other_and_leaves_what_it_writes_alone(tmp_path):
    """Two runs may have one `out`; which of them is late is known only at its end."""
    run, theirs = find(tmp_path), tmp_path / ".out.new"
    run.begin()
    theirs.mkdir()
    with locked(tmp_path / "out"), pytest.raises(UserError, match="out is in use by another process"):
        run.export(str(tmp_path / "out"), lambda folder, out: None)
    assert theirs.is_dir()
    assert not (run.path / "export.json").exists()


def test_an_export_that_a_kill_left_behind_may_be_replaced_by_its_own_run_only(tmp_path):
    out = tmp_path / "out"
    run = find(tmp_path)
    run.begin()
    run.note_attempt(0, {})
    assert not run.exported_to(out)
    run.export(str(out), lambda folder, out: None)
    assert find(tmp_path).exported_to(out)
    assert not find(tmp_path).exported_to(tmp_path / "other")
    find(tmp_path, "max_steps=7", "fresh=true").begin()
    assert not find(tmp_path, "max_steps=7").exported_to(out)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_a_training_out_of_memory_names_what_to_lower(error):
    with (
        pytest.raises(UserError, match=r"data.batch_size=4 .* data.row_tokens=1024, or give trainer.activation_check"),
        fitting.naming_the_remedy(config_of("+exp=spire")["data"]),
    ):
        raise error


def test_a_rank_that_lost_another_says_so():
    lost = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:22934. This is typically caused by\nmore")
    with (
        pytest.raises(UserError, match="another rank ended, and this one cannot go on alone"),
        fitting.naming_the_remedy(config_of("+exp=spire")["data"]),
    ):
        raise lost


def test_other_errors_of_a_training_pass_unchanged():
    with pytest.raises(RuntimeError, match="shape"), fitting.naming_the_remedy(config_of("+exp=spire")["data"]):
        raise RuntimeError("shape mismatch")
