"""`python -m spectrain.tune method=specdecpp`: what it finds, that it goes on and its choice runs; what it refuses."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from spectrain import report
from spectrain.cli import command
from spectrain.decoding import Sampling, TargetModel, fingerprint, load_target
from spectrain.errors import UserError
from spectrain.measure import stop_results, stopping
from spectrain.measure.questions import read_answers
from spectrain.methods.registry import method_config, with_tuned
from spectrain.methods.specdecpp import open_drafter
from spectrain.models.artifacts import trained_artifact, write_manifest
from spectrain.models.head import AcceptanceHead, HeadConfig, HeadFacts, save_head
from tests.conftest import noisy_copy
from tests.models.test_artifacts import export_spire
from tests.reporting.test_benchmarks import Page

SMALL = (
    *("method=specdecpp", "prompts=asked.jsonl", "max_new_tokens=14", "stopping.timed=2", "stopping.rows=5"),
    *("stopping.thresholds=[0.3,0.7]", "stopping.gammas=[1,2,4]", "stopping.confidence=[0.01,0.1]"),
    *("stopping.entropy=5.0", "method.max_candidates=6", "target.dtype=float32"),
)


def export_head(folder: Path, target: TargetModel, kind: str, drafter: Path, n_blocks: int, w_rej: float) -> None:
    opened = open_drafter(target, kind, str(drafter))
    torch.manual_seed(n_blocks)
    head = AcceptanceHead(HeadConfig(opened.states.hidden_size, n_blocks))
    torch.nn.init.constant_(head.output.bias, 1.0)
    folder.mkdir()
    save_head(folder, head, HeadFacts(head.config, opened.facts, Sampling(), w_rej, 0.15))
    write_manifest(folder, trained_artifact("head", "tiny", fingerprint(target.model, target.tokenizer), {"steps": 3}))


@pytest.fixture(scope="module")
def target(shared) -> TargetModel:
    return load_target(shared / "target", "float32", "cpu")


@pytest.fixture(scope="module")
def exported(target, tmp_path_factory) -> Path:
    """Drafters `vanilla`, `other` and `spire` of the tiny target, two heads of the first and one of the last."""
    root = tmp_path_factory.mktemp("exports")
    for seed, name in enumerate(("vanilla", "other")):
        noisy_copy(target.model, 0.3, seed).save_pretrained(root / name)
        target.tokenizer.save_pretrained(root / name)
        write_manifest(
            root / name, trained_artifact("vanilla", "tiny", fingerprint(target.model, target.tokenizer), {"steps": 1})
        )
    export_spire(root / "spire", target, k=4, window_tokens=8)
    export_head(root / "linear", target, "vanilla", root / "vanilla", 0, 1)
    export_head(root / "deep", target, "vanilla", root / "vanilla", 2, 6)
    export_head(root / "on_spire", target, "spire", root / "spire", 0, 1)
    return root


@pytest.fixture
def asked(exported, tmp_path) -> Path:
    rows = [{"prompt": f"def read_config_{i}(path):\n    return read_config_{i}"} for i in range(4)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return exported


@pytest.fixture
def few_resamples(monkeypatch) -> None:
    """Fewer bootstraps than users get: here, nobody reads the intervals."""
    monkeypatch.setattr(stop_results, "RESAMPLES", 50)
    monkeypatch.setattr(stop_results, "HEAD_RESAMPLES", 20)


def results(folder: str) -> dict:
    return json.loads(Path(folder, "results.json").read_text())


@pytest.mark.usefixtures("few_resamples")
def test_everything_is_found_and_the_choice_runs(run, asked):
    Path("checkpoints").mkdir()
    for name in ("vanilla", "linear", "deep", "on_spire"):
        Path("checkpoints", name).symlink_to(asked / name)
    code, out, err = run("tune", *SMALL, "drafter=checkpoints/vanilla", "out=t")
    assert code == 0, err
    for word in ("fixed gamma", "held", "t_draft", "oracle (Theorem 4.1)", "as predicted, text by text", "deep"):
        assert word in out
    found = results("t")
    assert set(found["heads"]) == {"linear", "deep"}  # not the one of another drafter
    assert len(found["settings"]) == 3 + 2 + 1 + 2 * 2 * 2
    assert set(found["best"]) == {"autoregressive", "fixed gamma", "confidence", "entropy", "specdecpp"}
    assert [one["minus"] for one in found["differences"]] == [
        *("fixed gamma", "confidence", "entropy", "specdecpp, previous")
    ]
    timed = [json.loads(line) for line in Path("t/timed.jsonl").read_text().splitlines()]
    for one in found["best"].values():
        own = [row for row in timed if row["stage"] == "best" and row["setting"] == one["name"]]
        rate = sum(row["tokens"] for row in own) / sum(row["seconds"] for row in own)
        assert one["measured_tokens_per_s"]["value"] == pytest.approx(rate)
    assert found["oracle"]["equal"]
    assert found["oracle"]["measured_discarded"] == 0
    for text in found["oracle"]["texts"]:
        assert text["target_calls"] == text["disagreements"] + (not text["last_token_disagrees"])
    assert (Path("t") / "pareto.png").read_bytes().startswith(b"\x89PNG")
    check_page(found)
    tuned = OmegaConf.load("t/tuned.yaml")
    assert set(tuned) == {"speculative", "specdecpp", "confidence_stop", "entropy_stop"}
    code, _, err = run(
        *("bench", "prompts=asked.jsonl", "max_new_tokens=5", "tuned=t/tuned.yaml", "out=b", "target.dtype=float32"),
        *("methods=[speculative,specdecpp,confidence_stop,entropy_stop]", "drafter=checkpoints/vanilla", "limit=1"),
    )
    assert code == 0, err
    assert all(one["lossless"] for one in results("b")["methods"].values())
    for name in ("confidence_stop", "entropy_stop"):
        code, _, err = run(
            *("generate", f"method={name}", "tuned=t/tuned.yaml", "prompt=def", "max_new_tokens=4"),
            *("drafter=checkpoints/vanilla", "target.dtype=float32"),
        )
        assert code == 0, err


def check_page(found: dict) -> None:
    """`spectrain.report` shows the fronts, and the numbers of each family's best setting."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["spectrain.report", "runs=t", "out=page.html"])
        command("report")(report.main)()
    page = Page(Path("page.html").read_text(encoding="utf-8"))
    assert "t: when drafts should end" in page.text
    assert "target calls per token (fewer is faster)" in page.text
    assert f"asked.jsonl ({found['texts']} texts, {found['timed']} of them timed)" in page.text
    for family, one in found["best"].items():
        if "tau" in one:
            rates = f"{one['discard_rate']:.3f} {one['verification_rate']:.3f} {one['tau']:.2f}"
            assert f"{family} {one['name']} {rates}" in page.text
    pictures = [value for name, value in page.attributes if name == "src"]
    assert len(pictures) == 1
    assert pictures[0].startswith("data:image/png;base64,iVBOR")
    for name in ("linear", "deep", "held out"):
        assert name in page.text


