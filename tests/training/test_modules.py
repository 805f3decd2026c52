"""What a head learns from: mixing, masks, states and labels, offline as online, and the losses, by hand."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch

from spectrain.decoding import Sampling, generate
from spectrain.decoding.sampling import Uniforms, row_generator
from spectrain.drafting.stopping import StopRule
from spectrain.methods.spire import Spire
from spectrain.models.draft_states import DraftStates, ModelStates
from spectrain.models.head import DrafterFacts, HeadConfig, HeadFacts
from spectrain.models.labelled_texts import label_texts
from spectrain.models.pruned_init import last_layers, new_drafter
from spectrain.models.rollout import SpireStates
from spectrain.models.spire import SpireConfig
from spectrain.target import TargetModel
from spectrain.target.lean import shape_of
from spectrain.training.data import SeededLoader, TextBatch, TextRow, TextRows
from spectrain.training.head import HeadTraining
from spectrain.training.losses import binary_kl, weighted_bce
from spectrain.training.optim import OptimizerSettings, warmup_then_down
from spectrain.training.sums import Reliability
from tests.conftest import VOCAB_SIZE, noisy_copy, random_prompts, tiny_model

SAMPLING = Sampling(temperature=0.9, top_k=20)


def spire_states(target: TargetModel, block_tokens: int = 5, **options) -> SpireStates:
    config = SpireConfig(shape_of(target.model), last_layers(target.model, 2), k=4, window_tokens=8, **options)
    return SpireStates(new_drafter(target, config, "pruned").requires_grad_(False), block_tokens)


def model_states(target: TargetModel) -> ModelStates:
    return ModelStates(TargetModel(noisy_copy(target.model, 0.3)), VOCAB_SIZE)


PREVIOUS = {"input": "projected", "unembedding": "target", "previous_state": True}
STATES = {"vanilla": model_states, "spire": spire_states, "previous": partial(spire_states, **PREVIOUS)}


@pytest.fixture
def target() -> TargetModel:
    return TargetModel(tiny_model("llama"))


def text_rows(n_rows: int = 6) -> list[TextRow]:
    texts = random_prompts([10 + 7 * i for i in range(n_rows)], seed=5)
    return [TextRow(i, np.array(t[:4], np.int32), np.array(t[4:], np.int32)) for i, t in enumerate(texts)]


def batch_of(rows: list[TextRow]) -> TextBatch:
    return TextRows(rows)[list(range(len(rows)))]


def training(target: TargetModel, states: DraftStates, mixing_share: float = 0.15) -> HeadTraining:
    kind = "spire" if isinstance(states, SpireStates) else "vanilla"
    drafter = DrafterFacts(kind, "drafter", "0" * 16)
    facts = HeadFacts(HeadConfig(states.hidden_size, 2), drafter, SAMPLING, w_rej=6.0, mixing_share=mixing_share)
    return HeadTraining(facts, states, target, OptimizerSettings())


@pytest.mark.parametrize("w_rej", [1.0, 6.0])
def test_the_loss_is_the_formula(w_rej):
    predicted, labels = [0.9, 0.2, 0.5], [1.0, 0.25, 0.0]
    above = sum(
        w_rej * (1 - a) * -math.log(1 - f) + 2.0 * a * -math.log(f) for f, a in zip(predicted, labels, strict=True)
    )
    below = w_rej * sum(1 - a for a in labels) + 2.0 * sum(labels)
    log_odds = torch.tensor([math.log(f / (1 - f)) for f in predicted])
    torch.testing.assert_close(weighted_bce(log_odds, torch.tensor(labels), w_rej, 2.0), torch.tensor(above / below))


def test_binary_kl_is_the_formula_and_nothing_where_they_agree():
    labels, predicted = torch.tensor([1.0, 0.25, 0.0, 0.6]), torch.tensor([0.9, 0.2, 0.5, 0.6])
    expected = [math.log(1 / 0.9), 0.25 * math.log(1.25) + 0.75 * math.log(0.75 / 0.8), math.log(2), 0.0]
    torch.testing.assert_close(binary_kl(torch.logit(predicted), labels), torch.tensor(expected), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", STATES)
def test_mixing_is_drawn_anew_every_epoch_and_does_not_depend_on_the_batch(target, kind):
    module = training(target, STATES[kind](target), mixing_share=0.5)
    rows = text_rows()
    first, again, next_epoch = (module.examples(batch_of(rows), epoch)[0] for epoch in (0, 0, 1))
    assert torch.equal(first, again)
    assert first.shape != next_epoch.shape or not torch.equal(first, next_epoch)
    one_by_one = torch.cat([module.examples(batch_of([row]), 0)[0] for row in rows])
    torch.testing.assert_close(one_by_one, first, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("kind", STATES)
def test_stored_labels_give_what_labels_on_the_fly_give(target, kind):
    states = STATES[kind](target)
    module, rows = training(target, states), text_rows()
    online = batch_of(rows)
    n_tokens = online.tokens.shape[1]
    generators = [row_generator(1, number) for number in online.numbers]  # those of seed 0, epoch 0
    drawing = Uniforms(generators, ahead=2 * n_tokens).take(2 * n_tokens).unflatten(1, (n_tokens, 2))[..., 1:]
    may_draft = online.is_response & states.reads_drafts(n_tokens)
    found = label_texts(module.target, states, online.tokens, may_draft, SAMPLING, drawing)
    stored = []
    for i, row in enumerate(rows):
        response = slice(len(row.prompt), len(row))
        drafts, labels = (values[i, response].T.numpy() for values in (found.drafts, found.labels))
        stored.append(TextRow(row.number, row.prompt, row.response, drafts.astype(np.int32), labels))
    hidden, labels = module.examples(online, 0)
    stored_hidden, stored_labels = module.examples(batch_of(stored), 0)
    assert torch.equal(labels, stored_labels)
    torch.testing.assert_close(hidden, stored_hidden)
    assert 0 < labels.mean() < 1


def test_each_epoch_takes_the_next_of_several_draws(target):
    states = model_states(target)
    row = text_rows(1)[0]
    drafts = np.stack([np.full(len(row.response), 7, np.int32), np.full(len(row.response), 9, np.int32)])
    labels = np.stack([np.full(len(row.response), value, np.float32) for value in (0.25, 0.75)])
    batch = batch_of([TextRow(0, row.prompt, row.response, drafts, labels)])
    module = training(target, states)
    assert [module.examples(batch, epoch)[1].unique().item() for epoch in range(3)] == [0.25, 0.75, 0.25]


@pytest.mark.parametrize("options", [{}, PREVIOUS], ids=str)
def test_states_of_a_spire_drafter_in_training_are_those_in_decoding(target, options, monkeypatch):
    """Drafts of the loop, from roots where a block of the training rollout begins, laid over the target's text."""
    monkeypatch.setattr(type(target._engine), "reads_prompts", False)  # programs round differently from texts
    states = spire_states(target, block_tokens=5, **options)
    drafts: list[tuple[list[int], list[int], list[torch.Tensor]]] = []

    class Spy(StopRule):
        needs_hidden = True

        def begin(self, n_rows, device):
            self.seen = []
            return ()

        def read(self, state, drafted, hidden):
            self.seen.append(hidden[0])
            return state, None

    spy = Spy()
    drafter = Spire(states.drafter, gamma=5, stop=spy)
    propose = drafter.propose

    def spied(context):
        tree = propose(context)
        drafts.append((context.tokens[0, : context.n_tokens[0]].tolist(), tree.tokens[0].tolist(), list(spy.seen)))
        return tree

    drafter.propose = spied
    generate(target, drafter, random_prompts([7, 10]), 40, Sampling(temperature=1.0), verification="token")
    checked = 0
    for text, (root, *drafted), seen in drafts:
        if (len(text) - 1) % 5 or len(seen) < 4:
            continue
        mixed = torch.tensor([[*text[:-1], root, *drafted[:4]]])
        own = torch.tensor([text + [0] * 4])  # what the target says after the root is not read
        captured = target.with_capture(states.capture_layers).features(own).captured
        hidden = states.hidden(mixed, captured)[0, len(text) :]
        # Rounding grows from one previous state to the next: in float64 the two agree to 1e-12.
        torch.testing.assert_close(torch.stack(seen[:4]), hidden, atol=5e-3 if options else 1e-5, rtol=1e-5)
        checked += 1
    assert checked >= 2


