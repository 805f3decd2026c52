"""EAGLE-3's training: which token is learned at which depth, the papers' loss, what it is refused for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from spectrain.config.training import Eagle3
from spectrain.errors import UserError
from spectrain.models.eagle3 import Eagle3Config, Eagle3Drafter, unrolled
from spectrain.models.pruned_init import copy_ends, draw_weights
from spectrain.models.rollout import root_of_epoch
from spectrain.target import TargetModel
from spectrain.target.lean import shape_of
from spectrain.training.data import RowBatch, RowData, TokenRows
from spectrain.training.eagle3 import Eagle3Experiment, Eagle3Training, copy_last_block
from spectrain.training.losses import LossSettings
from spectrain.training.optim import OptimizerSettings
from spectrain.training.sums import ValidationSums
from tests.conftest import VOCAB_SIZE, tiny_model
from tests.models.test_artifacts import tiny_tokenizer
from tests.models.test_eagle3 import N_LAYER, drafter_for, drafts, export, published, speculators
from tests.training.trainers import quiet_trainer

K, LAYERS = 3, (1, 2)
KEPT = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(2))[:40]
RESPONSE = torch.rand(2, 16, generator=torch.Generator().manual_seed(5)) < 0.8
STARTS = torch.tensor([[0] * 6 + [6] * 10, [0] + [1] * 9 + [10] * 6], dtype=torch.int32)


def eagle3_training(
    target: TargetModel,
    optimizer: str = "adamw",
    loss: str = "soft",
    roots_every: int = 1,
    decay: float = 0.8,
    **options,
) -> Eagle3Training:
    torch.manual_seed(0)
    options = {"draft_vocab": len(KEPT), "window_tokens": 6} | options
    drafter = Eagle3Drafter(Eagle3Config(shape_of(target.model), LAYERS, k=K, **options), target).apply(draw_weights)
    if drafter.kept is not None:
        drafter.kept.copy_(KEPT)
    settings = OptimizerSettings(name=optimizer, lr=1e-2, warmup_steps=2)
    return Eagle3Training(drafter, target, LossSettings(loss), settings, 0, roots_every, decay)


def batch_of(starts: bool = True, is_response: bool = True) -> RowBatch:
    tokens = torch.randint(4, VOCAB_SIZE, (2, 16), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    return TokenRows(tokens, RESPONSE if is_response else None, STARTS if starts else None)[[0, 1]]


@pytest.fixture
def target() -> TargetModel:
    return TargetModel(tiny_model("llama", initializer_range=0.1))


def learned_pairs(batch: RowBatch, every: int, first_root: int) -> dict[tuple[int, int, int], int]:
    """Row, position and step of all that is learned, and its root: one by one, from what a draft is."""
    found = {}
    for row, position in batch.learned().nonzero().tolist():
        starts = [0] * 16 if batch.starts is None else batch.starts[row].tolist()
        for step in range(K):
            root = position - step
            if root < first_root or (root - first_root) % every or starts[root] == root:
                continue
            if starts[root] == starts[position]:
                found[row, position, step] = root
    return found


@pytest.mark.parametrize(("every", "first_root"), [(1, 0), (2, 1), (3, 0), (3, 2)])
@pytest.mark.parametrize("starts", [True, False])
def test_each_learned_token_is_drafted_from_every_root_that_reaches_it(target, every, first_root, starts):
    module, batch = eagle3_training(target, roots_every=every, decay=0.5), batch_of(starts)
    captured = module.target.features(batch.tokens, batch.starts).captured
    drafts = unrolled(module.drafter, batch.tokens, captured, K, every, first_root, batch.starts)
    places = batch.learned().flatten().nonzero()[:, 0]
    found = module.drafted(module.states(batch, captured, first_root), places, batch, first_root)
    expected = learned_pairs(batch, every, first_root)
    seen = {}
    for n, j in found.reached.nonzero().tolist():
        (row, position), step = divmod(int(places[n]), 16), int(found.steps[n, j])
        seen[row, position, step] = position - step
        assert torch.equal(found.hidden[n, j], drafts[step][row, (position - step - first_root) // every])
        assert found.weights[n, j] == 0.5**step
    assert seen == expected
    assert not found.weights[~found.reached].any()
    assert found.hidden.shape[1] == -(-K // every)


def plain_soft(module: Eagle3Training, batch: RowBatch, every: int = 1, first_root: int = 0) -> Tensor:
    """The papers' loss, one position after the other."""
    said = module.target.features(batch.tokens, batch.starts)
    captured, final = said.captured.bfloat16(), said.final_hidden.bfloat16().float()
    drafts = unrolled(module.drafter, batch.tokens, captured, K, every, first_root, batch.starts)
    total, weights = 0.0, 0.0
    for (row, position, step), root in learned_pairs(batch, every, first_root).items():
        logits, weight = final[row, position] @ module.target.unembedding.T, module.decay**step
        log_q = module.drafter.lm_head(drafts[step][row, (root - first_root) // every]).log_softmax(-1)
        if logits.argmax() in KEPT:
            total = total - weight * (logits[KEPT].softmax(-1) * log_q).sum()
        weights += weight
    return total / weights


@pytest.mark.parametrize(("every", "first_root"), [(1, 0), (3, 1)])
def test_the_soft_loss_is_the_formula_and_so_is_its_gradient(target, monkeypatch, every, first_root):
    monkeypatch.setattr("spectrain.training.losses.MOST_LOGITS", {"cpu": 5 * VOCAB_SIZE})
    module, batch = eagle3_training(target, roots_every=every), batch_of()
    found, expected = module.parts(batch, first_root, False).loss, plain_soft(module, batch, every, first_root)
    torch.testing.assert_close(found, expected)
    parameters = [*module.drafter.parameters()]
    both = (torch.autograd.grad(loss, parameters) for loss in (found, expected))
    for own, plain in zip(*both, strict=True):  # of numbers that almost cancel, the rounding differs by processor
        assert (own - plain).norm() < 1e-3 * plain.norm()


def test_a_pruned_start_is_nearer_to_the_target_than_random_weights(target):
    rows = TokenRows(torch.randint(4, VOCAB_SIZE, (40, 32), dtype=torch.int32), None, None)
    losses = []
    for fits_input in (False, True):
        module = eagle3_training(target, loss="distill", draft_vocab=None, window_tokens=None)
        copy_ends(module.drafter, target.model)
        if fits_input:
            copy_last_block(module.drafter, target.model)
        module.fits_input = fits_input
        module.begin(rows)
        losses.append(float(module.parts(rows[[0, 1]]).loss.detach()))
    assert losses[1] < losses[0] - 0.1


@torch.no_grad()
def test_gradients_run_through_a_drafts_own_states(target):
    """The slope of the loss along a random direction of all weights, by differences."""
    module, batch = eagle3_training(target, decay=1.0), batch_of()
    parameters = [*module.drafter.parameters()]
    with torch.enable_grad():
        gradients = torch.autograd.grad(module.objective(batch), parameters)
    directions, losses = [torch.randn_like(one) for one in parameters], []
    for step in (1e-3, -2e-3):
        for one, direction in zip(parameters, directions, strict=True):
            one += step * direction
        losses.append(float(module.objective(batch)))
    slope = sum(float((one * direction).sum()) for one, direction in zip(gradients, directions, strict=True))
    assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(slope, rel=0.02)


def test_only_what_the_target_says_within_the_vocabulary_is_learned(target):
    """Some argmax lies outside of it, or the test above would say nothing of the mask."""
    module, batch = eagle3_training(target), batch_of()
    outside = ~torch.isin(target.logits_of(target.features(batch.tokens, batch.starts).final_hidden).argmax(-1), KEPT)
    assert 0 < outside[batch.learned()].sum() < batch.learned().sum()
    soft, distill = (eagle3_training(target, loss=loss).parts(batch, 0, False) for loss in ("soft", "distill"))
    assert 0 < soft.loss < distill.loss
    module.drafter.kept.copy_(KEPT)
    kept_all = eagle3_training(target, draft_vocab=None)
    other = eagle3_training(target, loss="distill", draft_vocab=None)
    assert torch.equal(kept_all.parts(batch, 0, False).loss, other.parts(batch, 0, False).loss)


@pytest.mark.parametrize("loss", ["soft", "mixed", "hard", "lk"])
def test_what_is_not_learned_changes_nothing(target, loss):
    """Positions of prompts, of other documents and behind the end: neither loss nor gradient notice them."""
    module, batch = eagle3_training(target, loss=loss), batch_of()
    states = module.states(batch, module.target.features(batch.tokens, batch.starts).captured, 0)
    changed = torch.rand_like(states)
    for (row, _, step), root in learned_pairs(batch, 1, 0).items():
        changed[row, root, step] = states[row, root, step]
    module.states = lambda *_: states
    expected = module.parts(batch, 0, False)
    module.states = lambda *_: changed.requires_grad_()
    found = module.parts(batch, 0, False)
    torch.testing.assert_close(found.loss, expected.loss)
    (gradient,) = torch.autograd.grad(found.loss, changed)
    reached = {(row, root, step) for (row, _, step), root in learned_pairs(batch, 1, 0).items()}
    assert {tuple(one) for one in gradient.any(-1).nonzero().tolist()} <= reached


def test_a_document_is_trained_as_if_it_were_alone(target):
    module, packed = eagle3_training(target), batch_of(is_response=False)
    captured = module.target.features(packed.tokens, packed.starts).captured
    states = module.states(packed, captured, 0)
    for row, document in ((0, slice(6, 16)), (1, slice(1, 10)), (1, slice(10, 16))):
        alone = TokenRows(packed.tokens[row : row + 1, document].int())[[0]]
        found = module.states(alone, module.target.features(alone.tokens).captured, 0)[0]
        length = found.shape[0]
        for step in range(K):  # the first token has no state before it, and the last drafts reach over the end
            of_packed = states[row, document][1 : length - step, step]
            torch.testing.assert_close(of_packed, found[1 : length - step, step], rtol=1e-4, atol=1e-4)


def test_validation_counts_acceptance_by_depth(target):
    """Against one position after the other; expected tau follows by hand."""
    module, batch = eagle3_training(target), batch_of()
    parts = module.parts(batch)
    module.sums.reset()
    module.validation_step(batch, 0)
    found = module.sums.compute()
    by_step = [[] for _ in range(K)]
    for n, j in parts.drafted.nonzero().tolist():
        by_step[int(parts.steps[n, j])].append(float(parts.alpha[n, j]))
    means = [sum(one) / len(one) for one in by_step]
    assert [found[f"eval/alpha_step_{step + 1}"] for step in range(K)] == pytest.approx(means)
    assert found["eval/tau_expected"] == pytest.approx(1 + means[0] * (1 + means[1] * (1 + means[2])))
    assert isinstance(module.sums, ValidationSums)


@pytest.mark.parametrize("every", [1, 3])
def test_drafts_begin_elsewhere_in_each_epoch_unless_they_begin_everywhere(target, monkeypatch, every):
    module, seen = eagle3_training(target, roots_every=every), []
    states = module.states
    monkeypatch.setattr(module, "states", lambda *given: seen.append(given[2]) or states(*given))
    rows = TokenRows(torch.randint(4, VOCAB_SIZE, (2, 16), dtype=torch.int32))
    trainer = quiet_trainer(max_steps=3, limit_val_batches=0, logger=False)
    trainer.fit(module, datamodule=RowData(rows, rows, batch_size=2, seed=3))
    assert seen == ([0, 0, 0] if every == 1 else [root_of_epoch(3, 0, epoch) for epoch in range(3)])


@pytest.mark.parametrize("loss", ["soft", "lk"])
def test_training_lowers_the_loss_and_is_accepted_far_more_often_than_chance(loss):
    target = TargetModel(tiny_model("llama", initializer_range=0.02))
    target.model.lm_head.weight.data.mul_(40)
    rows = TokenRows(torch.randint(4, VOCAB_SIZE, (32, 24), dtype=torch.int32))
    module = eagle3_training(target, loss=loss, draft_vocab=None)
    before = module.parts(rows[[0, 1]])
    trainer = quiet_trainer(max_steps=40, logger=False, val_check_interval=40)
    trainer.fit(module, datamodule=RowData(rows, rows, batch_size=4, seed=0))
    assert module.parts(rows[[0, 1]]).loss < before.loss
    assert trainer.callback_metrics["eval/alpha"] > 0.2 > 2 * before.alpha.mean()


def experiment(target: TargetModel, **options) -> Eagle3Experiment:
    found = object.__new__(Eagle3Experiment)
    found.own, found.target, found.config = Eagle3(**options), target, SimpleNamespace(seed=0)
    return found


def test_a_drafter_of_others_is_planned_and_trained_further_as_it_is(tmp_path, monkeypatch):
    target = TargetModel(tiny_model("llama", num_hidden_layers=N_LAYER), tiny_tokenizer())
    theirs = drafter_for(target, draft_vocab=20, window_tokens=16, norm_before_residual=True)

    def with_table(config: dict, tensors: dict) -> None:
        speculators(config, tensors)
        tensors["embed_tokens.weight"] = target.model.get_input_embeddings().weight.clone()

    folder = published(tmp_path / "theirs", theirs, with_table)
    given = {"init": str(folder), "norm_before_residual": True}
    further = experiment(target, **given).trained_before()
    assert (further.config.k, further.config.window_tokens, further.config.draft_vocab) == (4, 16, 20)
    torch.testing.assert_close(drafts(further), drafts(theirs))
    ours = given | {"init": str(export(tmp_path / "ours", target, theirs))}
    fewer = experiment(target, **ours, draft_vocab=9, window_tokens=8, ttt_steps=3).trained_before()
    assert torch.equal(fewer.lm_head.weight, theirs.lm_head.weight[:9])
    assert (fewer.config.k, fewer.config.window_tokens, len(fewer.kept)) == (3, 8, 9)
    monkeypatch.setattr("spectrain.training.fusing.fetched", lambda name, option: folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(target.model.config).eval().requires_grad_(False)
        planned = experiment(TargetModel(model, engine="transformers"), **given | {"init": "of/hub"}).blank()
    assert planned.drafter.config == further.config
    for wrong, said in ({"norm_before_residual": False}, "=true"), ({"draft_vocab": 9}, "draft_vocab=20, not 9"):
        with pytest.raises(UserError, match=said):
            experiment(target, **given | wrong).trained_before()


def test_for_a_target_of_other_blocks_it_is_a_plain_llama_that_begins_with_the_targets_head():
    """Engines load no other block. Gemma's norms multiply by 1 + weight."""
    target = TargetModel(tiny_model("gemma3"))
    rows = TokenRows(torch.randint(4, VOCAB_SIZE, (2, 16), dtype=torch.int32))
    drafter, states = experiment(target, draft_vocab=None).new(rows), torch.randn(3, target.config.hidden_size)
    assert (drafter.config.shape.hidden_act, drafter.config.shape.layer_types) == ("silu", ())
    torch.testing.assert_close(drafter.logits(states), target.model.lm_head(target.model.model.norm(states)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_layers": [2, 1]}, r"target_layers=\[2, 1\] must be of 0..2, each once and in order"),
        ({"target_layers": [1, 3]}, "must be of 0..2"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm exclude each other"),
        ({"window_tokens": 3}, "window_tokens=3 is shorter than drafts of 4 tokens; raise it, or lower ttt_steps"),
        ({"roots_every": 5}, "roots_every=5 is more than ttt_steps=4; lower it"),
        ({"draft_vocab": VOCAB_SIZE + 1}, "draft_vocab=62 is more than the target's 61 tokens"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(target, options, message):
    with pytest.raises(UserError, match=message):
        experiment(target, **options).blank()
