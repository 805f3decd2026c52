"""The acceptance that is expected of a drafter, teacher forced on the target's own answers: no server, no clock.

If those before it are accepted, token i of a draft is accepted with probability alpha_i = sum_v min(p_v, q_v) at
T = 1, so the expected tau is 1 + sum_i alpha_1 .. alpha_i. Answers are greedy, so what is accepted where all is greedy
is what decoding accepts.

Letters: as in docs/design.md; k tokens of a draft, R drafts of an answer, n answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spectrain.decoding import generate
from spectrain.errors import UserError
from spectrain.measure.statistics import Estimate, of_sums, ratio_of_sums
from spectrain.methods.autoregressive import Autoregressive
from spectrain.models.draft_states import DraftStates
from spectrain.target import TargetModel
from spectrain.terminal import stage

BATCH_SIZE = 8  # prompts that are answered together
Drafted = tuple[Tensor, Tensor | None]  # logits [R, k, K] of drafts, and the tokens [K] that they are of; None: all


@dataclass(frozen=True)
class Answer:
    """A prompt with the target's answer, and what the target computes on both."""

    tokens: Tensor  # [1, T] int64, cut to whole drafts
    first: int  # the root of the first draft
    captured: Tensor | None  # [1, T, C, D]
    p: Tensor  # [T - first, V] float32: the target's distributions at T = 1 behind the tokens from `first` on


@dataclass(frozen=True)
class Acceptance:
    """Sums over the drafts of each answer."""

    alpha: np.ndarray  # [n, k]: probabilities by draft token
    agreed: np.ndarray  # [n, k]: drafts whose token i is the target's likeliest
    accepted: np.ndarray  # [n]: tokens that are accepted where all is greedy
    drafts: np.ndarray  # [n]

    @property
    def value(self) -> float:
        """The expected tau."""
        return float(expected_tau(*self.alpha.sum(0), self.drafts.sum()))

    def tau(self) -> Estimate:
        return of_sums(expected_tau, *self.alpha.T, self.drafts)

    def gain_over(self, other: Acceptance) -> Estimate:
        """Estimate how much higher the expected tau is than another's of the same drafts."""

        def gain(*sums: np.ndarray) -> np.ndarray:
            k = len(sums) // 2
            return expected_tau(*sums[:k], sums[-1]) - expected_tau(*sums[k:])

        return of_sums(gain, *self.alpha.T, *other.alpha.T, self.drafts)

    def as_json(self) -> dict[str, object]:
        """Return alpha and the share that agreed, by draft token, and tau at T = 1 and where all is greedy."""
        found = {"alpha": self.alpha, "agreed": self.agreed}
        found = {name: [ratio_of_sums(one, self.drafts).as_json() for one in s.T] for name, s in found.items()}
        greedy = of_sums(lambda accepted, drafts: 1 + accepted / drafts, self.accepted, self.drafts)
        return found | {"tau": self.tau().as_json(), "tau_greedy": greedy.as_json()}


def expected_tau(*sums: np.ndarray) -> np.ndarray:
    """Return the expected tau of sums of alpha_1 .. alpha_k, behind which the number of drafts stands."""
    *alphas, drafts = sums
    return 1 + sum(np.cumprod([alpha / drafts for alpha in alphas], axis=0))


@torch.no_grad()
def answered(
    target: TargetModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, k: int, most_s: float
) -> list[Answer]:
    """Let the target answer prompts greedily, and read over them what it captures. Drafts begin at multiples of k.

    After `most_s` seconds no more of them are answered. Raise UserError where fewer than two answers have two drafts:
    there would be no interval.
    """
    ends, found = time.monotonic() + most_s, []
    with stage("the target answers", len(prompts)) as advance:
        for start in range(0, len(prompts), BATCH_SIZE):
            if found and time.monotonic() > ends:
                break
            asked = prompts[start : start + BATCH_SIZE]
            written = generate(target, Autoregressive(), asked, max_new_tokens, batch_size=BATCH_SIZE)
            for prompt, one in zip(asked, written, strict=True):
                text, first = [*prompt, *one.tokens], -(-max(len(prompt) - 1, 2) // k) * k
                if (n_drafts := (len(text) - first) // k) >= 2:
                    tokens = torch.tensor([text[: first + n_drafts * k]], device=target.device)
                    found += _read(target, tokens, [(first, tokens.shape[1])])
            advance(len(asked))
    if len(found) < 2:
        raise UserError(
            f"answers of at least {2 * k} tokens: {len(found)}, and an interval takes two; give more prompts, or raise "
            "max_new_tokens"
        )
    return found


@torch.no_grad()
def joined(target: TargetModel, answers: Sequence[Answer]) -> list[Answer]:
    """Return the second half of the answers, each behind all before it, as far as the target's context reaches."""
    ends = np.cumsum([answer.tokens.shape[1] for answer in answers]).tolist()
    spans = [(end - len(answer.p), end) for answer, end in zip(answers, ends, strict=True)][len(answers) // 2 :]
    spans = [span for span in spans if span[1] <= target.max_positions]
    whole = torch.cat([answer.tokens for answer in answers], dim=1)
    return _read(target, whole[:, : spans[-1][1]], spans) if len(spans) > 1 else [*answers]


def _read(target: TargetModel, text: Tensor, spans: Sequence[tuple[int, int]]) -> list[Answer]:
    """Return the answers that begin and end in a text [1, T] at these places, each with all that is before it."""
    read, found = target.features(text), []
    for first, end in spans:
        p = target.logits_of(read.final_hidden[0, first:end]).float().softmax(-1)
        captured = None if read.captured is None else read.captured[:, :end]
        found.append(Answer(text[:, :end], first, captured, p))
    return found


@torch.no_grad()
def acceptance(answers: Sequence[Answer], k: int, drafted: Callable[[Answer], Drafted], every: int) -> Acceptance:
    """Compare drafts of k tokens from every `every`-th token of answers with the target."""
    sums = []
    for answer in answers:
        logits, kept = drafted(answer)
        roots = every * torch.arange(len(logits), device=logits.device)
        places = roots[:, None] + torch.arange(k, device=logits.device)
        p, best, likeliest = answer.p, logits.argmax(-1), answer.p.argmax(-1)[places]
        if kept is not None:
            p, best = p[:, kept], kept[best]
        alpha = torch.minimum(p[places], logits.float().softmax(-1)).sum(-1)
        agreed = (best == likeliest).float()
        sums.append((alpha.sum(0), agreed.sum(0), agreed.cumprod(1).sum(), torch.tensor(len(alpha))))
    return Acceptance(*(torch.stack(list(one)).double().cpu().numpy() for one in zip(*sums, strict=True)))


def of_states(answers: Sequence[Answer], k: int, states: DraftStates) -> Acceptance:
    """Compare a drafter that reads whole texts; one with rollouts drafts k tokens in each."""

    def drafted(answer: Answer) -> Drafted:
        hidden = states.hidden(answer.tokens, answer.captured)[0, answer.first :]
        return states.logits(hidden).unflatten(0, (-1, k)), None

    return acceptance(answers, k, drafted, k)
