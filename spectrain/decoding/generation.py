"""One prompt's continuation: what it is, when it ends, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedTokenizerBase

from spectrain.target.tree import Source

STAGES = ("draft", "forward", "verify", "commit", "other")
OF_STEP = STAGES[:-1]
LOOKED_UP = (Source.FORWARD, Source.BACKWARD, Source.INPUT, Source.DATASTORE)  # found in a table, not computed


@dataclass
class Choice:
    """The method, of several, that drafts steps in a row for one reason."""

    method: str
    why: str  # "first": it is not known well enough yet; "trial": whether it is faster by now; "fastest"
    speed: float | None = None  # over that of plain decoding, as it was known when it was chosen last
    steps: int = 1


@dataclass
class Generation:
    """One prompt's continuation and what it cost, in wall seconds. The loop fills it step by step.

    `elapsed_s` runs from joining the batch to leaving it. `prefill_s` and `time_s` are the row's share of the batch's
    time, 1/n for a batch of n rows, so that they add up to the time of the whole run.
    """

    tokens: list[int] = field(default_factory=list)  # without the prompt; ends with the EOS where one was drawn
    finish_reason: str = ""  # "eos", "stop", "length" or "cancelled"
    target_forwards: int = 0  # after prefill
    accepted: list[int] = field(default_factory=list)  # per step, drafted tokens emitted, without those cut at the end
    drafted: list[int] = field(default_factory=list)  # per step, nodes drafted: no root, no probe
    drafted_by_source: list[int] = field(default_factory=lambda: [0] * len(Source))  # the same nodes
    steps_by_depth: list[int] = field(default_factory=list)  # [d - 1]: steps that drafted a node at depth d
    retrieval_hits: int = 0  # steps that drafted a node of a source in LOOKED_UP
    sources: list[int] = field(default_factory=list)  # Source of each token
    choices: list[Choice] = field(default_factory=list)  # where the drafter chooses among methods
    cached_tokens: int = 0  # of the prompt, which were not read because an earlier text began alike
    elapsed_s: float = 0.0
    prefill_s: float = 0.0
    time_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def count_choice(self, choice: Choice) -> None:
        """Add a step that this method drafted."""
        last = self.choices[-1] if self.choices else None
        if last is None or (last.method, last.why) != (choice.method, choice.why):
            self.choices.append(replace(choice))
        else:
            last.steps, last.speed = last.steps + 1, choice.speed

    def count_drafted(self, by_source: Sequence[int], by_depth: Sequence[int]) -> None:
        """Add a step's drafted nodes, counted by Source and by depth (from 0)."""
        self.drafted.append(sum(by_source))
        for source, count in enumerate(by_source):
            if count:
                self.drafted_by_source[source] += count
        self.retrieval_hits += any(map(by_source.__getitem__, LOOKED_UP))
        for depth, count in enumerate(by_depth[1:]):
            if count:
                while depth >= len(self.steps_by_depth):
                    self.steps_by_depth.append(0)
                self.steps_by_depth[depth] += 1


@dataclass(frozen=True)
class Ending:
    """The tokens and strings that end a text before its maximum length."""

    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    stop: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase | None

    def cut(self, before: list[int], new: list[int]) -> tuple[list[int], str | None]:
        """Cut the new tokens after the first one that ends the text. Return them and the reason, or None to go on."""
        end, reason = len(new), None
        for i, token in enumerate(new):
            if token in self.stop_ids:
                end, reason = i + 1, "eos" if token in self.eos_ids else "stop"
                break
        if self.stop and self._in_text(before, new[:end]):
            end = next(i for i in range(1, end + 1) if self._in_text(before, new[:i]))
            reason = "stop"
        return new[:end], reason

    def _in_text(self, before: list[int], new: list[int]) -> bool:
        # A token is at least a byte, so this tail is longer than any stop string that ends in a new token.
        tail = 4 * max(map(len, self.stop)) + 8
        text = self.tokenizer.decode(before[-tail:] + new)
        return any(stop in text for stop in self.stop)


Told = Callable[[float, float], None]  # is told the seconds of a step's draft, and of the rest


class Clock:
    """Divides time among the rows of a batch: the time between two laps is shared equally by the active rows.

    A GPU keeps working after a call returns. There a lap is an event in its queue, and is counted by `settle`, when a
    row joins or ends; no step waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.shares = dict.fromkeys(STAGES, 0.0)  # seconds that a row present from the start would have been given
        self.now = time.perf_counter()  # of the last lap that was counted
        self._spent = [0.0, 0.0]  # seconds of this step so far: on its draft, and on the rest
        self._laps: list[tuple[str | None, int, torch.cuda.Event] | Told | None] = []  # not yet counted
        self._event = self._record() if self.on_gpu else None  # of the last lap that was counted

    def lap(self, stage: str | None, n_rows: int = 1, seconds: float | None = None) -> None:
        """Add the time since the last lap to a stage, shared by n active rows; to no stage if it is None."""
        if seconds is None and self.on_gpu:
            self._laps.append((stage, n_rows, self._record()))
            return
        seconds = time.perf_counter() - self.now if seconds is None else seconds
        self.now += seconds
        if stage is not None:
            self.shares[stage] += seconds / n_rows
        if stage in OF_STEP:
            self._spent[stage != "draft"] += seconds

    def end_step(self, told: Told | None) -> None:
        """A step has ended: say what its draft took, and the rest of it, once that is known."""
        if self.on_gpu:
            self._laps.append(told)
        else:
            self._tell(told)

    def settle(self) -> None:
        """Count all laps; on a GPU, wait for them."""
        laps, self._laps = self._laps, []
        last = next((lap[2] for lap in reversed(laps) if isinstance(lap, tuple)), None)
        if last is None:
            return
        last.synchronize()
        for lap in laps:
            if isinstance(lap, tuple):
                self.lap(*lap[:2], self._event.elapsed_time(lap[2]) / 1000)
                self._event = lap[2]
            else:
                self._tell(lap)

    def _tell(self, told: Told | None) -> None:
        spent, self._spent = self._spent, [0.0, 0.0]
        if told is not None:
            told(*spent)

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
