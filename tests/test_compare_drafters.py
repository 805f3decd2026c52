"""scripts/compare_drafters.py: an interrupted comparison goes on as if it never was, and mixes nothing up."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from spectrain.measure.measured_tau import choose_tau, read_tau

from spectrain.decoding import load_target
from spectrain.measure.tau import Setting, compare
from spectrain.stores.packing import token_documents
from spectrain.stores.texts import read_documents
from tests.models.test_artifacts import export_spire
from tests.support.scripts import load_script

SHORT = ["--row-tokens", "48", "--skip", "0", "--held-out-share", "0.3", "--new-tokens", "12", "--batch-size", "2"]


@pytest.fixture(scope="module")
def script():
    return load_script("compare_drafters")


@pytest.fixture(scope="module")
def drafters(shared, tmp_path_factory) -> Path:
    """SPIRe drafters of the tiny target with two windows, and one of another target."""
    root = tmp_path_factory.mktemp("drafters")
    target = load_target(str(shared / "target"))
    export_spire(root / "wide", target, window_tokens=16)
    export_spire(root / "narrow", target, window_tokens=4)
    shutil.copytree(root / "wide", root / "foreign")
    manifest = json.loads((root / "foreign/spectrain.json").read_text())
    (root / "foreign/spectrain.json").write_text(json.dumps(manifest | {"target_fingerprint": "f" * 16}))
    return root


@pytest.fixture
def call(script, shared, drafters, monkeypatch, capfd):
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(drafters)
        given = ["--target", str(shared / "target"), "--corpus", str(shared / "corpus"), "--context-tokens", "16", "32"]
        monkeypatch.setattr(sys, "argv", ["compare_drafters.py", *given, *SHORT, *arguments])
        monkeypatch.setattr(script, "PART_ROWS", 2)
        code = 0
        try:
            script.main()
        except SystemExit as stop:
            code = stop.code
        return code, *capfd.readouterr()

    return run


def measured(out: Path) -> dict:
    return json.loads((out / "drafters.json").read_text())["drafters"]


def test_an_interrupted_comparison_that_goes_on_equals_an_uninterrupted_one(call, script, tmp_path, monkeypatch):
    asked = ["wide", "magicdec", "--rows", "5"]
    assert call(*asked, "--out", str(tmp_path / "whole"))[0] == 0
    decoded, real = [], script.decode

    def cut_short(*arguments):
        decoded.append(arguments[6])  # number of the part's first row
        if len(decoded) == 4:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(script, "decode", cut_short)
    with pytest.raises(KeyboardInterrupt):
        call(*asked, "--out", str(tmp_path / "cut"))
    assert not (tmp_path / "cut/drafters.json").exists()
    assert call(*asked, "--out", str(tmp_path / "cut"))[0] == 0
    assert measured(tmp_path / "cut") == measured(tmp_path / "whole")
    settings, parts = 4, 3  # two lengths, two temperatures; rows 0, 1 | 2, 3 | 4
    assert len(decoded) == 1 + 2 * settings * parts  # the part that was cut short is all that was decoded twice


def test_more_rows_and_drafters_are_added_to_what_is_there(call, script, tmp_path, monkeypatch):
    out = ["--out", str(tmp_path / "grown")]
    assert call("wide", "--rows", "3", *out)[0] == 0
    firsts, real = [], script.decode
    monkeypatch.setattr(script, "decode", lambda *a: firsts.append(a[6]) or real(*a))
    assert call("wide", "narrow", "--rows", "5", *out)[0] == 0
    assert firsts == [3] * 4 + [4] * 4 + [0] * 4 + [2] * 4 + [4] * 4  # of the first drafter but the rest, row 3 and 4
    assert call("wide", "narrow", "--rows", "5", "--out", str(tmp_path / "at once"))[0] == 0
    assert measured(tmp_path / "grown") == measured(tmp_path / "at once")


def test_the_file_says_what_it_compared_and_the_throughput_model_reads_it(call, tmp_path):
    code, printed, _ = call("spire=wide", "no_feedback=narrow", "magicdec", "--rows", "3", "--out", str(tmp_path / "o"))
    assert code == 0
    assert "Traceback" not in printed
    found = json.loads((tmp_path / "o/drafters.json").read_text())
    kinds = {name: (one["kind"], one["folder"]) for name, one in found["drafters"].items()}
    assert kinds == {"spire": ("spire", "wide"), "no_feedback": ("spire", "narrow"), "magicdec": ("magicdec", None)}
    assert (found["kind"], found["first"], found["contexts"]) == ("drafters", "spire", {"16": 3, "32": 3})
    assert (tmp_path / "o" / found["figures"][0]["file"]).is_file()
    file = tmp_path / "o/drafters.json"
    for name in ("spire", "magicdec"):
        chosen = choose_tau(file, read_tau(file), name, 4, at=Setting(32, 0.0))
        assert chosen.tau.value == found["drafters"][name]["tau"]["32 tokens, greedy"]["value"]


def test_several_seeds_of_a_drafter_are_one_whose_counts_are_added(call, tmp_path):
    asked = ["wide", "both=wide,narrow", "twice=wide,wide", "narrow", "--rows", "3", "--out", str(tmp_path / "o")]
    assert call(*asked)[0] == 0
    found = measured(tmp_path / "o")
    read = {name: json.loads((tmp_path / f"o/counts/{name}.json").read_text())["counts"] for name in ("wide", "narrow")}
    for setting, value in found["both"]["tau"].items():
        alone = [found[name]["tau"][setting]["value"] for name in ("wide", "narrow")]
        assert [seed[setting] for seed in found["both"]["by_seed"]] == pytest.approx(alone)
        assert found["twice"]["tau"][setting] == found["wide"]["tau"][setting]
        if setting in read["wide"]:
            counts = np.array(read["wide"][setting]) + np.array(read["narrow"][setting])
            assert value["value"] == pytest.approx(counts[:, 0].sum() / counts[:, 1].sum())
    assert found["both"]["folder"] == "wide,narrow"
    assert "by_seed" not in found["wide"]


def test_computed_tau_is_of_one_text_that_begins_as_a_held_out_document(call, script, shared, tmp_path, monkeypatch):
    texts, real = [], script.computed
    monkeypatch.setattr(script, "computed", lambda given, *rest: texts.append(given) or real(given, *rest))
    asked = ["wide", "same=wide", "narrow", "--rows", "2", "--computed", "--documents", "--out", str(tmp_path / "o")]
    code, printed, err = call(*asked)
    assert code == 0, err
    assert "tau, computed, on 2 held-out contexts" in printed
    assert len(texts) == 3 * 4  # drafters, settings
    assert texts[:4] == texts[4:8] == texts[8:]
    target = load_target(str(shared / "target"))
    documents = token_documents(read_documents(str(shared / "corpus")), target.tokenizer)
    begins = [d.tokens[:16].tolist() for d in documents]
    assert all(text.tokens[:16] in begins for part in texts for text in part)
    found = measured(tmp_path / "o")
    assert found["wide"]["tau"] == found["same"]["tau"] != found["narrow"]["tau"]
    assert not any(one["value"] for one in found["same"]["difference"].values())
    counts = json.loads((tmp_path / "o/counts/wide.json").read_text())["counts"]
    assert {row[1] for rows in counts.values() for row in rows} == {12 - 4}  # drafts of 4 tokens that end in the text


def comparison(**drafters: list) -> dict:
    """Content of drafters.json, of counts [R, 2] in two settings."""
    counts = {name: {Setting(n, 0.0): np.array(c, dtype=float) for n in (256, 512)} for name, c in drafters.items()}
    contexts = {"256": 2, "512": 2}
    first = next(iter(drafters))
    return {"rows": 2, "new_tokens": 64, "gamma": 4, "contexts": contexts, "first": first, "drafters": compare(counts)}


OURS, THEIRS = [[6, 2], [3, 3]], [[4, 2], [3, 3]]  # tau 9 / 5 and 7 / 5


def test_what_is_shown_are_the_numbers_beside_those_of_the_paper(script):
    found = comparison(spire=OURS, vanilla=THEIRS)
    header, _, ours, theirs, less = script.markdown(found).splitlines()
    assert header == "| drafter | 256 tokens, greedy | 512 tokens, greedy | all, greedy | paper, 512 tokens |"
    assert ours == f"| spire | {' | '.join(['1.800 ± 1.000'] * 3)} | 3.401 |"
    assert theirs == f"| vanilla | {' | '.join(['1.400 ± 0.500'] * 3)} | 2.647 |"
    # 2.647 - 3.401; the interval of the measured difference ends at 0
    assert less == f"| vanilla - spire | {' | '.join(['-0.400 ± 0.500 unresolved'] * 3)} | -0.754 |"
    assert "Diamonds: what the SPIRe paper reports" in script.caption(found)
    title, table = script.terminal_table(found)
    assert "2 held-out contexts of 256, 512 tokens each, in pairs with spire" in title
    assert table.to_dict("list") == {
        "drafter": ["spire", "vanilla", "vanilla - spire"],
        "all, greedy": ["1.800 ± 1.000", "1.400 ± 0.500", "-0.400 ± 0.500 unresolved"],
    }


def test_drafters_that_the_paper_has_not_stand_alone(script):
    found = comparison(mine=OURS, yours=THEIRS)
    assert "3.401" not in script.markdown(found)
    assert script.markdown(found).splitlines()[-1].endswith("|  |")
    assert "paper" not in script.caption(found).lower()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["wide"], "was counted of another drafter"),  # another window, the same weights
        (["a=wide", "--new-tokens", "8"], "other rows"),
        (["a=wide", "--skip", "1"], "other rows"),
    ],
)
def test_counts_of_something_else_are_refused(call, tmp_path, arguments, said):
    out = ["--rows", "2", "--out", str(tmp_path / "o")]
    assert call("wide=narrow", "a=wide", *out)[0] == 0
    before = (tmp_path / "o/drafters.json").read_bytes()
    code, _, err = call(*out, *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert said in err
    assert (tmp_path / "o/drafters.json").read_bytes() == before


def test_a_corpus_that_changed_behind_its_name_is_refused(call, shared, tmp_path):
    corpus = shutil.copytree(shared / "corpus", tmp_path / "corpus")
    asked = ["wide", "--rows", "4", "--corpus", str(corpus), "--out", str(tmp_path / "o")]
    assert call(*asked)[0] == 0
    for file in corpus.iterdir():
        file.write_text(file.read_text().replace("config", "other"))
    code, _, err = call(*asked)
    assert code == 2
    assert "other rows" in err


def test_damaged_counts_are_named(call, tmp_path):
    (tmp_path / "o/counts").mkdir(parents=True)
    (tmp_path / "o/counts/wide.json").write_text('{"made_of": ')
    code, _, err = call("wide", "--rows", "2", "--out", str(tmp_path / "o"))
    assert code == 2
    assert "wide.json is damaged" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "drafter=nowhere does not exist"),
        (["."], "has no spectrain.json"),
        (["foreign"], "not for this target"),
        (["wide", "other/../wide"], "two drafters are called wide"),
        (["wide", "--rows", "0"], "--rows=0 must be a whole number of at least 1"),
        (["wide", "--skip", "-1"], "--skip=-1"),
        (["wide", "--skip", "100000"], "lower --skip"),
        (["wide", "--new-tokens", "1"], "--new-tokens=1 must be a whole number of at least 2"),
        (["wide", "--gamma", "0"], "--gamma=0"),
        (["wide", "--context-tokens", "0"], "--context-tokens=0"),
        (["wide", "--context-tokens", "49"], "lower --context-tokens"),
        (["wide", "--temperatures", "-1"], "temperature=-1"),
        (["wide", "--corpus", "./nowhere"], "nowhere"),
        (["wide", "--computed", "--new-tokens", "4"], "--new-tokens=4 must be above --gamma=4"),
        (["wide", "magicdec", "--computed"], "--computed knows drafters of kind spire and vanilla"),
        (
            ["wide", "--documents", "--row-tokens", "9999", "--context-tokens", "9999"],
            "lower --skip or --context-tokens, or give --also",
        ),
        (["wide", "--corpus", ".", "--also", "."], "--also=. is the corpus itself"),
        (["a=,"], "a=, names no folder"),
    ],
)
def test_bad_input_is_one_sentence(call, tmp_path, arguments, said):
    code, _, err = call(*arguments, "--out", str(tmp_path / "o"))
    assert (code, err.count("\n")) == (2, 1), err
    assert err.startswith("error: ")
    assert said in err
    assert not (tmp_path / "o/drafters.json").exists()
