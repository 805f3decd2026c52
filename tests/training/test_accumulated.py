"""A step is the same however its rows are divided into batches: a mean over all of their learned positions."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lightning import Callback

from spectrain.decoding import TargetModel
from spectrain.decoding.lean import shape_of
from spectrain.models.pruned_init import last_layers, new_drafter
from spectrain.models.spire import SpireConfig
from spectrain.training.base import Training
from spectrain.training.data import RowData, TextRows, TokenRows
from spectrain.training.head import HeadTraining
from spectrain.training.losses import LossSettings
from spectrain.training.optim import OptimizerSettings
from spectrain.training.spire import SpireTraining
from spectrain.training.vanilla import LanguageModelTraining
from tests.conftest import VOCAB_SIZE, tiny_model
from tests.training.test_modules import model_states, text_rows
from tests.training.test_modules import training as head_training
from tests.training.trainers import quiet_trainer

STEPS, CLIP = 8, 3.0  # a gradient of "hard" and "vanilla" is larger, the others are smaller
OPTIMIZER = OptimizerSettings(name="adamw", lr=1e-2, warmup_steps=2)


class Watch(Callback):
    """Notes the rows, what is logged of each step, and the clipped gradient of the first one."""

    def __init__(self) -> None:
        self.numbers, self.logged, self.gradient = [], {}, {}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.numbers += batch.numbers
        self.logged[trainer.global_step] = {
            name: float(value) for name, value in trainer.logged_metrics.items() if name.startswith("train/")
        }
        if trainer.global_step == 1 and not self.gradient:
            self.gradient = {name: p.grad.clone() for name, p in trained(module).items()}


def trained(module: Training) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def spire(target: TargetModel, loss: str, **options: object) -> SpireTraining:
    config = SpireConfig(shape_of(target.model), last_layers(target.model, 1), k=3, window_tokens=8, **options)
    kept = torch.arange(config.draft_vocab) if config.draft_vocab else None
    drafter = new_drafter(target, config, "pruned", kept)
    return SpireTraining(drafter, target, LossSettings(loss), OPTIMIZER, fits_input=False)


def vanilla(target: TargetModel) -> LanguageModelTraining:
    return LanguageModelTraining(tiny_model("llama").train().requires_grad_(True), OPTIMIZER, target)


def head(target: TargetModel) -> HeadTraining:
    module = head_training(target, model_states(target))
    module.optimizer_settings = OPTIMIZER
    return module


KINDS = {
    "mixed": partial(spire, loss="mixed"),
    "hard": partial(spire, loss="hard", input="projected", draft_vocab=VOCAB_SIZE // 2),  # not every label counts
    "vanilla": vanilla,
    "head": head,
}


def new(kind: str) -> Training:
    torch.manual_seed(0)
    return KINDS[kind](TargetModel(tiny_model("llama", initializer_range=0.3)))


def data(kind: str, batch_size: int, loss_on: str) -> RowData:
    """18 rows, of which a step takes 4, so that epochs have some left; they have from 1 to 20 positions to learn."""
    if kind == "head":
        rows = text_rows(24)
        return RowData(TextRows(rows[:18]), TextRows(rows[18:]), batch_size, seed=3, by_length=True)
    tokens = torch.randint(4, VOCAB_SIZE, (24, 24), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    is_response = torch.arange(24) >= 24 - torch.tensor([1, 20, 3, 9, 2, 14] * 4)[:, None]
    marks = (is_response[:18], is_response[18:]) if loss_on == "response" else (None, None)
    return RowData(TokenRows(tokens[:18], marks[0]), TokenRows(tokens[18:], marks[1]), batch_size, seed=3)


def train(kind: str, batch_size: int, accumulated: int, loss_on: str) -> tuple[dict, Watch, dict]:
    """Return the weights, what was seen, and the last validation."""
    module, watch = new(kind), Watch()
    options = {"max_steps": STEPS, "accumulate_grad_batches": accumulated, "val_check_interval": accumulated}
    options |= {"gradient_clip_val": CLIP, "callbacks": [watch], "logger": False, "log_every_n_steps": 1}
    trainer = quiet_trainer(**options)
    trainer.fit(module, datamodule=data(kind, batch_size, loss_on))
    validated = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("eval/")}
    return {name: p.detach() for name, p in trained(module).items()}, watch, validated


def difference(found: dict, expected: dict) -> float:
    """Return the largest difference of a tensor, relative to its norm."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - one).norm() / one.norm().clamp_min(1e-3)) for name, one in expected.items())


@pytest.mark.parametrize(("kind", "loss_on"), [*((kind, "response") for kind in KINDS), ("hard", "all")])
def test_a_step_is_the_same_however_it_is_divided(kind, loss_on):
    weights, whole, validated = train(kind, 4, 1, loss_on)
    module, batch = new(kind), data(kind, 4, loss_on).train[whole.numbers[:4]]
    if kind == "head":
        hidden, labels = module.examples(batch, 0)
        module.loss(module.head(hidden), labels).backward()
    else:
        module.objective(batch).backward()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
    assert (norm > CLIP) == (kind in ("hard", "vanilla"))
    gradient = {name: p.grad for name, p in trained(module).items()}
    assert difference(whole.gradient, gradient) < 1e-5
    for division in ((2, 2), (1, 4)):
        found, seen, validated_there = train(kind, *division, loss_on)
        steps = [[sorted(one.numbers[i : i + 4]) for i in range(0, 4 * STEPS, 4)] for one in (seen, whole)]
        assert steps[0] == steps[1]
        assert difference(seen.gradient, gradient) < 1e-5
        assert difference(found, weights) < 1e-5
        assert validated_there == pytest.approx(validated, rel=1e-5)
        assert all(seen.logged[step] == pytest.approx(whole.logged[step], rel=1e-5) for step in range(1, STEPS + 1))
