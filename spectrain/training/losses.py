"""Losses: SPIRe's MixedLoss (SPIRe, section 3.4), cross-entropy on the data, and that of acceptance heads (SpecDec++).

    MixedLoss = omega * CE(p, q) - (1 - omega) * alpha,    alpha = sum_v min(p_v, q_v)

alpha is the probability that a token drawn from q is accepted. With omega = 0 it is the total variation; `lk` is
-log alpha ("LK losses", arXiv 2602.23881). Hidden states become logits one chunk of positions at a
time, and the gradient is computed with the loss, so that memory does not grow with L x V. The gradient is

    d CE / dz = q - p,    d alpha / dz = q * (m - <q, m>),   m_v = 1 where q_v < p_v.

A position may be drafted at several depths. They share the target's logits, which are computed once.

Letters: N positions (of all rows, flattened), n of a chunk, J depths, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.target.device import PLANNED, device_type

MOST_LOGITS = {"cpu": 1 << 22}  # of a chunk: 16 MB, for which a CPU's allocator need not ask the system each time
MOST_LOGITS_ELSEWHERE = 1 << 26  # with fewer positions a GPU waits for the unembedding, which each chunk reads
TILE = 128  # positions that a GPU multiplies together
LEAST_ALPHA = 1e-30  # whose logarithm "lk" takes: where nothing is shared, it is a number still
Chunk = Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]


@dataclass(frozen=True)
class LossSettings:
    """The loss that a drafter is trained with."""

    kind: str = "mixed"  # mixed | distill, soft (omega = 1) | tv (omega = 0) | lk (-log alpha) | hard (CE on the data)
    omega: float = 0.5  # share of the cross-entropy in "mixed", 0 to 1

    @property
    def weights(self) -> tuple[float, float]:
        """Weights of the cross-entropy and of -alpha, or under "lk" of -log alpha."""
        return {"mixed": (self.omega, 1 - self.omega), "tv": (0.0, 1.0), "lk": (0.0, 1.0)}.get(self.kind, (1.0, 0.0))


@dataclass(frozen=True)
class Teacher:
    """The target that a drafter learns from: its final hidden states and unembedding, never its logits."""

    hidden: Tensor  # [N, D_target]
    unembedding: Tensor  # [V, D_target]
    kept: Tensor | None = None  # [K] int64: of its probabilities these are compared with the drafter's; None: all
    # Whether it is its distribution among `kept`, and positions whose likeliest token is none of them count as 0
    # (EAGLE-3's soft cross-entropy).
    within: bool = False


@dataclass(frozen=True)
class LossParts:
    """A loss and what it is made of."""

    loss: Tensor  # scalar float32, with gradient
    cross_entropy: Tensor  # scalar float32, nats: CE(p, q), or of the data under "hard"
    alpha: Tensor  # [N] or [N, J] float32: acceptance probability at each position
    weight: Tensor  # scalar: positions that the loss is a mean over, or the sum of their weights
    drafted: Tensor | None = None  # bool, like alpha: where it is known
    steps: Tensor | None = None  # int64, like alpha: which token of its draft each is; None: drafts of k in a row


def drafter_loss(
    settings: LossSettings,
    hidden: Tensor,
    unembedding: Tensor,
    teacher: Teacher,
    next_tokens: Tensor,
    chunk: Chunk | None = None,
    weights: Tensor | None = None,
) -> LossParts:
    """Compute the training loss of a drafter, averaged over positions; 0 where there is none.

    Args:
        settings: which loss.
        hidden: [N, D] the drafter's final hidden states; [N, J, D] at several depths.
        unembedding: [V, D] of the drafter.
        teacher: the target at the same positions.
        next_tokens: [N] int64, the data's next token; -100 where there is none (read by "hard" only).
        chunk: `chunk_loss`, compiled.
        weights: [N, J] float32 in the mean; None: equal ones.
    """
    hard = next_tokens if settings.kind == "hard" else None
    if weights is not None:
        weights = weights if hard is None else weights * (hard >= 0)[:, None]
        weight = weights.sum()
    else:
        weight = torch.full((), len(hidden), device=hidden.device) if hard is None else (hard >= 0).sum()
    options = settings, torch.is_grad_enabled(), chunk or chunk_loss
    loss, cross_entropy, alpha = _ChunkedLoss.apply(hidden, unembedding, teacher, hard, weights, *options)
    return LossParts(loss, cross_entropy, alpha, weight)


def next_token_loss(
    hidden: Tensor, unembedding: Tensor, tokens: Tensor, learned: Tensor, chunk: Chunk | None = None
) -> Tensor:
    """Compute the cross-entropy on the data, nats per token, averaged over the learned positions.

    Args:
        hidden: [B, L, D] the model's final hidden states.
        unembedding: [V, D].
        tokens: [B, L] int64.
        learned: [B, L] bool, the positions whose next token is learned. The last of a row has none.
        chunk: `chunk_loss`, compiled.
    """
    places = with_next(learned).flatten().nonzero()[:, 0]
    labels = F.pad(tokens[:, 1:], (0, 1)).flatten()[places]
    states = hidden.flatten(0, 1)[places]
    options = LossSettings("hard"), torch.is_grad_enabled(), chunk or chunk_loss
    return _ChunkedLoss.apply(states, unembedding, None, labels, None, *options)[0]


def with_next(learned: Tensor) -> Tensor:
    """Return those of the positions [B, L] bool that have a next token in their row."""
    return F.pad(learned[:, :-1], (0, 1))


class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradient with the loss, chunk by chunk; backward only scales it.

    Without a teacher alpha is 0.
    """

    @staticmethod
    def forward(ctx, hidden, unembedding, teacher, hard, counts, settings, grad_enabled, chunk):
        needs_grad = grad_enabled and (hidden.requires_grad or unembedding.requires_grad)
        trains_unembedding = grad_enabled and unembedding.requires_grad
        flat, n_depths = hidden.flatten(0, -2), hidden.shape[1] if hidden.dim() == 3 else 1
        kept, cut = teacher and teacher.kept, teacher is not None and teacher.within
        n_positions = max(1, len(hidden))
        n_hard = n_positions if hard is None else (hard >= 0).sum().clamp_min(1)
        if counts is not None:
            n_positions = n_hard = counts.sum().clamp_min(torch.finfo(counts.dtype).tiny)
            counts = counts.clone()
        elif cut or settings.kind == "lk":
            counts = hidden.new_ones(len(hidden), n_depths, dtype=torch.float32)
        cast, cast_teacher = _as_computed(unembedding, hidden), None
        if teacher is not None:
            alike = teacher.unembedding is unembedding and _dtype_of(teacher.hidden) == cast.dtype
            cast_teacher = cast if alike else _as_computed(teacher.unembedding, teacher.hidden)
        grad_hidden = torch.empty_like(flat) if needs_grad else None
        grad_unembedding = torch.zeros_like(unembedding, dtype=torch.float32) if trains_unembedding else None
        cross_entropy = hidden.new_zeros((), dtype=torch.float32)
        alphas = hidden.new_zeros(len(flat), dtype=torch.float32)
        n_logits = max(n_depths * len(unembedding), len(cast_teacher) if cut else 0)
        with torch.autocast("cpu" if hidden.is_meta else hidden.device.type, enabled=False):  # all is cast here
            for part in _parts(hidden, n_logits):
                drafted = slice(n_depths * part.start, n_depths * part.stop)
                logits = flat[drafted].to(cast.dtype) @ cast.T  # [n J, V]
                of_teacher = None
                if cast_teacher is not None:
                    of_teacher = teacher.hidden[part].to(cast_teacher.dtype) @ cast_teacher.T
                if cut:
                    best, of_teacher = of_teacher.amax(-1), of_teacher[:, kept]
                    counts[part] *= (of_teacher.amax(-1) == best)[:, None]
                labels = None if hard is None else hard[part].repeat_interleave(n_depths)
                given = logits, of_teacher, None if cut else kept, labels, settings.weights, needs_grad
                ce, alpha, grad_logits = chunk(*given, *([n_depths] if n_depths > 1 else []))
                count = None if counts is None else counts[part].flatten()
                cross_entropy += (ce if count is None else ce * count).sum()
                if alpha is not None:
                    alphas[drafted] = alpha if settings.kind != "lk" else alpha.clamp_(min=LEAST_ALPHA)
                if not needs_grad:
                    continue
                grad_hidden[drafted] = grad_logits @ cast
                if count is not None:  # states are far fewer numbers than logits
                    count = (count / alpha if settings.kind == "lk" else count)[:, None]
                    grad_hidden[drafted] *= count
                if trains_unembedding:
                    states = flat[drafted].to(cast.dtype)
                    grad_unembedding += grad_logits.T @ (states if count is None else (states * count).to(cast.dtype))
        cross_entropy /= n_hard
        if needs_grad:
            scale = (settings.weights[0] or settings.weights[1]) / n_hard
            grad_hidden *= scale
            if trains_unembedding:
                grad_unembedding = grad_unembedding.mul_(scale).to(unembedding.dtype)
            ctx.save_for_backward(grad_hidden.view_as(hidden), grad_unembedding)
        gained = alphas.log() if settings.kind == "lk" else alphas
        gained = gained if counts is None else gained * counts.flatten()
        alphas = alphas.view(hidden.shape[:-1])
        ctx.mark_non_differentiable(cross_entropy, alphas)
        loss = settings.weights[0] * cross_entropy - settings.weights[1] * (gained.sum() / n_positions)
        return loss, cross_entropy, alphas

    @staticmethod
    def backward(ctx, grad_loss, *_):
        grad_hidden, grad_unembedding = ctx.saved_tensors
        by_unembedding = None if grad_unembedding is None else grad_unembedding * grad_loss
        return grad_hidden * grad_loss, by_unembedding, *[None] * 6


