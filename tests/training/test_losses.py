"""MixedLoss: values worked out by hand, gradients against autograd, chunks against the whole."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch

from spectrain.planning.dry_step import cost_of
from spectrain.target.device import PLANNED
from spectrain.training import losses
from spectrain.training.losses import LossSettings, Teacher, drafter_loss, next_token_loss


def plain_loss(kind, omega, hidden, unembedding, teacher, labels):
    """The definition, over all positions at once, differentiated by autograd."""
    log_q = (hidden @ unembedding.T).log_softmax(-1)
    p = (teacher.hidden @ teacher.unembedding.T).softmax(-1)
    if kind == "hard":
        return torch.nn.functional.nll_loss(log_q, labels)
    alpha = torch.minimum(p, log_q.exp()).sum(-1)
    if kind == "lk":
        return -alpha.log().mean()
    alpha = alpha.mean()
    omega = {"mixed": omega, "tv": 0.0}.get(kind, 1.0)
    return omega * -(p * log_q).sum(-1).mean() - (1 - omega) * alpha


def make_batch(n: int = 7, d: int = 5, v: int = 11):
    hidden, unembedding = torch.randn(n, d, requires_grad=True), torch.randn(v, d, requires_grad=True)
    labels = torch.randint(0, v, (n,))
    labels[-1] = -100
    return hidden, unembedding, Teacher(torch.randn(n, 6), torch.randn(v, 6)), labels


@pytest.mark.parametrize(
    ("kind", "omega"),
    [*[("mixed", omega) for omega in (0.5, 0.0, 1.0)], *[(kind, 0.5) for kind in ("distill", "tv", "lk", "hard")]],
)
@pytest.mark.parametrize("chunk", [3, 100])
def test_value_and_gradient_equal_autograd_s(kind, omega, chunk, monkeypatch):
    monkeypatch.setattr(losses, "MOST_LOGITS", {"cpu": chunk * 11})
    hidden, unembedding, teacher, labels = make_batch()
    expected = plain_loss(kind, omega, hidden, unembedding, teacher, labels)
    expected_grads = torch.autograd.grad(expected, [hidden, unembedding])
    found = drafter_loss(LossSettings(kind, omega), hidden, unembedding, teacher, labels)
    grads = torch.autograd.grad(found.loss, [hidden, unembedding])
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(grads, expected_grads)


@pytest.mark.parametrize("kind", ["mixed", "distill", "lk", "hard"])
@pytest.mark.parametrize("chunk", [3, 100])
def test_depths_are_positions_of_their_own_with_weights(kind, chunk, monkeypatch):
    """Three depths of seven positions are 21 positions of the same teacher; weights are counts of each."""
    monkeypatch.setattr(losses, "MOST_LOGITS", {"cpu": chunk * 11})
    _, unembedding, teacher, labels = make_batch()
    hidden, counts = torch.randn(7, 3, 5, requires_grad=True), torch.randint(0, 3, (7, 3))
    each = counts.flatten()
    repeated = Teacher(*(teacher.hidden.repeat_interleave(3, 0).repeat_interleave(each, 0), teacher.unembedding))
    flat = hidden.flatten(0, 1).repeat_interleave(each, 0)
    expected = drafter_loss(
        LossSettings(kind), flat, unembedding, repeated, labels.repeat_interleave(3).repeat_interleave(each)
    )
    found = drafter_loss(LossSettings(kind), hidden, unembedding, teacher, labels, weights=counts.float())
    both = [torch.autograd.grad(one.loss, [hidden, unembedding], retain_graph=True) for one in (found, expected)]
    torch.testing.assert_close((found.loss, found.cross_entropy), (expected.loss, expected.cross_entropy))
    torch.testing.assert_close(*both)
    assert found.weight == expected.weight
    torch.testing.assert_close(found.alpha.flatten().repeat_interleave(each), expected.alpha)


def test_alpha_is_the_overlap_of_p_and_q():
    """p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4): they share 1/4 + 1/4 + 1/4."""
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    one = torch.ones(1, 1)
    parts = drafter_loss(LossSettings(), one, q.log()[:, None], Teacher(one, p.log()[:, None]), torch.tensor([-100]))
    assert parts.alpha.item() == pytest.approx(0.75)
    entropy = -(p * q.log()).sum().item()
    assert parts.cross_entropy.item() == pytest.approx(entropy)
    assert parts.loss.item() == pytest.approx(0.5 * entropy - 0.5 * 0.75)


@pytest.mark.parametrize("chunk", [3, 100])
def test_the_next_token_loss_has_the_gradient_of_autograd_s(chunk, monkeypatch):
    monkeypatch.setattr(losses, "MOST_LOGITS", {"cpu": chunk * 11})
    hidden, unembedding = torch.randn(2, 5, 4, requires_grad=True), torch.randn(11, 4, requires_grad=True)
    tokens, learned = torch.randint(0, 11, (2, 5)), torch.rand(2, 5) < 0.7
    labels = tokens[:, 1:].masked_fill(~learned[:, :-1], -100)
    expected = torch.nn.functional.cross_entropy((hidden @ unembedding.T)[:, :-1].flatten(0, 1), labels.flatten())
    found = next_token_loss(hidden, unembedding, tokens, learned)
    torch.testing.assert_close(found, expected)
    both = (torch.autograd.grad(loss, [hidden, unembedding]) for loss in (found, expected))
    torch.testing.assert_close(*both)


def test_autocast_casts_an_unembedding_once_and_keeps_its_gradient_s_dtype(monkeypatch):
    monkeypatch.setattr(losses, "MOST_LOGITS", {"cpu": 11})
    hidden, unembedding, teacher, labels = make_batch()
    casts = []
    cast = losses._as_computed
    monkeypatch.setattr(losses, "_as_computed", lambda *given: casts.append(given) or cast(*given))
    with torch.autocast("cpu", torch.bfloat16):
        parts = drafter_loss(LossSettings(), hidden, unembedding, teacher, labels)
    assert len(casts) == 2
    assert cast(unembedding, hidden).dtype == torch.float32
    grads = torch.autograd.grad(parts.loss, [hidden, unembedding])
    assert [grad.dtype for grad in grads] == [torch.float32, torch.float32]
    plain = drafter_loss(LossSettings(), hidden, unembedding, teacher, labels)
    torch.testing.assert_close(parts.loss, plain.loss, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("kind", "omega"), [("mixed", 0.5), ("mixed", 0.0), ("distill", 0.5), ("hard", 0.5)])
def test_a_chunk_of_many_tokens_is_as_exact_as_its_dtype(kind, omega, dtype, tolerance):
    """Against the definition in float64: nothing of order V is lost in sums over 5,000 tokens."""
    logits, of_teacher = (5 * torch.randn(6, 5000)).to(dtype), (5 * torch.randn(6, 5000)).to(dtype)
    labels = torch.randint(0, 5000, (6,)) if kind == "hard" else None
    exact = logits.double().requires_grad_()
    one, teacher = torch.eye(6, dtype=torch.float64), Teacher(torch.eye(6).double(), of_teacher.double().T)
    expected = plain_loss(kind, omega, one, exact.T, teacher, labels)
    (gradient,) = torch.autograd.grad(expected, exact)
    weights = LossSettings(kind, omega).weights
    entropy, alpha, found = losses.chunk_loss(logits, of_teacher, None, labels, weights, True)
    assert found.dtype == dtype
    loss = weights[0] * entropy.mean() - weights[1] * alpha.mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    error = (found.double() * (weights[0] or weights[1]) / 6 - gradient).abs().max() / gradient.abs().max()
    assert error < tolerance


@pytest.mark.parametrize(("kind", "most_gb"), [("mixed", 1.6), ("vanilla", 1.0)])
def test_the_loss_of_a_large_vocabulary_takes_little_memory(kind, most_gb):
    """V = 128,256, D = 4,096, 4,096 positions, a frozen unembedding: the logits alone would be 2.1 GB in float32."""
    with torch.device("meta"):
        hidden, labels = torch.empty(4096, 4096, requires_grad=True), torch.zeros(4096, dtype=torch.int64)
        unembedding, of_target = (torch.empty(n, 4096, dtype=torch.bfloat16) for n in (128_256, 4096))
        learned, teacher = torch.ones(1, 4096, dtype=torch.bool), Teacher(of_target, unembedding)

        def loss() -> torch.Tensor:
            if kind == "vanilla":
                return next_token_loss(hidden[None], unembedding, labels[None], learned)
            return drafter_loss(LossSettings(kind), hidden, unembedding, teacher, labels).loss

        assert cost_of(loss, half=True).peak_bytes < most_gb * 1e9


def eagle3_loss(n: int, width: int, vocab_size: int, n_kept: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """EAGLE-3's loss of n positions, each at seven depths, with a trained unembedding of the tokens it can draft."""
    unembedding, table = torch.empty(n_kept, width, requires_grad=True), torch.empty(vocab_size, width, dtype=dtype)

    def loss() -> torch.Tensor:
        hidden, weights = torch.empty(n, 7, width, requires_grad=True), torch.ones(n, 7)
        teacher = Teacher(torch.empty(n, width, dtype=dtype), table, torch.arange(n_kept), within=True)
        labels = torch.zeros(n, dtype=torch.int64)
        return drafter_loss(LossSettings("soft"), hidden, unembedding, teacher, labels, weights=weights).loss

    return loss


def test_seven_depths_take_little_memory_and_what_is_counted_is_taken():
    """V = 128,256, of which 32,000 are drafted, D = 4,096, 4,096 positions; at a small size beside the allocator."""
    small = 700, 64, 8000, 2000, torch.float32
    with torch.device("meta"):
        assert cost_of(eagle3_loss(4096, 4096, 128_256, 32_000, torch.bfloat16), half=True).peak_bytes < 3e9
        planned = PLANNED.set(("cpu", torch.float32))
        counted = cost_of(eagle3_loss(*small), half=False).peak_bytes
        PLANNED.reset(planned)
    loss = eagle3_loss(*small)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss().backward()
    taken = [one for one in profile.profiler.kineto_results.events() if one.name() == "[memory]"]
    peak = max(accumulate(one.nbytes() for one in sorted(taken, key=lambda one: one.start_ns())))
    assert counted == pytest.approx(peak, rel=0.05)
