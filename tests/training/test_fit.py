"""The trainer of a config: which strategy, on which ranks, and from which checkpoints it may go on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra.utils import instantiate
from torch import nn

from spectrain.cli import composed
from spectrain.config import options_of
from spectrain.config.training import Optimizer as OptimizerSettings
from spectrain.errors import UserError
from spectrain.train import why_low
from spectrain.training import fit as fitting
from spectrain.training import strategies
from spectrain.training.fit import build_trainer, check_batches, prepare_resume
from spectrain.training.optim import build_optimizer, orthogonal
from spectrain.training.strategies import CPUZeroStrategy, ZeroStrategy
from tests.conftest import tiny_model
from tests.training.trainers import config_of

DDP_CHECKPOINT, ZERO_CHECKPOINT = "step-00000004.ckpt", "step-00000006.ckpt"


def zero(stage: int = 2) -> CPUZeroStrategy:
    return strategies.deepspeed("cpu", stage)


@pytest.fixture
def checkpoints(tmp_path) -> Path:
    """A plain checkpoint, and one of DeepSpeed for two ranks."""
    torch.save({"state_dict": {}}, tmp_path / DDP_CHECKPOINT)
    pieces = tmp_path / ZERO_CHECKPOINT / "checkpoint"
    pieces.mkdir(parents=True)
    for rank in range(2):
        torch.save({}, pieces / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    torch.save({}, pieces / "mp_rank_00_model_states.pt")
    return tmp_path


@pytest.mark.parametrize(("name", "expected"), [("AMX", "bf16-mixed"), ("AVX2", "32-true")])
def test_precision_is_what_the_processor_multiplies_the_fastest(use_processor, name, expected):
    use_processor(name)
    trainer = config_of("+exp=spire", "trainer.accelerator=cpu").trainer
    assert trainer.precision == expected
    assert strategies.precision_of(replace(trainer, precision="auto")) == expected
    assert build_trainer(config_of("+exp=spire"), 1, [], []).precision == expected
    assert strategies.precision_of(replace(trainer, precision="bf16-true")) == "bf16-true"


def test_float16_is_refused():
    config = config_of("+exp=spire", "trainer.precision=16-mixed")
    with pytest.raises(UserError, match="would round gradients before they are scaled; give bf16-mixed"):
        build_trainer(config, 1, [], [])


@pytest.mark.parametrize(("ranks", "again"), [(2, False), (1, True), (3, True)])
def test_a_checkpoint_of_deepspeed_is_resharded_for_another_number_of_ranks(checkpoints, ranks, again, monkeypatch):
    cut = []
    monkeypatch.setattr(fitting, "reshard", cut.append)
    trainer = SimpleNamespace(strategy=zero(), world_size=ranks, is_global_zero=True)
    prepare_resume(checkpoints / ZERO_CHECKPOINT, trainer)
    assert cut == [checkpoints / ZERO_CHECKPOINT] * again
    assert trainer.strategy.config.get("checkpoint") == ({"load_universal": True} if again else None)


def test_a_checkpoint_of_another_kind_is_refused(checkpoints):
    with pytest.raises(UserError, match="was written without DeepSpeed and cannot be resumed with it"):
        prepare_resume(checkpoints / DDP_CHECKPOINT, SimpleNamespace(strategy=zero(), world_size=2))
    with pytest.raises(UserError, match="was written with DeepSpeed and cannot be resumed without it"):
        prepare_resume(checkpoints / ZERO_CHECKPOINT, SimpleNamespace(strategy=None, world_size=2))


def test_muon_under_deepspeed_is_refused_with_the_remedy():
    cfg = config_of("+exp=target", "trainer=deepspeed_zero2", "trainer.accelerator=cpu", "trainer.devices=1")
    with pytest.raises(UserError, match="needs whole matrices.*give optimizer.name=adamw"):
        build_trainer(cfg, 1, [], [])


@pytest.mark.parametrize(("name", "rounding"), [("AMX", 0), ("AVX2", 2e-3)])
def test_muon_steps_as_torchs_does_in_the_dtype_that_the_processor_multiplies(use_processor, name, rounding):
    use_processor(name)
    start, settings = {"wide": torch.ones(8, 24), "tall": torch.ones(24, 8)}, OptimizerSettings("muon", lr=0.1)
    ours, theirs = ({name: nn.Parameter(one.clone()) for name, one in start.items()} for _ in range(2))
    built = build_optimizer([*ours.items(), ("norm", nn.Parameter(torch.ones(8)))], settings)
    expected = torch.optim.Muon(theirs.values(), lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for optimizer in (built, expected):
        torch.manual_seed(2)
        for _ in range(3):
            for one in optimizer.param_groups[0]["params"]:
                one.grad = torch.randn(one.shape)
            optimizer.step()
    for name, one in ours.items():
        assert (one - theirs[name]).abs().max() <= rounding < 0.1 < (one - start[name]).abs().max()
        assert (orthogonal(one).dtype == torch.bfloat16) == (rounding == 0)


@pytest.mark.parametrize(
    ("option", "stage", "offloads"),
    [("deepspeed_zero2", 2, False), ("deepspeed_zero2_offload", 2, True), ("deepspeed_zero3", 3, False)],
)
def test_deepspeed_on_gpus_and_on_cpu_ranks(option, stage, offloads):
    for accelerator, kind in (("gpu", ZeroStrategy), ("cpu", CPUZeroStrategy)):
        node = config_of("+exp=spire", f"trainer={option}", f"trainer.accelerator={accelerator}").trainer.strategy
        made = instantiate(node)
        assert type(made) is kind
        assert made.config["zero_optimization"]["stage"] == stage
        assert ("offload_optimizer" in made.config["zero_optimization"]) == offloads


def test_torchruns_ranks_take_the_place_of_devices_and_nodes(monkeypatch):
    for name, value in {
        "TORCHELASTIC_RUN_ID": "x",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "3",
        "RANK": "0",
        "LOCAL_RANK": "0",
    }.items():
        monkeypatch.setenv(name, value)
    cfg = config_of("+exp=spire", "trainer=ddp", "trainer.accelerator=cpu", "data.batch_size=12")
    trainer = build_trainer(cfg, 1, [], [])
    assert (trainer.num_devices, trainer.num_nodes, trainer.world_size) == (3, 2, 6)


def test_a_batch_that_ranks_cannot_share_out_is_refused():
    options = ("trainer=ddp", "trainer.accelerator=cpu", "data.batch_size=4")
    cfg = config_of("+exp=spire", *options, "trainer.devices=3")
    with pytest.raises(UserError, match="data.batch_size=4 rows cannot be shared out evenly by 3 ranks"):
        build_trainer(cfg, 1, [], [])


def test_defaults_fit_the_machine(monkeypatch, tmp_path):
    """One row for each of eight GPUs, the checkpoint's dtype; on a CPU one process in float32."""
    on_cpu = config_of("+exp=spire")
    assert (on_cpu.trainer.accelerator, on_cpu.trainer.devices) == ("cpu", "auto")
    assert (on_cpu.data.batch_size, on_cpu.target.dtype) == (4, "float32")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=85e9))
    on_gpus = config_of("+exp=spire")
    assert (on_gpus.trainer.accelerator, on_gpus.trainer.precision) == ("gpu", "bf16-mixed")
    assert (on_gpus.data.batch_size, on_gpus.target.dtype) == (8, "bfloat16")
    assert config_of("+exp=spire", "trainer=cpu").target.dtype == "float32"
    assert config_of("+exp=spire", "target.device=cpu").target.dtype == "float32"
    assert config_of("+exp=specdecpp").data.batch_size == 32
    tiny_model().save_pretrained(tmp_path)
    assert config_of("+exp=spire", f"target.path={tmp_path}").target.dtype == "float32"
    assert config_of("+exp=spire", "target.path=no/where").target.dtype == "float32"
    assert config_of("+exp=spire", "trainer.devices=3").data.batch_size == 6
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert config_of("+exp=spire", "trainer=ddp").data.batch_size == 16


