"""Acceptance labels, the training data of an acceptance head (SpecDec++, Huang et al. 2024, section 4.4).

At each position i of a response X by the target, a token Y_i is drawn from q(. | x, X_<i). Its label is the probability
that it is accepted, min(1, p(Y_i) / q(Y_i)). Both distributions are warped as in decoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.decoding.sampling import Sampling, draw_token
from spectrain.models.draft_states import DraftStates
from spectrain.target.target import TargetModel

CHUNK_POSITIONS = 128  # positions whose p and q, [128, V] float32 each, are in memory at a time


@dataclass(frozen=True)
class LabelledTexts:
    """Drafts and labels at the positions of texts; all are 0 where none was drawn."""

    drafts: Tensor  # [B, T, K] int64, drawn from q
    p: Tensor  # [B, T, K] float32: the target's probability of each
    q: Tensor  # [B, T, K] float32: the drafter's, above 0
    labels: Tensor  # [B, T, K] float32: the probability that each is accepted
    captured: Tensor | None  # [B, T, C, D] of the target on the texts


@torch.no_grad()
def label_texts(
    target: TargetModel, states: DraftStates, tokens: Tensor, may_draft: Tensor, sampling: Sampling, uniforms: Tensor
) -> LabelledTexts:
    """Draw and label drafts at some positions of texts, by one forward of the target and one of the drafter.

    Args:
        target: captures the drafter's `capture_layers`.
        states: of the drafter.
        tokens: [B, T] int64, prompt and response, padded on the right.
        may_draft: [B, T] bool, the positions; never the first of a row.
        sampling: warps p and q as in decoding; greedy gives labels 0 and 1.
        uniforms: [B, T, K] float32 in [0, 1), one per draw.
    """
    features = target.features(tokens)
    hidden = states.hidden(tokens, features.captured)
    drafts = torch.zeros(uniforms.shape, dtype=torch.int64, device=hidden.device)
    p_drafted, q_drafted, labels = (torch.zeros(uniforms.shape, device=hidden.device) for _ in range(3))
    for chunk in may_draft.nonzero().split(CHUNK_POSITIONS):
        rows, places = chunk.unbind(1)
        q = sampling.warp(states.logits(hidden[rows, places - 1]))
        p = sampling.warp(target.logits_of(features.final_hidden[rows, places - 1]).to(q.device))
        drawn = torch.stack([draw_token(q, column) for column in uniforms[rows, places].unbind(1)], dim=1)  # [m, K]
        drawn = drawn.clamp(max=q.shape[-1] - 1)  # where q is NaN; the label will be NaN, too
        p, q = p.gather(1, drawn), q.gather(1, drawn)
        drafts[rows, places], p_drafted[rows, places], q_drafted[rows, places] = drawn, p, q
        labels[rows, places] = (p / q).clamp(max=1.0)
    return LabelledTexts(drafts, p_drafted, q_drafted, labels, features.captured)


def mix_tokens(
    text: Tensor, drafts: Tensor, may_draft: Tensor, share: float, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Mix text X and drafts Y, where there are any: Z_i is X_i with probability `share` (0.15 in the paper), else Y_i.

    All tensors are [..., T]. Returns Z int64, and bool: where Z is a draft, so that there is a loss.
    """
    drafted = may_draft & (uniforms >= share)
    return torch.where(drafted, drafts, text), drafted
