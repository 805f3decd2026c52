"""Teacher-forced acceptance is what drafting token by token accepts, and tau follows from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spectrain.errors import UserError
from spectrain.measure.acceptance import BATCH_SIZE, Acceptance, answered, expected_tau, of_states
from spectrain.models.draft_states import ModelStates
from spectrain.target import TargetModel
from tests.conftest import VOCAB_SIZE, noisy_copy, random_prompts, tiny_model

K = 3


@pytest.fixture
def target() -> TargetModel:
    return TargetModel(tiny_model(eos_token_id=None))


def states_of(target: TargetModel, scale: float) -> ModelStates:
    return ModelStates(TargetModel(noisy_copy(target.model, scale)).with_hidden(), VOCAB_SIZE)


def test_tau_is_one_and_the_products_of_the_mean_probabilities():
    alpha = np.array([[2.0, 1.0, 0.0], [1.0, 0.5, 0.0]])
    found = Acceptance(alpha, alpha, np.array([4.0, 2.0]), np.array([4.0, 2.0]))
    assert found.value == found.tau().value == expected_tau(3.0, 1.5, 0.0, 6.0) == 1 + 0.5 + 0.5 * 0.25
    assert found.as_json()["tau_greedy"]["value"] == 2.0
    better = Acceptance(2 * alpha, alpha, np.array([4.0, 2.0]), np.array([4.0, 2.0]))
    assert better.gain_over(found).value == 1 + 0.5 - 0.625


def test_the_target_itself_accepts_all_that_it_drafts(target):
    found = of_states(answered(target, random_prompts([5, 9]), 12, K, 60.0), K, states_of(target, 0.0))
    assert found.value == pytest.approx(K + 1, abs=1e-5)
    assert found.as_json()["tau_greedy"]["value"] == K + 1


@torch.no_grad()
def test_acceptance_is_that_of_drafting_token_by_token(target):
    answers, states = answered(target, random_prompts([5, 9, 14]), 12, K, 60.0), states_of(target, 0.1)
    alphas, accepted = torch.zeros(K), 0
    for answer in answers:
        text = answer.tokens[0]
        for root in range(answer.first, len(text), K):
            draft = text[: root + 1]
            for i in range(K):
                q = states.logits(states.hidden(draft[None], None)[0, -1:]).softmax(-1)
                known = text[None, : root + 1 + i]
                p = target.forward(known).logits[0, -1:].softmax(-1)
                teacher_forced = states.logits(states.hidden(known, None)[0, -1:]).softmax(-1)
                alphas[i] += torch.minimum(p, teacher_forced).sum()
                if len(draft) == root + 1 + i and q.argmax() == p.argmax():
                    accepted, draft = accepted + 1, torch.cat([draft, q.argmax(-1)])
    found = of_states(answers, K, states)
    assert found.alpha.sum(0) == pytest.approx(alphas.numpy(), abs=1e-4)
    assert 0 < accepted < found.drafts.sum() * K
    assert found.accepted.sum() == accepted


def test_after_its_seconds_no_more_prompts_are_answered(target):
    assert len(answered(target, random_prompts([5] * (BATCH_SIZE + 1)), 12, K, 0.0)) == BATCH_SIZE


def test_answers_without_two_drafts_are_no_measurement(target):
    with pytest.raises(UserError, match="answers of at least 6 tokens: 0, and an interval takes two; give more"):
        answered(target, random_prompts([5, 9]), 3, K, 60.0)
