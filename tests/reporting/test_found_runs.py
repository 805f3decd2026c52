"""What trainings have in common and in what they differ; how far an unfinished one got."""

from __future__ import annotations

from pathlib import Path

import pytest

from spectrain.reporting.found_runs import Training, differences, groups, natural, option_text, short_path

CONFIG = {
    "kind": "spire",
    "max_steps": 100,
    "target": {"path": "/models/lab-8l"},
    "data": {"batch_size": 4, "row_tokens": 64},
    "trainer": {"accumulate_grad_batches": 2, "accelerator": "cpu"},
}


def training(name: str = "r", kind: str = "spire", options: dict | None = None, **more) -> Training:
    config = CONFIG | {"kind": kind}
    return Training(name, Path("runs") / name, config, options=options or {}, **{"target_fingerprint": "f"} | more)


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
    runs = [training("old", options={"k": 4}), training("new", options={"k": 4, "select.every": 1})]
    assert differences(runs) == {"old": {}, "new": {}}
    assert differences(runs[::-1]) == {"old": {}, "new": {}}


def test_runs_of_one_kind_and_target_stand_together_in_natural_order():
    runs = [training("k_10"), training("head", "specdecpp"), training("k_2"), training("k_3", target_fingerprint="g")]
    assert [[run.name for run in group] for group in groups(runs).values()] == [["head"], ["k_2", "k_10"], ["k_3"]]
    assert natural("k_2") < natural("k_10")


def test_an_unfinished_run_says_how_far_it_got():
    curve = {9: {"train/loss": 3.0}, 19: {"train/loss": 2.0}, 20: {"eval/loss": 1.5}, 40: {"eval/alpha": 0.5}}
    run = training(curve=curve, checkpoint_step=15)
    assert (run.steps, run.asked_steps, run.tokens_a_step, run.tokens) == (20, 100, 512, 20 * 512)
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


def test_anchors_are_fit_for_an_id_and_differ():
    anchors = {training(name).anchor for name in ("a b", "a-b", "a_b", "<a>", "a/b")}
    assert len(anchors) == 5
    assert all(c.isalnum() or c == "-" for anchor in anchors for c in anchor)
