"""`method=auto`: several methods and plain decoding, of which the fastest one runs.

Each method is scored by its own tokens per step and the seconds of its steps in the table (`budget.py`). All that may
beat plain decoding first run a few steps in turn; then the best one runs, and the others are tried again, ever more
seldom, and sooner where a generation begins or the number of rows changes. Plain decoding is always a candidate. Every
method with `max_nodes=auto` runs under this class, as the only one beside plain decoding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from spectrain.decoding import Context, Drafter, Sampling, Verified
from spectrain.decoding.drafter import Chooser, Method
from spectrain.decoding.generation import Choice, Told
from spectrain.drafting.budget import CountingDrafter
from spectrain.drafting.step_costs import KEEP_S, Costs, Table
from spectrain.kernels import NODES, ROWS, padded
from spectrain.methods.autoregressive import Autoregressive
from spectrain.models.kinds import drafters
from spectrain.target import DraftTree, KVCache, TargetModel, TargetOutput

PLAIN = "autoregressive"
FIRST_STEPS = 16  # of each method, before it is judged
TRIAL_STEPS, BLOCK_STEPS, PLAIN_STEPS = 4, 12, 64  # that a trial, the best method and plain decoding run at a time
MEAN_STEPS = 48.0  # over which a method's tokens are averaged
LEAD = 1.02  # how much faster than the one that runs another method must be to take its place
TRIAL_SHARE = 0.01  # of the time, that trying a slower method may cost
SWITCHING = 0.1  # of a trial's time, that it costs to begin and end it
MOST_FAILURES = 7  # the wait for the next trial is a multiple of those that failed, up to this one
RESTING = 256  # a method that reads states takes no part in a generation if its next trial is more steps away

LOOKUPS = {"sssd": ("logitspec",), "pld": (), "logitspec": ()}


def candidates() -> dict[str, tuple[str, ...]]:
    """Return the methods that method=auto chooses from, and those that each of them makes superfluous."""
    return {name: without for _, kind in drafters() for name, without in kind.auto.items()} | LOOKUPS


@dataclass(eq=False)
class Arm:
    """A method, or plain decoding, and what its steps have been like of late."""

    name: str
    drafter: Drafter
    n_steps: int = 0  # that it has run
    failures: int = 0  # trials in a row after which another one was still faster
    next_trial: int = 0  # number of the step
    sums: np.ndarray = field(default_factory=lambda: np.zeros(4))  # steps of late, their tokens of a row, nodes, reads
    drafted: int = 0  # tokens, in all steps
    accepted: int = 0
    costs: Costs | None = None
    is_behind: bool = True  # its next draft first reads what it has missed, which is no cost of drafting
    keys: tuple[str, str] = "", ""  # of its forwards and its drafts in the table
    # Tokens of each row that the drafter knew when it ran last; rows at the end may not have joined yet.
    known: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counting = self.drafter if isinstance(self.drafter, CountingDrafter) else None
        self.budget = None if self.counting is None else self.counting.budget
        self.reads_states = bool(self.drafter.method.capture_layers)

    def cost(self, n_rows: int) -> float:
        """Seconds of its steps over those of plain decoding."""
        n_steps, _, nodes, reads = self.sums
        if not n_steps:
            return 1.0
        return self.costs.step_s(n_rows, nodes / n_steps, reads / n_steps) / self.costs.forward_s(n_rows)[1]

    def speed(self, n_rows: int) -> float:
        """Tokens of a row in the time of a plain step; inf: it was never run, and may be faster."""
        if self.name == PLAIN:
            return 1.0
        if self.sums[0]:
            return self.sums[1] / self.sums[0] / self.cost(n_rows)
        return float("inf") if self.budget is None else self.budget.first_speed(n_rows)


class Auto(Chooser):
    """Runs one of several methods, and decides for which every few steps.

    Args:
        methods: by name; plain decoding is added.
        target: that they were built for.
        artifacts: folders that they were given, by kind.
    """

    def __init__(
        self,
        methods: Mapping[str, Drafter],
        target: TargetModel | None = None,
        artifacts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.tried = [Arm(name, drafter) for name, drafter in methods.items()]
        self.plain = self.active = self.leader = Arm(PLAIN, Autoregressive())  # `active` runs, `leader` was the fastest
        self.arms = [*self.tried, self.plain]
        self.taking_part = self.arms  # in this generation
        self.n_steps = self.n_rows = self._left = 0  # `_left`: steps until methods are compared again
        self._rows_before = 0  # when they were compared last
        self._size = 1, 0  # nodes and reads of this step
        of = [arm.drafter.method for arm in self.arms]
        draws = {one.draws for one in of[:-1]}
        self.method = Method(
            PLAIN,
            folders=tuple(folder for one in of for folder in one.folders),
            artifacts={kind: path for one in of for kind, path in one.artifacts.items()} | artifacts,
            target=target,
            store=next((one.store for one in of if one.store), None),
            max_positions=min(one.max_positions for one in of),
            draws=draws.pop() if len(draws) == 1 else Method.draws,
            warns=lambda *asked: next(filter(None, (one.warning(*asked) for one in of)), None),
        )

    def prepare(self, target: TargetModel, sampling: Sampling, n_rows: int) -> Method:
        table = self.table = Table.of(target)
        if target.leads:
            table.keep(KEEP_S)
        for arm in self.tried:
            arm.costs = table.costs(target, sampling, n_rows, arm.drafter)
            arm.keys = table.keys_of(arm.drafter, sampling)
            if arm.budget is not None:
                arm.budget.costs = arm.costs
        self._retry(n_rows)
        # With graphs all do: what is captured belongs to what was recorded.
        self.taking_part = [arm for arm in self.arms if target.graphs is not None or not self._rests(arm)]
        if self.active not in self.taking_part:
            self.active = self.plain
        # States that a method reads cost time in each step, also while it sleeps.
        layers = (layer for arm in self.taking_part for layer in arm.drafter.method.capture_layers)
        return self.describe(capture_layers=tuple(dict.fromkeys(layers))).method

    def _rests(self, arm: Arm) -> bool:
        """Whether a method takes no part in the next generation."""
        return arm.reads_states and arm is not self.leader and arm.next_trial > self.n_steps + RESTING

    def start(self, target: TargetModel, cache: KVCache) -> None:
        self._left = 0
        self.n_rows = 0
        for arm in self.arms:
            arm.known = []
            if arm in self.taking_part:
                arm.drafter.start(target, cache)

    def rehearsals(self) -> Iterator[Callable[[Context], DraftTree]]:
        def proposed(arm: Arm, way: Callable[[Context], DraftTree], context: Context) -> DraftTree:
            self._turn_to(arm, context)
            return way(context)

        before = self.active
        for arm in self.taking_part:
            yield from (partial(proposed, arm, way) for way in arm.drafter.rehearsals())
        self.active = before

    def read_of_prompts(self, lengths: Tensor) -> Tensor | None:
        asked = [arm.drafter.read_of_prompts(lengths) for arm in self.taking_part if arm.reads_states]
        if not asked or any(one is None for one in asked):
            return None
        each = [torch.cat(of_row).unique() for of_row in zip(*asked, strict=True)]  # ascending
        return pad_sequence([one[one >= 0] for one in each], batch_first=True, padding_value=-1)

    def prefill(self, context: Context, output: TargetOutput, rows: range) -> None:
        self._left = 0
        self.n_rows = rows.stop
        for arm in self.taking_part:
            arm.is_behind = True
            if arm is self.active or not arm.drafter.method.joins_late:
                arm.drafter.prefill(context, self._seen_by(arm.drafter, output), rows)
                arm.known += [context.n_tokens[row] for row in rows]

    def propose(self, context: Context) -> DraftTree:
        if self._left == 0:
            self._choose(context)
        self._left -= 1
        self.n_steps += 1
        arm = self.active
        arm.n_steps += 1
        tree = arm.drafter.propose(context)
        self._size = tree.shape[1], 0 if arm.counting is None else arm.counting.reads
        return tree

    def observe(self, context: Context, tree: DraftTree, output: TargetOutput, verified: Verified) -> Tensor | None:
        active = self.active.drafter
        for arm in self.taking_part:
            if arm.drafter is not active and arm.reads_states:
                arm.drafter.watch(context, self._seen_by(arm.drafter, output), verified)
        return active.observe(context, tree, self._seen_by(active, output), verified)

    def extend(self, context: Context, emitted: Sequence[list[int]], asked: Sequence[list[int]]) -> None:
        arm = self.active
        if arm is self.plain:
            return
        expected = None if arm.budget is None else arm.budget.expected
        arm.drafter.extend(context, emitted, asked)
        tokens = sum(map(len, emitted)) / len(emitted)
        arm.drafted += (self._size[0] - 1) * len(emitted)
        arm.accepted += sum(map(len, emitted)) - len(emitted)
        # What a few steps gained may be luck, so what was expected of them counts as much.
        mean = tokens if expected is None else (tokens + expected) / 2
        arm.sums *= 1 - 1 / MEAN_STEPS
        arm.sums += 1, mean, *self._size

    def watch_clock(self, n_rows: int) -> Told | None:
        arm, (nodes, reads) = self.active, self._size
        was_behind, arm.is_behind = arm.is_behind and reads > 0, arm.is_behind and not reads
        return None if self.table.is_given or was_behind else partial(self._took, arm, n_rows, nodes, reads)

    def _took(self, arm: Arm, n_rows: int, nodes: int, reads: int, draft_s: float, rest_s: float) -> None:
        if (costs := self.tried[0].costs).pads:  # graphs have rows and nodes of a few numbers
            n_rows, nodes = min(padded(n_rows, ROWS), costs.n_rows), padded(nodes, NODES)
        # A single node is scored alike for chains and for trees.
        for key in {one.keys[0] for one in (self.tried if nodes == 1 else [arm])}:
            self.table.learn(key, n_rows, nodes, rest_s)
        if arm is not self.plain:
            self.table.learn(arm.keys[1], n_rows, reads, draft_s)

    def free(self, row: int) -> None:
        self._left = 0
        for arm in self.tried:
            if len(arm.known) == self.n_rows:
                arm.drafter.free(row)
                arm.known[row] = arm.known[-1]
                arm.known.pop()
            elif row < len(arm.known):  # a row that has not joined yet would move between those that have
                for one in reversed(range(len(arm.known))):
                    arm.drafter.free(one)
                arm.known = []
        self.n_rows -= 1

    def _retry(self, n_rows: int) -> None:
        """Try all methods sooner: text or batch are others now."""
        best = self.leader.speed(n_rows)
        for arm in self.tried:
            arm.failures = 0
            arm.next_trial = min(arm.next_trial, self.n_steps + self._wait(arm, best, n_rows))

    def _wait(self, arm: Arm, best: float, n_rows: int) -> int:
        """Steps until the next trial of a method, if trying it may cost TRIAL_SHARE of the time."""
        if not arm.n_steps:
            return 0 if arm.speed(n_rows) > 1 else RESTING
        lost = TRIAL_STEPS * max(1.0, arm.cost(n_rows)) * (SWITCHING + max(0.0, 1 - arm.speed(n_rows) / best))
        return int(lost / TRIAL_SHARE * (1 + min(arm.failures, MOST_FAILURES)))

    def _choose(self, context: Context) -> None:
        """Choose the method of the next steps."""
        n_rows = context.n_rows
        if (n_rows - 1).bit_length() != (self._rows_before - 1).bit_length():  # a full batch often lacks a row
            self._retry(n_rows)
        self._rows_before = n_rows
        speeds = {arm: arm.speed(n_rows) for arm in self.taking_part}
        best = max(speeds, key=lambda arm: speeds[arm] * (LEAD if arm is self.leader else 1))
        best = self.leader = best if speeds[best] > 1 else self.plain
        tried = [arm for arm in speeds if arm is not self.plain]
        new = [arm for arm in tried if arm.n_steps < FIRST_STEPS and speeds[arm] > 1]
        due = [arm for arm in tried if arm is not best and arm.next_trial <= self.n_steps]
        if new:
            arm, why, self._left = min(new, key=lambda arm: arm.n_steps), "first", TRIAL_STEPS
        elif due:
            arm, why, self._left = min(due, key=lambda arm: arm.next_trial), "trial", TRIAL_STEPS
            arm.failures += 1
        else:
            arm, why, self._left = best, "fastest", BLOCK_STEPS
            arm.failures = 0
        if arm is self.plain:
            trials = [other.next_trial - self.n_steps for other in tried]
            self._left = max(1, min([PLAIN_STEPS, *trials]))
        else:
            arm.next_trial = self.n_steps + TRIAL_STEPS + self._wait(arm, speeds[best], n_rows)
            if arm.budget is not None:
                arm.budget.must_draft = why != "fastest"
        self._turn_to(arm, context)
        speed = speeds[arm]
        self.choice = Choice(arm.name, why, speed if speed < float("inf") else None)

    def _turn_to(self, arm: Arm, context: Context) -> None:
        if arm is not self.active:
            arm.is_behind = True
            self.active.known, self.active = list(context.n_tokens), arm
            self._catch_up(arm, context)

    def _catch_up(self, arm: Arm, context: Context) -> None:
        if arm is self.plain:
            return
        if late := range(len(arm.known), context.n_rows):
            arm.drafter.prefill(context, None, late)
            arm.known += [context.n_tokens[row] for row in late]
        tokens, ends = context.tokens.numpy(), zip(arm.known, context.n_tokens, strict=True)
        missed = [tokens[row, known:end].tolist() for row, (known, end) in enumerate(ends)]
        if any(missed):
            arm.drafter.resume(context, missed)

    def _seen_by(self, drafter: Drafter, output: TargetOutput) -> TargetOutput:
        """The output with the captured layers that the drafter asked for."""
        layers, own = self.method.capture_layers, drafter.method.capture_layers
        if output.captured is None or own in ((), layers):
            return output
        places = [layers.index(layer) for layer in own]
        return dataclasses.replace(output, captured=output.captured[..., places, :])


def why_plain(drafter: Drafter) -> str | None:
    """Return why a method drafted hardly anything, as one sentence; None: it drafted, or had no choice."""
    tried = drafter.tried if isinstance(drafter, Auto) else []
    if not tried or 5 * sum(arm.n_steps for arm in tried) > drafter.n_steps:
        return None
    costs = tried[0].costs
    n_rows = min(costs.n_rows, max(1, drafter._rows_before)) if costs else 1
    best = max(tried, key=lambda arm: arm.speed(n_rows) if arm.n_steps else 0.0)
    if not best.n_steps:
        return "nothing was drafted: by the table of seconds no draft can be faster than plain decoding here"
    nodes, share = best.sums[2] / best.sums[0], best.accepted / max(1, best.drafted)
    return (
        f"hardly anything was drafted: a step of {best.name} with {nodes:.0f} nodes takes {best.cost(n_rows):.1f} "
        f"times as long as plain decoding here, and {100 * share:.0f} % of its drafted tokens were accepted"
    )
