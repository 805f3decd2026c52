"""`method=auto`: several methods and plain decoding, of which the next few steps run the fastest one of late.

It is a bandit whose arms are methods. An arm's value is its speed: tokens of a row per step over seconds per step, over
its last steps. Each arm that beats plain decoding first runs SETTLED_STEPS steps, in turns with the others, so that all
see the same kind of text while they learn. Then the best arm runs, where an arm that has run few steps may be faster
than it seems (optimism, as in bandits that choose by upper bounds: Auer et al. 2002). As texts change, every other arm
is also tried for a few steps now and then, and the more seldom the slower it was, so that trying it costs at most
TRIAL_SHARE of the time and, where the best arm gains on plain decoding, GAIN_SHARE of that gain: MOST_TRIAL_SHARE at
most, for each arm. What a trial takes beside its steps is measured. An arm that reads states rests for a generation if
its next trial is far away. Plain decoding is always an arm, and runs TRIAL_STEPS in ANCHOR_STEPS to say how slow the
machine is, or three times as many as seldom.

What speeds are estimated from may be wrong for a while, so an `Allowance` bounds what methods lose against plain
decoding, whatever the text, the batch or the machine: once it is used up, plain steps run until it has grown again (a
conservative bandit: Wu et al. 2016).

Every method with `max_nodes=auto` runs under it, as the only one beside plain decoding.

Letters: n active rows, C captured layers.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from spectrain.decoding import Context, Drafter, DraftTree, KVCache, TargetModel, TargetOutput, Verified
from spectrain.decoding.generation import Choice
from spectrain.methods.sizing import ChainSizer, Sizer
from spectrain.methods.step_times import DISTURBED, Mean, StepTimes
from spectrain.stores.forward_times import times_of

PLAIN = "autoregressive"
TRIAL_STEPS = 4
BLOCK_STEPS = 12  # of the best arm before the arms are compared again
PLAIN_STEPS = 128  # the most of plain decoding, likewise
WARM_UP_STEPS = 6  # the first of a method, some of which write programs and compile; and of plain decoding
LEAD = 1.01  # how much faster than the fastest arm so far another one must be to take its place
KNOWN_STEPS = 10  # of an arm without a sizer, over which its tokens and costs are averaged
ANCHOR_STEPS = 160  # of methods, after which plain steps say again how slow the machine is; sooner at first
SHORT_STEP_S = 1e-3  # plain steps below this are slower right behind drafts, which push their data out of the caches
ANCHOR_OF_SHORT = 3  # so many times more plain steps then, and as many times more seldom
TIMED = 0.97  # of a method's step is what its sizer times
OPTIMISM = 0.7  # of its speed, by how much an arm may be faster than it seems after one step of one row
TRIAL_SHARE = 0.005  # of the time, that trying a slower arm may cost
GAIN_SHARE = 0.1  # of the best arm's gain over plain decoding, which may be spent on it besides
MOST_TRIAL_SHARE = 0.03
SWITCHING = 0.1  # of a trial's time, that it costs to begin and end it
SETTLED_STEPS = 24  # of an arm, before it is judged against faster ones
LONG_STEP_S = 4e-3  # of plain decoding, beside which it does not matter what looking up costs
MOST_BETWEEN = 2**14  # steps between two trials of an arm
EXTRA_TRIALS = 3  # over which what trials take beside their steps is averaged
RESTING = 512  # an arm that reads states rests for a generation if its next trial is more steps away, or after a loss
ALLOWED_SHARE = 0.02  # of the time, that methods may lose against plain decoding
FIRST_ALLOWED, MOST_ALLOWED = 24.0, 48.0  # plain steps, that they may lose at first, and that gains are saved up to
OVERDRAWN = 4.0  # plain steps lost beyond that, which end a block
MOST_DEBT = 10.0  # the most that counts of what was lost beyond it: the machine may have been disturbed, or a text long
SLEEP_SHARE = 0.01  # of a plain step, the most that counts of what sleeping methods take from it


@dataclass(frozen=True)
class Covers:
    """The methods that are hardly ever faster than another one, so that trying them would only cost time."""

    always: tuple[str, ...] = ()
    slow_target: tuple[str, ...] = ()  # where a plain step takes more than LONG_STEP_S


# To choose from, and what each of them covers. The first five need a folder.
METHODS = {
    "spire_sssd": Covers(("sssd", "logitspec"), slow_target=("pld",)),
    "speculative_sssd": Covers(("sssd", "logitspec"), slow_target=("pld",)),
    "spire": Covers(),
    "speculative": Covers(),
    "sssd": Covers(("logitspec",), slow_target=("pld",)),
    "pld": Covers(),
    "logitspec": Covers(),
}


def build(target: TargetModel, methods: Mapping[str, Drafter], covers: Mapping[str, Covers]) -> Auto:
    """The method over others that the registry has built."""
    return Auto(methods, covers)


class Allowance:
    """Plain steps that methods may still lose against plain decoding.

    In the time of any n plain steps they lose at most MOST_ALLOWED + ALLOWED_SHARE x n + MOST_DEBT, but for what a
    single event, such as catching up with a long text, takes beyond that.
    """

    def __init__(self) -> None:
        self.left = FIRST_ALLOWED

    def count(self, gained: float, spent: float) -> None:
        """Count a step that gained as much as `gained` plain steps, and took as long as `spent` of them."""
        left = self.left + gained - (1 - ALLOWED_SHARE) * spent
        self.left = max(min(left, MOST_ALLOWED), -MOST_DEBT)

    @property
    def steps_to_wait(self) -> int:
        """Plain steps after which something may be lost again."""
        return math.ceil(max(0.0, -self.left) / ALLOWED_SHARE)


@dataclass(eq=False)
class Arm:
    """A method, or plain decoding, and how fast it has been."""

    name: str
    drafter: Drafter | None  # None: plain decoding
    tokens: Mean = field(default_factory=lambda: Mean(KNOWN_STEPS))  # of a row per step, where there is no sizer
    cost: Mean = field(default_factory=lambda: Mean(KNOWN_STEPS))  # over those of a plain step, likewise
    # Plain steps that a trial takes beside what its steps usually take: it catches up, and the caches hold other data.
    extra: Mean = field(default_factory=lambda: Mean(EXTRA_TRIALS))
    n_steps: int = 0  # that it has run
    next_trial: int = 0  # number of the step
    # Tokens of each row that the drafter knew when it ran last; rows at the end may not have joined yet.
    known: list[int] = field(default_factory=list)

    @property
    def sizer(self) -> Sizer | ChainSizer | None:
        return getattr(self.drafter, "sizer", None)


class Auto(Drafter):
    """Runs one of several methods, and decides for which every few steps.

    Args:
        methods: by name; plain decoding is added.
        covers: methods that need not be tried, by the name of the one that covers them.
    """

    def __init__(self, methods: Mapping[str, Drafter], covers: Mapping[str, Covers] | None = None):
        self.covers = covers or {}
        self.arms = [*(Arm(name, drafter) for name, drafter in methods.items()), Arm(PLAIN, None)]
        self.drafters = [(arm, arm.drafter) for arm in self.arms if arm.drafter is not None]
        self.choices = self.arms  # that may run: those that no other one covers
        self.plain = self.arms[-1]
        self.n_rows = self._max_rows = 0
        self._joined = False  # whether rows have joined the active arm since the last block
        self.active = self.leader = self.plain  # the one that runs, and the one that was the fastest
        self.n_steps = 0
        self.artifacts = {kind: path for one in methods.values() for kind, path in one.artifacts.items()}
        self.store = next((store for one in methods.values() if (store := getattr(one, "store", None))), None)
        self.warning = next((one.warning for one in methods.values() if one.warning), None)
        self.times = StepTimes(1)  # of plain steps
        for arm in self.arms:
            if arm.sizer is not None:
                arm.sizer.times.slowness = self.times.slowness
        self.times.slowness.is_shared = True
        # Of the block of steps that runs: steps that are left, how many of them are not timed, and of those that were
        # timed their number, seconds and tokens of a row.
        self._left, self._untimed, self._began = 0, 0, 0.0
        self._n_timed, self._seconds_timed, self._tokens_timed = 0, 0.0, 0.0
        self.allowance = Allowance()
        self._extra: float | None = None  # what this trial has taken so far beside its steps, see `Arm`; None: no trial
        self._layers = self.capture_layers  # of this generation

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """Of the next generation: states that a method reads cost time in each step, also while it sleeps."""
        return tuple(dict.fromkeys(x for arm, one in self.drafters if not self._rests(arm) for x in one.capture_layers))

    def _rests(self, arm: Arm) -> bool:
        """Whether an arm takes no part in the next generation."""
        if arm.drafter is None or not arm.drafter.capture_layers:
            return False
        is_far = arm is not self.leader and arm.next_trial > self.n_steps - self._left + RESTING
        return is_far or self.allowance.steps_to_wait > 0

    def start(self, target: TargetModel, cache: KVCache) -> None:
        self.times.start(*times_of(target, cache.max_rows))
        self.plain_s = [float(self.times.seconds(n)[1]) for n in range(1, len(self.times.forwards) + 1)]
        self._end_block()
        self.n_rows, self._layers = 0, self.capture_layers
        self.choices = self._not_covered()
        if self.active not in self.choices:
            self.active = self.plain
        if cache.max_rows != self._max_rows:  # an arm that was slow with so many rows may take part again
            self._max_rows = cache.max_rows
            for arm in self.arms:
                arm.next_trial = min(arm.next_trial, self.n_steps + RESTING)
        for arm, drafter in self.drafters:
            if arm in self.choices:
                drafter.start(target, cache)
            arm.known = []

    def read_of_prompts(self, lengths: Tensor) -> Tensor | None:
        reading = [arm.drafter for arm in self.choices if arm.drafter is not None and arm.drafter.capture_layers]
        asked = [drafter.read_of_prompts(lengths) for drafter in reading]
        if not asked or any(one is None for one in asked):
            return None
        most = max(asked, key=lambda one: one.shape[1])
        return most if all(bool(((one < 0) | _is_in(one, most)).all()) for one in asked) else None

    def prefill(self, context: Context, output: TargetOutput, rows: range) -> None:
        self._end_block()
        self.n_rows, self._joined, began = rows.stop, True, time.perf_counter()
        for arm, drafter in self.drafters:
            if arm not in self.choices:
                continue
            if arm is self.active or not drafter.joins_late:
                drafter.prefill(context, self._seen_by(drafter, output), rows)
                arm.known += [context.n_tokens[row] for row in rows]
        if any(arm.n_steps for arm, _ in self.drafters):  # the first steps ever write programs
            self.allowance.count(0.0, self._plain_steps(began))

    def propose(self, context: Context) -> DraftTree:
        if self._left == 0:
            self._choose(context)
        self._left -= 1
        self._began = time.perf_counter()
        drafter = self.active.drafter
        return DraftTree.root_only(context.roots) if drafter is None else drafter.propose(context)

    def observe(self, context: Context, tree: DraftTree, output: TargetOutput, verified: Verified) -> Tensor | None:
        active, began = self.active.drafter, time.perf_counter()
        for arm in self.choices:
            drafter = arm.drafter
            if drafter is not None and drafter is not active and drafter.capture_layers:
                drafter.watch(context, self._seen_by(drafter, output), verified)
        if active is None:  # what those that sleep cost a plain step
            self.allowance.count(0.0, min(self._plain_steps(began), SLEEP_SHARE))
        return active and active.observe(context, tree, self._seen_by(active, output), verified)

    def extend(self, context: Context, emitted: Sequence[list[int]], asked: Sequence[list[int]]) -> None:
        if self.active.drafter is not None:
            self.active.drafter.extend(context, emitted, asked)
        spent = self._plain_steps(self._began)
        gained = sum(map(len, emitted)) / len(emitted)
        if self.active.drafter is None:
            self.allowance.count(1.0, 1.0)
        elif cost := self._cost(self.active, len(emitted)):  # the first steps ever write programs
            self.allowance.count(gained, min(spent, DISTURBED**2 * cost))
            if self._extra is not None:
                self._extra += min(spent, DISTURBED * cost) - cost
        if self._untimed:
            self._untimed -= 1
        else:
            self._n_timed += 1
            self._seconds_timed += spent * self.times.slowness.value
            self._tokens_timed += gained
        if self.allowance.left < -OVERDRAWN and self.active.drafter is not None:
            self._end_block()

    def free(self, row: int) -> None:
        self._end_block()
        for arm, drafter in self.drafters:
            if len(arm.known) == self.n_rows:
                drafter.free(row)
                arm.known[row] = arm.known[-1]
                arm.known.pop()
            elif row < len(arm.known):  # a row that has not joined yet would move between those that have
                for one in reversed(range(len(arm.known))):
                    drafter.free(one)
                arm.known = []
        self.n_rows -= 1

    def _plain_steps(self, began: float) -> float:
        """Plain steps that would have taken the time since then."""
        return (time.perf_counter() - began) / self.plain_s[self.n_rows - 1] / self.times.slowness.value

    def _end_block(self) -> None:
        """Count the block, which may end before its time."""
        self.n_steps -= self._left
        self.active.n_steps -= self._left
        n_steps, arm = self._n_timed, self.active
        if n_steps and arm.drafter is None:
            self.times.slowness.count(self._seconds_timed / n_steps, n_steps)
        elif n_steps and arm.sizer is None:
            arm.tokens.count(self._tokens_timed / n_steps)
            arm.cost.count(self._seconds_timed / n_steps / self.times.slowness.value)
        if self._extra is not None:
            arm.extra.count(self._extra)
        self._extra = None
        self._left = self._untimed = self._n_timed = 0
        self._seconds_timed = self._tokens_timed = 0.0

    def _choose(self, context: Context) -> None:
        """Choose the arm of the next block."""
        before = self.active
        self._end_block()
        wait = self.allowance.steps_to_wait
        if not self.times.slowness.is_known:  # what all others are compared with comes first
            arm, why, speed = self.plain, "first", 1.0
        elif wait:
            arm, why, speed = self.plain, "loss", 1.0
        else:
            arm, why, speed = self._compared(context)
        is_trial = why == "trial"
        if arm.drafter is None:
            arm.next_trial = self.n_steps + self._steps_between(arm, 1.0, 1.0, context)
        # The first step of a method, or of new rows, also reads what came before.
        self._left, self._untimed = TRIAL_STEPS if is_trial else BLOCK_STEPS, int(arm is not before or self._joined)
        if is_trial and arm.drafter is None and self._is_short(context):
            self._left, self._untimed = ANCHOR_OF_SHORT * TRIAL_STEPS, TRIAL_STEPS
        if arm.drafter is None and not is_trial:  # nothing is learnt of the others before the next trial
            trials = [other.next_trial for other in self.choices if other is not arm]
            next_trial = min(trials, default=self.n_steps + PLAIN_STEPS)
            self._left = min(max(next_trial - self.n_steps, wait, TRIAL_STEPS), PLAIN_STEPS)
        if not self.times.slowness.is_known or (arm.drafter is not None and not arm.n_steps):
            self._left, self._untimed = WARM_UP_STEPS, WARM_UP_STEPS // 2
        self.n_steps += self._left
        arm.n_steps += self._left
        if arm is not before:
            before.known, self.active, began = list(context.n_tokens), arm, time.perf_counter()
            self._catch_up(arm, context)
            if self._cost(arm, context.n_rows):  # the first steps ever write programs
                spent = self._plain_steps(began)
                self.allowance.count(0.0, spent)
                self._extra = spent if is_trial else None
        elif self._joined and arm.sizer is not None:
            arm.sizer.resume()
        self._joined = False
        self.choice = Choice(arm.name, why, speed if speed < float("inf") else None)

    def _compared(self, context: Context) -> tuple[Arm, str, float]:
        """Compare the arms. Return the next one, why it runs, and its speed."""
        speeds = {arm: self._speed(arm, context.n_rows) for arm in self.choices}
        for arm in self.choices:
            if not arm.n_steps and not arm.next_trial and speeds[arm] < 1:
                arm.next_trial = self.n_steps + self._steps_between(arm, speeds[arm], 1.0, context)
        hopes = {arm: self._hoped(arm, speed, context.n_rows) for arm, speed in speeds.items()}
        best = self.leader = max(self.choices, key=lambda arm: hopes[arm] * (LEAD if arm is self.leader else 1))
        new = [arm for arm in self.choices if arm.n_steps < SETTLED_STEPS and speeds[arm] > 1]
        due = [arm for arm in self.choices if arm is not best and arm.next_trial <= self.n_steps]
        if new:
            arm, why = min(new, key=lambda arm: arm.n_steps), "first"
            best = arm
        elif due:
            arm, why = min(due, key=lambda arm: arm.next_trial), "trial"
        else:
            arm, why = best, "fastest"
        arm.next_trial = self.n_steps + self._steps_between(arm, speeds[arm], speeds[best], context)
        return arm, why, speeds[arm]

    def _not_covered(self) -> list[Arm]:
        """The arms that may be the fastest on this target, and do not rest."""
        arms = [arm for arm in self.arms if not self._rests(arm)]
        if self.plain_s[0] <= LONG_STEP_S:
            return arms
        covered = {name for arm in arms if arm.name in self.covers for name in self.covers[arm.name].slow_target}
        return [arm for arm in arms if arm.name not in covered]

    def _steps_between(self, arm: Arm, speed: float, best: float, context: Context) -> int:
        """Steps until the next trial of an arm; `speed` is its own, and `best` that of the best arm."""
        if arm.drafter is None:  # what the others are compared with was first measured while the process began
            return min(4 * arm.n_steps, ANCHOR_STEPS * (ANCHOR_OF_SHORT if self._is_short(context) else 1))
        share = min(TRIAL_SHARE + GAIN_SHARE * max(0.0, best - 1), MOST_TRIAL_SHARE)
        plain_steps = TRIAL_STEPS * max(1.0, self._cost(arm, context.n_rows))  # in whose time it runs
        known = min(1.0, (arm.n_steps or SETTLED_STEPS) / SETTLED_STEPS)  # the first steps may have been unlucky
        loss = known * plain_steps * (SWITCHING + max(0.0, 1 - speed / best)) + max(0.0, arm.extra.value)
        return int(min(loss / share, MOST_BETWEEN))

    def _is_short(self, context: Context) -> bool:
        return self.plain_s[context.n_rows - 1] < SHORT_STEP_S

    def _hoped(self, arm: Arm, speed: float, n_rows: int) -> float:
        """The speed that an arm may have after all. One that seems slower than plain decoding is taken as it seems."""
        if arm.drafter is None or not 1 < speed < float("inf"):
            return speed
        return speed * (1 + OPTIMISM / (arm.n_steps * n_rows) ** 0.5)

    def _speed(self, arm: Arm, n_rows: int) -> float:
        """Tokens of a row in the time of a plain step; inf: it was never run, and may be faster."""
        if arm.drafter is None:
            return 1.0
        if arm.sizer is None:
            return arm.tokens.value / arm.cost.value if arm.cost.value else float("inf")
        speed = arm.sizer.times.speed(n_rows)
        if speed is not None:
            return TIMED * speed * self.times.seconds(n_rows)[1] / n_rows
        most = arm.sizer.most_speed(n_rows) if isinstance(arm.sizer, ChainSizer) else float("inf")
        return most if most < 1 else float("inf")

    def _cost(self, arm: Arm, n_rows: int) -> float:
        """Seconds of an arm's step over those of a plain one; 0: not known."""
        if arm.sizer is None:
            return arm.cost.value
        return arm.sizer.times.step_s(n_rows) / self.times.seconds(n_rows)[1]

    def _catch_up(self, arm: Arm, context: Context) -> None:
        if arm.drafter is not None:
            if late := range(len(arm.known), context.n_rows):
                arm.drafter.prefill(context, None, late)
                arm.known += [context.n_tokens[row] for row in late]
            tokens, ends = context.tokens.numpy(), zip(arm.known, context.n_tokens, strict=True)
            missed = [tokens[row, known:end].tolist() for row, (known, end) in enumerate(ends)]
            if any(missed):
                arm.drafter.resume(context, missed)
            if arm.sizer is not None:
                arm.sizer.resume(WARM_UP_STEPS // 2 if arm.n_steps <= WARM_UP_STEPS else 1)

    def _seen_by(self, drafter: Drafter, output: TargetOutput) -> TargetOutput:
        """The output with the captured layers that the drafter asked for."""
        if output.captured is None or drafter.capture_layers == self._layers:
            return output
        if not drafter.capture_layers:
            return dataclasses.replace(output, captured=None)
        places = [self._layers.index(layer) for layer in drafter.capture_layers]
        return dataclasses.replace(output, captured=output.captured[..., places, :])


def _is_in(positions: Tensor, others: Tensor) -> Tensor:
    """Whether each of the positions [R, P] is among those of its row in others [R, Q], [R, P] bool."""
    return (positions[:, :, None] == others[:, None]).any(dim=-1)
