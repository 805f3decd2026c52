"""Acceptance labels, the training data of an acceptance head (SpecDec++, Huang et al. 2024, section 4.4).

At each position i of a response X by the target, a token Y_i is drawn from q(. | x, X_<i). Its label is the probability
that it is accepted, min(1, p(Y_i) / q(Y_i)). Both distributions are warped as in decoding.

Letters: B rows, T tokens, M positions, K draws per position, V vocabulary, C captured layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.decoding.sampling import Sampling, draw_token
from spectrain.decoding.target import TargetModel
from spectrain.models.draft_states import DraftStates

CHUNK_POSITIONS = 128  # positions whose p and q, [128, V] float32 each, are in memory at a time


@dataclass(frozen=True)
class Draws:
    """K drafted tokens at each of M positions."""

    tokens: Tensor  # [M, K] int64, drawn from q
    p: Tensor  # [M, K] float32: the target's probability of each
    q: Tensor  # [M, K] float32: the drafter's, above 0

    @property
    def labels(self) -> Tensor:
        """[M, K] float32: the probability that each token is accepted."""
        return (self.p / self.q).clamp(max=1.0)


@dataclass(frozen=True)
class LabelledTexts:
    """Drafts and labels at the positions of texts; all are 0 where none was drawn."""

    drafts: Tensor  # [B, T, K] int64
    p: Tensor  # [B, T, K] float32
    q: Tensor  # [B, T, K] float32
    labels: Tensor  # [B, T, K] float32
    captured: Tensor | None  # [B, T, C, D] of the target on the texts


@torch.no_grad()
def label_texts(
    target: TargetModel,
    states: DraftStates,
    tokens: Tensor,
    may_draft: Tensor,
    sampling: Sampling,
    uniforms: Tensor,
) -> LabelledTexts:
    """Draw and label drafts at some positions of texts, by one forward of the target and one of the drafter.

    Args:
        target: captures the drafter's `capture_layers`.
        states: of the drafter.
        tokens: [B, T] int64, prompt and response, padded on the right.
        may_draft: [B, T] bool, the positions; never the first of a row.
        sampling: as in decoding.
        uniforms: [B, T, K] float32 in [0, 1).
    """
    features = target.features(tokens)
    hidden = states.hidden(tokens, features.captured)
    rows, places = may_draft.nonzero(as_tuple=True)
    draws = draw_drafts(
        features.final_hidden[rows, places - 1],
        hidden[rows, places - 1],
        target.logits_of,
        states.logits,
        sampling,
        uniforms[rows, places],
    )
    filled = []
    for values in (draws.tokens, draws.p, draws.q, draws.labels):
        whole = values.new_zeros(uniforms.shape)
        whole[rows, places] = values
        filled.append(whole)
    return LabelledTexts(*filled, features.captured)


def draw_drafts(
    target_hidden: Tensor,
    draft_hidden: Tensor,
    target_logits: Callable[[Tensor], Tensor],
    draft_logits: Callable[[Tensor], Tensor],
    sampling: Sampling,
    uniforms: Tensor,
) -> Draws:
    """Draw tokens from the drafter at M positions, and read their probabilities in p and q.

    Args:
        target_hidden: [M, D_target] states that predict the positions.
        draft_hidden: [M, D] likewise.
        target_logits: maps states [m, D_target] to logits [m, V].
        draft_logits: likewise, over the same vocabulary.
        sampling: warps both; greedy gives labels 0 and 1.
        uniforms: [M, K] float32 in [0, 1), one per draw.
    """
    parts = []
    for start in range(0, max(1, len(uniforms)), CHUNK_POSITIONS):  # M = 0 gives tensors too
        chunk = slice(start, start + CHUNK_POSITIONS)
        q = sampling.warp(draft_logits(draft_hidden[chunk]))
        p = sampling.warp(target_logits(target_hidden[chunk]).to(q.device))
        tokens = torch.stack([draw_token(q, column) for column in uniforms[chunk].unbind(1)], dim=1)  # [m, K]
        tokens = tokens.clamp(max=q.shape[-1] - 1)  # where q is NaN; the label will be NaN, too
        parts.append((tokens, p.gather(1, tokens), q.gather(1, tokens)))
    return Draws(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def mix_tokens(
    text: Tensor, drafts: Tensor, may_draft: Tensor, share: float, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Mix text and drafts: Z_i is X_i with probability `share`, else Y_i.

    Args:
        text: [..., T] int64, prompt and response X.
        drafts: [..., T] int64, Y; read where `may_draft`.
        may_draft: [..., T] bool: positions of the response that have a draft.
        share: r, of the target's own tokens; 0.15 in the paper.
        uniforms: [..., T] float32 in [0, 1).

    Returns:
        Z [..., T] int64, and [..., T] bool: where Z is a draft, so that there is a loss.
    """
    drafted = may_draft & (uniforms >= share)
    return torch.where(drafted, drafts, text), drafted
