"""MixedLoss: values worked out by hand, gradients against autograd, chunks against the whole."""

from __future__ import annotations

import pytest
import torch

from spectrain.training import losses
from spectrain.training.losses import LossSettings, Teacher, drafter_loss


def plain_loss(kind, omega, hidden, unembedding, teacher, labels):
    """The definition, over all positions at once, differentiated by autograd."""
    log_q = (hidden @ unembedding.T).log_softmax(-1)
    p = (teacher.hidden @ teacher.unembedding.T).softmax(-1)
    if kind == "hard":
        return torch.nn.functional.nll_loss(log_q, labels)
    alpha = torch.minimum(p, log_q.exp()).sum(-1).mean()
    omega = omega if kind == "mixed" else 1.0
    return omega * -(p * log_q).sum(-1).mean() - (1 - omega) * alpha


def make_batch(n: int = 7, d: int = 5, v: int = 11):
    hidden, unembedding = torch.randn(n, d, requires_grad=True), torch.randn(v, d, requires_grad=True)
    labels = torch.randint(0, v, (n,))
    labels[-1] = -100
    return hidden, unembedding, Teacher(torch.randn(n, 6), torch.randn(v, 6)), labels


@pytest.mark.parametrize(
    ("kind", "omega"), [("mixed", 0.5), ("mixed", 0.0), ("mixed", 1.0), ("distill", 0.5), ("hard", 0.5)]
)
@pytest.mark.parametrize("chunk", [3, 100])
def test_value_and_gradient_equal_autograd_s(kind, omega, chunk, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_POSITIONS", chunk)
    hidden, unembedding, teacher, labels = make_batch()
    expected = plain_loss(kind, omega, hidden, unembedding, teacher, labels)
    expected_grads = torch.autograd.grad(expected, [hidden, unembedding])
    found = drafter_loss(LossSettings(kind, omega), hidden, unembedding, teacher, labels)
    grads = torch.autograd.grad(found.loss, [hidden, unembedding])
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(grads, expected_grads)


def test_a_frozen_unembedding_costs_no_gradient_and_changes_none():
    hidden, unembedding, teacher, labels = make_batch()
    parts = drafter_loss(LossSettings(), hidden, unembedding, teacher, labels)
    frozen = drafter_loss(LossSettings(), hidden, unembedding.detach(), teacher, labels)
    assert frozen.loss.grad_fn.saved_tensors[1] is None
    torch.testing.assert_close(*(torch.autograd.grad(one.loss, hidden)[0] for one in (frozen, parts)))


def test_alpha_is_the_overlap_of_p_and_q():
    """p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4): they share 1/4 + 1/4 + 1/4."""
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    one = torch.ones(1, 1)
    parts = drafter_loss(LossSettings(), one, q.log()[:, None], Teacher(one, p.log()[:, None]), torch.tensor([-100]))
    assert parts.alpha.item() == pytest.approx(0.75)
    entropy = -(p * q.log()).sum().item()
    assert parts.cross_entropy.item() == pytest.approx(entropy)
    assert parts.loss.item() == pytest.approx(0.5 * entropy - 0.5 * 0.75)


def test_equal_distributions_are_always_accepted():
    hidden, unembedding = torch.randn(4, 5), torch.randn(9, 5)
    parts = drafter_loss(LossSettings(), hidden, unembedding, Teacher(hidden, unembedding), torch.zeros(4).long())
    torch.testing.assert_close(parts.alpha, torch.ones(4))
