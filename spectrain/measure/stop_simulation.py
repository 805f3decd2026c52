"""Compute what decoding of known texts would have cost under any stop rule, from the drafts of `draft_paths.py`.

A rule says how long the draft behind each root gets. The walk from root to root then follows: of L drafted tokens a are
emitted, L - a are discarded, and the target's own token behind them is the next root. No model runs.

Letters: n tokens of a text, R = n - 1 roots, g draft length, S settings, Q texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spectrain.decoding.errors import UserError, check_whole
from spectrain.measure.draft_paths import DraftPaths
from spectrain.methods import stopping
from spectrain.models.head import AcceptanceHead

FIXED, HEAD = "fixed gamma", "specdecpp"
FAMILIES = {"gamma": FIXED, "confidence": "confidence", "entropy": "entropy", "head": HEAD}  # by rule


@dataclass(frozen=True)
class Setting:
    """A stop rule with its options.

    Args:
        rule: "confidence", "entropy", "head", or "gamma" for a fixed draft length.
        value: the draft length, or the rule's threshold.
        head: the head's name where the rule is "head".
        judge: "current" or "previous" where the rule is "head"; see `HeadStop`.

    Raises:
        UserError: a value is out of range.
    """

    rule: str
    value: float
    head: str | None = None
    judge: str | None = None

    def __post_init__(self) -> None:
        assert (self.head is not None) == (self.rule == "head") == (self.judge is not None), self
        if self.rule == "gamma":
            check_whole("stopping.gammas", self.value, 1)
        elif self.rule == "entropy":
            stopping.check_entropy("stopping.entropy", self.value)
        else:
            name = "stopping.thresholds" if self.rule == "head" else "stopping.confidence"
            stopping.check_share(name, self.value)
        if self.judge not in (None, *stopping.JUDGED):
            raise UserError(f"stopping.judge={self.judge} must be one of {', '.join(stopping.JUDGED)}")

    def __str__(self) -> str:
        return f"{self.head} {self.value:g} {self.judge}" if self.rule == "head" else f"{self.rule} {self.value:g}"

    @property
    def family(self) -> str:
        return FAMILIES[self.rule]

    def stop(self, heads: Mapping[str, AcceptanceHead], min_candidates: int = 1) -> stopping.StopRule:
        """The rule as decoding runs it. A fixed length has none: see `gamma_within`."""
        if self.rule == "gamma":
            return stopping.StopRule()
        if self.rule == "head":
            return stopping.HeadStop(heads[self.head], self.value, min_candidates, self.judge)
        return stopping.HEURISTICS[self.rule](self.value, min_candidates)

    def gamma_within(self, max_candidates: int) -> int:
        """Most tokens of its drafts."""
        return int(self.value) if self.rule == "gamma" else max_candidates


@dataclass(frozen=True)
class Counts:
    """The cost of texts under each setting. Prefill and the first token, which it draws, do not count.

    A Counts of one text has no last axis.
    """

    tokens: np.ndarray  # [Q] int64: n - 1
    target_calls: np.ndarray  # [S, Q] int64
    discarded: np.ndarray  # [S, Q] int64: drafted, but not emitted
    draft_forwards: np.ndarray  # [S, Q] int64

    @classmethod
    def stack(cls, texts: Sequence[Counts]) -> Counts:
        names = ("tokens", "target_calls", "discarded", "draft_forwards")
        return cls(*(np.stack([getattr(one, name) for one in texts], axis=-1) for name in names))

    @property
    def rates(self) -> np.ndarray:
        """Target calls, discarded tokens and drafter's forwards per token of all texts, [3, S] float64."""
        sums = np.stack([self.target_calls, self.discarded, self.draft_forwards]).sum(axis=-1)
        return sums / self.tokens.sum()