def _as_computed(weight: Tensor, states: Tensor) -> Tensor:
    """Return a weight in the dtype of its products with states: autocast would cast it anew for each chunk."""
    return weight.to(_dtype_of(states))


def _dtype_of(states: Tensor) -> torch.dtype:
    """Return the dtype in which products of these states run."""
    kind = states.device.type
    if states.is_meta:
        return PLANNED.get()[1]
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype


def _parts(hidden: Tensor, n_tokens: int) -> list[slice]:
    """Cut positions into chunks of like size whose logits fit the device."""
    kind = device_type(hidden.device)
    most = max(1, MOST_LOGITS.get(kind, MOST_LOGITS_ELSEWHERE) // n_tokens)
    size = most - most % TILE if kind != "cpu" and most > TILE else most
    return [slice(start, start + size) for start in range(0, len(hidden), size)]


def chunk_loss(
    logits: Tensor,
    of_teacher: Tensor | None,
    kept: Tensor | None,
    labels: Tensor | None,
    weights: tuple[float, float],
    needs_grad: bool,
    n_depths: int = 1,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the cross-entropy [n] and alpha [n] of a chunk, float32, whatever the dtype of the logits.

    With several depths the teacher's logits are [n / J, V], of the positions that J rows each are drafts of.

    With `needs_grad` also the gradient of the weighted loss by the logits [n, V], in their dtype, divided by the first
    weight that is not 0. Each operation reads or writes [n, V] once more, so there are as few as may be.
    """
    p = None if of_teacher is None else of_teacher.softmax(-1, dtype=torch.float32)
    p = p if kept is None else p[:, kept]
    if n_depths > 1 and p is not None:
        p = p.repeat_interleave(n_depths, 0)
    log_q = logits.log_softmax(-1, dtype=torch.float32)
    if labels is None:
        cross_entropy = -_dot(p, log_q)
    else:
        labels, counted = labels.clamp_min(0)[:, None], labels >= 0
        cross_entropy = -log_q.gather(-1, labels)[:, 0] * counted
    q, alpha = log_q.exp_(), None
    if p is not None:
        shared = torch.minimum(p, q)
        alpha = shared.sum(-1)
    if not needs_grad:
        return cross_entropy, alpha, None
    if labels is not None:
        assert weights == (1.0, 0.0), weights
        grad = q.scatter_add_(-1, labels, -torch.ones_like(q[:, :1])).mul_(counted[:, None])
    elif not weights[1]:
        grad = q.sub_(p)
    else:
        difference = torch.sub(q, p, out=p)
        below = torch.lt(difference, 0, out=shared)  # m, as numbers: masks are ten times as slow on a CPU
        below -= _dot(q, below)[:, None]
        if weights[0]:
            grad = torch.addcmul(difference, q, below, value=-weights[1] / weights[0], out=q)
        else:
            grad = q.mul_(below).neg_()
    return cross_entropy, alpha, grad.to(logits.dtype)


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """Return the products [n] of rows [n, V], which a compiler fuses and eager mode leaves to BLAS."""
    return (one * other).sum(-1) if torch.compiler.is_compiling() else torch.linalg.vecdot(one, other)


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
