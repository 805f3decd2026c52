"""The trainer of a config: which strategy, on which ranks, and from which checkpoints it may go on."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from spectrain.errors import UserError
from spectrain.training import fit as fitting
from spectrain.training import precision as precisions
from spectrain.training.checkpoints import check_readable, whole_weights
from spectrain.training.fit import build_trainer, check_batches, prepare_resume
from spectrain.training.strategies import CPUZeroStrategy, ZeroStrategy, strategy
from tests.test_cli import composed

DDP_CHECKPOINT, ZERO_CHECKPOINT = "step-00000004.ckpt", "step-00000006.ckpt"


def zero(stage: int = 2) -> CPUZeroStrategy:
    return strategy(composed("train", "+exp=spire", f"trainer=deepspeed_zero{stage}", "trainer.accelerator=cpu"))


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


@pytest.mark.parametrize(("multiplies", "expected"), [(True, "bf16-mixed"), (False, "32-true")])
def test_precision_is_what_the_processor_multiplies_the_fastest(monkeypatch, multiplies, expected):
    monkeypatch.setattr(precisions, "multiplies", lambda dtype: multiplies)
    trainer = composed("train", "+exp=spire", "trainer.accelerator=cpu").trainer
    assert trainer.precision == "auto"
    assert precisions.precision_of(trainer) == expected
    assert build_trainer(composed("train", "+exp=spire"), [], []).precision == expected
    assert precisions.precision_of({**trainer, "precision": "bf16-true"}) == "bf16-true"


@pytest.mark.parametrize("precision", ["16-mixed", "16-true", "16"])
def test_float16_is_refused(precision):
    config = composed("train", "+exp=spire", f"trainer.precision={precision}")
    with pytest.raises(UserError, match="would round gradients before they are scaled; give bf16-mixed"):
        build_trainer(config, [], [])


def test_a_plain_checkpoint_goes_on_at_any_number_of_ranks(checkpoints):
    for ranks in (1, 2, 4):
        prepare_resume(checkpoints / DDP_CHECKPOINT, SimpleNamespace(strategy=None, world_size=ranks))


@pytest.mark.parametrize(("ranks", "again"), [(2, False), (1, True), (3, True)])
def test_a_checkpoint_of_deepspeed_is_cut_anew_for_another_number_of_ranks(checkpoints, ranks, again, monkeypatch):
    cut = []
    monkeypatch.setattr(fitting, "cut_anew", cut.append)
    trainer = SimpleNamespace(strategy=zero(), world_size=ranks, is_global_zero=True)
    prepare_resume(checkpoints / ZERO_CHECKPOINT, trainer)
    assert cut == [checkpoints / ZERO_CHECKPOINT] * again
    assert trainer.strategy.config.get("checkpoint") == ({"load_universal": True} if again else None)


def test_a_checkpoint_of_another_kind_is_refused(checkpoints):
    with pytest.raises(UserError, match="was written without DeepSpeed and cannot be resumed with it"):
        prepare_resume(checkpoints / DDP_CHECKPOINT, SimpleNamespace(strategy=zero(), world_size=2))
    with pytest.raises(UserError, match="was written with DeepSpeed and cannot be resumed without it"):
        prepare_resume(checkpoints / ZERO_CHECKPOINT, SimpleNamespace(strategy=None, world_size=2))


@pytest.mark.parametrize("file", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_a_damaged_piece_is_said(checkpoints, file):
    piece = checkpoints / ZERO_CHECKPOINT / "checkpoint" / file
    piece.write_bytes(piece.read_bytes()[:100])
    with pytest.raises(UserError, match="step-00000006.ckpt cannot be read"):
        prepare_resume(checkpoints / ZERO_CHECKPOINT, SimpleNamespace(strategy=zero(), world_size=2))


@pytest.mark.parametrize("piece", ["checkpoint/x.pt", "universal/zero/weight/fp32.pt"])
def test_no_code_of_a_checkpoint_is_run(checkpoints, piece):
    class Code:
        def __reduce__(self):
            return os.mkdir, (str(checkpoints / "ran"),)

    file = checkpoints / ZERO_CHECKPOINT / piece
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"module": Code()}, file)
    for read in (check_readable, whole_weights):
        with pytest.raises(UserError, match=r"step-00000006.ckpt cannot be read \(UnpicklingError\)"):
            read(checkpoints / ZERO_CHECKPOINT)
    assert not (checkpoints / "ran").exists()


@pytest.mark.parametrize(("kind", "fits"), [(ZeroStageEnum, True), (str, False)], ids=["its stage", "a type"])
def test_an_enumeration_may_be_pickled_by_name_as_python_3_11_2_does(checkpoints, kind, fits):
    class ByName:
        def __reduce__(self):
            return getattr, (kind, "gradients" if fits else "format")

    torch.save({"stage": ByName()}, checkpoints / ZERO_CHECKPOINT / "checkpoint" / "x.pt")
    with nullcontext() if fits else pytest.raises(UserError, match="step-00000006.ckpt cannot be read"):
        check_readable(checkpoints / ZERO_CHECKPOINT)


def test_a_checkpoint_that_names_pieces_elsewhere_is_refused(checkpoints):
    (checkpoints / ZERO_CHECKPOINT / "latest").write_text("../elsewhere")
    with pytest.raises(UserError, match="step-00000006.ckpt cannot be read"):
        check_readable(checkpoints / ZERO_CHECKPOINT)


def test_pieces_that_lack_their_content_are_one_sentence(checkpoints):
    check_readable(checkpoints / ZERO_CHECKPOINT)
    with pytest.raises(UserError, match="step-00000006.ckpt cannot be read"):
        whole_weights(checkpoints / ZERO_CHECKPOINT)


def test_muon_under_deepspeed_is_refused_with_the_remedy():
    cfg = composed("train", "+exp=target", "trainer=deepspeed_zero2")
    with pytest.raises(UserError, match="needs whole matrices.*give optimizer.name=adamw"):
        strategy(cfg)


@pytest.mark.parametrize("node", ["{name: fsdp}", "{stage: 2}"])
def test_a_strategy_node_of_something_else_is_refused(node):
    with pytest.raises(UserError, match="is unknown; give ddp, auto or trainer=deepspeed_zero2"):
        strategy(composed("train", "+exp=spire", f"trainer.strategy={node}"))


def test_a_stage_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match="stage=4 must be 1, 2 or 3"):
        strategy(composed("train", "+exp=spire", "trainer=deepspeed_zero2", "trainer.strategy.stage=4"))


def test_an_unknown_option_of_deepspeed_is_said():
    with pytest.raises(UserError, match="trainer.strategy has no option offload; it has stage, offload_optimizer"):
        strategy(composed("train", "+exp=spire", "trainer=deepspeed_zero2", "+trainer.strategy.offload=true"))


@pytest.mark.parametrize(
    ("option", "stage", "offloads"),
    [("deepspeed_zero2", 2, False), ("deepspeed_zero2_offload", 2, True), ("deepspeed_zero3", 3, False)],
)
def test_deepspeed_on_gpus_and_on_cpu_ranks(option, stage, offloads):
    for accelerator, kind in (("gpu", ZeroStrategy), ("cpu", CPUZeroStrategy)):
        made = strategy(composed("train", "+exp=spire", f"trainer={option}", f"trainer.accelerator={accelerator}"))
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
    cfg = composed("train", "+exp=spire", "trainer=ddp", "trainer.accelerator=cpu", "data.batch_size=12")
    trainer = build_trainer(cfg, [], [])
    assert (trainer.num_devices, trainer.num_nodes, trainer.world_size) == (3, 2, 6)


def test_a_batch_that_ranks_cannot_share_out_is_refused():
    cfg = composed("train", "+exp=spire", "trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=3")
    with pytest.raises(UserError, match="data.batch_size=4 rows cannot be shared out evenly by 3 ranks"):
        build_trainer(cfg, [], [])


def test_a_sweep_in_one_command_on_several_ranks_is_sent_to_torchrun():
    options = ["trainer=ddp", "trainer.accelerator=cpu", "data.batch_size=4"]
    with pytest.raises(UserError, match="-m on 2 ranks needs torchrun --nproc-per-node 2"):
        build_trainer(composed("train", "+exp=spire", *options, "trainer.devices=2"), [], [], in_sweep=True)
    build_trainer(composed("train", "+exp=spire", *options, "trainer.devices=1"), [], [], in_sweep=True)


@pytest.mark.parametrize(("accumulated", "n_batches", "max_steps"), [(2, 41, 20), (2, 40, 99), (1, 41, 99)])
def test_gradients_that_end_with_the_epoch_may_be_accumulated(accumulated, n_batches, max_steps):
    cfg = composed("train", "+exp=spire", f"trainer.accumulate_grad_batches={accumulated}")
    check_batches(cfg, SimpleNamespace(strategy=zero(), max_steps=max_steps), 4 * n_batches)


def test_a_gradient_that_would_run_on_into_the_next_epoch_is_refused_under_deepspeed():
    cfg = composed("train", "+exp=spire", "trainer.accumulate_grad_batches=2")
    with pytest.raises(UserError, match="accumulate_grad_batches=2 does not divide the 41 batches of an epoch"):
        check_batches(cfg, SimpleNamespace(strategy=zero(), max_steps=21), 4 * 41)
    check_batches(cfg, SimpleNamespace(strategy=None, max_steps=21), 4 * 41)


def test_a_checkpoint_is_written_where_it_belongs_and_nowhere_else(tmp_path, monkeypatch):
    """A kill would leave what was written elsewhere."""

    def never(*_, **__):
        raise AssertionError("a temporary file")

    monkeypatch.setattr("tempfile.mkstemp", never)
    trainer = build_trainer(composed("train", "+exp=spire"), [], [])
    trainer.strategy.checkpoint_io.save_checkpoint({"a": torch.ones(2)}, tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt")["a"].tolist() == [1.0, 1.0]
