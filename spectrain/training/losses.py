"""Losses: SPIRe's MixedLoss (SPIRe, section 3.4), cross-entropy on the data, and that of acceptance heads (SpecDec++).

    MixedLoss = omega * CE(p, q) - (1 - omega) * alpha,    alpha = sum_v min(p_v, q_v)

alpha is the probability that a token drawn from q is accepted. Hidden states become logits one chunk of positions at a
time, and the gradient is computed with the loss, so that memory does not grow with L x V. The gradient is

    d CE / dz = q - p,    d alpha / dz = q * (m - <q, m>),   m_v = 1 where q_v < p_v.

Letters: N positions (of all rows, flattened), D hidden size, V vocabulary.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_LOGITS = {"cpu": 1 << 22}  # of a chunk: 16 MB, for which a CPU's allocator need not ask the system each time
MOST_LOGITS_ELSEWHERE = 1 << 25
# The device that a step on `meta`, which has no autocast, stands for, and the dtype of its products.
PLANNED: ContextVar[tuple[str, torch.dtype]] = ContextVar("planned", default=("cuda", torch.bfloat16))


@dataclass(frozen=True)
class LossSettings:
    """The loss that a drafter is trained with."""

    kind: str = "mixed"  # mixed | distill (omega = 1) | hard (cross-entropy on the data)
    omega: float = 0.5  # share of the cross-entropy in "mixed", 0 to 1

    @property
    def weights(self) -> tuple[float, float]:
        """Weights of the cross-entropy and of -alpha."""
        return (self.omega, 1 - self.omega) if self.kind == "mixed" else (1.0, 0.0)


@dataclass(frozen=True)
class Teacher:
    """The target that a drafter learns from: its final hidden states and unembedding, never its logits."""

    hidden: Tensor  # [N, D_target]
    unembedding: Tensor  # [V, D_target]
    kept: Tensor | None = None  # [K] int64: of its probabilities these are compared with the drafter's; None: all


@dataclass(frozen=True)
class LossParts:
    """A loss and what it is made of."""

    loss: Tensor  # scalar float32, with gradient
    cross_entropy: Tensor  # scalar float32, nats: CE(p, q), or of the data under "hard"
    alpha: Tensor  # [N] float32: acceptance probability at each position


def drafter_loss(
    settings: LossSettings, hidden: Tensor, unembedding: Tensor, teacher: Teacher, next_tokens: Tensor
) -> LossParts:
    """Compute the training loss of a drafter, averaged over positions; 0 where there is none.

    Args:
        settings: which loss.
        hidden: [N, D] the drafter's final hidden states.
        unembedding: [V, D] of the drafter.
        teacher: the target at the same positions.
        next_tokens: [N] int64, the data's next token; -100 where there is none (read by "hard" only).
    """
    hard = next_tokens if settings.kind == "hard" else None
    loss, cross_entropy, alpha = _ChunkedLoss.apply(
        hidden,
        unembedding,
        teacher.hidden,
        teacher.unembedding,
        teacher.kept,
        hard,
        settings.weights,
        torch.is_grad_enabled(),
    )
    return LossParts(loss, cross_entropy, alpha)


def next_token_loss(hidden: Tensor, unembedding: Tensor, tokens: Tensor, learned: Tensor) -> Tensor:
    """Compute the cross-entropy on the data, nats per token, averaged over the learned positions.

    Args:
        hidden: [B, L, D] the model's final hidden states.
        unembedding: [V, D].
        tokens: [B, L] int64.
        learned: [B, L] bool, the positions whose next token is learned. The last of a row has none.
    """
    places = F.pad(learned[:, :-1], (0, 1)).flatten().nonzero()[:, 0]
    labels = F.pad(tokens[:, 1:], (0, 1)).flatten()[places]
    states = hidden.flatten(0, 1)[places]
    return _ChunkedLoss.apply(states, unembedding, None, None, None, labels, (1.0, 0.0), torch.is_grad_enabled())[0]


class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradient with the loss, chunk by chunk; backward only scales it.

    Without a teacher alpha is 0.
    """

    @staticmethod
    def forward(ctx, hidden, unembedding, teacher_hidden, teacher_unembedding, kept, hard, weights, grad_enabled):
        needs_grad = grad_enabled and (hidden.requires_grad or unembedding.requires_grad)
        trains_unembedding = grad_enabled and unembedding.requires_grad
        n_positions = max(1, hidden.shape[0])
        n_hard = n_positions if hard is None else (hard >= 0).sum().clamp_min(1)
        cast, cast_teacher = _as_computed(unembedding), None
        if teacher_unembedding is not None:
            cast_teacher = cast if teacher_unembedding is unembedding else _as_computed(teacher_unembedding)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_unembedding = torch.zeros_like(unembedding, dtype=torch.float32) if trains_unembedding else None
        cross_entropy = hidden.new_zeros((), dtype=torch.float32)
        alphas = hidden.new_zeros(len(hidden), dtype=torch.float32)
        kind = PLANNED.get()[0] if hidden.is_meta else hidden.device.type
        most = MOST_LOGITS.get(kind, MOST_LOGITS_ELSEWHERE)
        size = max(1, most // len(unembedding))
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            logits, p = hidden[part] @ cast.T, None
            if cast_teacher is not None:
                p = (teacher_hidden[part] @ cast_teacher.T).float().softmax(dim=-1)  # [n, V]
                p = p if kept is None else p[:, kept]
            labels = None if hard is None else hard[part]
            ce, alpha, grad_logits = _chunk(logits.float(), p, labels, weights, needs_grad)
            cross_entropy += ce.sum() / n_hard
            if p is not None:
                alphas[part] = alpha
            if needs_grad:
                grad_logits = (grad_logits / n_hard).to(logits.dtype)
                grad_hidden[part] = grad_logits @ cast
                if trains_unembedding:
                    grad_unembedding += grad_logits.T @ hidden[part].to(logits.dtype)
        if needs_grad:
            ctx.save_for_backward(grad_hidden, grad_unembedding.to(unembedding.dtype) if trains_unembedding else None)
        ctx.mark_non_differentiable(cross_entropy, alphas)
        return weights[0] * cross_entropy - weights[1] * (alphas.sum() / n_positions), cross_entropy, alphas

    @staticmethod
    def backward(ctx, grad_loss, *_):
        grad_hidden, grad_unembedding = ctx.saved_tensors
        by_unembedding = None if grad_unembedding is None else grad_unembedding * grad_loss
        return grad_hidden * grad_loss, by_unembedding, None, None, None, None, None, None


def _as_computed(weight: Tensor) -> Tensor:
    """Return a weight in the dtype that products run in: autocast would cast it anew for each chunk."""
    kind = weight.device.type
    if weight.is_meta:
        return weight.to(PLANNED.get()[1])
    return weight.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else weight


def _chunk(
    logits: Tensor, p: Tensor | None, labels: Tensor | None, weights: tuple[float, float], needs_grad: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Cross-entropy [n], alpha [n] and, per position, the gradient of the weighted loss by the logits [n, V]."""
    log_q = logits.log_softmax(dim=-1)
    q = log_q.exp()
    alpha = None if p is None else torch.minimum(p, q).sum(dim=-1)
    if labels is None:
        cross_entropy = -(p * log_q).sum(dim=-1)
    else:
        kept = labels >= 0
        cross_entropy = -log_q.gather(-1, labels.clamp_min(0)[:, None])[:, 0] * kept
    if not needs_grad:
        return cross_entropy, alpha, None
    if labels is not None:
        assert weights == (1.0, 0.0), weights
        grad = q.scatter_add(-1, labels.clamp_min(0)[:, None], -torch.ones_like(q[:, :1])) * kept[:, None]
        return cross_entropy, alpha, grad
    if not weights[1]:
        return cross_entropy, alpha, q.sub_(p).mul_(weights[0])
    mass = q.where(q < p, 0)  # q_v m_v
    # In place, because each new [n, V] tensor costs memory traffic: w0 (q - p) - w1 (mass - q <q, m>)
    grad = q.mul_(weights[0] + weights[1] * mass.sum(dim=-1, keepdim=True))
    grad.sub_(p, alpha=weights[0]).sub_(mass, alpha=weights[1])
    return cross_entropy, alpha, grad


def weighted_bce(log_odds: Tensor, labels: Tensor, w_rej: float, w_acc: float = 1.0) -> Tensor:
    """Compute the weighted binary cross-entropy on soft labels (SpecDec++, section 4.4), a scalar in nats.

        sum[ w_rej (1 - a) (-log(1 - f)) + w_acc a (-log f) ] / (w_rej sum(1 - a) + w_acc sum a)

    Args:
        log_odds: [M] float32, of the predicted acceptance f.
        labels: [M] float32, a. Without any position the loss is 0.
        w_rej, w_acc: weights of rejections and of acceptances.
    """
    rejected, accepted = w_rej * (1 - labels), w_acc * labels
    loss = rejected * F.softplus(log_odds) + accepted * F.softplus(-log_odds)
    return loss.sum() / (rejected + accepted).sum().clamp_min(torch.finfo(loss.dtype).tiny)


def binary_kl(log_odds: Tensor, labels: Tensor) -> Tensor:
    """KL(a || f) of Bernoulli labels a [M] and predictions, given as log odds [M]: [M] float32, nats."""
    cross_entropy = labels * F.softplus(-log_odds) + (1 - labels) * F.softplus(log_odds)
    return cross_entropy + torch.xlogy(labels, labels) + torch.xlogy(1 - labels, 1 - labels)
