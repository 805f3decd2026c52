"""`python -m spectrain.tune method=sssd`: what it writes is what `bench` loads; it goes on; what it refuses."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf
from spectrain.stores.forward_times import NODES

from spectrain import tune
from spectrain.measure import questions
from spectrain.measure.simulation import Text
from spectrain.measure.sssd import Clock, best_choice, choose_options
from spectrain.methods.sssd import Sssd, SssdOptions

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
    assert all({"nodes", "tau", "tokens_per_s"} == set(one) for one in result["candidates"].values())
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


@pytest.mark.parametrize(
    ("arguments", "nodes", "says"),
    [
        ((), None, "sampling greedy; {} nodes of max_nodes=auto; 1 row"),
        (("sampling=t08", "method.max_nodes=6"), 6, "sampling temperature 0.8, top_k 50; {} nodes; 1 row"),
        (("sampling=t1", "batch_size=3"), None, "sampling temperature 1; {} nodes of max_nodes=auto; 3 rows"),
    ],
)
def test_it_is_tuned_for_this_sampling_these_nodes_and_rows_and_says_so(run, command, arguments, nodes, says):
    code, out, err = run(*command, *arguments, "out=t")
    assert code == 0, err
    result = json.loads(Path("t/result.json").read_text())
    chosen = result["candidates"][result["winner"]]["nodes"]
    assert chosen == nodes or (nodes is None and chosen in NODES[1:])
    assert f"chosen for tokens/s: {says.format(chosen)}" in out
    header = Path("t/sssd.yaml").read_text().splitlines()[1]
    assert header.startswith("# Chosen for tokens/s on cpu")
    assert header.endswith(says.format(chosen))
    rows = map(json.loads, Path("t/responses.jsonl").read_text().splitlines())
    assert {row["sampling"] for row in rows} == {result["sampling"]}


def test_answers_of_another_sampling_are_refused(run, command):
    assert run(*command, "sampling=t08", "out=t")[0] == 0
    code, _, err = run(*command, "out=u", "responses=t/responses.jsonl")
    assert code == 2
    assert "was written with sampling temperature 0.8, top_k 50, not greedy; give the same sampling" in err


REPETITIVE = [Text([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4])] * 2


def test_the_number_of_nodes_is_the_fastest_one():
    drafter = Sssd(None, SssdOptions(datastore_source=False), 12)
    free, linear = np.ones(13), np.arange(13.0)
    chosen = best_choice(drafter, REPETITIVE, Clock(free, 1, [2, 4, 12]))
    assert (chosen.nodes, chosen.tau, chosen.tokens_per_s) == (12, 5.5, 5.5)  # 11 tokens behind the first, 2 steps
    # Steps of 2 nodes give 2 tokens in 2 s, which no larger tree does: its bonus is free, and its last nodes are cut.
    chosen = best_choice(drafter, REPETITIVE, Clock(linear, 1, [2, 4, 12]))
    assert chosen.nodes == 2
    assert chosen.tokens_per_s == pytest.approx(11 / 11)


@pytest.mark.parametrize(("seconds", "branch_tokens"), [(np.ones(25), 8), (np.arange(25.0), 1)], ids=["free", "dear"])
def test_the_options_with_the_most_tokens_per_second_are_chosen(seconds, branch_tokens):
    known = np.random.default_rng(0).integers(0, 4, size=160).tolist()
    texts = [Text(known[i : i + 40], known[i + 40 : i + 100]) for i in (0, 20, 40, 60)]
    method = {"datastore_source": False}
    opened = Sssd(None, SssdOptions(**method), 24)
    found = choose_options(opened, method, {"branch_tokens": [1, 8]}, texts, Clock(seconds, 1, [24]))
    short, long = found["tried"]
    assert short["tau"] < long["tau"]
    assert found["candidates"].keys() == {"defaults", "best discounts", "calibrated"}
    assert max(found["tried"], key=lambda one: one["tokens_per_s"])["branch_tokens"] == branch_tokens
    assert found["options"].get("branch_tokens", 8) == branch_tokens


@pytest.mark.parametrize("n_rows", [1, 2, 3])
def test_a_batch_is_as_wide_as_its_widest_row(n_rows):
    seconds, widths = np.array([0.0, 1.0, 1.5, 4.0, 4.5, 9.0]), np.array([2, 2, 5, 3, 1])
    found = Clock(seconds, n_rows, [5]).of_widths(widths)
    for width in range(1, 6):
        others = itertools.product(widths, repeat=n_rows - 1)
        expected = np.mean([seconds[max(width, *other, 0)] for other in others])
        assert found[width] == pytest.approx(expected)


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
        (["batch_size=100000000"], "batch_size=100000000 rows do not fit into memory, about"),
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
