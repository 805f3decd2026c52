"""`spectrain check` says what it measured and what is wrong, and its exit code says whether anything is."""

from __future__ import annotations

import json

import pytest

from spectrain.models.artifacts import Artifact, write_manifest
from spectrain.models.eagle3 import Eagle3Config, Eagle3Drafter, default_layers, save
from spectrain.target import load_target
from spectrain.target.lean import shape_of

SMALL = ("limit=4", "max_new_tokens=12")


@pytest.fixture(scope="module")
def guessing(shared, tmp_path_factory):
    """An EAGLE-3 drafter that nobody has trained."""
    target = load_target(shared / "target")
    drafter = Eagle3Drafter(Eagle3Config(shape_of(target.model), default_layers(target.n_layer)), target)
    folder = tmp_path_factory.mktemp("drafters") / "guessing"
    folder.mkdir()
    save(folder, drafter)
    return folder


def test_a_drafter_that_is_the_target_accepts_all(run, shared):
    code, out, _ = run("check", f"drafter={shared}/target", *SMALL)
    assert code == 0
    assert " drafts of 4 in 4 answers of " in out
    assert "5.00 [5.00, 5.00]" in out
    assert "readings" not in out
    assert "Nothing is wrong." not in out  # which nobody looked for


def test_what_is_wrong_stands_below_the_tables(run, guessing):
    code, out, _ = run("check", f"drafter={guessing}", *SMALL)
    assert code == 1
    assert "as its files say" in out
    assert "config.json: eagle_aux_hidden_state_layer_ids: [1, 2]" in out
    assert "It makes nothing of this target's states" in out
    assert "vLLM 0.33 reads it" in out
    assert "Nothing is wrong." not in out


def test_two_prompts_are_of_two_of_the_bundled_kinds(run, chatty):
    code, out, _ = run("check", f"drafter={chatty}", "limit=2", "max_new_tokens=12", target=chatty)
    assert code == 0
    assert " in 2 answers of " in out
    assert "(chat, code)" in out


def test_json_holds_all_readings(run, guessing):
    code, out, _ = run("check", f"drafter={guessing}", *SMALL, "json=true")
    result = json.loads(out)
    assert code == 1
    assert (result["kind"], result["drafter_kind"], result["gamma"], result["answers"]) == ("check", "eagle3", 4, 4)
    assert len(result["alpha"]) == len(result["agreed"]) == 4
    assert len(result["readings"]) > 8
    assert [one["engine"] for one in result["engines"]] == ["vLLM 0.33", "SGLang 0.5.23"]
    assert result["wrong"]


def test_what_drafts_nothing_alone_is_refused(run, tmp_path):
    (tmp_path / "lookup").mkdir()
    write_manifest(tmp_path / "lookup", Artifact("head", "target", "", {}))
    code, _, err = run("check", "drafter=lookup", *SMALL)
    assert code == 2
    assert "drafter=lookup is of kind head, which drafts nothing alone; give a drafter" in err
