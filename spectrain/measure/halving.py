"""Find the fastest method for some prompts in a given time, by successive halving (Jamieson and Talwalkar 2016).

In each round the methods that are left answer the same prompts interleaved, plain decoding among them. Then those leave
that are clearly slower than the fastest one, and at least half of them. So most of the time is spent on methods that
are close to each other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from spectrain.decoding import Sampling
from spectrain.measure.benchmark import Benchmark
from spectrain.measure.results import QuestionRow, summarise
from spectrain.methods.auto import candidates
from spectrain.methods.registry import BASELINE

AUTO = "auto"
KEPT = (BASELINE, AUTO)  # to the end: what others are compared with, and the answer where they cannot be distinguished
FEWEST = 4  # prompts by which methods can be distinguished
LEAST_GAIN = 1.03  # times plain decoding; less is not worth an option
ALIKE = 0.97  # of the fastest method's speed; from there on `auto` is recommended, because other texts are to come
WARM_UP_TOKENS = 16
GROUP_IN_BATCHES = 2  # questions that are answered in one go, in batches


def fastest_known() -> tuple[str, ...]:
    """Return the methods that `recommend` compares: in docs/benchmarks.md nothing else is 5 % ahead of all of these."""
    return *candidates(), "specdecpp", *KEPT


@dataclass
class Halving:
    """What was measured with one sampling and batch size. The first method of the benchmark is plain decoding."""

    sampling: Sampling
    benchmark: Benchmark
    clock: Callable[[], float] = time.monotonic
    rows: list[QuestionRow] = field(default_factory=list)
    rounds: list[list[str]] = field(default_factory=list)  # which methods were left after each round

    def __str__(self) -> str:
        drawn = "greedy" if self.sampling.greedy else f"T = {self.sampling.temperature:g}"
        return f"{drawn}, batch {self.benchmark.batch_size}"

    @property
    def left(self) -> list[str]:
        return self.rounds[-1] if self.rounds else list(self.benchmark.decoders)

    @property
    def groups(self) -> list[range]:
        """Numbers of the questions that are answered in one go."""
        n, n_rows = len(self.benchmark.questions), self.benchmark.batch_size
        size = 1 if n_rows == 1 else GROUP_IN_BATCHES * n_rows
        return [range(i, min(i + size, n)) for i in range(0, n, size) if i == 0 or i + size <= n]

    def prepare(self, until: float, tell: Callable[[str], object]) -> None:
        """Let each method compile and time what its steps need; see `run`."""
        for name in self.left:
            if self.clock() > until:
                return
            tell(f"preparing {name}")
            if self.benchmark.strict:
                replace(self.benchmark, decoders={name: self.benchmark.decoders[name]}).warm_up()
            else:
                self.benchmark.answer(name, self.groups[0], min(WARM_UP_TOKENS, self.benchmark.max_new_tokens))

    def run(self, until: float, tell: Callable[[str], object]) -> None:
        """Measure until the clock shows `until` or all questions are answered; `tell` hears what is done next."""
        benchmark, groups = self.benchmark, self.groups
        began, taken = self.clock(), dict.fromkeys(self.left, 0.0)
        n_rounds, turn = max(1, math.ceil(math.log2(max(1, len(self.left) - len(KEPT))))), 0
        for number in range(1, n_rounds + 1):
            ends, first = began + (until - began) * number / n_rounds, turn
            # A round has at least one turn, if there is time for it.
            while turn < len(groups) and self.clock() + sum(map(taken.get, self.left)) <= (
                until if turn == first else ends
            ):
                start = turn % len(self.left)  # another one begins each time, as in a benchmark
                for name in self.left[start:] + self.left[:start]:
                    if (before := self.clock()) > until:
                        break
                    tell(f"{name}, prompt {groups[turn][-1] + 1} of {len(benchmark.questions)}")
                    self.rows += benchmark.answer(name, groups[turn], benchmark.max_new_tokens)
                    taken[name] = self.clock() - before
                turn += 1
            if turn == first:  # no prompts or no time are left
                break
            self.rounds.append(benchmark.target.agreed(self.survivors()))

    def summary(self) -> dict[str, dict]:
        """Return what results.json has of each method that answered something; `speed` is 1 where it hardly drafts."""
        kinds = {row.method: "method" for row in self.rows if row.error is None}
        judged = self.sampling.greedy, self.benchmark.target.dtype == torch.float32, self.sampling.shares_noise
        found = summarise(self.rows, kinds, *judged)
        return {name: one | {"speed": one["speedup"] or 1.0} for name, one in found.items()}

    def survivors(self) -> list[str]:
        """Return the methods that go on to the next round."""
        found = {name: one for name, one in self.summary().items() if name in self.left}
        ranked = sorted(found.keys() - KEPT, key=lambda name: found[name]["speed"], reverse=True)
        known = {name: one["speedup_ci95"] for name, one in found.items() if one["questions"] >= FEWEST}
        bounds = {name: known.get(name) or (0.0, math.inf) for name in found}
        least = max((low for low, _ in bounds.values()), default=0.0)
        near = [name for name in ranked[: math.ceil(len(ranked) / 2)] if bounds[name][1] >= least]
        return [name for name in self.left if name in (*KEPT, *near)]

    def result(self) -> dict:
        """Return what was measured, as plain values, and which method is recommended."""
        methods = self.summary()
        speeds = {name: methods[name]["speed"] for name in self.left if name in methods}
        n_prompts = min((methods[name]["questions"] for name in speeds), default=0)
        best = max(speeds, key=speeds.get, default=AUTO)
        if n_prompts < FEWEST or speeds.get(AUTO, 0.0) >= ALIKE * speeds[best]:
            best = AUTO
        if n_prompts >= FEWEST and max(speeds.values()) < LEAST_GAIN:
            best = BASELINE
        return {
            "setting": str(self),
            "temperature": self.sampling.temperature,
            "batch_size": self.benchmark.batch_size,
            "prompts": n_prompts,
            "recommended": best,
            "left": list(speeds),
            "methods": methods,
        }


def advice(settings: Sequence[Mapping], minutes: float) -> str:
    """Say in a sentence what to use in each of the settings, as `Halving.result` gives them."""
    if (n_prompts := settings[0]["prompts"]) < FEWEST:
        more = math.ceil(minutes * 2 * FEWEST / max(1, n_prompts))
        says = f"Use auto, which chooses by itself: {minutes:g} minutes were enough for {n_prompts} prompts"
        return f"{says}, too few to distinguish methods, so give minutes={more} or methods=[...]."
    known = [(one["recommended"], one) for one in settings if one["prompts"] >= FEWEST]
    uses = [f"{name} for {one['setting']} ({one['methods'][name]['speed']:.2f} times plain)" for name, one in known]
    return f"Use {', '.join(uses)}."


def gain_of_drafters(setting: Mapping, trained: Sequence[str]) -> str:
    """Say what the trained drafters gain in a setting."""
    if not trained:
        return "No drafter is trained for this target. With plan=true a training says what it would take."
    speeds = {name: one["speed"] for name, one in setting["methods"].items() if name != AUTO}
    if not speeds.keys() & trained or not speeds.keys() - trained:
        return "There is a trained drafter for this target, but no time was left to compare it."
    best, other = (max(some, key=speeds.get) for some in (speeds.keys() & trained, speeds.keys() - trained))
    says = f"With its trained drafter {best} is {speeds[best] / speeds[other]:.2f} times as fast as {other}"
    return f"{says}, the fastest method without one ({setting['setting']})."
