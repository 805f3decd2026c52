"""DFlash's training: which token is learned at which place of a block, with which weight, and what is refused."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from spectrain.config.training import DFlash
from spectrain.errors import UserError
from spectrain.models.dflash import drafted
from spectrain.models.pruned_init import draw_weights
from spectrain.target import TargetModel
from spectrain.training.data import RowBatch, RowData, TokenRows
from spectrain.training.dflash import DFlashExperiment, DFlashTraining
from spectrain.training.losses import LossSettings
from spectrain.training.optim import OptimizerSettings
from tests.conftest import VOCAB_SIZE, tiny_model
from tests.models.test_artifacts import tiny_tokenizer
from tests.models.tiny_dflash import export_dflash, new_dflash
from tests.training.trainers import quiet_trainer

K, DECAY = 3, math.exp(-1 / 7)
STARTS = torch.tensor([[0] * 6 + [6] * 10, [0] + [1] * 9 + [10] * 6], dtype=torch.int32)


def dflash_training(target: TargetModel, loss: str = "hard", roots_every: int = 2, **options) -> DFlashTraining:
    torch.manual_seed(0)
    drafter = new_dflash(target, **options).requires_grad_(True).apply(draw_weights).train()
    settings = OptimizerSettings(lr=1e-2, warmup_steps=2)
    return DFlashTraining(drafter, target, LossSettings(loss), settings, 0, roots_every, DECAY)


@pytest.fixture
def target() -> TargetModel:
    return TargetModel(tiny_model("llama", initializer_range=0.1), tiny_tokenizer())


def packed() -> RowBatch:
    tokens = torch.randint(4, VOCAB_SIZE, (2, 16), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    return TokenRows(tokens, None, STARTS)[[0, 1]]


@pytest.mark.parametrize(("every", "first_root"), [(1, 0), (2, 1), (5, 2)])
def test_the_hard_loss_is_the_formula(target, every, first_root):
    """Blocks from every root: token j of a block predicts the text's, within its document, with a weight that falls."""
    module, batch, total, weights = dflash_training(target, roots_every=every), packed(), 0.0, 0.0
    captured = module.target.features(batch.tokens, batch.starts).captured.bfloat16()
    drafts = drafted(module.drafter, batch.tokens, captured, every, first_root, batch.starts)
    logits = torch.stack(drafts, 2) @ module.target.unembedding.T  # [B, R, K, V]
    for row, begins in enumerate(STARTS.tolist()):
        for r, root in enumerate(range(first_root, 16, every)):
            for j in range(1, 1 + K):
                if begins[root] < root and root + j < 16 and begins[root + j] == begins[root]:
                    log_q = logits[row, r, j - 1].log_softmax(-1)
                    total = total - math.exp(-(j - 1) / 7) * log_q[batch.tokens[row, root + j]]
                    weights += math.exp(-(j - 1) / 7)
    torch.testing.assert_close(module.parts(batch, first_root, False).loss, total / weights)


def test_a_document_is_trained_as_if_it_were_alone(target):
    module, batch = dflash_training(target, roots_every=1), packed()
    states = module.states(batch, module.target.features(batch.tokens, batch.starts).captured, 0)
    for row, document in ((0, slice(6, 16)), (1, slice(1, 10)), (1, slice(10, 16))):
        alone = TokenRows(batch.tokens[row : row + 1, document].int())[[0]]
        found = module.states(alone, module.target.features(alone.tokens).captured, 0)[0]
        torch.testing.assert_close(states[row, document], found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("loss", "options"), [("hard", {}), ("soft", {"draft_vocab": 40, "unembedding": "trained"})])
def test_training_lowers_the_loss_also_where_activations_are_recomputed(loss, options):
    target = TargetModel(tiny_model("llama", initializer_range=0.02))
    target.model.lm_head.weight.data.mul_(40)
    rows, losses = TokenRows(torch.randint(4, VOCAB_SIZE, (16, 24), dtype=torch.int32)), []
    for recomputes in (False, True):
        module = dflash_training(target, loss=loss, **options)
        module.drafter.recomputes = recomputes
        before = module.parts(rows[[0, 1]]).loss.item()
        trainer = quiet_trainer(max_steps=12, logger=False, val_check_interval=12)
        trainer.fit(module, datamodule=RowData(rows, rows, batch_size=4, seed=0))
        losses.append(module.parts(rows[[0, 1]]).loss.item())
        assert losses[-1] < 0.95 * before
        assert trainer.callback_metrics["eval/tau_expected"] > 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def experiment(target: TargetModel, **options) -> DFlashExperiment:
    found = object.__new__(DFlashExperiment)
    found.own, found.target, found.config = DFlash(**{"n_layer": 2} | options), target, SimpleNamespace(seed=0)
    return found


def test_a_new_drafter_begins_and_goes_on_as_the_options_say(target, tmp_path):
    rows = TokenRows(torch.randint(4, VOCAB_SIZE, (4, 24), dtype=torch.int32))
    options = {"block_tokens": 4, "draft_vocab": 30, "unembedding": "trained", "export_dtype": "float32"}
    new = experiment(target, **options).new(rows)
    assert new.config.mask_token == VOCAB_SIZE - 1
    assert new.config.target_layers == (1, 2)
    assert new.config.shape.qk_norm
    assert torch.equal(new.lm_head.weight, target.unembedding[new.kept])
    folder = str(export_dflash(tmp_path / "init", target, new))
    again = experiment(target, init=folder, **options).trained_before()
    assert all(torch.equal(one, again.state_dict()[name]) for name, one in new.state_dict().items())
    with pytest.raises(UserError, match=r"init=.* has other options; give block_tokens=4"):
        experiment(target, init=folder, **options | {"block_tokens": 8}).trained_before()
    weights = {f"drafter.{name}": one for name, one in new.state_dict().items()}
    assert torch.equal(experiment(target, **options).model(weights).fc.weight, new.fc.weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_layers": [2, 1]}, r"target_layers=\[2, 1\] must be of 0..2, each once and in order"),
        ({"mask_token": VOCAB_SIZE}, "mask_token=61 must be 0..60, a token of the target"),
        ({"draft_vocab": VOCAB_SIZE + 1}, "draft_vocab=62 is more than the target's 61 tokens"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(target, options, message):
    with pytest.raises(UserError, match=message):
        experiment(target, **options).blank()