def test_a_sweep_in_one_command_on_several_ranks_is_sent_to_torchrun():
    options = ["trainer=ddp", "trainer.accelerator=cpu", "data.batch_size=4"]
    with pytest.raises(UserError, match="-m on 2 ranks needs torchrun --nproc-per-node 2"):
        build_trainer(config_of("+exp=spire", *options, "trainer.devices=2"), 1, [], [], in_sweep=True)
    build_trainer(config_of("+exp=spire", *options, "trainer.devices=1"), 1, [], [], in_sweep=True)


@pytest.mark.parametrize(("accumulated", "n_batches", "max_steps"), [(2, 41, 20), (2, 41, 99), (1, 41, 99)])
def test_gradients_of_whole_steps_may_be_accumulated(accumulated, n_batches, max_steps):
    cfg = config_of("+exp=spire", f"trainer.accumulate_grad_batches={accumulated}")
    check_batches(cfg, SimpleNamespace(strategy=zero(), max_steps=max_steps), 4 * n_batches)


def test_a_gradient_that_would_run_on_into_the_next_epoch_is_refused_under_deepspeed():
    cfg = config_of("+exp=spire", "trainer.accumulate_grad_batches=42")
    with pytest.raises(UserError, match="accumulate_grad_batches=42 is more than the 41 batches of an epoch"):
        check_batches(cfg, SimpleNamespace(strategy=zero(), max_steps=21), 4 * 41)
    check_batches(cfg, SimpleNamespace(strategy=None, max_steps=21), 4 * 41)


@pytest.mark.parametrize(
    ("options", "tokens", "tau", "said"),
    [
        (["corpus=chats.json"], 2_000_000, 2.0, ()),
        (["corpus=chats.json"], 2_000_000, 1.7, ("the target did not write", "prompts=<questions> target=smollm2")),
        (["corpus=[chats.json,responses:answers]"], 2_000_000, 1.7, ()),
        (["corpus=responses:answers"], 900_000, 2.0, ("from 900,000 tokens only (30 steps)", "more text and time")),
        (["data=offline"], 900_000, 2.0, ("from 900,000 tokens only",)),
        (["data=offline", "init=one"], 900_000, 2.0, ()),
    ],
)
def test_a_low_tau_is_explained_with_what_helps(options, tokens, tau, said):
    config = options_of("train", composed("train", "+exp=spire", "target=smollm2", *options))
    found = {"plain": {"64 tokens, greedy": {"value": 1.0}}, "spire": {"64 tokens, greedy": {"value": tau}}}
    before = [{"drafter": "one", "tokens": 200_000}] if "init=one" in options else []
    result = {"tokens": tokens, "steps": 30, "metrics": {"eval/tau_expected": 2.0}, "tau": found, "before": before}
    why = why_low(result, config)
    assert (why is None) == (said == ())
    assert all(one in why for one in said)
