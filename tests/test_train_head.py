"""`+exp=specdecpp` as a user types it: what it makes, refuses and resumes; and the sweep over its heads."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning import Callback
from safetensors.torch import load_file

from spectrain.cli import run as run_command
from spectrain.stores.rows import open_acceptance, save_rows
from spectrain.target import load_target
from spectrain.training import fit as fitting
from tests.data_prep.conftest import RESPONSES_SAMPLING, save_responses
from tests.models.test_artifacts import export_spire, export_vanilla

N_ROWS = 30


@pytest.fixture(scope="module")
def made(shared, tmp_path_factory) -> Path:
    """Drafters of the tiny target, and its responses."""
    root = tmp_path_factory.mktemp("made")
    target = load_target(shared / "target")
    torch.manual_seed(0)
    export_vanilla(root / "vanilla", target)
    export_spire(root / "spire", target, k=2, window_tokens=16)
    save_responses(root / "responses", target, N_ROWS, [(5, 7 + i) for i in range(N_ROWS)])
    return root


@pytest.fixture
def small(made) -> list[str]:
    return options(made)


def options(made: Path) -> list[str]:
    return [
        *("+exp=specdecpp", f"responses={made / 'responses'}", f"drafter={made / 'vanilla'}", "held_out_share=0.3"),
        *("data.batch_size=4", "epochs=2"),
    ]


@pytest.fixture(scope="module")
def trained(made, shared, tmp_path_factory) -> Path:
    """A folder with a finished run `runs/head`, its export `checkpoints/head` and what it printed, `printed`."""
    folder, printed = tmp_path_factory.mktemp("trained"), io.StringIO()
    arguments = [f"target={shared / 'target'}", *options(made), "run_dir=runs/head", "out=checkpoints/head"]
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["spectrain.train", *arguments])
        run_command("spectrain.train")
    (folder / "printed").write_text(printed.getvalue())
    return folder


def test_a_head_is_trained_and_used(run, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(trained)
    folder, out = Path("checkpoints/head"), Path("printed").read_text()
    assert "KL of labels and predictions" in out
    assert "warped for temperature 0.8, top_k 40" in " ".join(out.split())
    names = {f.name for f in folder.iterdir()}
    assert names >= {"model.safetensors", "config.json", "spectrain.json", "tokenizer.json", "README.md", "drafter"}
    facts = json.loads((folder / "config.json").read_text())
    assert facts["sampling"] == {**RESPONSES_SAMPLING, "draws": "auto"}
    assert facts["drafter"]["kind"] == "vanilla"
    run_folder = Path("runs/head")
    result = json.loads((run_folder / "result.json").read_text())
    assert result["metrics"].keys() >= {"eval/loss", "eval/kl_binary", "eval/calibration_error", "eval/label"}
    assert sum(b["positions"] for b in result["reliability"]) > 50

    sampled = ["sampling.temperature=0.8", "sampling.top_k=40"]
    for verification, warned in (("token", False), ("block", True)):
        asked = "prompt=def f", "max_new_tokens=9", f"verification={verification}", *sampled
        code, out, err = run("generate", "method=specdecpp", *asked)
        assert code == 0, err
        assert ("was trained for verification=token and is used with verification=block" in err) == warned
        assert ("was trained for" in err) == warned
    code, out, err = run("generate", "method=specdecpp", "prompt=def f", "max_new_tokens=9", "baseline=false")
    assert code == 0, err
    assert "was trained for temperature 0.8, top_k 40 and is used for greedy" in err

    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps({"prompt": "def read_config(path):"}) + "\n")
    code, out, err = run("bench", "methods=[specdecpp]", f"prompts={asked}", "max_new_tokens=6", f"out={tmp_path}/b")
    assert code == 0, err
    measured = json.loads((tmp_path / "b/results.json").read_text())["methods"]["specdecpp"]
    assert measured["lossless"]
    assert "is used for greedy" in measured["warning"]
    assert "is used for greedy" in (tmp_path / "b/report.html").read_text()


def test_a_head_is_exported_from_its_run_as_training_exported_it(trained, typed, tmp_path):
    assert typed("export", f"run={trained}/runs/head", f"out={tmp_path}/again")[0] == 0
    exported, again = trained / "checkpoints/head", tmp_path / "again"
    names = {str(file.relative_to(exported)) for file in exported.rglob("*") if file.is_file()}
    assert names == {str(file.relative_to(again)) for file in again.rglob("*") if file.is_file()}
    assert {"drafter/model.safetensors", "drafter/spectrain.json", "README.md"} <= names
    for name in names - {"README.md"}:  # the cards differ in their own folders' names
        assert (again / name).read_bytes() == (exported / name).read_bytes(), name


def test_a_head_finds_the_drafter_that_it_brings_along(run, trained):
    shutil.copytree(trained / "checkpoints/head", "moved")
    facts = json.loads(Path("moved/config.json").read_text())
    facts["drafter"]["path"] = "gone"
    Path("moved/config.json").write_text(json.dumps(facts))
    options = ["method=specdecpp", "head=moved", "prompt=def f", "max_new_tokens=9", "baseline=false"]
    code, _, err = run("generate", *options)
    assert code == 0, err
    shutil.rmtree("moved/drafter")
    code, _, err = run("generate", *options)
    assert code == 2
    assert "holds no vanilla drafter for this target" in err


def test_an_interrupted_run_from_a_store_goes_on_exactly_by_the_same_command(run, small, shared, monkeypatch):
    class Interrupt(Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            if trainer.global_step == 5:
                os.kill(os.getpid(), signal.SIGINT)

    labelled = [f"target={shared / 'target'}", *small[1:3], "out=labels"]
    monkeypatch.setattr(sys, "argv", ["data_prep.acceptance", *labelled])
    run_command("data_prep.acceptance")
    arguments = [*small, "data=offline", "data.path=labels"]
    code, _, err = run("train", *arguments, "run_dir=whole", "out=whole_out")
    assert code == 0, err
    callbacks = fitting.callbacks
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "callbacks", lambda *given: [*callbacks(*given), Interrupt()])
        code, _, err = run("train", *arguments, "run_dir=cut", "out=cut_out")
    assert code == 130
    assert run("train", *arguments, "run_dir=cut", "out=cut_out")[0] == 0
    whole, cut = (load_file(f"{name}_out/model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_a_head_for_a_spire_drafter(run, small, made):
    arguments = [a for a in small if not a.startswith("drafter=")]
    code, _, err = run("train", *arguments, f"drafter={made / 'spire'}", "rollout_tokens=6", "out=head")
    assert code == 0, err
    assert json.loads(Path("head/config.json").read_text())["drafter"]["kind"] == "spire"
    code, _, err = run("generate", "method=specdecpp", "head=head", "prompt=def f", "max_new_tokens=9", "sampling=t08")
    assert code == 0, err


@pytest.mark.parametrize("kind", ["vanilla", "spire"])
def test_a_head_learns_from_stored_labels(run, small, made, shared, kind, monkeypatch):
    """Also from those of earlier versions, which may hold states beside them."""
    arguments = [*(a for a in small if not a.startswith("drafter=")), f"drafter={made / kind}", "rollout_tokens=6"]
    labelled = f"responses={made / 'responses'}", f"drafter={made / kind}", "rollout_tokens=6", "draws=2", "out=s"
    monkeypatch.setattr(sys, "argv", ["data_prep.acceptance", f"target={shared / 'target'}", *labelled])
    run_command("data_prep.acceptance")
    store = open_acceptance("s")
    states = [[[0.5] * 8] * 2] * len(store.rows)
    earlier = store.rows.add_column("drafted", store.rows["q"][:]).add_column("states", states)
    save_rows(Path("earlier"), earlier, replace(store.manifest, mixing_share=0.2, files={}))
    for folder in ("s", "earlier"):
        code, _, err = run("train", *arguments, "data=offline", f"data.path={folder}", f"out=head-{folder}")
        assert code == 0, err
    heads = [load_file(f"head-{folder}/model.safetensors") for folder in ("s", "earlier")]
    assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])
    other = "spire" if kind == "vanilla" else "vanilla"
    for option, message in {
        "sampling=t1": "was labelled for temperature 0.8, top_k 40, not",
        f"drafter={made / other}": f"are of the {kind} drafter",
    }.items():
        code, _, err = run("train", *arguments, "data=offline", "data.path=s", option, "out=other")
        assert (code, message in err) == (2, True), err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["drafter={made}/nowhere"], "nowhere"),
        (["drafter=[{made}/vanilla,{made}/spire]"], "a head belongs to one drafter"),
        (["responses={made}/vanilla"], "responses={made}/vanilla"),
        (["held_out_share=0.0001"], "0 held-out rows"),
        (["data.batch_size=100"], "fewer than one batch of 100"),
        (["mixing_share=null"], "mixing_share=null must be a number"),
        (["data=offline", "data.path={made}/nowhere"], "data.path={made}/nowhere does not exist"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(run, small, made, arguments, message):
    given = [argument.format(made=made) for argument in arguments]
    code, out, err = run("train", *small, *given)
    assert code == 2
    assert err.splitlines()[-1].startswith("error: ")
    assert message.format(made=made) in err
    assert "Traceback" not in err
    assert not Path("checkpoints").exists()
    assert not Path("runs").exists()


def test_a_run_does_not_go_on_with_other_rows(run, small, trained):
    shutil.copytree(trained / "runs/head", "r")
    (Path("r") / "result.json").unlink()
    noted = json.loads(Path("r/source.json").read_text())
    noted["rows"][1] += 1
    Path("r/source.json").write_text(json.dumps(noted))
    code, _, err = run("train", *small, "run_dir=r")
    assert code == 2
    assert "was started with rows" in err


def test_a_vanilla_drafter_is_not_trained_from_a_store(run, shared):
    code, _, err = run("train", "+exp=vanilla", "data=offline", f"corpus={shared / 'corpus'}", "data.row_tokens=64")
    assert code == 2
    assert "data=offline is for other experiments than +exp=vanilla; give data=online" in err


def test_a_head_asks_for_its_drafter_and_a_drafter_is_no_head(run, made):
    code, _, err = run("generate", "method=specdecpp", "prompt=x")
    assert code == 2
    assert "holds no SpecDec++ head for this target; train one with spectrain train +exp=specdecpp target=" in err
    code, _, err = run("generate", "method=specdecpp", f"head={made / 'vanilla'}", "prompt=x")
    assert code == 2
    assert "is a vanilla drafter; give one made by spectrain train +exp=specdecpp" in err
    code, _, err = run("generate", "method=pld", f"head={made / 'vanilla'}", "prompt=x")
    assert code == 2
    assert "which none of the methods takes" in err
