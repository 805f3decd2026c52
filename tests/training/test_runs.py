"""Run folders: who goes on, who begins anew, and under which id."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from spectrain.config import plain
from spectrain.errors import LostRankError, UserError
from spectrain.stores import environment
from spectrain.training import fit as fitting
from spectrain.training import runs
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


def test_options_that_came_later_leave_runs_of_earlier_versions_as_they_were(tmp_path):
    now = config_of("+exp=spire")
    before = {key: value for key, value in plain(now).items() if key not in ("shifted_blocks", "own_key")}
    before["optimizer"] = {key: value for key, value in before["optimizer"].items() if key != "final_share"}
    assert RunFolder.path_of(before) == RunFolder.path_of(now)
    before["workload"] = {"batch": [1, 8], "context_tokens": [1024, 8192]}  # which runs of earlier versions had
    assert RunFolder.path_of(before) == RunFolder.path_of(now)
    assert RunFolder.path_of(before | {"workload": {"batch": [2]}}) != RunFolder.path_of(now)
    for changed in ("optimizer.final_share=0.1", "shifted_blocks=false", "own_key=false"):
        assert RunFolder.path_of(config_of("+exp=spire", changed)) != RunFolder.path_of(now)
    place = str(tmp_path / "run")
    RunFolder.find(before | {"run_dir": place}).begin()
    with RunFolder.claim(replace(now, run_dir=place), settle=lambda config: config) as run:
        assert run.resumes
        assert run.config.own.optimizer.final_share == 0.0
        assert (run.config.own.shifted_blocks, run.config.own.own_key) == (True, True)


def test_the_config_of_an_earlier_version_lacks_options_and_has_others(tmp_path):
    run = find(tmp_path)
    run.begin()
    earlier = plain(run.config) | {"gone": 1}
    earlier["tau"] |= {"gone": 2}
    del earlier["trainer"]["compile"], earlier["optimizer"]["final_share"]
    OmegaConf.save(OmegaConf.create(earlier), run.path / "config.yaml")
    assert RunFolder.open(run.path).config == run.config


def test_a_training_may_go_on_elsewhere_but_a_measurement_may_not():
    here, there = ({"device": one, "parallel": "none", "tp": None, "path": "x"} for one in ("cpu", "cuda"))
    trainings = [{"kind": "spire", "run_dir": None, "trainer": {"devices": 1}, "target": one} for one in (here, there)]
    assert RunFolder.path_of(trainings[0]) == RunFolder.path_of(trainings[1])
    bench = [{"kind": "bench", "run_dir": None, "target": one} for one in (here, there)]
    assert RunFolder.path_of(bench[0]) != RunFolder.path_of(bench[1])


def test_each_start_is_noted_with_where_and_with_what_it_ran(tmp_path):
    run = find(tmp_path)
    run.begin()
    for done_steps in (0, 40):
        facts = {"code": environment.commit_of(fitting.PACKAGE), "environment": environment.environment(2)}
        find(tmp_path).note_attempt(done_steps, facts)
    facts = json.loads((run.path / "run.json").read_text())
    assert [attempt["done_steps"] for attempt in facts["attempts"]] == [0, 40]
    attempt = facts["attempts"][1]
    assert attempt["started"] >= facts["attempts"][0]["started"]
    assert attempt["environment"]["torch"] == torch.__version__
    assert attempt["environment"].keys() >= {"python", "lightning", "transformers", "deepspeed", "cuda", "devices"}
    assert (attempt["environment"]["ranks"], bool(attempt["environment"]["host"])) == (2, True)


def test_an_export_is_replaced_by_its_own_run_only(tmp_path):
    out, run = str(tmp_path / "out"), find(tmp_path)
    run.begin()
    for text in ("killed", "again"):
        run.export(out, lambda folder, _: Path(folder, "text").write_text(text))  # noqa: B023
    assert Path(out, "text").read_text() == "again"
    other = RunFolder.find(config_of("+exp=target", f"run_dir={tmp_path / 'other'}"))
    other.begin()
    with pytest.raises(UserError, match="out exists already"):
        other.export(out, lambda folder, _: None)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_a_training_out_of_memory_names_what_to_lower(error):
    with (
        pytest.raises(UserError, match=r"data.batch_size=4 .* data.row_tokens=1024, or give trainer.activation_check"),
        fitting.naming_the_remedy(config_of("+exp=spire").data, None),
    ):
        raise error


@pytest.mark.parametrize(
    ("code", "kind"), [(None, LostRankError), (-9, LostRankError), (2, SystemExit)], ids=["elsewhere", "killed", "said"]
)
def test_a_rank_that_lost_another_says_so_unless_that_one_has_spoken(code, kind):
    lost = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:22934. This is typically caused by\nmore")
    launched = SimpleNamespace(procs=[SimpleNamespace(poll=lambda: code)]) if code else None
    trainer = SimpleNamespace(strategy=SimpleNamespace(launcher=launched))
    said = "2" if kind is SystemExit else "another rank ended, and this one cannot go on alone"
    with pytest.raises(kind, match=said), fitting.naming_the_remedy({}, trainer):
        raise lost