@pytest.mark.usefixtures("few_resamples")
def test_an_interrupted_run_goes_on_and_a_spire_drafter_samples(run, asked, monkeypatch):
    heads = f"stopping.heads={asked}/on_sp*"
    command = ("tune", *SMALL, heads, "stopping.judge=[current]", "sampling=t1", "out=t")
    time_drafters = stopping.time_drafters

    def interrupted(*arguments):
        rows = time_drafters(*arguments)
        if "best" in arguments:
            raise KeyboardInterrupt
        return rows

    monkeypatch.setattr(stopping, "time_drafters", interrupted)
    code, _, err = run(*command)
    assert code == 130
    assert "run the same command to resume in t" in err
    kept = {name: Path("t", name).read_text() for name in ("responses.jsonl", "timed.jsonl")}
    monkeypatch.setattr(stopping, "time_drafters", time_drafters)
    code, out, err = run(*command)
    assert code == 0, err
    assert kept == {name: Path("t", name).read_text() for name in kept}  # nothing was measured again
    found = results("t")
    assert found["drafter"]["kind"] == "spire"
    assert found["oracle"] is None
    assert "oracle" not in out
    assert found["sampling"] == "temperature 1"
    assert set(OmegaConf.load("t/tuned.yaml")) == {"spire", "specdecpp"}
    code, _, err = run(*command[:-1], "out=u", "responses=t/responses.jsonl")
    assert code == 0, err
    ours, theirs = ([(s["name"], s["discard_rate"]) for s in results(name)["settings"]] for name in "tu")
    assert ours == theirs


