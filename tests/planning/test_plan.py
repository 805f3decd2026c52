"""Plans of trainings: counted steps, bytes by hand, steps, and the options that a run keeps."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig

from spectrain.cli import composed
from spectrain.config import options_of
from spectrain.config.training import Train
from spectrain.data.texts import train_tokenizer
from spectrain.errors import UserError
from spectrain.models.pruned_init import FIT_TOKENS
from spectrain.planning.defaults import peak_tokens_per_s, plan_for, settled
from spectrain.planning.dry_step import StepCost, cost_of
from spectrain.planning.peaks import Peaks
from spectrain.planning.plan import Machine, Outline, plan_of
from spectrain.target import load_target
from spectrain.train import main as train
from spectrain.train import obstacles, steps_of
from spectrain.training.base import Experiment
from spectrain.training.callbacks import UNKNOWN_STEPS, StepsForHours
from spectrain.training.runs import RunFolder
from spectrain.training.sources import Online
from tests.conftest import tiny_model
from tests.training.trainers import config_of

PEAKS = Peaks("a machine", 1e9, 1e8)


SHAPES = {"8B": (4096, 14336, 32, 32), "70B": (8192, 28672, 80, 64)}


def llama_3(folder, width, inner, n_blocks, n_heads):
    """Write the config of a Llama 3.1."""
    shape = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": n_blocks}
    shape |= {"num_attention_heads": n_heads, "num_key_value_heads": 8, "vocab_size": 128_256}
    LlamaConfig(**shape, max_position_embeddings=131_072, dtype="bfloat16").save_pretrained(folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny_model().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("half", [False, True])
def test_a_counted_step_has_the_flops_bytes_and_seconds_of_its_products(half):
    with torch.device("meta"):
        x, weight = torch.empty(4, 8), torch.nn.Parameter(torch.empty(16, 8))
        cost = cost_of(lambda: F.linear(x, weight).sum(), half)
    assert cost.flops.sum() == 2 * (2 * 4 * 8 * 16)  # forward, and the gradient of the weight
    width = 2 if half else 4
    forward = width * (4 * 8 + 8 * 16 + 4 * 16)
    assert forward in cost.moved_bytes
    casts = 2 * (4 * 8 + 16 * 8) if half else 0
    assert cost.peak_bytes >= casts + width * 4 * 16
    alone = replace(cost, flops=np.array([1e6]), moved_bytes=np.array([1e6]))
    assert alone.seconds(PEAKS) == pytest.approx(0.01)  # reading takes longer than computing


def test_a_counted_step_keeps_what_the_backward_pass_needs_and_frees_the_rest():
    with torch.device("meta"):
        weight = torch.nn.Parameter(torch.empty(1000))
        kept = cost_of(lambda: (weight.exp().exp()).sum(), half=False)  # exp keeps its result, 4,000 bytes each
        freed = cost_of(lambda: ((weight + 1) + 1).sum(), half=False)
    assert kept.peak_bytes > 3 * 4000
    assert freed.peak_bytes < kept.peak_bytes


def test_half_of_causal_attention_is_counted_and_a_cast_that_died_is_no_other_tensor_s():
    with torch.device("meta"):
        x = torch.empty(1, 2, 16, 8, requires_grad=True)
        whole, causal = (
            cost_of(partial(lambda c: F.scaled_dot_product_attention(x, x, x, is_causal=c).sum(), c), half=True)
            for c in (False, True)
        )
        cost_of(lambda: sum((torch.empty(n, 8) @ torch.empty(8, 4)).sum() * x.sum() for n in range(1, 50)), half=True)
    assert causal.flops.sum() == whole.flops.sum() / 2 > 0


@pytest.mark.parametrize("options", [[], pytest.param(["n_layer=quarter"], marks=pytest.mark.slow)], ids=str)
def test_packed_rows_of_32768_tokens_of_an_8b_shaped_drafter_fit_one_card(tmp_path, options):
    """Llama 3.1 8B: two blocks as they are, eight by computing activations again, which is found to be needed."""
    llama_3(tmp_path, *SHAPES["8B"])
    rows = "data.row_tokens=32768", "data.batch_size=1", "data.document_mask=true", "target.dtype=bfloat16"
    machine = "hardware=h100", "trainer.devices=1", "plan=true"
    config = config_of("+exp=spire", f"target.path={tmp_path}", *rows, *machine, *options)
    assert config.trainer.activation_checkpointing == bool(options)
    plan, machine = plan_for(config)
    assert plan.memory["forward and backward pass"] < 27 * 2**30
    assert plan.bytes < 0.8 * machine.memory_bytes


@pytest.mark.slow
@pytest.mark.parametrize("n_gpus", [8, 64])
@pytest.mark.parametrize("name", SHAPES)
def test_the_page_s_table_is_what_the_plan_says_today(name, n_gpus, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text().split("## Long rows")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    column = next(row for row in rows if "70B on 64" in row).index(f"{name} on {n_gpus}")
    said = {row[0]: row[column] for row in rows if len(row) == 5}
    llama_3(tmp_path, *SHAPES[name])
    options = ["recipe=llama_8b", "hardware=h100", "trainer.devices=8", "plan=true", f"target.path={tmp_path}"]
    options += ["trainer.num_nodes=8", "data.batch_size=1024"] if n_gpus == 64 else []
    if name == "70B":
        options += ["n_layer=4", "trainer=deepspeed_zero2", "target.parallel=tp"]
        options += ["target.tp=8"] if n_gpus == 64 else []
    plan, _ = plan_for(config_of("+exp=spire", *options))
    found = {what: f"{size / 2**30:.2f} GiB" for what, size in plan.memory.items()}
    found["tokens per second"] = f"{plan.tokens_per_s:,.0f}"
    found["steps of 0.9 tokens per parameter"] = f"{plan.steps:,}"
    assert {what: said[what] for what in found} == found


@pytest.mark.parametrize("data", [["data=offline"], ["data.document_mask=true"], []], ids=str)
def test_memory_is_linear_in_the_row_and_a_drafter_costs_its_window_alone(tiny, data):
    """Equal tokens in rows of 1,024 and 65,536. What attention of the target takes more is its FLOPs."""

    def step(row_tokens: int) -> StepCost:
        options = f"target.path={tiny}", f"data.row_tokens={row_tokens}", "trainer.accelerator=cpu"
        return Outline.of(config_of("+exp=spire", *options, *data)).step(2**16 // row_tokens)

    short, long = map(step, (1024, 2**16))
    assert long.peak_bytes == pytest.approx(short.peak_bytes, rel=0.01)
    assert long.flops.sum() == pytest.approx(short.flops.sum(), rel=0.01) or data != ["data=offline"]


def test_a_plan_refuses_rows_that_are_longer_than_the_context(tiny):
    options = "train", "+exp=spire", f"target.path={tiny}", "data.row_tokens=257", "plan=true", "hardware=h100"
    with pytest.raises(UserError, match="data.row_tokens=257 is longer than the target's context of 256; lower"):
        train(options_of("train", composed(*options)))


def test_a_plan_says_what_would_end_the_training(tmp_path, tiny, monkeypatch, caplog):
    shutil.copytree(tiny, tmp_path / "target")
    tokenizer = train_tokenizer(["a text"], 270)
    tokenizer.chat_template = {"a": "{{ messages }}", "b": "{{ tools }}"}
    tokenizer.save_pretrained(tmp_path / "target")
    monkeypatch.setattr("spectrain.train.free_bytes", lambda folder: 0)
    options = f"target.path={tmp_path}/target", "data.row_tokens=64", "plan=true", "hardware=h100"
    train(options_of("train", composed("train", "+exp=spire", *options)))
    assert "no conversation could be read: the tokenizer of" in caplog.text
    assert "but 0 GiB of the disk are free here; make space" in caplog.text


def test_the_peak_in_tokens_per_second_is_that_of_all_ranks(tiny):
    options = "+exp=spire", f"target.path={tiny}", "data.row_tokens=32", "window_tokens=8"
    assert peak_tokens_per_s(config_of(*options)) is None  # what this CPU has at the most is not known
    config = config_of(*options, "hardware=h100", "trainer.devices=2", "trainer.precision=32-true")
    flops = Outline.of(config).step(3).flops.sum() / (3 * 32)
    assert peak_tokens_per_s(config) == pytest.approx(2 * 67.0e12 / flops, rel=0.01)
    again = replace(config, trainer=replace(config.trainer, activation_checkpointing=True))
    assert peak_tokens_per_s(again) == peak_tokens_per_s(config)  # what is computed again is not counted


def test_a_target_that_is_made_at_first_use_is_made_with_numbers(tiny, monkeypatch):
    asked = []
    monkeypatch.setattr("spectrain.planning.plan.target_path", lambda name: asked.append(torch.ones(1)) or name)
    Outline.of(config_of("+exp=spire", f"target.path={tiny}", "data.row_tokens=32", "window_tokens=8"))
    assert [one.is_meta for one in asked] == [False]


def test_bytes_of_a_rank_are_those_of_the_arithmetic(tiny):
    options = "+exp=spire", f"target.path={tiny}", "data.row_tokens=32", "window_tokens=8", "trainer.devices=2"
    config = config_of(*options, "trainer.accelerator=cpu")
    outline = Outline.of(config)
    n = outline.trained
    assert outline.weights(2) == {
        "target": sum(one.nbytes for one in (*tiny_model().parameters(), *tiny_model().buffers())),
        "drafter": 4 * n,
        "optimizer": 8 * n,
        "gradients in exchange": 4 * n,
    }
    stages = {
        stage: config_of(*options, f"trainer=deepspeed_zero{stage}", "trainer.accelerator=cpu") for stage in (2, 3)
    }
    of_stage = {stage: Outline.of(one).weights(2) for stage, one in stages.items()}
    assert [of_stage[2][name] for name in ("drafter", "optimizer")] == [2 * n, 12 * n // 2]  # as training_bytes.json
    assert of_stage[3]["drafter"] == 2 * n // 2 + 2 * n
    fsdp = Outline.of(config_of(*options, "trainer=fsdp", "trainer.accelerator=cpu"))
    assert [fsdp.weights(2)[name] for name in ("drafter", "optimizer")] == [4 * n // 2, 8 * n // 2]
    step = fsdp.step(2)  # all is gathered for it, and a share of the gradients is kept
    assert fsdp.pass_bytes(step, 2) == step.peak_bytes + 4 * n + 4 * n // 2
    plan = plan_of(config, Machine(PEAKS, None, training_share=0.5), 2)
    assert plan.steps == round(0.9 * n / (4 * 32))
    n_target = sum(one.numel() for one in tiny_model().parameters())
    assert plan.fit_s == pytest.approx(2 * n_target * FIT_TOKENS / PEAKS.flops_per_s / 0.5)
    assert plan.hours == pytest.approx((plan.fit_s + plan.steps * plan.step_s) / 3600)
    fitted = config_of(*options, "trainer.accelerator=cpu", "init=checkpoints/one")  # its input was fitted before
    assert plan_of(fitted, Machine(PEAKS, None), 2).fit_s == 0
    within = plan_of(replace(config, hours=1.0), Machine(PEAKS, None, training_share=0.5), 2)
    assert within.steps == round((3300 - plan.fit_s) / plan.step_s)
    assert plan_of(config, Machine(PEAKS, None), 2).step_s == pytest.approx(plan.step_s / 2)
    assert plan_of(config, Machine(PEAKS, None, link_bytes_per_s=1e3), 2).step_s > 4 * n / 1e3  # the all-reduce


@pytest.mark.parametrize(("options", "passes"), [([], 10), (["hours=9"], 20), (["max_steps=20"], 4)])
def test_a_plan_reads_the_rows_of_a_store_as_often_as_the_training(tiny, monkeypatch, options, passes):
    store = SimpleNamespace(held_out=np.arange(14) >= 10)
    monkeypatch.setattr("spectrain.planning.plan.open_features", lambda folder, verify: store)
    options = f"target.path={tiny}", "data=offline", "data.path=store", "data.row_tokens=32", *options
    config = config_of("+exp=spire", *options, "data.batch_size=2", "trainer.accelerator=cpu", "window_tokens=8")
    plan = plan_of(config, machine := Machine(PEAKS, None), 1)
    assert (plan.passes, plan.steps, plan.fit_s) == (passes, 5 * passes, 0)
    assert f"tokens, {passes}.0 passes over the text)" in plan.sentence(machine)


def test_rows_of_a_step_are_divided_until_they_fit(tiny):
    options = (
        "+exp=spire",
        f"target.path={tiny}",
        "data.row_tokens=64",
        "window_tokens=8",
        "data.batch_size=8",
        "plan=true",
    )
    hardware = "hardware=h100", "trainer.devices=2"
    whole = config_of(*options, *hardware)
    assert (whole.data.batch_size, whole.trainer.accumulate_grad_batches) == (8, 1)
    outline = Outline.of(whole)
    held = sum(outline.weights(2).values())
    two_rows = outline.pass_bytes(outline.step(2), 2)
    memory = (held + two_rows) / 0.92 + 1
    divided = config_of(*options, *hardware, f"hardware.memory_bytes={memory}")
    assert (divided.data.batch_size, divided.trainer.accumulate_grad_batches) == (4, 2)
    asked = config_of(*options, *hardware, f"hardware.memory_bytes={memory}", "trainer.accumulate_grad_batches=1")
    assert asked.data.batch_size == 8


def test_a_run_is_named_by_what_was_asked_and_goes_on_as_it_began(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = options_of("train", composed("train", "+exp=spire", "data.row_tokens=512"))
    with RunFolder.claim(asked, settle=settled) as first:
        assert first.config.data.batch_size == 4
        first.begin()
        first.change({"data.row_tokens": 128})

    def elsewhere(config: Train) -> Train:  # a smaller GPU divides the batch
        config = settled(config)
        there = {"accelerator": "gpu", "precision": "bf16-true", "accumulate_grad_batches": 4}
        return replace(config, trainer=replace(config.trainer, **there), data=replace(config.data, batch_size=2))

    later = replace(asked, trainer=replace(asked.trainer, devices=8), tau=replace(asked.tau, context_tokens=[9]))
    with RunFolder.claim(later, settle=elsewhere) as again:
        assert (again.path, again.id) == (first.path, first.id)
        data, trainer = again.config.data, again.config.trainer
        assert (data.batch_size, data.row_tokens, trainer.accumulate_grad_batches) == (4, 128, 1)
        assert trainer.precision == first.config.trainer.precision
        assert (trainer.accelerator, trainer.devices) == ("gpu", 8)  # where it runs now
        assert again.config.tau.context_tokens == [9]
    with RunFolder.claim(replace(later, seed=1), settle=settled) as other:
        assert other.config.data.batch_size == 8
    with pytest.raises(UserError, match="differs in data"):
        RunFolder.find(replace(asked, run_dir=str(first.path), data=replace(asked.data, batch_size=4)))


def test_steps_follow_from_parameters_and_text(caplog):
    config = config_of(
        "+exp=spire", "tokens_per_parameter=2", "data.row_tokens=100", "trainer.accumulate_grad_batches=5"
    )
    steps = partial(Experiment.steps_of, SimpleNamespace(config=config))
    assert steps(10_000) == 2 * 10_000 / (4 * 5 * 100)
    assert steps(10_000, n_rows=20) == steps(10_000)  # ten passes over the text
    assert not caplog.text
    assert steps(10_000, n_rows=8) == 10 * 8 / (4 * 5)
    assert "tokens_per_parameter=2 asks for 25 passes over the text, but at most 10 are made" in caplog.text
    assert partial(Experiment.steps_of, SimpleNamespace(config=replace(config, max_steps=7)))(10_000) == 7
    config.own.epochs = 40  # as many as are asked for, and of no number of rows that is not known yet
    assert steps(10_000, n_rows=8) == 40 * 8 / (4 * 5)
    assert steps(10_000) == 2 * 10_000 / (4 * 5 * 100)


def test_hours_become_steps_after_the_first_ones_and_are_kept_on_a_machine_that_becomes_slower(
    tmp_path, monkeypatch, caplog
):
    run = RunFolder(tmp_path, Train(hours=1.0), "id")
    now_s = iter(range(1000))
    monkeypatch.setattr("time.monotonic", lambda: next(now_s))
    loop = SimpleNamespace(max_steps=UNKNOWN_STEPS)
    trainer = SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_loop=loop),
        strategy=SimpleNamespace(broadcast=lambda n: n),
        is_global_zero=True,
    )
    caplog.set_level("INFO")
    callback = StepsForHours(200.0, 150, run.note_steps)
    for batch in range(2, 40):  # two batches per step, of a second each
        trainer.global_step, trainer.max_steps = batch // 2, loop.max_steps
        callback.on_train_batch_end(trainer, None, None, None, 0)
    assert loop.max_steps == 101  # the first one ended at 0 s
    assert "101 steps of 2.00 s fit into hours=, 13.5 passes over the text" in caplog.text
    assert "too few" not in caplog.text
    assert steps_of(replace(run, resumes=True), None, None) == 101
    now_s = iter(range(39, 1000, 2))  # other work: a batch takes two seconds
    for batch in range(40, 150):
        trainer.global_step, trainer.max_steps = batch // 2, loop.max_steps
        callback.on_train_batch_end(trainer, None, None, None, 0)
    assert callback.ends_s - 4 <= 4 * (loop.max_steps - 20) + 39 <= callback.ends_s + 4
    assert run.facts()["steps"] == loop.max_steps
    few, loop.max_steps, now_s = StepsForHours(200.0, 30, run.note_steps), UNKNOWN_STEPS, iter(range(1000))
    for batch in range(2, 40):
        trainer.global_step, trainer.max_steps = batch // 2, loop.max_steps
        few.on_train_batch_end(trainer, None, None, None, 0)
    assert loop.max_steps == 30
    assert "30 steps have read it 20 times" in caplog.text
    assert steps_of(run, None, None) == UNKNOWN_STEPS  # fresh=true, beside what an earlier run has left


def test_a_small_corpus_makes_shorter_rows_and_holds_more_of_them_out(shared, tmp_path, monkeypatch, caplog):
    for i in range(12):
        (tmp_path / f"{i}.txt").write_text(f"number {i} of twelve short texts " * 12)
    monkeypatch.setattr("spectrain.planning.defaults.ROW_TOKENS", 256)
    asked = options_of("train", composed("train", "+exp=spire", f"corpus={tmp_path}", "trainer.devices=2"))
    run = RunFolder(tmp_path / "run", settled(asked), "id", asked=asked)
    config, target = run.config, load_target(shared / "target")
    found = Online(**vars(config.data)).drafter_rows(run, target)
    with pytest.raises(UserError, match="no held-out row of 256 tokens"):
        Online(**vars(config.data)).drafter_rows(replace(run, asked=None), target)  # if all was asked for
    run.change(found.changed)
    row_tokens = config.data.row_tokens
    assert (row_tokens, config.corpus.held_out_share) == (64, 0.2)
    assert config.tau.context_tokens == [row_tokens // 4, row_tokens // 2]
    assert run.asked.data.row_tokens is None
    assert len(found.train) >= config.data.batch_size == found.batch_size
    assert "the corpus is small: data.row_tokens=64" in caplog.text


def test_a_plan_is_printed_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train(options_of("train", composed("train", "+exp=spire", "plan=true", "hardware=h100", "trainer.devices=8")))
    said = " ".join(capsys.readouterr().out.split())
    assert "memory of one rank" in said
    parameters = "1.74 million parameters train for a target of 7.48 million"
    assert f"{parameters}, at most 191 steps (1.56 million tokens) of 8 x 1,024 on 8 x H100" in said
    assert not any(tmp_path.iterdir())
    with pytest.raises(UserError, match="plan=true predicts what drafters take"):
        train(options_of("train", composed("train", "+exp=specdecpp", "plan=true")))


def test_a_plan_of_hours_counts_the_steps_that_fit_beside_measuring_tau_and_warns_of_few(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = settled(options_of("train", composed("train", "+exp=spire", "hours=1", "hardware=h100", "plan=true")))
    plan, _ = plan_for(config)
    assert plan.hours == pytest.approx((3600 - 300) / 3600, rel=0.01)  # at most five minutes are for tau
    assert list(obstacles(config, plan)) == []
    few = replace(plan, steps=49)
    assert list(obstacles(config, few)) == [f"49 steps, {few.tokens:,} tokens, are few to learn from; give more hours="]
    assert list(obstacles(config, replace(few, within_hours=None))) == []
