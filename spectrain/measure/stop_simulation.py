"""What decoding of known texts would have cost under any stop rule, from the drafts of `draft_paths.py`.

A rule says how long the draft behind each root gets; the walk from root to root then follows: of L drafted tokens a are
emitted, L - a are discarded, and the target's own token behind them is the next root. No model runs.

Letters: n tokens of a text, R = n - 1 roots, g draft length, S settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spectrain.decoding.errors import UserError, check_whole
from spectrain.measure.draft_paths import DraftPaths
from spectrain.methods.stopping import (
    JUDGED,
    ConfidenceStop,
    EntropyStop,
    HeadStop,
    StopRule,
    check_entropy,
    check_share,
)
from spectrain.models.head import AcceptanceHead

RULES = ("gamma", "confidence", "entropy", "head")


@dataclass(frozen=True)
class Setting:
    """A stop rule with its options.

    Args:
        rule: one of `RULES`; "gamma" is a fixed draft length.
        value: the draft length, or the rule's threshold.
        head: the head's name where the rule is "head".
        judge: "current" or "previous" where the rule is "head"; see `HeadStop`.

    Raises:
        UserError: a value makes no sense.
    """

    rule: str
    value: float
    head: str | None = None
    judge: str | None = None

    def __post_init__(self) -> None:
        assert self.rule in RULES, self.rule
        assert (self.head is not None) == (self.rule == "head") == (self.judge is not None), self
        if self.rule == "gamma":
            check_whole("stopping.gammas", self.value, 1)
        elif self.rule == "entropy":
            check_entropy("stopping.entropy", self.value)
        else:
            check_share("stopping.thresholds" if self.rule == "head" else "stopping.confidence", self.value)
            if self.head and self.judge not in JUDGED:
                raise UserError(f"stopping.judge={self.judge} must be one of {', '.join(JUDGED)}")

    def __str__(self) -> str:
        if self.rule == "head":
            return f"{self.head} {self.value:g} {self.judge}"
        return f"{self.rule} {self.value:g}"

    def stop(self, heads: Mapping[str, AcceptanceHead], min_candidates: int = 1) -> StopRule:
        """The rule as decoding runs it. A fixed length has none: see `gamma_within`."""
        if self.rule == "head":
            return HeadStop(heads[self.head], self.value, min_candidates, self.judge)
        rules = {"gamma": lambda *_: StopRule(), "confidence": ConfidenceStop, "entropy": EntropyStop}
        return rules[self.rule](self.value, min_candidates)

    def gamma_within(self, max_candidates: int) -> int:
        """Most tokens of its drafts."""
        return int(self.value) if self.rule == "gamma" else max_candidates


@dataclass(frozen=True)
class Counts:
    """What decoding of one text costs under each setting, prefill and the first token, which it draws, left out."""

    tokens: int  # n - 1
    discarded: np.ndarray  # [S] int64: drafted, but not emitted
    target_calls: np.ndarray  # [S] int64
    draft_forwards: np.ndarray  # [S] int64


def simulate_stops(
    paths: DraftPaths, settings: Sequence[Setting], heads: Sequence[str], max_candidates: int, min_candidates: int = 1
) -> Counts:
    """Decodes one text under every setting.

    Args:
        paths: its drafts, of at least max_candidates tokens where the text has room for them.
        settings: rules; a fixed length may be max_candidates at most.
        heads: names of the heads of `paths`, in their order.
        max_candidates: most tokens of a draft.
        min_candidates: tokens that a rule does not stop before.
    """
    lengths, forwards = zip(
        *(_drafts(paths, setting, heads, max_candidates, min_candidates) for setting in settings), strict=True
    )
    return _walk(paths, np.stack(lengths), np.stack(forwards))


def simulate_oracle(paths: DraftPaths, gamma: int | None = None) -> Counts:
    """Greedy decoding that ends each draft right before its first rejection and leaves the last token to the target.

    Args:
        paths: greedy ones.
        gamma: most tokens of a draft; None: as many as the target agrees with, for drafters whose guess at a place
            does not depend on the root (Theorem 4.1).
    """
    room = _room(paths)
    roots = np.arange(len(room))
    agreed = paths.accepted if gamma is not None else _runs(paths.accepted > 0)
    lengths = np.minimum(agreed, paths.n_tokens - 2 - roots)
    left = room if gamma is None else np.minimum(room, gamma)
    lengths = np.minimum(lengths, left)
    return _walk(paths, lengths[None], (lengths + (lengths < left))[None], accepted=lengths)


def disagreements(paths: DraftPaths) -> int:
    """|S| of Theorem 4.1: tokens, from the second on, that the drafter's greedy guess missed."""
    return int((paths.accepted == 0).sum())


def misses_last(paths: DraftPaths) -> bool:
    """Whether the text's last token is in S."""
    return bool(paths.accepted[-1] == 0)


def _runs(agrees: np.ndarray) -> np.ndarray:
    """How many entries from each on are true without a gap, [R] int64."""
    runs, run = np.zeros(len(agrees), dtype=np.int64), 0
    for t in range(len(agrees) - 1, -1, -1):
        run = run + 1 if agrees[t] else 0
        runs[t] = run
    return runs


def _room(paths: DraftPaths) -> np.ndarray:
    """Tokens that the draft behind each root may have, [R] int64; a draft deeper than that is never emitted whole."""
    return paths.max_new_tokens - 2 - np.arange(paths.n_tokens - 1)


def _drafts(
    paths: DraftPaths, setting: Setting, heads: Sequence[str], max_candidates: int, min_candidates: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens drafted and forwards of the drafter behind each root, [R] int64 both.

    The first forward reads the root, each further one a drafted token; the last token is read where a rule then ended
    the draft: the head to judge that very token, the others to see what would be drawn next.
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
    """The first true column from `start` on, of [R, g] bool; where there is none, one past all."""
    found = np.pad(found[:, start:], ((0, 0), (0, 1)))
    return np.where(found.any(1), found.argmax(1) + start, np.iinfo(np.int32).max)


def _walk(paths: DraftPaths, lengths: np.ndarray, forwards: np.ndarray, accepted: np.ndarray | None = None) -> Counts:
    """From root to root, for all settings at once; lengths and forwards are [S, R]."""
    emitted = np.minimum(lengths, paths.accepted if accepted is None else accepted)
    n_settings, n_roots = lengths.shape
    discarded, calls, drafted = (np.zeros(n_settings, dtype=np.int64) for _ in range(3))
    going, roots = np.arange(n_settings), np.zeros(n_settings, dtype=np.int64)
    while len(going):
        cells = going, roots[going]
        calls[going] += 1
        discarded[going] += (lengths - emitted)[cells]
        drafted[going] += forwards[cells]
        roots[going] += emitted[cells] + 1
        going = going[roots[going] < n_roots]
    return Counts(paths.n_tokens - 1, discarded, calls, drafted)
