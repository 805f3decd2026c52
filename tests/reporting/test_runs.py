"""What trainings have in common and in what they differ; how far an unfinished one got."""

from __future__ import annotations

from pathlib import Path

import pytest
from spectrain.reporting.runs import Run, Training, differences, groups, natural, option_text, short_path

CONFIG = {
    "kind": "spire",
    "max_steps": 100,
    "target": {"path": "/models/lab-8l"},
    "data": {"batch_size": 4, "row_tokens": 64},
    "trainer": {"accumulate_grad_batches": 2, "accelerator": "cpu"},
}


def training(
    name: str = "r", kind: str = "spire", options: dict | None = None, fingerprint: str = "f", **more
) -> Training:
    config = CONFIG | {"kind": kind} | (options or {})
    return Training(name, kind, Path("runs") / name, config, begun={"target_fingerprint": fingerprint}, **more)


def test_a_run_is_told_by_what_most_others_have_not():
    options = [{"k": 4, "loss": "mixed"}, {"k": 4, "loss": "hard"}, {"k": 2, "loss": "mixed"}]
    runs = [training(str(i), options=one | {"seed": 0}) for i, one in enumerate(options)]
    assert differences(runs) == {"0": {}, "1": {"loss": "hard"}, "2": {"k": 2}}


def test_where_no_value_is_that_of_most_everybody_tells_its_own():
    runs = [training(str(i), options={"w_rej": w}) for i, w in enumerate([1, 1, 6, 12])]
    assert differences(runs) == {str(i): {"w_rej": w} for i, w in enumerate([1, 1, 6, 12])}
    assert differences(runs[:1]) == {"0": {}}
    assert differences(runs[:2]) == {"0": {}, "1": {}}


def test_an_option_that_an_older_run_does_not_know_is_no_difference():
    runs = [training("old", options={"k": 4}), training("new", options={"k": 4, "select": {"every": 1}})]
    assert differences(runs) == {"old": {}, "new": {}}
    assert differences(runs[::-1]) == {"old": {}, "new": {}}


def test_runs_of_one_kind_and_target_stand_together_in_natural_order():
    runs = [training("k_10"), training("head", "specdecpp"), training("k_2"), training("k_3", fingerprint="g")]
    assert [[run.name for run in group] for group in groups(runs)] == [["head"], ["k_2", "k_10"], ["k_3"]]
    assert natural("k_2") < natural("k_10")


def test_an_unfinished_run_says_how_far_it_got():
    curve = {9: {"train/loss": 3.0}, 19: {"train/loss": 2.0}, 20: {"eval/loss": 1.5}, 40: {"eval/alpha": 0.5}}
    run = training(curve=curve, checkpoint_step=15)
    assert (run.steps, run.steps_text, run.tokens_per_step, run.tokens) == (20, "20 of 100", 512, 20 * 512)
    assert run.metrics == {"eval/loss": 1.5, "eval/alpha": 0.5}
    assert training(curve=curve, checkpoint_step=33).steps == 33
    assert training().steps == 0


def test_a_finished_run_tells_its_result():
    tau = {"autoregressive": {"s": {"value": 1.0}}, "spire": {"s": {"value": 2.5, "low": 2.0, "high": 3.0}}}
    result = {"steps": 7, "tokens": 99, "metrics": {"eval/loss": 1.0}, "tau": tau, "settings": {"contexts": 8}}
    run = training(result=result)
    assert (run.steps, run.tokens, run.contexts) == (7, 99, 8)
    assert run.tau == {"s": {"value": 2.5, "low": 2.0, "high": 3.0}}
    assert training(kind="specdecpp", result=result).tau == {}
    assert training(kind="specdecpp").tokens is None  # rows differ in length
    assert training(kind="target", result={"eval/loss": 2.0}).metrics == {"eval/loss": 2.0}  # of `+exp=target`


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("w_rej", 12, "w_rej=12"),
        ("feedback", False, "feedback=false"),
        ("corpus.path", None, "corpus.path=null"),
        ("corpus.path", "/data/train.jsonl", "corpus.path=train.jsonl"),
        ("target.path", "org/model", "target.path=org/model"),
    ],
)
def test_options_are_told_as_they_are_typed(key, value, text):
    assert option_text(key, value) == text


def test_paths_are_shortened_and_hub_names_are_not():
    assert [short_path(p) for p in ("/a/b", "./c", "org/model", "/", "")] == ["b", "c", "org/model", "/", ""]


def test_what_changes_a_training_is_told_by_dotted_key_and_where_it_ran_is_not():
    trainer = {"accelerator": "cpu", "devices": 2, "precision": "bf16-mixed"}
    options = training(options={"trainer": trainer, "out": "x", "tau": {"contexts": 3}, "sizes": {}}).options
    assert options["trainer.precision"] == "bf16-mixed"
    assert options["data.row_tokens"] == 64
    assert options["sizes"] == {}
    assert not {"out", "tau.contexts", "trainer.devices"} & options.keys()


def test_a_run_tells_where_it_ran_and_its_command():
    attempts = [{"environment": {"devices": ["H100", "H100", "A100"]}}]
    run = Run("r", "bench", Path("r"), begun={"attempts": attempts, "command": "python -m x"})
    assert (run.devices, run.command) == ("2 x H100, A100", "python -m x")
    assert Run("r", "bench", Path("r"), result={"device": "cpu", "command": "older"}).devices == "cpu"
    assert Run("r", "bench", Path("r"), result={"device": "cpu", "command": "older"}).command == "older"
    assert Run("r", "cost", Path("r"), result={"hardware": {"name": "H100"}}).devices == "H100 (modelled)"
    assert training().devices == "cpu"


def test_anchors_are_fit_for_an_id_and_differ():
    anchors = {training(name).anchor for name in ("a b", "a-b", "a_b", "<a>", "a/b")}
    assert len(anchors) == 5
    assert all(c.isalnum() or c == "-" for anchor in anchors for c in anchor)
