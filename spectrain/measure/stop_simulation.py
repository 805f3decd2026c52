"""Compute what decoding of known texts would have cost under any stop rule, from the drafts of `draft_paths.py`.

A rule says how long the draft behind each root gets. The walk from root to root then follows: of L drafted tokens a are
emitted, L - a are discarded, and the target's own token behind them is the next root. No model runs.

Letters: n tokens of a text, R = n - 1 roots, g draft length, S settings, Q texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spectrain.measure.draft_paths import DraftPaths
from spectrain.methods.specdecpp import OpenDrafter
from spectrain.methods.speculative import Speculative
from spectrain.methods.spire import Spire
from spectrain.methods.stopping import HEURISTICS, HeadStop, NeverStop, StopRule
from spectrain.models.head import AcceptanceHead

FIXED, HEAD = "fixed gamma", "specdecpp"  # families of settings, besides those of HEURISTICS


@dataclass(frozen=True)
class Setting:
    """A stop rule with its options."""

    family: str
    head: str | None  # its name, of the family HEAD; None for others, as is `judge`
    judge: str | None  # "current" or "previous"; see `HeadStop`
    value: float  # the draft length, or the rule's threshold

    def __str__(self) -> str:
        if self.family == HEAD:
            return f"{self.head} {self.value:g} {self.judge}"
        return f"{'gamma' if self.family == FIXED else self.family} {self.value:g}"

    def gamma_within(self, max_candidates: int) -> int:
        """Most tokens of its drafts."""
        return int(self.value) if self.family == FIXED else max_candidates

    def drafter(
        self, opened: OpenDrafter, heads: Mapping[str, AcceptanceHead], max_candidates: int, min_candidates: int = 1
    ) -> Speculative | Spire:
        """The drafter whose drafts end by this rule."""
        stop: StopRule = NeverStop()
        if self.family == HEAD:
            stop = HeadStop(heads[self.head], self.value, min_candidates, self.judge)
        elif self.family != FIXED:
            stop = HEURISTICS[self.family](self.value, min_candidates)
        return opened.with_stop(self.gamma_within(max_candidates), stop)


@dataclass(frozen=True)
class Counts:
    """The cost of texts under each setting. Prefill and the first token, which it draws, do not count."""

    tokens: np.ndarray  # [Q] int64: n - 1
    target_calls: np.ndarray  # [S, Q] int64
    discarded: np.ndarray  # [S, Q] int64: drafted, but not emitted
    draft_forwards: np.ndarray  # [S, Q] int64

    @property
    def rates(self) -> np.ndarray:
        """Target calls, discarded tokens and drafter's forwards per token of all texts, [3, S] float64."""
        sums = np.stack([self.target_calls, self.discarded, self.draft_forwards]).sum(axis=-1)
        return sums / self.tokens.sum()


def simulate_stops(
    texts: Sequence[DraftPaths],
    settings: Sequence[Setting],
    heads: Sequence[str],
    max_candidates: int,
    min_candidates: int = 1,
) -> Counts:
    """Decode texts under every setting; `heads` names the heads of the drafts in their order.

    A rule drafts at least min_candidates tokens and at most max_candidates, which no fixed length exceeds either.
    """
    walks = []
    for paths in texts:
        drafts = [_drafts(paths, setting, heads, max_candidates, min_candidates) for setting in settings]
        walks.append(_walk(paths.accepted, *np.stack(drafts, axis=1)))
    return _counts(texts, walks)


def simulate_oracle(texts: Sequence[DraftPaths], gamma: int | None = None) -> Counts:
    """Decode greedily, ending each draft right before its first rejection and leaving the last token to the target.

    A draft has up to gamma tokens. None: as many as the target agrees with, for drafters whose guess at a place does
    not depend on the root (Theorem 4.1).
    """
    walks = []
    for paths in texts:
        agreed, left, places = paths.accepted, paths.room, np.arange(paths.n_tokens - 1)
        if gamma is None:
            misses = np.where(agreed == 0, places, len(places))
            agreed = np.minimum.accumulate(misses[::-1])[::-1] - places  # tokens up to the next one that was missed
        else:
            left = np.minimum(left, gamma)
        lengths = np.minimum.reduce([agreed, paths.n_tokens - 2 - places, left])
        walks.append(_walk(lengths, lengths[None], (lengths + (lengths < left))[None]))
    return _counts(texts, walks)


def _drafts(
    paths: DraftPaths, setting: Setting, heads: Sequence[str], max_candidates: int, min_candidates: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens drafted and forwards of the drafter behind each root, [R] int64 both.

    The first forward reads the root, each further one a drafted token. The last token is read where a rule then ended
    the draft: the head judges that very token, the others look at the distribution of the next.
    """
    left = np.minimum(np.minimum(paths.room, paths.ends), setting.gamma_within(max_candidates))
    if setting.family == FIXED:
        return left, left
    if setting.family == HEAD:  # column i - 1 judges token i
        likely = np.cumprod(paths.heads[heads.index(setting.head)], axis=1, dtype=np.float32)
        doubted = likely < 1 - setting.value
        if setting.judge == "previous":  # ends with the token behind it, which is not read
            lengths = np.minimum(_first(doubted, max(min_candidates - 2, 0)) + 2, left)
            return lengths, lengths
        ends = _first(doubted, min_candidates - 1) + 1
    else:  # column i says whether token i + 1 is drawn
        unsure = paths.confidence < setting.value if setting.family == "confidence" else paths.entropy > setting.value
        ends = _first(unsure, min_candidates)
    lengths = np.minimum(ends, left)
    return lengths, lengths + (lengths < left)


def _first(found: np.ndarray, start: int) -> np.ndarray:
    """The first true column from `start` on, of [R, g] bool; where there is none, one beyond all."""
    found = np.pad(found[:, start:], ((0, 0), (0, 1)))
    return np.where(found.any(1), found.argmax(1) + start, np.iinfo(np.int32).max)


def _walk(accepted: np.ndarray, lengths: np.ndarray, forwards: np.ndarray) -> np.ndarray:
    """Go from root to root, for all settings at once. Returns target calls, discarded tokens and forwards, [3, S].

    A draft of full length would emit `accepted` tokens [R]; drafts have `lengths` and take `forwards` [S, R].
    """
    emitted = np.minimum(lengths, accepted)
    cost = np.stack([np.ones_like(lengths), lengths - emitted, forwards])  # [3, S, R]
    totals = np.zeros(cost.shape[:2], dtype=np.int64)
    going, roots = np.arange(len(lengths)), np.zeros(len(lengths), dtype=np.int64)
    while len(going):
        cells = going, roots[going]
        totals[:, going] += cost[:, *cells]
        roots[going] += emitted[cells] + 1
        going = going[roots[going] < lengths.shape[1]]
    return totals


def _counts(texts: Sequence[DraftPaths], walks: Sequence[np.ndarray]) -> Counts:
    return Counts(np.array([paths.n_tokens - 1 for paths in texts]), *np.stack(walks, axis=-1))