def test_methods_of_one_module_have_options_of_their_own(tmp_path):
    file = tmp_path / "tuned.yaml"
    file.write_text("confidence_stop: {threshold: 0.2}\nentropy_stop: {threshold: 3.5}\nspecdecpp: {threshold: 0.9}\n")
    for name, threshold in (("confidence_stop", 0.2), ("entropy_stop", 3.5), ("specdecpp", 0.9)):
        assert with_tuned(method_config(name), str(file)).threshold == threshold


OPTIONS = stopping.StopOptions(
    *([1, 4], [0.1], [5.0], [0.3], ["current"]),
    **{"min_candidates": 1, "max_candidates": 6, "timed": 2, "rows": 5, "max_new_tokens": 14, "seed": 0},
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gammas": [7]}, "stopping.gammas has 7, but a draft has at most 6 tokens"),
        ({"min_candidates": 7}, "method.min_candidates has 7, but a draft has at most 6 tokens"),
        ({"max_new_tokens": 2}, "max_new_tokens=2 must be a whole number of at least 3"),
    ],
)
def test_settings_out_of_range_are_refused(changes, reason):
    with pytest.raises(UserError) as error:
        replace(OPTIONS, **changes)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("heads", "drafters", "reason"),
    [
        (["nowhere*"], {}, "stopping.heads=nowhere* matches no folder"),
        (["nowhere"], {}, "head=nowhere does not exist"),
        (["{e}/vanilla"], {}, "vanilla drafter; give one made by"),
        (["{e}/linear"], {"vanilla": "{e}/other"}, "was trained on the vanilla drafter"),
        ([], {"vanilla": "{e}/other"}, "holds no acceptance head for the drafter"),
        ([], {}, "head for this target; train one with python -m spectrain.train +exp=specdecpp"),
        ([], {"vanilla": "{e}/vanilla", "spire": "{e}/spire"}, "are several; a head belongs to one drafter"),
    ],
)
def test_heads_and_drafters_that_do_not_belong_together_are_refused(
    target, exported, tmp_path, monkeypatch, heads, drafters, reason
):
    monkeypatch.chdir(tmp_path)
    heads = [folder.replace("{e}", str(exported)) for folder in heads]
    drafters = {kind: folder.replace("{e}", str(exported)) for kind, folder in drafters.items()}
    with pytest.raises(UserError) as error:
        stopping.open_search(target, heads, drafters, OPTIONS, Sampling())
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (None, "does not exist"),
        ({"sampling": "temperature 1"}, "was written with sampling temperature 1, not"),
        ({"target": "ffff"}, "was written with target ffff, not"),
        ({}, "give the max_new_tokens that it was written with"),
        ({"response": [7]}, "give more prompts"),
    ],
)
def test_responses_of_something_else_are_refused(target, tmp_path, row, reason):
    file = tmp_path / "responses.jsonl"
    if row is not None:
        file.write_text(json.dumps({"id": "a", "prompt": [5, 6], "response": [7, 8, 9], **row}) + "\n")
    with pytest.raises(UserError) as error:
        read_answers(file, target, Sampling(), 14)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["stopping.gammas=null"], "stopping.gammas=null must be a whole number of at least 1, or a list"),
        (["drafter=[{e}/vanilla,{e}/spire]"], "are several; a head belongs to one drafter"),
        (
            ["stopping.heads=[{e}/on_spire]", "method.max_candidates=9", "stopping.gammas=[9]"],
            "stopping.gammas has 9, but a draft has at most 8 tokens",
        ),
        (["responses=nowhere.jsonl", "stopping.heads=[{e}/linear]"], "responses=nowhere.jsonl does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_requests_are_one_sentence(run, asked, arguments, reason):
    code, _, err = run("tune", *SMALL, *(argument.replace("{e}", str(asked)) for argument in arguments), "out=t")
    assert code == 2, err
    assert reason in err
    assert "Traceback" not in err
