"""Training on two real CPU ranks over gloo: DDP, ZeRO-2 and 3, and FSDP2 train, save, resume and export as one rank."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from spectrain.cli import run as run_command
from spectrain.models.pruned_init import last_layers, new_drafter
from spectrain.models.spire import SpireConfig
from spectrain.target import TargetModel, load_target
from spectrain.target.lean import shape_of
from spectrain.target.llama import LlamaBlock
from spectrain.training.checkpoints import CheckpointFolder, ranks_of, whole_weights
from spectrain.training.data import TokenRows
from spectrain.training.losses import LossSettings
from spectrain.training.optim import OptimizerSettings
from spectrain.training.runs import RunFolder
from spectrain.training.spire import SpireTraining
from spectrain.training.vanilla import LanguageModelTraining
from tests import ranks
from tests.conftest import VOCAB_SIZE, tiny_model
from tests.data_prep.conftest import save_responses

STEPS, BATCH = 6, 4
ZERO = ("deepspeed_zero2", "deepspeed_zero3")
DIVIDED = (*ZERO, "fsdp")
SPIRE = ("+exp=spire", "export_dtype=float32")  # exports are compared
VARIANTS = {  # what else must train under ZeRO-3, in bfloat16
    "untied": ["+exp=spire", "k=1", "init=random"],
    "ablated": ["+exp=spire", "feedback=false", "target_activations=false", "trainer.activation_checkpointing=true"],
    "eagle3": ["+exp=eagle3", "select.every=1"],
    "few tokens": ["+exp=spire", "draft_vocab=100", "unembedding=trained", "select.every=1"],
    "vanilla": ["+exp=vanilla", "optimizer.name=adamw", "trainer.activation_checkpointing=true", "select.every=1"],
}
HALVES = [*(("own", trainer) for trainer in ("ddp", *DIVIDED)), ("eagle3", "ddp"), ("eagle3", "fsdp")]
HALVES += [("vanilla", "fsdp"), ("head", "deepspeed_zero2")]
MUON = ("+exp=vanilla", "trainer.activation_checkpointing=true", "max_steps=2")


@pytest.fixture(scope="module")
def small(shared, tmp_path_factory) -> list[str]:
    """Overrides that make a training take a second or two, for a target with tied embeddings."""
    tied = tmp_path_factory.mktemp("tied")
    AutoTokenizer.from_pretrained(shared / "target").save_pretrained(tied)
    sizes = {"vocab_size": 300, "num_hidden_layers": 4, "initializer_range": 0.05, "eos_token_id": 0}
    tiny_model("llama", tie_word_embeddings=True, **sizes).save_pretrained(tied)
    return [
        f"target={tied}",
        f"corpus={shared / 'corpus'}",
        "corpus.held_out_share=0.3",
        "data.row_tokens=64",
        f"data.batch_size={BATCH}",
        "data.val_rows=4",
        f"max_steps={STEPS}",
        "trainer.accelerator=cpu",
        "trainer.precision=32-true",
        "trainer.val_check_interval=4",
        "trainer.log_every_n_steps=1",
        "select.every=0",
        "tau.context_tokens=[16]",
        "tau.contexts=1",
        "tau.new_tokens=4",
        "tau.temperatures=[0.0]",
        "tau.timed_contexts=1",
    ]


@pytest.fixture(scope="module")
def runs(small, shared, tmp_path_factory) -> Path:
    """Runs of all strategies on two ranks; `one` on one.

    `one_two_one` and `<trainer>_cut` are interrupted and resumed, `<trainer>_anew` resumed on one rank. `exchanged`
    goes from DDP to FSDP2 and back.
    """
    folder = tmp_path_factory.mktemp("runs")

    def job(name: str, *arguments: str, **strikes: int) -> dict:
        out = [] if strikes else [f"out={name}-exported"]
        return {"arguments": [*small, f"run_dir={name}", *out, *arguments], **strikes}

    switching = [*SPIRE, "trainer=ddp", "run_dir=one_two_one", "trainer.devices=1"]
    jobs = [job("one_two_one", *SPIRE, "trainer=ddp", interrupt=3)]
    for trainer in DIVIDED:
        arguments = [*SPIRE, f"trainer={trainer}"]
        jobs += [job(trainer, *arguments), job(f"{trainer}_cut", *arguments, interrupt=2)]
        jobs += [job(f"{trainer}_cut", *arguments), job(f"{trainer}_anew", *arguments, interrupt=3)]
    jobs += [job("ddp", *SPIRE, "trainer=ddp"), job("exchanged", *SPIRE, "trainer=ddp", interrupt=1)]
    jobs += [job("exchanged", *SPIRE, "trainer=fsdp", interrupt=3), job("exchanged", *SPIRE, "trainer=ddp")]
    jobs += [job(f"{trainer}_muon", *MUON, f"trainer={trainer}") for trainer in ("ddp", "fsdp")]
    jobs.append(job("poisoned", "+exp=vanilla", "trainer=ddp", "checkpoint_s=0", poison=2))
    jobs += [job("offload", *SPIRE, "trainer=deepspeed_zero2_offload", "max_steps=2")]
    save_responses(folder / "answers", load_target(shared / "target", device="cpu"), 90)
    own = ["+exp=spire", f"target={shared / 'target'}", "corpus=responses:answers", "data.document_mask=true"]
    own.append("draft_vocab=auto")
    jobs += [job("own_cut", *own, "trainer=ddp", interrupt=2), job("own_cut", *own, "trainer=ddp")]
    head = ["+exp=specdecpp", f"target={shared / 'target'}", "responses=answers", "drafter=own_one-exported"]
    kinds = {
        "own": own,
        "eagle3": ["+exp=eagle3", *own[1:], "ttt_steps=3"],
        "vanilla": ["+exp=vanilla", *own[1:4]],
        "head": head,
    }
    adamw = ("optimizer.name=adamw", "optimizer.lr=3e-3", "trainer.gradient_clip_val=0.5", "max_steps=8")
    divided = ("data.batch_size=2", "trainer.accumulate_grad_batches=2")
    halves = [job(f"{kind}_{way}", *kinds[kind], *adamw, *divided, f"trainer={way}") for kind, way in HALVES]
    variants = VARIANTS | {"untied": [*VARIANTS["untied"], f"target={shared / 'target'}"]}
    for name, arguments in variants.items():
        jobs.append(job(name, "trainer=deepspeed_zero3", "trainer.precision=bf16-mixed", "max_steps=2", *arguments))
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert ranks.run([*small, *SPIRE, "trainer=cpu", "run_dir=one", "out=one-exported"]) == 0
        assert ranks.run([*small, *own, "trainer=cpu", "run_dir=own_one", "out=own_one-exported"]) == 0
        for kind, arguments in kinds.items():
            assert ranks.run([*small, *arguments, *adamw, "trainer=cpu", f"run_dir={kind}_whole"], rounds=False) == 0
        ranks.launch(2, folder, [one | {"rounds": False} for one in halves])
        assert ranks.run([*small, *switching], interrupt=1) == 130
        said = ranks.launch(2, folder, jobs).stderr
        ranks.launch(1, folder, [job(f"{trainer}_anew", *SPIRE, f"trainer={trainer}") for trainer in DIVIDED])
        assert ranks.run([*small, *switching, "out=one_two_one-exported"]) == 0
    finally:
        os.chdir(before)
    (folder / "said.txt").write_text(said)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["few tokens", "eagle3", "vanilla"])
def test_the_last_weights_are_validated_before_they_are_kept(runs, name):
    best = json.loads((runs / name / "checkpoints" / "best" / "best.json").read_text())
    result = json.loads((runs / name / "result.json").read_text())
    assert best["step"] == result["selected"]["step"] == 2
    assert best["expected"] == pytest.approx(result["metrics"]["eval/tau_expected"], abs=0.02)
    assert best["expected"] > 1


def losses(run: Path) -> dict[int, float]:
    return {step: row["train/loss"] for step, row in curve(run).items() if "train/loss" in row}


def curve(run: Path) -> dict[int, dict[str, float]]:
    return RunFolder(run, {}, json.loads((run / "run.json").read_text())["id"]).curve()


def rows_by_step(run: Path) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for file in run.glob("numbers-*.jsonl"):
        for line in file.read_text().splitlines():
            step, numbers = json.loads(line)
            found.setdefault(step, []).extend(numbers)
    return {step: sorted(numbers) for step, numbers in found.items()}


def largest_difference(left: dict, right: dict) -> float:
    assert left.keys() == right.keys()
    return max((left[name].float() - right[name].float()).abs().max().item() for name in left)


RESUMED = ["one_two_one", *(f"{trainer}_{how}" for trainer in DIVIDED for how in ("cut", "anew")), "exchanged"]


@pytest.mark.slow
@pytest.mark.parametrize("run", [*RESUMED, *DIVIDED, "offload"])
def test_losses_are_those_of_one_rank_with_the_same_batches(runs, run):
    expected, found = losses(runs / "one"), losses(runs / run)
    steps = range(2 if run == "offload" else STEPS)
    assert sorted(found) == [*steps]
    assert max(abs(found[step] - expected[step]) for step in steps) < 1e-4
    if run != "offload":
        last = max(curve(runs / "one"))
        assert curve(runs / run)[last]["eval/loss"] == pytest.approx(curve(runs / "one")[last]["eval/loss"], abs=1e-4)


@pytest.mark.slow
def test_losses_on_responses_of_packed_documents_are_those_of_one_rank(runs):
    """A second epoch begins, so that rollouts begin elsewhere; ranks have different numbers of learned positions."""
    expected, found = losses(runs / "own_one"), losses(runs / "own_cut")
    assert sorted(found) == [*range(STEPS)]
    assert max(abs(found[step] - expected[step]) for step in range(STEPS)) < 1e-4
    seen = Counter(row for rows in rows_by_step(runs / "own_one").values() for row in rows)
    assert max(seen.values()) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "trainer"), HALVES)
def test_two_ranks_with_two_batches_per_step_learn_what_one_batch_teaches(runs, kind, trainer):
    """Rows have different numbers of positions to learn, and only some gradients are clipped.

    AdamW steps a gradient near zero by its sign, so rounding grows from step to step, to 1.3e-4 of the weights on some
    processors. Without the weights of rows it is 1.2e-2.
    """
    whole, found = runs / f"{kind}_whole", runs / f"{kind}_{trainer}"
    weights, divided = (load_file(run / "whole.safetensors") for run in (whole, found))
    for name, expected in weights.items():
        assert (divided[name] - expected).norm() < 1e-3 * max(1, expected.norm()), name
    assert losses(found) == pytest.approx(losses(whole), rel=1e-5)
    last, expected = (rows[max(rows)]["eval/loss"] for rows in map(curve, (found, whole)))
    assert last == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("run", RESUMED)
def test_every_step_sees_the_rows_of_an_uninterrupted_run_and_none_twice(runs, run):
    assert rows_by_step(runs / run) == rows_by_step(runs / "one")
    seen = Counter(row for rows in rows_by_step(runs / run).values() for row in rows)
    assert set(seen.values()) == {1}
    assert len(seen) == STEPS * BATCH


@pytest.mark.slow
@pytest.mark.parametrize("trainer", DIVIDED)
def test_divided_weights_resume_exactly_at_their_rank_count(runs, trainer):
    assert losses(runs / f"{trainer}_cut") == losses(runs / trainer)
    whole, cut = (load_file(runs / f"{name}-exported/model.safetensors") for name in (trainer, f"{trainer}_cut"))
    assert largest_difference(whole, cut) == 0


@pytest.mark.slow
@pytest.mark.parametrize("run", ["one", *RESUMED, *DIVIDED, "offload", *VARIANTS, "fsdp_muon"])
def test_checkpoint_and_whole_state_hold_the_drafter_alone_and_agree(runs, run):
    checkpoint = CheckpointFolder(runs / run / "checkpoints").newest()
    is_file = run.startswith(("one", "fsdp", "exchanged"))
    assert ranks_of(checkpoint) == (None if is_file else 1 if run.endswith("anew") else 2)
    weights, whole = whole_weights(checkpoint), load_file(runs / run / "whole.safetensors")
    kept = {name.split(".")[0] for name in weights}
    assert kept == {"model" if run in ("vanilla", "fsdp_muon") else "drafter"}  # nothing of the frozen target
    assert all(tensor.dtype == torch.float32 for tensor in whole.values())
    assert largest_difference(weights, whole) == 0


@pytest.mark.slow
@pytest.mark.parametrize("trainer", DIVIDED)
def test_divided_weights_are_exported_as_training_exports(runs, trainer, monkeypatch):
    monkeypatch.chdir(runs)
    monkeypatch.setattr(sys, "argv", ["spectrain.export", f"run={trainer}", f"out={trainer}-again", "weights=last"])
    run_command("spectrain.export")
    again, exported = runs / f"{trainer}-again", runs / f"{trainer}-exported"
    assert {file.name for file in again.iterdir()} == {file.name for file in exported.iterdir()}
    assert (again / "config.json").read_text() == (exported / "config.json").read_text()
    weights = load_file(again / "model.safetensors")
    assert "lm_head.weight" not in weights  # tied
    assert largest_difference(weights, load_file(exported / "model.safetensors")) == 0


@pytest.mark.slow
def test_a_bad_loss_on_one_of_two_ranks_stops_both_and_one_says_it(runs):
    said = (runs / "said.txt").read_text()
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert re.search(r"the loss is NaN or infinite at step 3, the last good checkpoint is .*2.ckpt", line)
    assert [file.name for file in (runs / "poisoned/checkpoints").glob("*.ckpt")] == ["step-00000002.ckpt"]
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("run", ["fsdp", "fsdp_cut", "exchanged"])
def test_fsdp_equals_ddp_and_takes_turns_with_it(runs, run):
    """Two gradients have one sum, and a norm below 1 clips nothing, so that even the bits are equal."""
    assert losses(runs / run) == losses(runs / "ddp")
    assert largest_difference(*(load_file(runs / name / "whole.safetensors") for name in (run, "ddp"))) == 0


@pytest.mark.slow
def test_muon_steps_divided_matrices_up_to_its_rounding(runs):
    ddp, fsdp = (losses(runs / f"{name}_muon") for name in ("ddp", "fsdp"))
    assert ddp[0] == fsdp[0]
    assert ddp[1] == pytest.approx(fsdp[1], abs=2e-3) != ddp[0]


PREVIOUS = {"input": "projected", "unembedding": "target", "previous_state": True}
ABLATIONS = [{}, {"k": 1}, {"feedback": False}, {"feedback": False, "target_activations": False}, {"n_layer": 1}]


def gradients(options: dict, recomputes: bool) -> dict[str, torch.Tensor | None]:
    """Of a drafter's training loss, by parameter, after one batch."""
    target = TargetModel(tiny_model("llama"))
    n_layer = options.get("n_layer", 2)
    rest = {"k": 3, "window_tokens": 8, **{name: value for name, value in options.items() if name != "n_layer"}}
    config = SpireConfig(shape_of(target.model), last_layers(target.model, n_layer), **rest)
    drafter = new_drafter(target, config, "pruned")
    module = SpireTraining(drafter, target, LossSettings(), OptimizerSettings())
    if recomputes:
        module.recompute_activations()
    tokens = torch.randint(4, VOCAB_SIZE, (2, 24), generator=torch.Generator().manual_seed(1))
    module.parts(TokenRows(tokens)[[0, 1]]).loss.backward()
    return {name: p.grad for name, p in drafter.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("options", [*ABLATIONS, {"input": "trained"}, PREVIOUS], ids=str)
def test_every_trained_parameter_gets_a_gradient_which_ddp_waits_for(options):
    found = gradients(options, recomputes=False)
    assert [name for name, gradient in found.items() if gradient is None or not gradient.any()] == []


@pytest.mark.parametrize("options", ABLATIONS, ids=str)
def test_recomputed_activations_give_equal_gradients(options, monkeypatch):
    kept = gradients(options, recomputes=False)
    calls = []
    block = LlamaBlock.forward
    monkeypatch.setattr(LlamaBlock, "forward", lambda *inputs: calls.append(1) or block(*inputs))
    recomputed = gradients(options, recomputes=True)
    once = options.get("n_layer", 2) * (1 if options.get("target_activations") is False else options.get("k", 3))
    assert len(calls) == 2 * once  # forward, and again in the backward pass
    assert largest_difference(kept, recomputed) == 0


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*")
def test_recomputed_activations_of_a_language_model_give_equal_gradients():
    found = []
    for recomputes in (False, True):
        model = tiny_model("llama").train().requires_grad_(True)
        module = LanguageModelTraining(model, OptimizerSettings())
        if recomputes:
            module.recompute_activations()
            assert model.is_gradient_checkpointing
        tokens = torch.randint(4, VOCAB_SIZE, (2, 24), generator=torch.Generator().manual_seed(1))
        batch = TokenRows(tokens.int())[[0, 1]]
        module.loss(module.states(batch), batch).backward()
        found.append({name: p.grad for name, p in module.named_parameters()})
    assert largest_difference(*found) == 0
