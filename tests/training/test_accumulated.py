"""A step is the same however its rows are divided into batches: a mean over all of their learned positions."""

from __future__ import annotations

import pytest
import torch
from lightning import Callback

from spectrain.target import TargetModel
from spectrain.training.base import Training
from spectrain.training.data import RowData, TextRows, TokenRows
from spectrain.training.losses import LossSettings
from spectrain.training.vanilla import LanguageModelTraining
from tests.conftest import VOCAB_SIZE, tiny_model
from tests.training.test_eagle3 import eagle3_training
from tests.training.test_modules import model_states, text_rows
from tests.training.test_modules import training as head_training
from tests.training.test_offline import spire_training
from tests.training.trainers import quiet_trainer

STEPS, CLIP = 5, 3.0  # a first gradient of "hard" and "vanilla" is larger, the others are smaller


class Watch(Callback):
    """Notes the rows, what is logged of each step, and the clipped gradient of the first one."""

    def __init__(self) -> None:
        self.numbers, self.logged, self.gradient = [], {}, None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.numbers += batch.numbers
        metrics = {name: float(value) for name, value in trainer.logged_metrics.items() if name.startswith("train/")}
        self.logged[trainer.global_step] = metrics
        if trainer.global_step and self.gradient is None:
            self.gradient = [p.grad.clone() for p in trained(module)]


def trained(module: Training) -> list[torch.nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def new(kind: str) -> Training:
    torch.manual_seed(0)
    target = TargetModel(tiny_model("llama", initializer_range=0.3))
    few = {"input": "projected", "draft_vocab": VOCAB_SIZE // 2}  # then not every label counts
    spire = spire_training(target, **(few if kind == "hard" else {}))
    if kind == "hard":
        spire.drafter.kept.copy_(torch.arange(VOCAB_SIZE // 2))
    spire.loss_settings, spire.fits_input = LossSettings(kind), False
    model = tiny_model("llama").train().requires_grad_(True)
    head = head_training(target, model_states(target))
    head.optimizer_settings = spire.optimizer_settings
    vanilla = LanguageModelTraining(model, spire.optimizer_settings, target)
    return {"vanilla": vanilla, "head": head, "eagle3": eagle3_training(target)}.get(kind, spire)


def data(kind: str, batch_size: int, loss_on: str) -> RowData:
    """18 rows, of which a step takes 4, so that epochs have some left; they have from 1 to 20 positions to learn."""
    if kind == "head":
        rows = text_rows(24)
        return RowData(TextRows(rows[:18]), TextRows(rows[18:]), batch_size, seed=3)
    tokens = torch.randint(4, VOCAB_SIZE, (24, 24), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    is_response = torch.arange(24) >= 24 - torch.tensor([1, 20, 3, 9, 2, 14] * 4)[:, None]
    parts = (slice(18), slice(18, 24))
    train, held_out = (TokenRows(tokens[part], is_response[part] if loss_on == "response" else None) for part in parts)
    return RowData(train, held_out, batch_size, seed=3)


def train(kind: str, batch_size: int, accumulated: int, loss_on: str) -> tuple[list[torch.Tensor], Watch, dict]:
    """Return the weights, what was seen, and the last validation."""
    module, watch = new(kind), Watch()
    options = {"max_steps": STEPS, "accumulate_grad_batches": accumulated, "val_check_interval": accumulated}
    options |= {"gradient_clip_val": CLIP, "callbacks": [watch], "logger": False, "log_every_n_steps": 1}
    trainer = quiet_trainer(**options)
    trainer.fit(module, datamodule=data(kind, batch_size, loss_on))
    validated = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("eval/")}
    return [p.detach() for p in trained(module)], watch, validated


def agree(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all((a - b).norm() < 1e-5 * b.norm().clamp_min(1e-3) for a, b in zip(found, expected, strict=True))


KINDS = [
    ("mixed", "response"),
    ("hard", "response"),
    ("eagle3", "response"),
    ("vanilla", "response"),
    ("head", "response"),
]
KINDS.append(pytest.param("hard", "all", marks=pytest.mark.slow))  # as many positions in each row


@pytest.mark.parametrize(("kind", "loss_on"), KINDS)
def test_a_step_is_the_same_however_it_is_divided(kind, loss_on):
    weights, whole, validated = train(kind, 4, 1, loss_on)
    module, batch = new(kind), data(kind, 4, loss_on).train[whole.numbers[:4]]
    if kind == "head":
        hidden, labels = module.examples(batch, 0)
        module.loss(module.head(hidden), labels).backward()
    else:
        module.objective(batch).backward()
    assert (torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP) > CLIP) == (kind in ("hard", "vanilla"))
    gradient = [p.grad for p in trained(module)]
    assert agree(whole.gradient, gradient)
    for division in ((2, 2), (1, 4)):
        found, seen, validated_there = train(kind, *division, loss_on)
        rows = [[sorted(one.numbers[i : i + 4]) for i in range(0, 4 * STEPS, 4)] for one in (seen, whole)]
        assert rows[0] == rows[1]
        assert agree(seen.gradient, gradient)
        assert agree(found, weights)
        assert validated_there == pytest.approx(validated, rel=1e-5)
        assert all(seen.logged[step] == pytest.approx(whole.logged[step], rel=1e-5) for step in whole.logged)
