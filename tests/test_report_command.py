"""`python -m spectrain.report` on real runs of a tiny target: their numbers, what is unfinished, damaged, refused."""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
from spectrain.reporting.formats import fixed, interval

from spectrain import bench, train
from spectrain.cli import command
from spectrain.stores.folder import locked
from tests.reporting.test_benchmarks import Page
from tests.reporting.test_runs_page import COST, DRAFTERS

SMALL = [
    "corpus.held_out_share=0.3",
    *("data.row_tokens=64", "data.batch_size=2", "data.val_rows=2", "max_steps=6"),
    *("trainer.precision=32-true", "trainer.val_check_interval=3", "trainer.log_every_n_steps=2"),
    *("tau.context_tokens=[16,32]", "tau.contexts=3", "tau.new_tokens=12", "tau.timed_contexts=1"),
]
EVIL = "<script>alert(1) & co"


@pytest.fixture(scope="module")
def made(shared, tmp_path_factory) -> Path:
    """A folder with `runs/`: two SPIRe drafters, a vanilla one named like a script, and a benchmark."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "asked.jsonl").write_text("".join(json.dumps({"prompt": f"def read_{i}(path):"}) + "\n" for i in (1, 2)))
    corpus = f"corpus={shared / 'corpus'}"
    commands = [
        (train, "train", ["+exp=vanilla", corpus, *SMALL, f'run_dir="runs/{EVIL}"', "out=vanilla"]),
        (train, "train", ["+exp=spire", corpus, *SMALL, "run_dir=runs/whole", "vanilla=vanilla"]),
        (train, "train", ["+exp=spire", corpus, *SMALL, "run_dir=runs/hard", "loss=hard"]),
        (
            bench,
            "bench",
            ["prompts=asked.jsonl", "methods=[pld,logitspec]", "max_nodes=paper", "max_new_tokens=8", "out=runs/b"],
        ),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for module, name, arguments in commands:
            patch.setattr(sys, "argv", [f"spectrain.{name}", f"target={shared / 'target'}", *arguments])
            command(name)(module.main)()
    return folder


@pytest.fixture
def runs(made, tmp_path, monkeypatch) -> Path:
    """A copy of it, as the working folder."""
    shutil.copytree(made, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return Path("runs")


@pytest.fixture
def reported(typed):
    """Runs the command; returns exit code, stdout, stderr."""
    return partial(typed, "report")


def test_the_page_holds_the_numbers_of_all_runs(runs, reported, shared):
    code, out, err = reported("runs=runs", "out=report.html")
    assert code == 0, err
    assert out.startswith("report.html: 5 runs and measurements")
    page = Page(Path("report.html").read_text(encoding="utf-8"))
    for name, method in ((EVIL, "speculative"), ("whole", "spire"), ("hard", "spire")):
        result = json.loads((runs / name / "result.json").read_text())
        assert fixed(result["metrics"]["eval/loss"], 3) in page.text
        assert f"{fixed(result['selected']['step'], 0)} {tau_of(result['selected'])}" in page.text
        taus = [interval(one, 2) for one in result["tau"][method].values()]
        rates = result["tokens_per_s"]
        speedup = rates[method]["value"] / rates["autoregressive"]["value"]
        assert f"{name} {' '.join(taus)} 3 {interval(rates[method], 1)} {fixed(speedup, 2)}" in page.text
        fastest, greedy = result["fastest_gamma"], result["gammas"]["greedy"]
        assert f"{fastest} (fastest) {interval(greedy[str(fastest)]['tau'], 2)}" in page.text
        assert json.loads((runs / name / "run.json").read_text())["target_fingerprint"] in page.text
    assert "hard SPIRe drafter target loss=hard 6 768" in page.text
    for kind in ("spire", "vanilla"):
        assert f"python -m spectrain.train target={shared / 'target'} +exp={kind}" in page.text
    results = json.loads((runs / "b/results.json").read_text())
    for one in results["methods"].values():
        assert fixed(one["mean_accepted"], 2) in page.text
        assert fixed(one["tokens_per_s_micro"], 1) in page.text
    assert results["command"] in page.text
    for part in (
        "Curves",
        "Acceptance by position in the draft",
        "Acceptance by source",
    ):
        assert part in page.text
    assert page.open == []


def tau_of(selected: dict) -> str:
    return interval({"value": selected["tau"]} | selected, 2)


def test_the_page_runs_nothing_and_loads_nothing(runs, reported):
    assert reported("runs=runs")[0] == 0
    page = Page(Path("report.html").read_text(encoding="utf-8"))
    assert EVIL in page.text
    assert not {"script", "link", "iframe", "object", "embed"} & set(page.tags)
    loaded = [value for name, value in page.attributes if name in ("src", "href", "xlink:href", "srcset", "action")]
    assert all(value.startswith(("#", "data:image/png;base64,")) for value in loaded)
    assert "@import" not in Path("report.html").read_text()


def test_an_unfinished_run_and_one_that_has_just_begun_are_shown(runs, reported):
    (runs / "hard/result.json").unlink()
    (runs / "b/results.json").unlink()
    (runs / "new").mkdir()
    shutil.copy(runs / "whole/config.yaml", runs / "new")
    code, _, err = reported("runs=runs")
    assert code == 0, err
    text = Page(Path("report.html").read_text()).text
    assert "4 trainings (2 unfinished)" in text
    assert "unfinished: 6 of 6 steps" in text
    assert "unfinished: 0 of 6 steps" in text
    assert "Unfinished, 6 answers so far" in text


def test_damaged_files_are_named_with_the_reason_and_the_rest_is_shown(runs, reported):
    (runs / "hard/result.json").write_text('{"steps": 6, "metr')
    (runs / "whole/run.json").write_text("[]")
    (runs / "b/results.json").write_text('{"methods": 3}')
    (runs / "cost.json").write_text('{"kind": "cost", "tables": ')
    (runs / "drafters.json").write_text(json.dumps({"kind": "drafters", "drafters": 7}))
    with (runs / EVIL / "metrics/version_0/metrics.csv").open("a") as file:
        file.write("x,y,z")
    (runs / "other").mkdir()
    (runs / "other/config.yaml").write_text("kind: painting\n")
    code, out, err = reported("runs=runs")
    assert code == 0, err
    text = Page(Path("report.html").read_text()).text
    for name, reason in {
        "hard/result.json": "Unterminated string",
        "whole/run.json": "it holds no names with values",
        "b/results.json": "methods: Input should be an object",
        "cost.json": "Expecting value",
        "other": "config.yaml has kind=painting, which this page does not show",
    }.items():
        assert f"left out: runs/{name}: {reason}" in err
        assert f"runs/{name} {reason}" in text
    assert "runs/drafters.json its files are not as expected (AttributeError: 'int' object has no attribute" in text
    result = json.loads((runs / "whole/result.json").read_text())
    assert interval(result["tau"]["spire"]["16 tokens, greedy"], 2) in text


def test_measurements_and_their_pictures_are_found_beside_runs(runs, reported):
    figure = {"figures": [{"file": "../../b/map.png", "caption": "a map"}, {"file": "gone.png", "caption": "none"}]}
    for name, content in (("cost", COST | figure), ("drafters", DRAFTERS)):
        (runs / "more" / name).mkdir(parents=True)
        (runs / "more" / name / f"{name}.json").write_text(json.dumps({"kind": name, **content}))
    (runs / "more/cost/map.png").write_bytes(b"a picture")
    (runs / "more/cost/spectrain.json").write_text(json.dumps({"kind": "spire"}))  # an export is no measurement
    code, _, err = reported("runs=[runs/more,runs/more/cost]")  # the same folder twice
    assert code == 0, err
    assert "left out: runs/more/cost/gone.png: No such file" in err
    page = Page(Path("report.html").read_text())
    assert "2 other measurements" in page.text
    assert page.text.count("A figure") == 1
    assert "data:image/png;base64,YSBwaWN0dXJl" in dict(page.attributes).values() or "a map" in page.text
    for part in ("2.78", "unresolved"):
        assert part in page.text


def test_equally_named_runs_of_several_folders_are_told_apart(runs, reported):
    shutil.copytree(runs / "whole", "second/whole")
    code, _, err = reported("runs=[runs,second]")
    assert code == 0, err
    text = Page(Path("report.html").read_text()).text
    assert "runs/whole SPIRe drafter" in text
    assert "second/whole SPIRe drafter" in text
    assert "hard SPIRe drafter" in text


def test_a_report_is_replaced_and_nothing_else(runs, reported):
    assert reported("runs=runs", "out=a/b.html", 'title="First & only"')[0] == 0
    assert "First &amp; only" in Path("a/b.html").read_text()
    assert reported("runs=runs", "out=a/b.html")[0] == 0
    assert "First" not in Path("a/b.html").read_text()
    assert [file.name for file in Path("a").iterdir()] == ["b.html"]
    theirs = (runs / "b/report.html").read_text()  # of spectrain.bench
    code, _, err = reported("runs=runs", f"out={runs / 'b/report.html'}")
    assert code == 2
    why = "exists and is no page of this command; give another out or fresh=true"
    assert err == f"error: out={runs / 'b/report.html'} {why}\n"
    assert (runs / "b/report.html").read_text() == theirs
    assert reported("runs=runs", f"out={runs / 'b/report.html'}", "fresh=true")[0] == 0
    assert (runs / "b/report.html").read_text() != theirs


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["runs=nowhere"], "runs=nowhere is no folder; give the folder that holds runs"),
        (["runs=empty"], "runs=empty holds no run or measurement that could be shown; give another folder"),
        (["runs=[]"], "runs=[] must be a path, or a list, with each value a path"),
        (["runs=/", "max_folders=50"], "runs=/ holds more than 50 folders; give the folder that holds runs, or raise"),
        (["runs=asked.jsonl"], "runs=asked.jsonl is no folder; give the folder that holds runs"),
        (["runs=broken"], "broken/config.yaml cannot be read: it holds no names with values"),
        (["runs=runs", "out=runs"], "out=runs is a folder; give the name of a file, such as out=runs/report.html"),
        (["runs=runs", "out=asked.jsonl"], "out=asked.jsonl exists and is no page of this command"),
        (["runs=runs", "out=asked.jsonl/a.html"], "asked.jsonl/a.html cannot be made (Not a directory)"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(runs, reported, arguments, said):
    Path("empty").mkdir()
    Path("broken").mkdir()
    Path("broken/config.yaml").write_text("- 1\n")
    before = sorted(Path().iterdir())
    code, out, err = reported(*arguments)
    assert code == 2
    assert said in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert out == ""
    assert sorted(Path().iterdir()) == before


def test_a_page_that_cannot_be_made_leaves_the_old_one(runs, reported, monkeypatch):
    assert reported("runs=runs")[0] == 0
    before = Path("report.html").read_text()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("spectrain.stores.writing.to_disk", full)
        code, _, err = reported("runs=runs")
    assert code == 2
    assert "is full; free some and run the same command again" in err
    assert Path("report.html").read_text() == before
    assert not list(Path().glob(".report.html*"))


def test_a_page_that_another_process_writes_is_refused(runs, reported):
    with locked(Path("a.html"), is_file=True):
        code, _, err = reported("runs=runs", "out=a.html")
    assert (code, err) == (
        2,
        "error: a.html is in use by another process; wait for its end, or give another out\n",
    )
    assert not list(Path().glob("*a.html*"))
