"""Which positions are learned, and from where rollouts begin: masks of responses and of packed documents, offsets."""

from __future__ import annotations

import pytest
import torch

from spectrain.errors import UserError
from spectrain.models.rollout import rollout, root_of_epoch
from spectrain.target import TargetModel
from spectrain.training import losses
from spectrain.training.data import RowData, TokenRows
from spectrain.training.drafters import drafted_tokens
from spectrain.training.losses import LossSettings
from spectrain.training.optim import OptimizerSettings
from spectrain.training.sums import ValidationSums
from spectrain.training.vanilla import LanguageModelTraining
from tests.conftest import VOCAB_SIZE, noisy_copy, tiny_model
from tests.support.pretend import pretend_device
from tests.training.test_offline import EAGLE3, PREVIOUS, spire_training, training_of
from tests.training.trainers import quiet_trainer

RESPONSE = torch.tensor([[0, 0, 1, 1, 0, 0, 1, 1], [1, 0, 0, 0, 1, 0, 0, 0]], dtype=torch.bool)
STARTS = torch.tensor([[0, 0, 0, 0, 4, 4, 4, 4], [0, 1, 1, 1, 1, 1, 6, 6]], dtype=torch.int32)


def rows_of(is_response: bool = True, starts: bool = True) -> TokenRows:
    tokens = torch.randint(4, VOCAB_SIZE, (2, 8), dtype=torch.int32)
    return TokenRows(tokens, RESPONSE if is_response else None, STARTS if starts else None)


@pytest.fixture
def target() -> TargetModel:
    return TargetModel(tiny_model("llama", initializer_range=0.1))


@pytest.mark.parametrize(
    ("is_response", "starts", "expected"),
    [
        (False, False, ["11111111", "11111111"]),
        (True, False, ["01100110", "00010000"]),  # the token before each of a response
        (False, True, ["11101110", "01111010"]),  # not the last of a document
        (True, True, ["01100110", "00010000"]),
    ],
)
def test_learned_positions_by_hand(is_response, starts, expected):
    batch = rows_of(is_response, starts)[[0, 1]]
    assert ["".join(str(int(one)) for one in row) for row in batch.learned()] == expected
    assert torch.equal(rows_of(is_response, starts)[[-1]].counted(), torch.zeros(1, 8, dtype=torch.bool))


@pytest.mark.parametrize("kind", ["mixed", "hard"])
def test_the_loss_of_a_drafter_is_that_of_its_learned_positions(target, kind):
    """Every other position of the row may change its prediction: neither loss nor gradient notice."""
    module = spire_training(target)
    module.loss_settings = LossSettings(kind)
    rows = rows_of()
    parts = module.parts(rows[[0, 1]])
    learned = rows[[0, 1]].learned()
    assert torch.equal(parts.alpha > 0, learned)
    whole = module.parts(TokenRows(rows.tokens, None, rows.starts)[[0, 1]])
    torch.testing.assert_close(parts.alpha[learned], whole.alpha[learned])
    if kind == "mixed":
        expected = 0.5 * parts.cross_entropy - 0.5 * whole.alpha[learned].mean()
        torch.testing.assert_close(parts.loss, expected)
    assert not torch.isclose(parts.loss, whole.loss)


@pytest.mark.parametrize("unembedding", ["target", "trained"])
@pytest.mark.parametrize("kind", ["mixed", "distill", "hard"])
def test_losses_over_a_pruned_vocabulary(target, kind, unembedding):
    """Training compares with the target's distribution cut to it; validation with the whole one, as decoding does."""
    kept, batch = torch.arange(VOCAB_SIZE)[1::2].flip(0), rows_of()[[0, 1]]
    module = spire_training(target, input="projected", unembedding=unembedding, draft_vocab=len(kept))
    module.drafter.kept.copy_(kept)
    module.loss_settings = LossSettings(kind)
    features = module.target.features(batch.tokens, batch.starts)
    hidden = rollout(module.drafter, batch.tokens, features.captured, starts=batch.starts)
    p = (features.final_hidden.bfloat16().float() @ module.target.unembedding.T).softmax(-1)
    q, learned = module.drafter.logits(hidden).softmax(-1), batch.learned()
    exact = module.parts(batch)
    torch.testing.assert_close(exact.alpha, torch.minimum(p, q).sum(-1) * learned, rtol=1e-2, atol=1e-3)
    cut = p[..., kept] / p[..., kept].sum(-1, keepdim=True)
    parts = module.parts(batch, is_exact=False)
    torch.testing.assert_close(parts.alpha, torch.minimum(cut, q[..., kept]).sum(-1) * learned, rtol=1e-2, atol=1e-3)
    following = torch.roll(batch.tokens, -1, 1)[learned]
    if kind == "hard":
        following, q = following[following % 2 == 1], q[learned][following % 2 == 1]
        expected = -q[torch.arange(len(q)), following].log().mean()
        torch.testing.assert_close(exact.cross_entropy, expected, rtol=1e-2, atol=1e-3)
    else:
        expected = -(cut * q[..., kept].log()).sum(-1)[learned].mean()
        assert exact.cross_entropy < parts.cross_entropy
    torch.testing.assert_close(parts.cross_entropy, expected, rtol=1e-2, atol=1e-3)


