"""One prompt's continuation: its state while it grows, when it ends, what it cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from spectrain.decoding.tree import Source

STAGES = ("draft", "forward", "verify", "commit", "other")
LOOKED_UP = (Source.FORWARD, Source.BACKWARD, Source.INPUT, Source.DATASTORE)  # found in a table, not computed


@dataclass(frozen=True)
class Generation:
    """One prompt's continuation and what it cost, in wall seconds.

    `elapsed_s` runs from joining the batch to leaving it. `prefill_s` and `time_s` are the row's share of the batch's
    time, 1/n for a batch of n rows, so that they add up to the time of the whole run.
    """

    tokens: list[int]  # without the prompt; ends with the EOS where one was drawn
    finish_reason: str  # "eos", "stop" or "length"
    target_forwards: int  # after prefill
    accepted: list[int]  # drafted tokens emitted in each step; tokens cut by EOS or length are not counted
    drafted: list[int]  # nodes drafted in each step: no root, no probe
    drafted_by_source: list[int]  # the same nodes, counted by Source
    steps_by_depth: list[int]  # [d - 1]: steps that drafted a node at depth d
    retrieval_hits: int  # steps that drafted a node of a source in LOOKED_UP
    sources: list[int]  # Source of each token
    elapsed_s: float
    prefill_s: float
    time_s: dict[str, float]  # by STAGES


@dataclass(frozen=True)
class Ending:
    """The tokens and strings that end a text before its maximum length."""

    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase | None

    def cut(self, before: list[int], new: list[int]) -> tuple[list[int], str | None]:
        """Cut the new tokens after the first one that ends the text. Return them and the reason, or None to go on."""
        end, reason = len(new), None
        for i, token in enumerate(new):
            if token in self.stop_ids:
                end, reason = i + 1, "eos" if token in self.eos_ids else "stop"
                break
        if self.stop_strings and self._in_text(before, new[:end]):
            end = next(i for i in range(1, end + 1) if self._in_text(before, new[:i]))
            reason = "stop"
        return new[:end], reason

    def _in_text(self, before: list[int], new: list[int]) -> bool:
        # A token is at least a byte, so this tail is longer than any stop string that ends in a new token.
        tail = 4 * max(map(len, self.stop_strings)) + 8
        text = self.tokenizer.decode((before[-tail:] if tail else []) + new)
        return any(stop in text for stop in self.stop_strings)


class Clock:
    """Divides time among the rows of a batch: the time between two laps is shared equally by the active rows.

    A GPU keeps working after a call returns. Each lap waits for it, or a stage would pay for the one before it.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.gpu = torch.device(device) if torch.device(device).type == "cuda" else None
        self.shares = dict.fromkeys(STAGES, 0.0)  # seconds that a row present from the start would have been given
        self.now = time.perf_counter()

    def lap(self, stage: str, n_rows: int) -> None:
        """Add the time since the last lap to a stage, shared by n active rows."""
        self.shares[stage] += self.restart() / n_rows

    def restart(self) -> float:
        """Return the seconds since the last lap without adding them to a stage."""
        if self.gpu is not None:
            torch.cuda.synchronize(self.gpu)
        before, self.now = self.now, time.perf_counter()
        return self.now - before


@dataclass
class Row:
    """A prompt that is being continued."""

    prompt_index: int
    joined_s: float
    prefill_s: float = 0.0
    shares_at_start: dict[str, float] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    drafted_by_source: list[int] = field(default_factory=lambda: [0] * len(Source))
    steps_by_depth: list[int] = field(default_factory=list)
    retrieval_hits: int = 0
    finish_reason: str | None = None

    def count_drafted(self, by_source: Sequence[int], by_depth: Sequence[int]) -> None:
        """Add a step's drafted nodes, counted by Source and by depth (from 0)."""
        self.drafted.append(sum(by_source))
        for source, count in enumerate(by_source):
            if count:
                self.drafted_by_source[source] += count
        self.retrieval_hits += any(by_source[source] for source in LOOKED_UP)
        for depth, count in enumerate(by_depth[1:]):
            if count:
                if depth == len(self.steps_by_depth):
                    self.steps_by_depth.append(0)
                self.steps_by_depth[depth] += 1

    def generation(self, clock: Clock) -> Generation:
        return Generation(
            tokens=self.tokens,
            finish_reason=self.finish_reason,
            target_forwards=len(self.accepted),
            accepted=self.accepted,
            drafted=self.drafted,
            drafted_by_source=self.drafted_by_source,
            steps_by_depth=self.steps_by_depth,
            retrieval_hits=self.retrieval_hits,
            sources=self.sources,
            elapsed_s=clock.now - self.joined_s,
            prefill_s=self.prefill_s,
            time_s={stage: clock.shares[stage] - self.shares_at_start[stage] for stage in STAGES},
        )
