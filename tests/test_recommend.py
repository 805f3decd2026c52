"""`spectrain recommend`, which is `bench minutes=`, as a user types it: tables, advice, and lines to type next."""

from __future__ import annotations

import json
import shlex

import pytest

from spectrain.cli import composed
from spectrain.config import options_of
from spectrain.measure import halving
from spectrain.measure.questions import BUNDLED, read_questions
from spectrain.target import load_target
from tests.models.test_artifacts import export_spire

QUICK = ("methods=[pld,logitspec]", "max_new_tokens=8", "minutes=10")
ONE_SETTING = ("batch_size=[1]", "sampling.temperature=0")


@pytest.fixture
def spire(shared, tmp_path) -> str:
    return str(export_spire(tmp_path / "my drafter", load_target(shared / "target")))


def next_lines(out: str) -> list[list[str]]:
    return [shlex.split(line)[2:] for line in out.splitlines() if line.startswith("next: spectrain ")]


def test_each_setting_is_measured_and_written_as_json(run):
    code, out, err = run("recommend", *QUICK, "batch_size=[1,2]", "json=true")
    assert code == 0, err
    found = json.loads(out)
    settings = found["settings"]
    assert [one["setting"] for one in settings] == [
        *("greedy, batch 1", "T = 0.8, batch 1", "greedy, batch 2", "T = 0.8, batch 2")
    ]
    for one in settings:
        assert {"autoregressive", "auto"} <= set(one["left"]) <= {"autoregressive", "auto", "pld", "logitspec"}
        assert one["recommended"] in one["methods"]
        assert one["methods"]["autoregressive"]["speedup"] == 1
    assert all(method["lossless"] for method in settings[0]["methods"].values())
    assert settings[0]["prompts"] == 16  # of code: the tiny target has no chat template
    assert found["advice"].startswith("Use ")
    assert "No drafter is trained for this target" in found["drafter"]
    assert (found["folders"]["pld"], found["prompts"]) == ([], "code")


def test_the_lines_to_type_next_work(run, typed):
    code, out, err = run("recommend", *QUICK, *ONE_SETTING)
    assert code == 0, err
    assert [line[:15] for line in out.splitlines()].count("greedy, batch 1") == 1  # once, and nothing else
    assert "T = 0.8" not in out
    assert "times plain" in " ".join(out.split())
    lines = next_lines(out)
    assert [line[0] for line in lines if line[0] in ("generate", "train")][-1] == "train"
    name, *arguments = next(line for line in lines if line[0] == "generate")
    code, out, err = typed(name, *arguments, "max_new_tokens=4", "baseline=false")
    assert (code, "def read_config(path):" in out) == (0, True), err
    name, *arguments = next(line for line in lines if line[0] == "serve")
    assert options_of(name, composed(name, *arguments)).methods in ("auto", "autoregressive", "pld", "logitspec")


def test_a_given_drafter_is_measured_and_the_line_to_type_has_it(run, typed, spire, monkeypatch):
    monkeypatch.setattr(halving, "ALIKE", 0.0)  # auto is recommended, whatever is measured
    monkeypatch.setattr(halving, "LEAST_GAIN", 0.0)
    code, out, err = run("recommend", *QUICK[1:], "methods=[spire]", f"drafter={spire}", *ONE_SETTING)
    assert code == 0, err
    assert "With its trained drafter spire is" in out
    assert "auto drafts with my drafter" in out
    lines = next_lines(out)
    assert not any(line[0] == "train" for line in lines)
    assert lines[0][:2] + lines[0][3:4] == ["generate", "method=auto", f"drafter={spire}"]
    code, out, err = typed(*lines[0], "max_new_tokens=4", "baseline=false")
    assert code == 0, err


def test_too_little_time_is_one_sentence_with_a_way_on(run):
    code, out, err = run("bench", *QUICK[:2], "minutes=0.0001", "prompts=code")
    assert code == 0, err
    said = " ".join(out.split())
    assert "Use auto, which chooses by itself: 0.0001 minutes were enough for 0 prompts, too few" in said
    assert next_lines(out)[0][:2] == ["generate", "method=auto"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["max_new_tokens=300"], "context holds 256; shorten the prompt or lower max_new_tokens"),
        (["out=somewhere"], "out= is not for minutes=, which compares methods= and writes no file; remove one"),
        (["minutes=null"], "minutes=null must be a number"),
        (["batch_size=[0]"], "batch_size=[0] must be"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(run, arguments, said):
    code, out, err = run("recommend", *QUICK[:1], *arguments)
    assert (code, out) == (2, "")
    assert said in err


@pytest.mark.parametrize("kind", BUNDLED)
def test_prompts_of_each_kind_come_along(kind):
    asked = read_questions(kind, None)
    assert len(asked) == 16
    assert all(20 < len(question.turns[0]) < 400 for question in asked)
