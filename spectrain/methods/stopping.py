"""Stop rules, which end draft chains: the acceptance head of SpecDec++, the heuristics that it is compared with, and
the oracle of its Theorem 4.1.

A rule may look at the distribution that the next token will be drawn from (`before`), at a token that has joined the
chain (`drawn`), or at the drafter's state once it has read that token (`read`). A token that was drawn is submitted
whatever the rule says of it.

Letters: n rows, V vocabulary, D hidden size of the drafter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from spectrain.decoding.drafter import Context
from spectrain.decoding.errors import UserError, check_whole
from spectrain.models.head import AcceptanceHead

JUDGED = ("current", "previous")


class StopRule:
    """Never stops. A rule overrides the methods that it needs.

    Each method says for each row whether it ends with the tokens it has; None: no row does. Answers about rows that
    have ended are not read.
    """

    needs_hidden = False  # whether `read` looks at the drafter's state
    draft_forwards = 0  # of the drafter, for all rows of a batch together, as `draft_chain` counts them

    def begin(self, context: Context) -> None:
        """A new draft of all rows of `context`."""

    def before(self, i: int, logits: Tensor) -> list[bool] | None:
        """Rows that do not draw their i-th token, whose logits are [n, V]."""

    def drawn(self, i: int, logits: Tensor, tokens: Tensor) -> list[bool] | None:
        """Rows whose i-th token, of `tokens` [n], drawn from `logits` [n, V], is their last; it is not read then."""

    def read(self, i: int, hidden: Tensor | None) -> list[bool] | None:
        """Rows whose i-th token is their last, now that the drafter has read it: its state is [n, D]."""


class HeadStop(StopRule):
    """Stops once 1 - prod_{j <= i} f(token j) > threshold: a rejection is likely (SpecDec++, section 4.3).

    To judge a token, the drafter must have read it. `judge="current"` ends the draft with the token that tipped the
    scale. `judge="previous"`, as the paper's code does, draws one more, whose distribution is known by then.

    Args:
        head: f, which predicts from the drafter's state of a token that it is accepted, given that those before it are.
        threshold: h, in (0, 1).
        min_candidates: tokens that are drafted whatever the head says; the reference has 2.
        judge: see above.
    """

    needs_hidden = True

    def __init__(self, head: AcceptanceHead, threshold: float, min_candidates: int = 1, judge: str = "current") -> None:
        check_threshold("threshold", threshold, below=1)
        check_whole("min_candidates", min_candidates, 1)
        check_judge("judge", judge)
        self.head = head.eval()
        self.least_accepted = 1 - threshold  # stops below it
        self.min_candidates, self.judge = min_candidates, judge
        self._accepted: list[float] | None = None  # of each row: probability that every token so far is accepted
        self._due: list[bool] | None = None  # judge="previous": the next token is the last

    def begin(self, context: Context) -> None:
        self._accepted = self._due = None

    def drawn(self, i: int, logits: Tensor, tokens: Tensor) -> list[bool] | None:
        return self._due if i >= self.min_candidates else None

    def read(self, i: int, hidden: Tensor) -> list[bool] | None:
        accepted = self.head.probability(hidden).tolist()  # the host decides; there, a few numbers cost next to nothing
        if self._accepted is not None:
            accepted = [before * now for before, now in zip(self._accepted, accepted, strict=True)]
        self._accepted = accepted
        due = [probability < self.least_accepted for probability in accepted]
        if self.judge == "previous":
            self._due = due
            return None
        return due if i >= self.min_candidates else None


class UnsureStop(StopRule):
    """Stops before drawing from a distribution of which the draft model is unsure.

    The distribution is the draft model's own, before temperature and the like.
    """

    below: float  # which the threshold must be

    def __init__(self, threshold: float, min_candidates: int = 1) -> None:
        check_threshold("threshold", threshold, self.below)
        check_whole("min_candidates", min_candidates, 1)
        self.threshold, self.min_candidates = threshold, min_candidates

    def before(self, i: int, logits: Tensor) -> list[bool] | None:
        return self.unsure(logits).tolist() if i > self.min_candidates else None


class ConfidenceStop(UnsureStop):
    """Where the largest probability is below the threshold (Kim 2024, Liu 2024)."""

    below = 1.0

    def unsure(self, logits: Tensor) -> Tensor:
        return confidence(logits) < self.threshold


class EntropyStop(UnsureStop):
    """Where the entropy, in nats, is above the threshold (SpecDec++, appendix B.1)."""

    below = math.inf

    def unsure(self, logits: Tensor) -> Tensor:
        return entropy(logits) > self.threshold


HEURISTICS = {"confidence": ConfidenceStop, "entropy": EntropyStop}


class OracleStop(StopRule):
    """Knows the target's greedy text and ends each draft right before its first disagreement (Theorem 4.1).

    Args:
        texts: the target's greedy continuation of each prompt, a tuple of token ids.
    """

    def __init__(self, texts: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        self.texts = texts
        self._next: list[list[int]] = []  # of each row, the tokens after its root

    def begin(self, context: Context) -> None:
        self._next = [self._following(tokens, n) for tokens, n in zip(context.tokens, context.n_tokens, strict=True)]

    def _following(self, tokens: Tensor, n_tokens: int) -> list[int]:
        text = tokens[:n_tokens].tolist()
        for end in range(n_tokens - 1, 0, -1):
            known = self.texts.get(tuple(text[:end]))
            if known is not None:
                return list(known[n_tokens - end :])
        raise AssertionError("the oracle was asked about a prompt whose text it was not given")

    def before(self, i: int, logits: Tensor) -> list[bool]:
        guesses = logits.argmax(-1).tolist()
        # The last token of a text comes as the bonus.
        return [i >= len(rest) or guess != rest[i - 1] for guess, rest in zip(guesses, self._next, strict=True)]


def confidence(logits: Tensor) -> Tensor:
    """The largest probability [n] float32 of distributions given by logits [n, V]."""
    logits = logits.float()
    return (logits.amax(-1) - logits.logsumexp(-1)).exp()


def entropy(logits: Tensor) -> Tensor:
    """Entropies [n] float32, nats, of distributions given by logits [n, V]."""
    log_q = logits.float().log_softmax(-1)
    return -(log_q.exp() * log_q.clamp_min(torch.finfo(torch.float32).min)).sum(-1)


def check_threshold(name: str, value: object, below: float) -> None:
    """Raise UserError unless the option `name` is a number strictly between 0 and `below`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < below:
        raise UserError(f"{name}={value} must lie strictly between 0 and {below:g}")


def check_judge(name: str, value: object) -> None:
    """Raise UserError unless the option `name` is a way to judge tokens that `HeadStop` knows."""
    if value not in JUDGED:
        raise UserError(f"{name}={value} must be one of {', '.join(JUDGED)}")