@pytest.mark.parametrize("kind", STATES)
def test_a_row_that_only_fills_up_a_ranks_share_teaches_nothing(target, kind):
    batch = TextRows(text_rows())[[-1]]
    assert not batch.is_response.any()
    hidden, labels = training(target, STATES[kind](target)).examples(batch, 0)
    assert len(hidden) == len(labels) == 0


def test_calibration_error_by_hand():
    reliability = Reliability()
    reliability.update(torch.tensor([0.91, 0.93, 0.10]), torch.tensor([1.0, 0.5, 0.4]))
    reliability.update(torch.tensor([1.0]), torch.tensor([1.0]))
    # Bins of a fifteenth: 0.10 in [0.067, 0.133), 0.91 and 0.93 in [0.867, 0.933), 1 in the last.
    assert reliability.compute()["eval/calibration_error"] == pytest.approx(
        (abs(1.84 - 1.5) + abs(0.1 - 0.4)) / 4, abs=1e-6
    )
    assert [b["positions"] for b in reliability.bins] == [1, 2, 1]


def test_cosine_schedule_with_a_share_of_warm_up():
    settings = OptimizerSettings(lr=1.0, warmup_share=0.2, schedule="cosine")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = warmup_then_down(optimizer, settings, lambda: 10)
    rates = [schedule.lr_lambdas[0](step) for step in range(11)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates[6] == pytest.approx(0.5)
    assert rates[10] == 0
    assert rates[2:] == sorted(rates[2:], reverse=True)


@pytest.mark.parametrize(("shape", "expected"), [("linear", [1.0, 0.55, 0.1]), ("cosine", [1.0, 0.55, 0.1])])
def test_a_schedule_ends_at_its_final_share(shape, expected):
    """By hand: without warm-up, at 0, 1/2 and all of the steps; a quarter of a half cosine is (1 + cos 45) / 2."""
    settings = OptimizerSettings(lr=1.0, warmup_steps=0, schedule=shape, final_share=0.1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    rates = warmup_then_down(optimizer, settings, lambda: 8).lr_lambdas[0]
    assert [rates(step) for step in (0, 4, 8)] == pytest.approx(expected)
    assert rates(2) == pytest.approx({"linear": 0.775, "cosine": 0.1 + 0.9 * (1 + 0.5**0.5) / 2}[shape])


def test_batches_of_like_length_see_every_row_once_and_pad_little():
    lengths = [10 + (37 * i) % 200 for i in range(230)]
    ranks = [SeededLoader(list, 230, 8, 3, (rank, 2), lengths) for rank in (0, 1)]
    epochs = [[[list(batch) for batch in rank] for rank in ranks] for _ in range(2)]
    for batches in epochs:
        seen = [row for rank in batches for batch in rank for row in batch]
        assert len(seen) == len(set(seen)) == 230 // 8 * 8
        spread = [max(lengths[r] for r in batch) - min(lengths[r] for r in batch) for rank in batches for batch in rank]
        assert np.mean(spread) < 20  # of 200; batches by chance would have about 120
    assert epochs[0] != epochs[1]
    again = SeededLoader(list, 230, 8, 3, (0, 2), lengths)
    assert [list(batch) for batch in again] == epochs[0][0]


@pytest.mark.parametrize("lengths", [None, [5, 1, 3]])
def test_an_epoch_that_is_shorter_than_a_step_is_one_step(lengths):
    batches = list(SeededLoader(list, 3, 1, 0, lengths=lengths, accumulated=4))
    assert sorted(batches) == [[0], [1], [2]]
