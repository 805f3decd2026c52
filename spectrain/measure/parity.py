"""Acceptance by draft position from three sides under one definition (methods.md section 10), so that they can differ
only where something is wrong: counted in the real loop, computed teacher forced as validation does, and counted in
transformers' assisted generation.

A step is full where its drafter was free to draft gamma tokens: whether it was is known when it begins, so leaving the
others out selects nothing. At position j, acceptance is

    (full steps whose first j draft tokens were accepted) / (full steps whose first j - 1 were)

and tau = 1 + the mean number accepted. Behind the root of a step the loop's text is drawn from p, whatever the drafter
does, so teacher forcing predicts the counts from that text alone: with x_i its tokens,

    P(first j accepted) = E_p[ prod_{i < j} min(1, q_i(x_i) / p_i(x_i)) * sum_v min(p_j(v), q_j(v)) ]

as the loop keeps x_i with that probability. Under greedy decoding every factor is 0 or 1, and both agree step by step.

Letters: T texts, S full steps of a text, k = gamma, L tokens of a text, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spectrain.decoding import Generation, Sampling
from spectrain.measure.statistics import Estimate

N_RESAMPLES = 4000
LEAST_STEPS = 100  # that came to a position, for a bootstrap of its acceptance to mean anything
# (tokens [L], positions [S, k]) -> logits [S, k, V] after the tokens at these positions. Row s holds the root of a step
# and the draft tokens behind it: what the drafter reads in that step.
Logits = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Steps:
    """The full steps of one text."""

    tokens: list[int]  # context and continuation, [L]
    begins: int  # position of the first root, full step or not
    roots: list[int]  # position of the last token before each draft, [S]
    accepted: list[int]  # of gamma draft tokens, [S]


@dataclass(frozen=True)
class Acceptance:
    """How far drafts get: of each text how many full steps there were, and whose first 1, 2, .. k tokens were accepted.

    Args:
        counts: [T, k + 1] float64; expected counts where acceptance is computed.
        other: of the same texts, in the same order: then everything is the difference, this minus the other.
    """

    counts: np.ndarray
    other: np.ndarray | None = None

    def minus(self, other: Acceptance) -> Acceptance:
        assert self.counts.shape == other.counts.shape, "both must be of the same texts"
        return Acceptance(self.counts, other.counts)

    def rates(self) -> list[Estimate]:
        """Of each position, with a percentile bootstrap over texts; nan where no step came so far."""
        return [self._estimate(position) for position in range(1, self.counts.shape[1])]

    def tau(self) -> Estimate:
        """Tokens a full step, the bonus included."""
        return self._estimate(None)

    def apart(self) -> list[int]:
        """Of a difference: positions whose interval lies off 0; all intervals together hold at 95 % (Bonferroni)."""
        positions = range(1, self.counts.shape[1])
        reached = np.minimum(self.counts.sum(0), self.other.sum(0))[:-1]
        level = 1 - 0.05 / len(positions)
        estimates = {position: self._estimate(position, level) for position in positions}
        return [i for i, e in estimates.items() if reached[i - 1] >= LEAST_STEPS and (e.low > 0 or e.high < 0)]

    def _estimate(self, position: int | None, level: float = 0.95) -> Estimate:
        n_texts = len(self.counts)
        picks = np.random.default_rng(0).integers(n_texts, size=(N_RESAMPLES, n_texts))
        value, drawn = (
            _ratio(self.counts[rows].sum(-2), position)
            - (0 if self.other is None else _ratio(self.other[rows].sum(-2), position))
            for rows in (slice(None), picks)
        )
        if n_texts < 2 or np.isnan(value):
            return Estimate(float(value), float("nan"), float("nan"))
        low, high = np.nanquantile(drawn, [(1 - level) / 2, (1 + level) / 2])
        return Estimate(float(value), float(low), float(high))


def _ratio(sums: np.ndarray, position: int | None) -> np.ndarray:
    """The rate of a position, or tau (None), of counts [..., k + 1] summed over texts."""
    above = sums.sum(-1) if position is None else sums[..., position]
    with np.errstate(invalid="ignore", divide="ignore"):
        return above / sums[..., 0 if position is None else position - 1]


def full_steps(context: Sequence[int], generation: Generation, gamma: int, of_context: bool = False) -> Steps:
    """The steps of a continuation that drafted gamma tokens.

    Args:
        context: what was continued.
        generation: by a drafter of chains.
        gamma: draft tokens of a full step.
        of_context: the first root is the context's last token, as in assisted generation; else the first token written.
    """
    begins = len(context) - 1 if of_context else len(context)
    root, roots, accepted = begins, [], []
    for drafted, kept in zip(generation.drafted, generation.accepted, strict=True):
        if drafted == gamma:
            roots.append(root)
            accepted.append(kept)
        root += kept + 1
    return Steps([*context, *generation.tokens], begins, roots, accepted)


def counted(texts: Sequence[Steps], gamma: int) -> Acceptance:
    """What the loop did."""
    reached = [[sum(a >= j for a in text.accepted) for j in range(gamma + 1)] for text in texts]
    return Acceptance(np.array(reached, dtype=np.float64))


@dataclass(frozen=True)
class Computed:
    """What the loop should do on average, teacher forced."""

    everywhere: Acceptance  # as if a draft began at each position of what was written
    at_steps: Acceptance  # at the loop's own steps


@torch.inference_mode()
def computed(texts: Sequence[Steps], gamma: int, draft: Logits, target: Logits, sampling: Sampling) -> Computed:
    """Acceptance from the two models' logits, at all positions of a text at once.

    Args:
        texts: written under `sampling`.
        gamma: draft tokens of a step.
        draft: the drafter's logits, as training computes them.
        target: the target's, by one plain forward.
        sampling: how both are warped.
    """
    everywhere, at_steps = np.zeros((len(texts), gamma + 1)), np.zeros((len(texts), gamma + 1))
    for row, text in enumerate(texts):
        roots = np.arange(text.begins, len(text.tokens) - gamma)
        if not len(roots):
            continue
        reached = _reached(torch.tensor(text.tokens), torch.from_numpy(roots), gamma, draft, target, sampling)
        everywhere[row] = reached.sum(0)
        at_steps[row] = reached[np.isin(roots, text.roots)].sum(0)
    return Computed(Acceptance(everywhere), Acceptance(at_steps))


def _reached(
    tokens: Tensor, roots: Tensor, gamma: int, draft: Logits, target: Logits, sampling: Sampling
) -> np.ndarray:
    """Probabilities [S, k + 1] float64 that the first 0, 1, .. k draft tokens behind each root [S] are accepted."""
    positions = roots[:, None] + torch.arange(gamma)  # [S, k]
    p, q = (sampling.warp(logits(tokens, positions)).cpu() for logits in (target, draft))  # [S, k, V]
    overlap = torch.minimum(p, q).sum(-1).double()  # [S, k]: sum_v min(p, q)
    written = tokens[positions + 1][..., None]
    kept = (q.gather(-1, written) / p.gather(-1, written))[..., 0].clamp_max(1).double()
    before = torch.nn.functional.pad(kept.cumprod(1)[:, :-1], (1, 0), value=1.0)
    return torch.nn.functional.pad(before * overlap, (1, 0), value=1.0).numpy()