def simulate_stops(
    paths: DraftPaths, settings: Sequence[Setting], heads: Sequence[str], max_candidates: int, min_candidates: int = 1
) -> Counts:
    """Decode one text under every setting.

    Args:
        paths: its drafts, of at least max_candidates tokens where the text has room for them.
        settings: rules; a fixed length may be max_candidates at most.
        heads: names of the heads of `paths`, in their order.
        max_candidates: most tokens of a draft.
        min_candidates: tokens that a rule drafts in any case.
    """
    lengths, forwards = zip(
        *(_drafts(paths, setting, heads, max_candidates, min_candidates) for setting in settings), strict=True
    )
    return _walk(paths, np.stack(lengths), np.stack(forwards))


def simulate_oracle(paths: DraftPaths, gamma: int | None = None) -> Counts:
    """Decode greedily, ending each draft right before its first rejection and leaving the last token to the target.

    Args:
        paths: greedy ones.
        gamma: most tokens of a draft; None: as many as the target agrees with, for drafters whose guess at a place
            does not depend on the root (Theorem 4.1).
    """
    room = _room(paths)
    agreed = paths.accepted
    if gamma is None:
        places = np.arange(len(room))
        misses = np.where(agreed == 0, places, len(room))
        agreed = np.minimum.accumulate(misses[::-1])[::-1] - places  # tokens up to the next one that was missed
    left = room if gamma is None else np.minimum(room, gamma)
    lengths = np.minimum.reduce([agreed, paths.n_tokens - 2 - np.arange(len(room)), left])
    return _walk(paths, lengths[None], (lengths + (lengths < left))[None], accepted=lengths)


def _room(paths: DraftPaths) -> np.ndarray:
    """Tokens that the draft behind each root may have, [R] int64; a draft deeper than that is never emitted whole."""
    return paths.max_new_tokens - 2 - np.arange(paths.n_tokens - 1)


def _drafts(
    paths: DraftPaths, setting: Setting, heads: Sequence[str], max_candidates: int, min_candidates: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens drafted and forwards of the drafter behind each root, [R] int64 both.

    The first forward reads the root, each further one a drafted token. The last token is read where a rule then ended
    the draft: the head judges that very token, the others look at the distribution of the next.
    """
    left = np.minimum(_room(paths), setting.gamma_within(max_candidates))
    if setting.rule == "gamma":
        return left, left
    if setting.rule == "head":
        likely = np.cumprod(paths.heads[heads.index(setting.head)], axis=1, dtype=np.float32)
        # Column i - 1 judges token i: "current" ends the draft with it, "previous" with the next one.
        ends = _first(likely < 1 - setting.value, min_candidates - 1) + 1
        if setting.judge == "previous":
            ends = _first(likely < 1 - setting.value, max(min_candidates - 2, 0)) + 2
            return (lengths := np.minimum(ends, left)), lengths
    elif setting.rule == "confidence":
        ends = _first(paths.confidence < setting.value, min_candidates)  # column i says whether token i + 1 is drawn
    else:
        ends = _first(paths.entropy > setting.value, min_candidates)
    lengths = np.minimum(ends, left)
    return lengths, lengths + (lengths < left)


def _first(found: np.ndarray, start: int) -> np.ndarray:
    """The first true column from `start` on, of [R, g] bool; where there is none, one beyond all."""
    found = np.pad(found[:, start:], ((0, 0), (0, 1)))
    return np.where(found.any(1), found.argmax(1) + start, np.iinfo(np.int32).max)


def _walk(paths: DraftPaths, lengths: np.ndarray, forwards: np.ndarray, accepted: np.ndarray | None = None) -> Counts:
    """Go from root to root, for all settings at once; lengths and forwards are [S, R]."""
    emitted = np.minimum(lengths, paths.accepted if accepted is None else accepted)
    n_settings, n_roots = lengths.shape
    calls, discarded, drafted = (np.zeros(n_settings, dtype=np.int64) for _ in range(3))
    going, roots = np.arange(n_settings), np.zeros(n_settings, dtype=np.int64)
    while len(going):
        cells = going, roots[going]
        calls[going] += 1
        discarded[going] += (lengths - emitted)[cells]
        drafted[going] += forwards[cells]
        roots[going] += emitted[cells] + 1
        going = going[roots[going] < n_roots]
    return Counts(np.array(paths.n_tokens - 1), calls, discarded, drafted)
