"""`python -m spectrain.tune budget=true` and `max_nodes=auto` as a user types them, on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from spectrain.measure import budget
from spectrain.stores.budget_table import BudgetTable

TINY = (
    "nodes=[2,8,16]",
    "batch_sizes=[1,2]",
    "contexts=[8,32]",
    "repeats=1",
    "max_new_tokens=6",
    "prompts=asked.jsonl",
)


@pytest.fixture
def asked(tmp_path) -> None:
    rows = [{"prompt": f"def read_config_{i}(path):\n    return read_config_{i}"} for i in range(3)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def table_file() -> Path:
    (file,) = Path("checkpoints").glob("budget-*.json")
    return file


def tuned(run, *arguments: str) -> str:
    code, out, err = run("tune", "budget=true", *TINY, *arguments)
    assert code == 0, err
    return out


@pytest.mark.usefixtures("asked")
def test_what_tune_measures_is_what_auto_takes(run):
    out = tuned(run, "methods=[logitspec,pld,spectra_core]", "out=t")
    for word in ("forward pass of the target", "free speculation budget", "logitspec ", "spectra_core "):
        assert word in out
    for plot in ("budget.png", "accepted.png"):
        assert (Path("t") / plot).read_bytes().startswith(b"\x89PNG")
    table = BudgetTable.load(table_file())
    assert {entry.name: entry.curve.least for entry in table.entries} == {"logitspec": 1, "pld": 1, "spectra_core": 8}

    bench = ("bench", "prompts=asked.jsonl", "max_new_tokens=8", "max_nodes=auto", "batch_size=2", "out=b")
    code, _, err = run(*bench, "methods=[logitspec,pld,spectra_core,magicdec]")
    assert code == 0, err
    found = json.loads(Path("b/results.json").read_text())
    assert found["max_nodes"] == "auto"
    for name, method in found["methods"].items():
        assert method["lossless"], name
    assert set(found["methods"]["logitspec"]["max_nodes"]["auto"]) == {"1", "2"}
    assert found["methods"]["spectra_core"]["max_nodes"]["auto"]["2"] >= 8
    assert found["methods"]["magicdec"]["max_nodes"] == 5  # a chain keeps its own
    assert found["methods"]["autoregressive"]["max_nodes"] is None

    code, _, err = run("generate", "method=logitspec", "method.max_nodes=auto", "prompt=def f", "max_new_tokens=6")
    assert code == 0, err


@pytest.mark.usefixtures("asked")
def test_an_interrupted_run_goes_on_and_other_samplings_are_added(run, monkeypatch):
    command = ("methods=[pld]", "out=t")
    append = budget.RowFile.append

    def stops(file, row):
        if len(file.rows) == 3:
            raise KeyboardInterrupt
        append(file, row)

    monkeypatch.setattr(budget.RowFile, "append", stops)
    code, _, err = run("tune", "budget=true", *TINY, *command)
    assert code == 130
    assert "run the same command to resume in t" in err
    begun = (Path("t") / "groups.jsonl").read_text()
    forwards = (Path("t") / "forward.json").read_text()
    monkeypatch.setattr(budget.RowFile, "append", append)
    (Path("t") / "groups.jsonl").write_text(begun + begun[:20])  # killed while it wrote
    tuned(run, *command)
    assert (Path("t") / "groups.jsonl").read_text().startswith(begun)
    assert (Path("t") / "forward.json").read_text() == forwards
    tuned(run, "methods=[pld]", "out=u", "sampling=t08")
    assert [entry.sampling.temperature for entry in BudgetTable.load(table_file()).entries] == [0.0, 0.8]


def auto(run, *arguments: str) -> str:
    """The error of a command with max_nodes=auto."""
    code, _, err = run("generate", "prompt=x", "method.max_nodes=auto", "max_new_tokens=4", *arguments)
    assert code == 2, err
    assert "Traceback" not in err
    return err


@pytest.mark.usefixtures("asked")
def test_auto_without_fitting_measurements_names_the_command(run):
    err = auto(run, "method=logitspec")
    assert "holds no measurements of target" in err
    assert "python -m spectrain.tune budget=true" in err
    assert "this method drafts a chain; give gamma or max_candidates" in auto(run, "method=magicdec")
    tuned(run, "methods=[pld]")
    assert "logitspec was not measured on this machine" in auto(run, "method=logitspec")
    assert "pld was not measured under temperature 0.8, top_k 50, only under greedy" in auto(
        run, "method=pld", "sampling=t08"
    )
    file, threads = table_file(), torch.get_num_threads()
    values = json.loads(file.read_text())
    values["machine"]["threads"] = threads + 5
    file.unlink()
    other = file.with_name(file.name.replace(file.stem.split("-")[-1], "0" * 8))
    other.write_text(json.dumps(values))
    assert f"this target with threads {threads + 5}, not {threads}" in auto(run, "method=pld")
    other.rename(other.with_name("budget-0123456789abcdef-00000000.json"))
    assert "only of 0123456789abcdef" in auto(run, "method=pld")


@pytest.mark.usefixtures("asked")
def test_a_damaged_table_is_refused(run):
    tuned(run, "methods=[pld]")
    table_file().write_text("{}")
    assert "holds no budget table" in auto(run, "method=pld")


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["budget=true", "nodes=[0,2]"], "nodes=0 must be"),
        (["budget=true", "contexts=[4000]"], "contexts=4000 leaves no position"),
        (["budget=true", "methods=[magicdec]"], "magicdec drafts no trees"),
        (["budget=true", "methods=[spectra_core]", "nodes=[2,4]"], "spectra_core: max_nodes=4 must be at least 8"),
        (["budget=true", "methods=[nonsense]"], "methods=nonsense is unknown"),
        (["method=pld"], "method=pld has nothing to tune; give budget=true"),
        ([], "has nothing to tune"),
    ],
)
def test_wrong_options_are_one_sentence(run, arguments, says):
    code, _, err = run("tune", "prompts=asked.jsonl", *arguments)
    assert code == 2
    assert says in err
    assert "Traceback" not in err