def test_the_most_frequent_tokens_of_responses_are_kept_and_special_ones_always(target):
    tokens = torch.tensor([[5, 5, 5, 9], [9, 9, 7, 7]], dtype=torch.int32)
    ends = set(target.eos_ids)
    assert not ends & {5, 7, 9}

    def kept(draft_vocab, is_response=None):
        return drafted_tokens(draft_vocab, TokenRows(tokens, is_response), target).tolist()

    special = sorted(ends)
    assert kept(len(ends) + 1) == [*special, 5]
    assert kept(len(ends) + 2) == [*special, 5, 9]
    assert kept("auto") == [*special, 5, 9, 7]
    of_response = torch.tensor([[0, 0, 0, 1], [1, 1, 0, 0]], dtype=torch.bool)
    assert kept("auto", of_response) == [*special, 9]
    assert drafted_tokens(None, TokenRows(tokens), target) is None
    with pytest.raises(UserError, match="draft_vocab=62 is more than the target's 61 tokens"):
        kept(62)


@pytest.mark.parametrize("kind", ["mixed", "hard", "soft"])
@pytest.mark.parametrize("options", [{}, PREVIOUS, EAGLE3], ids=str)
def test_a_step_on_a_device_waits_for_it_once(options, kind, monkeypatch):
    monkeypatch.setattr(
        losses, "_as_computed", lambda weight, states: weight
    )  # torch knows no autocast of a pretended device
    rows = rows_of()
    with pretend_device() as device, torch.no_grad():
        module = training_of(device.target(tiny_model("llama")), **options)
        module.to(device.device)
        module.loss_settings = LossSettings(kind)
        batch = rows[[0, 1]]
        batch.tokens = batch.tokens.to(device.device)
        batch.is_response, batch.starts = batch.is_response.to(device.device), batch.starts.to(device.device)
        device.reads.clear()
        module.parts(batch, 1, is_exact=False)
    assert [copy.site for copy in device.reads if "training/drafters.py" not in copy.site] == []
    assert len(device.reads) == 1


def test_documents_of_a_packed_row_are_trained_as_each_alone(target, monkeypatch):
    """A vanilla drafter and the target beside it; the drafter of SPIRe is compared in tests/models/test_spire.py."""
    module = LanguageModelTraining(noisy_copy(target.model, 0.3).requires_grad_(True), OptimizerSettings(), target)
    packed, gradients = rows_of(is_response=False)[[0, 1]], []
    for most in (8, 4):  # behind a mask, and in rows that are too long for one
        monkeypatch.setattr("spectrain.training.vanilla.MOST_MASKED", most)
        gradients.append(torch.autograd.grad(module.objective(packed), module.model.parameters()))
    torch.testing.assert_close(*gradients)
    monkeypatch.setattr("spectrain.training.vanilla.packed_mask", None)
    monkeypatch.setattr("spectrain.training.vanilla.ALPHA_TOKENS", 3)
    states = module.states(packed)
    alpha = module.alpha(packed, states)
    for row, document in ((0, slice(0, 4)), (0, slice(4, 8)), (1, slice(1, 6))):
        alone = TokenRows(packed.tokens[row : row + 1, document].int())[[0]]
        torch.testing.assert_close(states[row, document], module.states(alone)[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(alpha[row, document], module.alpha(alone, module.states(alone))[0])


def test_validation_counts_a_document_inside_a_block_as_a_new_rollout():
    """By hand: k = 3, documents begin at 0 and 4; step numbers 0 1 2 0 | 0 1 0 1."""
    sums = ValidationSums(3)
    alpha = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]])
    sums.update(torch.tensor(1.0), torch.ones(1, 8, dtype=torch.bool), alpha, STARTS[:1].long())
    found = [sums.compute()[f"eval/alpha_step_{step}"] for step in (1, 2, 3)]
    assert found == pytest.approx([(0.1 + 0.4 + 0.5 + 0.7) / 4, (0.2 + 0.6 + 0.8) / 3, 0.3])


def test_in_k_epochs_a_token_has_every_depth_once():
    roots = [root_of_epoch(4, 7, epoch) for epoch in range(12)]
    assert roots[0] == 0
    assert roots[:4] == roots[4:8] == roots[8:]
    assert sorted(roots[:4]) == [0, 1, 2, 3]
    assert len({tuple(root_of_epoch(4, seed, epoch) for epoch in range(4)) for seed in range(30)}) > 3


def test_a_token_changes_its_depth_from_epoch_to_epoch_and_not_in_validations(target, monkeypatch):
    module, seen = spire_training(target), []
    parts = module.parts
    monkeypatch.setattr(
        module,
        "parts",
        lambda batch, root=0, **more: seen.append((module.training, root)) or parts(batch, root, **more),
    )
    rows = TokenRows(torch.randint(4, VOCAB_SIZE, (4, 16), dtype=torch.int32))
    trainer = quiet_trainer(
        max_steps=6,
        logger=False,
        val_check_interval=2,
    )
    trainer.fit(module, datamodule=RowData(rows, rows, batch_size=2, seed=3))
    in_training = [root for training, root in seen if training]
    assert in_training == [root_of_epoch(3, 0, epoch) for epoch in (0, 0, 1, 1, 2, 2)]
    assert len(set(in_training)) == 3
    assert {root for training, root in seen if not training} == {0}
    seen.clear()
    module.roots_every = 1
    quiet_trainer(max_steps=6, logger=False).fit(module, datamodule=RowData(rows, rows, batch_size=2, seed=3))
    assert {root for _, root in seen} == {0}
