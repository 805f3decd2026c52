"""`spectrain speedup`: from prompts to a trained drafter, a datastore, and what each method gains."""

from __future__ import annotations

import json
import random
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spectrain import speedup
from spectrain.cli import composed
from spectrain.config import options_of
from spectrain.config.commands import Speedup
from spectrain.config.groups import Target
from spectrain.config.training import Spire
from spectrain.data.prompts import Question, read_prompts
from spectrain.stores.files import read_lines
from spectrain.stores.rows import open_responses


@pytest.fixture
def prompts(tmp_path) -> str:
    file, words = tmp_path / "prompts.jsonl", random.Random(0)
    rows = ({"question_id": n, "turns": [f"def f{n}({words.choice('abc')}):\n    return "]} for n in range(48))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_each_stage_is_a_command_that_composes_and_shares_the_time(tmp_path, monkeypatch):
    given = Speedup(prompts="p.jsonl", target=Target(path="smollm2"), hours=2.0)
    asked, stages = {}, speedup.Stages(given, tmp_path / "out")
    monkeypatch.setattr(stages, "run", lambda stage, name, arguments, *_, **__: asked.update({name: arguments}))
    monkeypatch.setattr(speedup, "read_json", lambda file: {})
    stages.seconds.update({speedup.ANSWERS: 600.0})  # of an earlier attempt
    stages.answer()
    for init in ("checkpoints/before", None):
        stages.train(init)
        options = options_of("train", composed("train", *asked["train"]))
        assert options.own.init == (init or Spire().init)
        assert options.hours == pytest.approx(2.0 * (0.35 + 0.45) - 1 / 6, abs=1e-3)
    stages.seconds.clear()
    stages.seconds.update({speedup.ANSWERS: 9999.0})  # with all that interruptions took
    stages.train(None)
    assert options_of("train", composed("train", *asked["train"])).hours == pytest.approx(0.45)
    stages.seconds.update({speedup.ANSWERS: 600.0})
    stages.build_datastore()
    stages.measure()
    minutes = options_of("responses", composed("responses", *asked["responses"])).minutes
    assert minutes == pytest.approx(2.0 * 60 * 0.35 - 10)
    options = options_of("recommend", composed("recommend", *asked["recommend"]))
    assert (options.drafter, options.json) == (str(tmp_path / "out" / "drafter"), True)
    assert options.minutes == pytest.approx(110)
    assert options_of("datastore", composed("datastore", *asked["datastore"])).keep is None


def test_too_few_prompts_are_refused_before_anything_is_written(run, prompts, tmp_path):
    short = tmp_path / "short.jsonl"
    short.write_text("".join(Path(prompts).read_text().splitlines(keepends=True)[:39]))
    code, _, err = run("speedup", f"prompts={short}", f"out={tmp_path / 'out'}")
    assert code == 2
    assert "39 prompts, too few to hold 8 of them back; give 40 or more" in err
    assert not (tmp_path / "out").exists()


def test_questions_are_written_as_they_are_read(tmp_path):
    schema = {"type": "object", "properties": {"place": {"type": "string", "enum": ["Bern", "Rome"]}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    other = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
    asked = [Question("1", "chat", ("Hello?", "And now?"), "Be brief."), Question("2", "calls", ("Rain?",), "", tools)]
    asked += [Question("3", "calls", ("What time is it?",), "Call.", other), Question("4", "code", ("def f():",))]
    speedup.write_questions(tmp_path / "asked.jsonl", asked)
    assert read_prompts(tmp_path / "asked.jsonl") == asked


@pytest.mark.slow
def test_five_kills_leave_out_no_prompt_and_end_with_a_verdict(shared, prompts, tmp_path):
    command = [sys.executable, "-m", "spectrain", "speedup", f"prompts={prompts}", f"target={shared / 'target'}"]
    command += ["hours=0.01", "max_new_tokens=8", "out=out"]
    for elapsed_s in (6, 12, 12, 12, 12):
        with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
            try:
                one.communicate(timeout=elapsed_s)
            except subprocess.TimeoutExpired:
                one.send_signal(signal.SIGTERM)
                _, err = one.communicate()
                is_done = (tmp_path / "out" / "verdict.json").is_file()  # Python may be ending, which tells nothing
                assert is_done or "terminated; run the same command" in err
                assert "Traceback" not in err
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0 or "is finished" in said, said
    verdict = json.loads((tmp_path / "out" / "verdict.json").read_text())
    assert {one["recommended"] for one in verdict["settings"]} <= set(verdict["folders"])
    held, rest = (
        [row["question_id"] for row in read_lines(tmp_path / "out" / f"{name}.jsonl")]
        for name in ("held_out", "prompts")
    )
    assert (len(held), len(rest), len({*held, *rest})) == (9, 39, 48)
    assert {row["id"] for row in open_responses(tmp_path / "out" / "answers").rows} == {str(one) for one in rest}
    lines = [shlex.split(line)[2:] for line in said.splitlines() if line.startswith("next: spectrain ")]
    assert {name for name, *_ in lines} <= {"chat", "serve"}
    for name, *arguments in lines:
        options_of(name, composed(name, *arguments))
