"""`python -m spectrain.bench` as a user types it, on a tiny target: results, resuming, what it refuses."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from spectrain import bench
from spectrain.cli import composed
from spectrain.config import options_of
from spectrain.config.commands import Bench
from spectrain.data.texts import STDLIB_HELD_OUT, is_held_out
from spectrain.decoding import Sampling
from spectrain.errors import UserError
from spectrain.measure.bandwidth import weight_bytes
from spectrain.measure.benchmark import Benchmark
from spectrain.measure.questions import STDLIB_QUESTIONS, read_questions
from spectrain.measure.results import QuestionRow
from spectrain.methods.options import artifact_kinds
from spectrain.methods.pld import PromptLookup
from spectrain.methods.registry import method_config, method_names
from spectrain.stores.folder import locked
from spectrain.target import TargetModel, load_target
from tests.conftest import SMALL_TRAINING
from tests.methods.lookup_export import lookup_facts
from tests.models.test_artifacts import export_spire

ARTIFACTS = {name: next(iter(artifact_kinds(method_config(name)).values()), None) for name in method_names()}
MODEL_FREE = {name for name, kind in ARTIFACTS.items() if kind is None}
OF_DATASTORES = {name for name, kind in ARTIFACTS.items() if kind == "datastore"}
RESULT_KEYS = {
    *("questions", "tokens", "target_forwards", "mean_accepted", "mean_accepted_ci95", "tokens_per_s_micro"),
    *("tokens_per_s_macro", "speedup", "time_share", "acceptance_by_position", "acceptance_by_source", "discard_rate"),
    *("verification_rate", "retrieval_hit_rate", "lossless", "greedy_mismatches", "peak_memory_bytes"),
}


@pytest.fixture
def asked(tmp_path) -> str:
    """Three plain prompts."""
    return write(tmp_path, *({"prompt": f"def read_config_{i}(path):\n    return read_config_{i}"} for i in range(3)))


def write(folder: Path, *rows: dict) -> str:
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "prompts=asked.jsonl"


def bench_options(*arguments: str) -> Bench:
    return options_of("bench", composed("bench", *arguments))


def results(folder: str) -> dict:
    return json.loads((Path(folder) / "results.json").read_text())


def question_rows(folder: str) -> list[dict]:
    return [json.loads(line) for line in (Path(folder) / "questions.jsonl").read_text().splitlines()]


def test_all_methods_are_measured_side_by_side_and_lossless(run, asked):
    code, out, err = run("bench", asked, "out=b", "max_new_tokens=12", "peers=[hf_generate,hf_prompt_lookup]")
    assert code == 0, err
    found = results("b")
    assert set(found["methods"]) == MODEL_FREE | {"hf_generate", "hf_prompt_lookup"}
    for name, method in found["methods"].items():
        assert method.keys() >= RESULT_KEYS, name
        assert method["questions"] == 3
        assert (method["lossless"], method["greedy_mismatches"]) == (True, 0), name
    assert found["methods"]["autoregressive"]["mean_accepted"] == 1
    assert found["methods"]["autoregressive"]["speedup"] == 1
    assert set(found["skipped"]) == set(method_names()) - MODEL_FREE
    assert "holds no spire drafter" in found["skipped"]["spire"]
    assert "holds no datastore for this target; build one with" in found["skipped"]["rest"]
    assert len(question_rows("b")) == 3 * 10
    page = (Path("b") / "report.html").read_text()
    for word in (*found["methods"], "spire"):
        assert word in page
        assert word in out


def test_batch_sizes_are_measured_in_turn_and_compared_in_one_table(run, asked):
    command = ("bench", asked, "out=b", "methods=[pld]", "max_new_tokens=12", "batch_size=[1,2,2]", "max_nodes=paper")
    code, out, err = run(*command)
    assert code == 0, err
    found = results("b")
    assert found["batch_size"] == [1, 2, 2]
    assert list(found["by_batch"]) == ["1", "2"]
    assert found["methods"] == found["by_batch"]["1"]
    assert all(one["lossless"] for methods in found["by_batch"].values() for one in methods.values())
    rows = question_rows("b")
    assert Counter((row["batch_size"], row["method"]) for row in rows) == {
        (size, name): 3 for size in (1, 2) for name in ("autoregressive", "pld")
    }
    plain = [row for row in rows if row["method"] == "autoregressive"]
    steps = {size: sum(row["steps"] for row in plain if row["batch_size"] == size) for size in (1, 2)}
    assert steps == {1: 33, 2: 22}  # three texts of eleven steps, two at a time
    assert "batch 2" in out
    (Path("b") / "results.json").unlink()
    code, out, err = run(*command, "json=true")  # which changes no run
    assert code == 0, err
    assert question_rows("b") == rows  # none was measured again
    assert json.loads(out)["by_batch"] == results("b")["by_batch"] == found["by_batch"]


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_methods_of_datastores_are_lossless_and_say_what_they_took(run, asked, stored, batch_size):
    code, _, err = run(
        *("bench", asked, "out=b", f"methods=[{','.join(OF_DATASTORES)}]", f"datastore={stored}", "max_new_tokens=12"),
        *("variants=retrieval", f"batch_size={batch_size}", "max_nodes=paper"),
    )
    assert code == 0, err
    found = results("b")["methods"]
    assert set(found) == OF_DATASTORES | {"autoregressive"}
    for name in OF_DATASTORES:
        assert found[name]["lossless"], name
    for name in ("sssd", "spectra_retrieval"):  # the others want two known tokens or little else to guess
        assert found[name]["acceptance_by_source"]["datastore"]["drafted"] > 0, name
        assert found[name]["retrieval_hit_rate"] > 0


def test_the_newest_fitting_datastore_is_found_and_a_variant_may_have_its_own(run, asked, stored, tmp_path):
    shutil.copytree(stored, tmp_path / "checkpoints" / "datastore-x")
    shutil.copytree(stored, tmp_path / "other")
    code, _, err = run(
        *("bench", asked, "out=b", "methods=[rest,mine]", "max_new_tokens=6", "limit=1"),
        "+variants.mine={method: rest, datastore: other}",
    )
    assert code == 0, err
    assert results("b")["datastores"] == {"rest": "checkpoints/datastore-x", "mine": "other"}


def test_a_resumed_run_keeps_to_its_datastore(run, asked, stored, tmp_path):
    shutil.copytree(stored, tmp_path / "checkpoints" / "first")
    command = ("bench", asked, "out=b", "methods=[rest]", "max_new_tokens=6", "limit=1")
    assert run(*command)[0] == 0
    (Path("b") / "results.json").unlink()
    shutil.copytree(stored, tmp_path / "checkpoints" / "second")
    os.utime(tmp_path / "checkpoints" / "second" / "manifest.json", (2e9, 2e9))
    code, _, err = run(*command)
    assert code == 2
    assert "was started with the datastore of rest ['checkpoints/first'" in err
    shutil.rmtree(tmp_path / "checkpoints" / "second")
    assert run(*command)[0] == 0


def test_an_exported_folder_is_measured_with_its_own_options(run, asked, tmp_path):
    lookup_facts(tmp_path / "own", "pld", {"draft_tokens": 3, "max_nodes": 4})
    code, _, err = run("bench", asked, "methods=[own]", "max_new_tokens=6", "limit=1", "out=b", "max_nodes=16")
    assert code == 0, err
    options = OmegaConf.load(Path("b") / "config.yaml").measured.methods.own
    assert (options.draft_tokens, options.max_nodes, options.max_ngram) == (3, 4, 3)
    assert json.loads((Path("b") / "results.json").read_text())["methods"]["own"]["max_nodes"] == 4


def test_an_interrupted_run_goes_on_and_a_finished_one_is_refused(run, asked, monkeypatch):
    command, groups = ("bench", asked, "out=b", "methods=[pld,auto]", "max_new_tokens=6"), Benchmark.groups

    def interrupted(self, done):
        for n, rows in enumerate(groups(self, done)):
            if n == 4:
                raise KeyboardInterrupt
            yield rows

    with monkeypatch.context() as patch:
        patch.setattr(Benchmark, "groups", interrupted)
        code, _, err = run(*command)
    assert code == 130
    assert "interrupted; run the same command to resume in b" in err
    assert not (Path("b") / "results.json").exists()
    before = question_rows("b")
    lines = (Path("b") / "questions.jsonl").read_text().splitlines(keepends=True)
    (Path("b") / "questions.jsonl").write_text("".join(lines[:3]) + lines[3][:40])  # killed while it wrote
    code, _, err = run(*command)
    assert code == 0, err
    after = question_rows("b")
    assert (len(before), len(after)) == (4, 9)
    assert after[:3] == before[:3]  # times included: they were not measured again
    assert len({(r["question_id"], r["method"]) for r in after}) == 9
    for name in ("pld", "auto"):  # which methods drafted is told of all rows, not only of those of the last run
        rows = [row for row in after if row["method"] == name]
        steps = sum(row["target_forwards"] for row in rows)
        plain = sum(one["steps"] for row in rows for one in row["choices"] if one["method"] == "autoregressive")
        shares = {method: one["share"] for method, one in results("b")["methods"][name]["ran"].items()}
        assert (shares.get("autoregressive", 0), sum(shares.values())) == pytest.approx((plain / steps, 1))
    code, _, err = run(*command)
    assert code == 2
    assert "finished" in err
    assert run(*command, "fresh=true")[0] == 0


def test_a_question_that_fails_does_not_stop_the_run(run, tmp_path):
    asked = write(tmp_path, {"prompt": "def f(x):"}, {"prompt": "word " * 400}, {"prompt": "def g(x):"})
    code, out, err = run("bench", asked, "out=b", "methods=[pld]", "max_new_tokens=6")
    assert code == 0, err
    errors = {(r["question_id"], r["method"]): r["error"] for r in question_rows("b") if r["error"]}
    assert set(errors) == {("asked-2", "pld"), ("asked-2", "autoregressive")}
    assert "the target's context holds 256" in errors["asked-2", "pld"]
    assert results("b")["methods"]["pld"]["errors"] == 1
    assert results("b")["methods"]["pld"]["questions"] == 2
    (Path("b") / "results.json").unlink()  # errors are tried again
    run("bench", asked, "out=b", "methods=[pld]", "max_new_tokens=6")
    assert len(question_rows("b")) == 6


def test_without_a_prompt_file_held_out_modules_are_continued():
    questions = read_questions(None, 3)
    assert len({question.id for question in questions}) == 3
    assert {question.category for question in questions} == {"stdlib"}
    assert all(is_held_out(q.id, STDLIB_HELD_OUT) for q in questions)
    assert {len(turn) for question in questions for turn in question.turns} == {STDLIB_QUESTIONS[True][1]}


def test_variants_have_names_and_options_of_their_own(run, asked):
    code, _, err = run(
        *("bench", asked, "out=b", "methods=[early,no_retrieval,logitspec]", "max_new_tokens=6", "limit=1"),
        *("variants=ablations", "+variants.early={method: pld, match: earliest}", "max_nodes=paper"),
    )
    assert code == 0, err
    found = results("b")["methods"]
    assert list(found) == ["autoregressive", "early", "no_retrieval", "logitspec"]
    assert set(found["no_retrieval"]["acceptance_by_source"]) == {"logits"}


def test_a_sweep_measures_one_method_with_each_value_and_goes_on(run, asked):
    command = ("bench", "-m", asked, "method=pld", "method.draft_tokens=1,2", "max_nodes=paper", "max_new_tokens=6")
    code, out, err = run(*command, "limit=1")
    assert code == 0, err
    folders = sorted(Path("runs").glob("bench-*"))
    assert len(folders) == 2  # each job has its own, named by its options
    for folder in folders:
        draft_tokens = OmegaConf.load(folder / "config.yaml").method.draft_tokens
        found = results(folder)["methods"]
        assert list(found) == ["autoregressive", "pld"]
        assert max(n for row in question_rows(folder) for n in row["drafted"] or [0]) <= draft_tokens
        assert found["pld"]["lossless"]
    code, _, err = run(*command, "limit=1")
    assert code == 0, err
    assert err.count("already finished, skipping") == 2


def test_given_drafters_go_to_the_methods_of_their_kind(run, asked, shared):
    target = str(shared / "target")
    code, _, err = run(
        *("bench", asked, "out=b", "methods=[speculative]", f"drafter={target}", "max_new_tokens=9", "limit=1"),
        *("peers=[hf_assisted]", "verification=block", "sampling=t1", "max_nodes=paper"),
    )
    assert code == 0, err
    found = results("b")["methods"]
    assert found["speculative"]["acceptance_by_position"] == [1.0] * 4  # it drafts for itself
    assert found["hf_assisted"]["mean_accepted"] > 1


def test_other_questions_or_defaults_are_no_resumed_run(run, asked, tmp_path):
    command = ("bench", asked, "out=b", "methods=[pld]", "max_new_tokens=6")
    assert run(*command)[0] == 0
    (Path("b") / "results.json").unlink()
    write(tmp_path, {"prompt": "def other(x):"})
    code, _, err = run(*command)
    assert code == 2
    assert "another config (differs in measured)" in err


def test_a_run_without_any_answer_is_not_finished(run, tmp_path):
    asked = write(tmp_path, {"prompt": "word " * 400})
    code, _, err = run("bench", asked, "out=b", "methods=[pld]", "max_new_tokens=6")
    assert code == 2
    assert "no question was answered (UserError: the prompt has" in err
    assert not (Path("b") / "results.json").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["methods=[pld,nothing]"], "methods=nothing is unknown; choose among"),
        (["methods=[spire]"], "holds no spire drafter"),
        (["methods=[pld]", "+variants.pld={matches: latest}"], "variants.pld.matches is not an option of pld"),
        (["methods=[pld]", "+variants.x={method: y}", "methods=[x]"], "variants.x has method=y, which is unknown"),
        (["peers=[vllm]"], "peers=vllm is unknown; choose among hf_generate"),
        (["peers=[hf_generate]", "batch_size=4"], "give batch_size=1"),
        (["peers=[hf_generate]", "batch_size=[1,4]"], "not batch_size=4"),
        (["batch_size=[]"], "give a number of rows, or several such as [1,16,64]"),
        (["batch_size=many"], "batch_size=many must be a whole number"),
        (["batch_size=[1,0]"], "batch_size=[1, 0] must be"),
        (["methods=[pld]", "method=pld"], "method= measures one method with its options, methods= several"),
        (
            ["+variants.autoregressive={method: pld}"],
            "variants.autoregressive has the name of what others are compared",
        ),
        (["methods=all", "max_nodes=4"], "lookahead: max_nodes=4"),
        (
            ["drafter=nowhere", "methods=[pld]"],
            "drafter=nowhere is no folder here, and no method takes a vanilla drafter; correct it",
        ),
        (["peers=[hf_assisted]", "methods=[pld]"], "holds no vanilla drafter"),
        (["methods=[rest]"], "holds no datastore for this target"),
        (["methods=[rest]", "datastore=nowhere"], "datastore=nowhere does not exist; make one"),
        (
            ["methods=[pld]", "datastore=nowhere"],
            "datastore=nowhere is no folder here, and no method takes a datastore; correct it",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_wrong_requests_are_refused(opened, tmp_path, monkeypatch, arguments, reason):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # a missing folder is looked for on the hub
    with pytest.raises(UserError) as error:
        prepare(opened, bench_options(*arguments))
    assert reason in str(error.value)


@pytest.fixture(scope="module")
def opened(shared) -> TargetModel:
    return load_target(str(shared / "target"))


def prepare(target: TargetModel, options: Bench) -> None:
    """What the command does before it measures."""
    bench.check(options)
    drafters, _ = bench.built(options, bench.configured(options), target, Sampling(**vars(options.sampling)))
    bench.build_baselines(options, target, drafters)


def test_all_methods_are_those_that_can_run_whatever_folders_are_given(opened, stored, monkeypatch, tmp_path):
    """A method that lacks one of its folders is left out, although another one is given; a wrong folder is said."""
    monkeypatch.chdir(tmp_path)

    def built(*arguments: str) -> tuple[set[str], dict[str, str]]:
        options = bench_options("methods=all", *arguments)
        drafters, skipped = bench.built(options, bench.configured(options), opened, Sampling())
        assert drafters.keys() | skipped.keys() == {*method_names()}
        return {*drafters}, skipped

    drafters, skipped = built(f"datastore={stored}")
    assert drafters == MODEL_FREE | OF_DATASTORES | {"auto"}
    assert "holds no spire drafter" in skipped["spire_sssd"]
    drafter = export_spire(tmp_path / "mine", opened)
    drafters, skipped = built(f"drafter={drafter}")
    assert {"spire", "spire_tree", "spire_sssd"} <= drafters
    assert {"rest", "specdecpp", "speculative"} <= skipped.keys()
    assert "spire_sssd" in built(f"drafter={drafter}", f"datastore={stored}")[0]
    for wrong in (f"datastore={drafter}", f"head={drafter}", "drafter=nowhere/x"):
        with pytest.raises(UserError):
            built(wrong)


def test_a_folder_in_use_is_refused_and_left_alone(run, asked):
    with locked(Path("b")):
        code, _, err = run("bench", asked, "methods=[pld]", "limit=1", "out=b")
    assert (code, err.splitlines()[-1]) == (2, "error: b is in use by another process; wait for its end")
    assert not Path("b").exists()


def test_every_method_is_lossless_as_users_get_it_and_with_the_nodes_of_its_paper(run, asked):
    methods = "methods=[pld,logitspec,spectra_core,lookahead,magicdec]"
    for out, nodes, expected in (("a", "null", "auto"), ("b", "paper", 11)):
        code, _, err = run(
            "bench", asked, f"out={out}", methods, f"max_nodes={nodes}", "max_new_tokens=24", "batch_size=2"
        )
        assert code == 0, err
        found = results(out)["methods"]
        assert all(one["lossless"] for one in found.values())
        assert found["pld"]["max_nodes"] == expected
        assert found["magicdec"]["max_nodes"] == ("auto" if nodes == "null" else 5)
        assert found["autoregressive"]["max_nodes"] is None


def test_questions_that_a_datastore_or_a_drafter_has_seen_are_said(run, stored, shared, tmp_path):
    text = (shared / "corpus" / "m0.py").read_text()
    asked = write(tmp_path, {"prompt": text[:200]}, {"prompt": text[200::-1]})
    code, _, err = run("bench", asked, "out=b", "methods=[rest]", f"datastore={stored}", "max_new_tokens=4")
    assert code == 0, err
    assert f"1 of 2 questions stand in the text of {stored}, such as asked-1" in err
    assert results("b")["seen"] == {str(stored): ["asked-1"]}
    corpus = (f"corpus={shared / 'corpus'}", "corpus.held_out_share=0.3", "tau.context_tokens=[16]")
    assert run("train", "+exp=vanilla", *SMALL_TRAINING, *corpus, "out=v")[0] == 0
    code, _, err = run("bench", asked, "out=c", "methods=[speculative]", "drafter=v", "max_new_tokens=4")
    assert code == 0, err
    assert "1 of 2 questions stand in the text of v" in err


def test_costs_of_steps_are_those_of_target_and_drafter_on_the_card_at_hand(opened, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    steps = {"target_forwards": 3, "steps": 3.0, "time_s": {"forward": 0.1}}
    row = QuestionRow("q", "any", "pld", prompt_tokens=[10], replies=[[0] * 4], **steps)
    failed = QuestionRow("r", "any", "pld", error="too long")
    found = bench.costs_on_gpu(opened, PromptLookup(), [row, failed])
    assert found["bytes_per_step"] == weight_bytes(opened) + 12 * opened.token_bytes
    assert found["bandwidth_share"] == pytest.approx(found["bytes_per_step"] * 3 / 0.1 / 3.35e12)
