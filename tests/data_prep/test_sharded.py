"""A target that ranks share (`target.parallel=tp`) trains, answers and measures as it does in one process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spectrain.stores.rows import open_acceptance, open_responses
from spectrain.training.runs import RunFolder
from tests import ranks
from tests.data_prep.conftest import build_options, contents, kept_ids, same_rows

STEPS = 8


def training(shared: Path) -> list[str]:
    return [
        *("+exp=spire", f"target={shared / 'target'}", f"corpus={shared / 'corpus'}", "corpus.held_out_share=0.3"),
        *("data.row_tokens=32", "data.batch_size=4", "data.val_rows=6", f"max_steps={STEPS}", "export_dtype=float32"),
        *("trainer.accelerator=cpu", "trainer.precision=32-true", "trainer.log_every_n_steps=1", "select.every=0"),
        *("tau.context_tokens=[16]", "tau.contexts=1", "tau.new_tokens=8", "tau.temperatures=[0.0]"),
        *("tau.timed_contexts=1", "trainer.val_check_interval=4"),
    ]


def commands(made: Path, ready: Path, folder: Path) -> dict[str, list[str]]:
    """What is typed behind each command of data_prep."""
    target = f"target={made / 'target'}"
    rows = [{"question_id": f"q{i}", "category": "c", "turns": [f"def read_{i}("]} for i in range(12)]
    short = ["max_new_tokens=16", "sampling.temperature=0"]
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "datastore": build_options(made),
        "responses": [target, f"prompts={folder / 'p.jsonl'}", "method=spire", *drafter(ready), *short],
        "acceptance": [target, f"responses={ready / 'responses'}", f"drafter={ready / 'draft'}", "part_rows=3"],
        "activations": [*build_options(made)[:3], "row_tokens=32", "shard_tokens=270", "precision=32-true"],
    }


def drafter(ready: Path) -> list[str]:
    return [f"drafter={ready / 'spire'}"]


@pytest.fixture(scope="module")
def runs(shared, made, ready, tmp_path_factory) -> Path:
    """Everything on two groups of two ranks (`tp-`) and in one process (`one-`); runs that go from one to the other."""
    folder, typed = tmp_path_factory.mktemp("sharded"), training(shared)
    tp = ["target.parallel=tp", "target.tp=2"]

    def job(name: str, *arguments: str, **strikes: int) -> dict:
        typed_here = [*typed, "trainer=ddp", f"run_dir={name}", f"out={name}-out", *arguments]
        return {"arguments": typed_here, "rounds": False, **strikes}

    stores = commands(made, ready, folder)
    prepared = {
        way: [
            {"command": f"data_prep.{name}", "arguments": [*arguments, *more, f"out={way}-{name}"]}
            for name, arguments in stores.items()
        ]
        for way, more in (("one", []), ("tp", tp))
    }
    bench = [f"target={made / 'target'}", "methods=[pld,spire]", *drafter(ready), f"prompts={folder / 'p.jsonl'}"]
    bench += ["max_new_tokens=12", "limit=4", "out=tp-bench", "target.parallel=tp"]  # by all four

    def alone(*jobs: dict, code: int = 0) -> None:
        assert [ranks.run(**one) for one in jobs] == [code] * len(jobs)

    before = Path.cwd()
    os.chdir(folder)
    try:
        alone(job("one-two", "trainer.devices=1", interrupt=3), code=130)
        alone(job("one", "trainer.devices=1"), *prepared["one"])
        jobs = [job("tp", *tp), job("tp-cut", *tp, interrupt=3), job("one-two", *tp), *prepared["tp"]]
        ranks.launch(4, folder, [*jobs, {"command": "spectrain.bench", "arguments": bench}])
        again = {"command": "spectrain.export", "arguments": ["run=tp", "out=tp-again"]}
        alone(job("tp-cut", "trainer.devices=1"), again)
    finally:
        os.chdir(before)
    return folder


def losses(run: Path) -> list[float]:
    curve = RunFolder(run, {}, json.loads((run / "run.json").read_text())["id"]).curve()
    return [row["train/loss"] for row in curve.values() if "train/loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize("run", ["tp", "tp-cut", "one-two"])
def test_losses_are_those_of_one_process_also_after_a_resume(runs, run):
    found = losses(runs / run)
    assert len(found) == STEPS
    assert found == pytest.approx(losses(runs / "one"), abs=1e-4)


@pytest.mark.slow
def test_ranks_see_other_rows_and_export_the_same_drafter(runs):
    seen = [(runs / "tp" / f"numbers-{rank}.jsonl").read_text().splitlines() for rank in range(4)]
    assert len({tuple(json.loads(one[0])[1]) for one in seen}) == 4
    one, tp = (load_file(runs / f"{name}-out" / "model.safetensors") for name in ("one", "tp"))
    assert max(float((one[name] - tp[name]).abs().max()) for name in one) < 5e-3  # Adam divides by small gradients
    again = load_file(runs / "tp-again" / "model.safetensors")
    assert all(torch.equal(tp[name], again[name]) for name in tp)
    results = [json.loads((runs / name / "result.json").read_text()) for name in ("one", "tp")]
    assert results[0]["tau"]["spire"].keys() == results[1]["tau"]["spire"].keys()


@pytest.mark.slow
def test_stores_are_those_of_one_process(runs):
    responses = [open_responses(runs / f"{name}-responses").rows["response"] for name in ("one", "tp")]
    assert list(responses[0]) == list(responses[1])
    assert same_rows(*(open_acceptance(runs / f"{name}-acceptance") for name in ("one", "tp")))
    assert kept_ids(runs / "one-datastore") == kept_ids(runs / "tp-datastore")
    one, tp = (load_file(next((runs / f"{name}-activations").glob("*.safetensors"))) for name in ("one", "tp"))
    assert torch.equal(one["tokens"], tp["tokens"])
    assert torch.allclose(one["captured"].float(), tp["captured"].float(), rtol=0.02, atol=1e-3)
    assert contents(runs / "one-activations").keys() == contents(runs / "tp-activations").keys()


@pytest.mark.slow
def test_a_benchmark_on_shared_weights_is_lossless(runs):
    results = json.loads((runs / "tp-bench" / "results.json").read_text())
    assert {one["lossless"] for name, one in results["methods"].items() if name != "autoregressive"} == {True}
    assert results["methods"]["spire"]["questions"] == 4
