"""`python -m spectrain.tune method=sssd`: what it writes is what `bench` loads; it goes on; what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from spectrain import tune
from spectrain.measure import questions

GRID = (
    *("grid.input_scale=[0.5,1.0]", "grid.input_prefix_decay=[0.5]", "grid.input_depth_decay=[1.0]"),
    *("grid.datastore_prefix_decay=[1.0]", "grid.datastore_depth_decay=[0.9]", "grid.min_matches=[20]"),
)


@pytest.fixture
def command(stored, tmp_path) -> tuple[str, ...]:
    rows = [{"prompt": f"def read_config_{i}(path):\n    return read_config_{i}"} for i in range(4)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ("tune", "method=sssd", f"datastore={stored}", "prompts=asked.jsonl", "max_new_tokens=16", *GRID)


def test_the_choice_is_written_and_loaded_by_bench(run, command, stored):
    code, out, err = run(*command, "out=t")
    assert code == 0, err
    for word in ("defaults", "best discounts", "calibrated", "2 responses"):
        assert word in out
    chosen = OmegaConf.load("t/sssd.yaml").sssd
    result = json.loads(Path("t/result.json").read_text())
    assert result["chosen"] == OmegaConf.to_container(chosen)
    assert "datastore" not in chosen
    assert {one["input_scale"] for one in result["tried"]} == {0.5, 1.0}
    assert len(result["tau"]["defaults"]) == 3
    code, _, err = run(
        *("bench", "prompts=asked.jsonl", "out=b", "methods=[sssd,sssd_logits]", f"datastore={stored}"),
        *("tuned=t/sssd.yaml", "max_new_tokens=6"),
    )
    assert code == 0, err
    assert json.loads(Path("b/results.json").read_text())["methods"]["sssd"]["lossless"]
    code, _, err = run(
        "generate", "method=sssd", f"datastore={stored}", "tuned=t/sssd.yaml", "prompt=def", "max_new_tokens=5"
    )
    assert code == 0, err


def test_stored_responses_need_no_decoding_and_give_the_same(run, command, monkeypatch):
    assert run(*command, "out=t")[0] == 0
    monkeypatch.setattr(questions, "generate", None)
    code, _, err = run(*command, "out=u", "responses=t/responses.jsonl")
    assert code == 0, err
    first, second = (json.loads(Path(f"{run}/result.json").read_text()) for run in "tu")
    assert first == second


def test_an_interrupted_run_keeps_its_responses(run, command, monkeypatch):
    search = tune.choose_options
    monkeypatch.setattr(tune, "choose_options", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    code, _, err = run(*command, "out=t")
    assert code == 130
    assert "run the same command to resume in t" in err
    file = Path("t/responses.jsonl")
    kept = file.read_text().splitlines(keepends=True)
    file.write_text("".join(kept[:3]) + kept[3][:20])  # killed while it wrote
    monkeypatch.setattr(tune, "choose_options", search)
    assert run(*command, "out=t")[0] == 0
    assert file.read_text().splitlines(keepends=True) == kept


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["responses=asked.jsonl"], "row 1 has no prompt and response as token ids"),
        (["+grid.inputscale=[1]"], "unknown option: grid.inputscale"),
        (["grid.input_scale=[-1]"], "input_scale=-1 must be a number in"),
        (["method.last_logits=true"], "cannot be simulated without the target"),
        (["limit=1"], "give more prompts"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_requests_are_one_sentence(run, command, arguments, reason):
    code, _, err = run(*command, "out=t", *arguments)
    assert code == 2, err
    assert reason in err
    assert "Traceback" not in err


def test_other_methods_have_nothing_to_search(run):
    code, _, err = run("tune", "method=pld")
    assert code == 2
    assert "method=pld has nothing to tune; give method=sssd or method=specdecpp" in err
