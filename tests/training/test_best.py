"""The best weights are kept, whole, whatever kills the run; validation's numbers are those of all its rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger

from spectrain.target import TargetModel
from spectrain.training.callbacks import KeepBest
from spectrain.training.checkpoints import BestFolder
from spectrain.training.data import RowData, TokenRows, held_out_batches
from spectrain.training.optim import OptimizerSettings
from spectrain.training.runs import read_csv
from spectrain.training.sums import ValidationSums
from spectrain.training.vanilla import LanguageModelTraining
from tests.conftest import VOCAB_SIZE, noisy_copy, tiny_model
from tests.training.trainers import quiet_trainer


def weights(value: float) -> dict[str, torch.Tensor]:
    shared = torch.full((3,), value)
    return {"model.a": shared, "model.b": shared, "sums.c": torch.zeros(1)}  # tied, which safetensors refuses


def test_the_highest_expected_tau_is_kept_and_of_equals_the_later(tmp_path):
    folder = BestFolder(tmp_path / "best")
    assert folder.read() is None
    kept = [folder.offer(step, weights(step), value) for step, value in ((1, 2.0), (2, 1.5), (3, 2.0), (4, 1.9))]
    assert kept == [True, False, True, False]
    assert folder.read().facts() == {"step": 3, "expected": 2.0}
    assert {file.name for file in folder.path.iterdir()} == {"best.json", "step-00000003.safetensors"}
    assert folder.weights().keys() == {"model.a", "model.b", "sums.c"}
    assert folder.weights()["model.b"].tolist() == [3.0] * 3
    assert folder.offer(5, weights(5))  # nothing is known of them


def fit(tmp_path, *callbacks, max_steps=6, target=None, val_rows=3, **options):
    rows = torch.randint(4, VOCAB_SIZE, (11, 16), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    model = tiny_model("llama", initializer_range=0.02).train().requires_grad_(True)
    module = LanguageModelTraining(model, OptimizerSettings(lr=1e-2, warmup_steps=2), target)
    trainer = quiet_trainer(
        max_steps=max_steps,
        callbacks=list(callbacks),
        logger=CSVLogger(tmp_path, name="metrics", version=0),
        log_every_n_steps=1,
        val_check_interval=2,
        **options,
    )
    trainer.fit(module, datamodule=RowData(TokenRows(rows), TokenRows(rows[:val_rows]), batch_size=2, seed=3))
    return trainer, module, rows


def test_weights_are_compared_every_few_validations_and_at_the_end(tmp_path, monkeypatch):
    folder, offered, offer = BestFolder(tmp_path / "best"), {}, BestFolder.offer

    def noted(self, step, weights, expected):
        offered[step] = expected, weights["model.lm_head.weight"].clone()
        return offer(self, step, weights, expected)

    monkeypatch.setattr(BestFolder, "offer", noted)
    target = TargetModel(tiny_model("llama", seed=1, initializer_range=0.2))
    _, module, _ = fit(tmp_path, KeepBest(folder, every=2), max_steps=7, target=target)  # validated after 2, 4, 6 and 7
    assert list(offered) == [4, 7]
    assert torch.equal(offered[7][1], module.model.lm_head.weight)
    curve = read_csv(tmp_path / "metrics/version_0/metrics.csv")
    for step, (expected, _) in offered.items():
        assert expected == pytest.approx(curve[step - 1]["eval/tau_expected"], abs=1e-6)
    best = max(offered, key=lambda step: offered[step][0])
    assert folder.read().facts() == {"step": best, "expected": offered[best][0]}
    assert torch.equal(folder.weights()["model.lm_head.weight"], offered[best][1])


@pytest.mark.parametrize("every", [0, 1])
def test_without_a_comparison_the_last_weights_are_kept(tmp_path, every):
    """With every=1 there is no target, so that no tau is known."""
    target = None if every else TargetModel(tiny_model("llama", seed=1))
    folder, kept = BestFolder(tmp_path / "best"), {}
    # The last checkpoint is saved here, behind which a killed run trains no more.
    behind = LambdaCallback(on_validation_end=lambda trainer, _: kept.update({trainer.global_step: folder.read()}))
    _, module, _ = fit(tmp_path, KeepBest(folder, every), behind, target=target)
    assert folder.read().facts() == {"step": 6, "expected": None}
    assert {step: best and best.step for step, best in kept.items()} == {2: None, 4: None, 6: 6}
    assert torch.equal(folder.weights()["model.lm_head.weight"], module.model.lm_head.weight)


# --- validation


def test_a_validation_is_summed_over_positions_not_over_batches():
    """By hand: k = 2, a whole row and a padded one."""
    sums = ValidationSums(2)
    sums.update(torch.tensor(1.0), torch.ones(1, 3, dtype=torch.bool), torch.tensor([[0.8, 0.4, 0.6]]))
    padded = torch.tensor([[True, False, False]])
    sums.update(torch.tensor(5.0), padded, torch.tensor([[0.1, 9.0, 9.0]]))
    sums.update(torch.tensor(float("nan")), torch.zeros(1, 3, dtype=torch.bool), torch.full((1, 3), float("nan")))
    found = sums.compute()
    assert found == pytest.approx(
        {
            "eval/loss": (3 * 1.0 + 5.0) / 4,
            "eval/alpha": (0.8 + 0.4 + 0.6 + 0.1) / 4,
            "eval/alpha_step_1": 0.5,
            "eval/alpha_step_2": 0.4,
            "eval/tau_expected": 1 + 0.5 + 0.5 * 0.4,
        }
    )
    sums.reset()
    sums.update(torch.tensor(2.0), torch.ones(1, 3, dtype=torch.bool))
    assert sums.compute() == {"eval/loss": 2.0}


@pytest.mark.parametrize(("n_rows", "world"), [(5, 2), (3, 4), (8, 2), (1, 2)])
def test_ranks_see_every_held_out_row_once_in_equally_many_batches(n_rows, world):
    shares = [held_out_batches(n_rows, 4, rank, world) for rank in range(world)]
    assert {len(share) for share in shares} == {-(-n_rows // 4)}
    rows = sorted(row for share in shares for batch in share for row in batch if row >= 0)
    assert rows == list(range(n_rows))
    assert all(-1 not in batch or batch == [-1] for share in shares for batch in share)


def sums_of_ranks(module, rows, world: int) -> dict[str, float]:
    """What `world` ranks would add up, one after the other."""
    module.sums.reset()
    data = RowData(TokenRows(rows), TokenRows(rows), batch_size=4, seed=0)
    for rank in range(world):
        data.trainer = SimpleNamespace(global_rank=rank, world_size=world)
        for batch in data.val_dataloader():
            module.validation_step(batch, 0)
    return module.sums.compute()


def test_validation_says_the_same_on_any_number_of_ranks(llama_target):
    rows = torch.randint(4, VOCAB_SIZE, (5, 18), dtype=torch.int32)
    model = noisy_copy(llama_target.model, 0.3).eval()
    module = LanguageModelTraining(model, OptimizerSettings(), llama_target)
    with torch.no_grad():
        one, four = (sums_of_ranks(module, rows, world) for world in (1, 4))
        batch = TokenRows(rows)[[*range(5)]]
        whole = module.alpha(batch, module.states(batch))
    assert one == pytest.approx(four, abs=1e-6)
    assert one["eval/alpha"] == pytest.approx(float(whole.mean()), abs=1e-6)
    assert 0.05 < one["eval/alpha"] < 0.95
    by_step = [float(whole[:, i::4].mean()) for i in range(4)]
    assert one["eval/alpha_step_4"] == pytest.approx(by_step[3], abs=1e-6)
    expected, product = 1.0, 1.0
    for alpha in by_step:
        product *= alpha
        expected += product
    assert one["eval/tau_expected"] == pytest.approx(expected, abs=1e-5)


def test_training_leaves_the_target_untouched_and_out_of_the_checkpoint(tmp_path):
    target = TargetModel(tiny_model("llama", seed=1))
    before = {name: p.clone() for name, p in target.model.named_parameters()}
    trainer, module, _ = fit(tmp_path, target=target)
    assert trainer.callback_metrics["eval/alpha"] > 0
    assert all(torch.equal(p, before[name]) for name, p in target.model.named_parameters())
    assert all(name.startswith("model.") for name in module.state_dict())
    assert len(list(module.parameters())) == len(list(module.model.parameters()))
