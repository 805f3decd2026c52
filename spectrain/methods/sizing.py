"""Choose how many nodes a step scores, from how often drafts were accepted and what a forward costs on this machine.

The n likeliest candidates of each row (`chances.py`) are scored for which

    tokens gained - rate x (seconds of n nodes - seconds of one)

is largest, where `rate` is the tokens per second of late (`step_times.py`). This choice of n maximises tokens per
second in the long run (Dinkelbach 1967). It may be the root alone.

Letters: n nodes, b rows, N candidates and root, K kinds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from spectrain.decoding.sampling import Sampling
from spectrain.methods.chances import KIND_TRIALS, MOST_TRIALS, Ranking
from spectrain.methods.step_times import DraftSeconds, DraftTimes, Mean, StepTimes
from spectrain.stores.forward_times import ForwardTimes

AUTO = "auto"  # max_nodes: as many in each step as pay on this machine
FIRST_CHANCE = 0.6  # that a draft model's token is accepted, where its export does not say
TRAINED_TRIALS = 24.0  # seen tokens that the acceptance measured in training counts as
WIDTHS = np.array([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 63])
FOUND = np.array([0.25, 0.5, 1.0, 2.0])  # tokens that a lookup may gain, told apart by `Asking`
# What a draft model adds to these, on average over three prompt sets of SmolLM2, from which it starts, as if in
# FIRST_ASKED steps. It averages over ASKED_STEPS.
ADDED = (0.65, 0.6, 0.55, 0.4, 0.1)
FIRST_ASKED, ASKED_STEPS = 4, 16.0
LEAST_ASKED = 2  # steps in which a draft model is read before its seconds are known
SELDOM = 24  # steps without it after which a draft model, or a second level of its tree, is read again
FIRST_CANDIDATES = 16
FEWEST_CANDIDATES = 8


class Sizer(Ranking):
    """A ranking that also chooses how many of the likeliest nodes are scored. For arguments see `Ranking`."""

    def __init__(self, priors: Sequence[float], most_nodes: int):
        super().__init__(priors, most_nodes)
        self.times = StepTimes(most_nodes)
        self.n_candidates = FIRST_CANDIDATES
        self.n_read = 0  # times that a draft model was read in this step
        self._untimed = 0  # steps that do not count
        self._chosen = 0, 0, 0.0  # width, probes and tokens gained of this step

    def start(self, one_row: ForwardTimes, all_rows: ForwardTimes, n_rows: int) -> None:
        """Begin a generation; see `StepTimes.start`."""
        self.times.start(one_row, all_rows, n_rows)
        self.begin_rows(n_rows)

    def resume(self, n_steps: int = 1) -> None:
        """Do not time the next steps: they are the first ones, or follow steps without this method."""
        self._untimed = max(self._untimed, n_steps)

    @property
    def is_timed(self) -> bool:
        """Whether this step counts."""
        return not self._untimed

    def begin(self) -> None:
        self._began, self.n_read = time.perf_counter(), 0

    def choices(self, n_rows: int, n_probes: int, n_nodes: int) -> tuple[np.ndarray, np.ndarray]:
        most = self.most_nodes - 1 - n_probes
        return WIDTHS[: np.searchsorted(WIDTHS, most, side="right")], self.times.price(n_rows, 1 + n_probes)

    def chose(self, width: int, n_probes: int, gained: float) -> None:
        self._chosen = width, n_probes, gained
        wanted = min(self.most_nodes, max(FEWEST_CANDIDATES, 2 * (width - n_probes)))
        self.n_candidates += (wanted - self.n_candidates) // (1 if wanted > self.n_candidates else 8)
        self._drafted = time.perf_counter()

    def end(self, emitted: Sequence[Sequence[int]]) -> None:
        if not self._last:
            return
        super().end(emitted)
        width, n_probes, gained = self._chosen
        seconds = self._drafted - self._began, time.perf_counter() - self._drafted
        tokens = sum(map(len, emitted)), len(emitted) + gained
        if self._untimed:
            self._untimed -= 1
        else:
            self.times.count(len(emitted), width, 1 + n_probes, seconds, tokens, self.n_read)


class Asking:
    """Chooses in which steps a draft model is read, given what a lookup has found for the step.

    It is read if it has lately added more tokens to the lookup's than its seconds would have gained otherwise. What it
    adds depends on how sure the lookup is: the more tokens that may gain, the less is left to add. Where the model does
    not pay it is still read now and then, as texts change.
    """

    def __init__(self) -> None:
        self.added = [Mean(ASKED_STEPS) for _ in ADDED]  # tokens per row, by what was found
        for mean, first in zip(self.added, ADDED, strict=True):
            mean.n_steps, mean.value = FIRST_ASKED, first
        self.seconds: dict[int, DraftSeconds] = {}  # of reading it, by rows
        self._waited = [0] * len(self.added)  # steps in which it was not read
        self._bucket = 0

    def asks(self, n_rows: int, found: float, rate: float) -> bool:
        """Whether it is read in this step.

        Args:
            n_rows: of the step.
            found: tokens of a row that the lookup's candidates may gain.
            rate: tokens per second of late.
        """
        self._bucket = of = int(np.searchsorted(FOUND, found, side="right"))
        seconds = self.seconds.get(n_rows)
        self._waited[of] += 1
        is_known = seconds is not None and seconds.n_steps >= LEAST_ASKED
        if not is_known or n_rows * self.added[of].value > rate * seconds.value or self._waited[of] >= SELDOM:
            self._waited[of] = 0
            return True
        return False

    def count(self, n_rows: int, added: float, seconds: float, n_read: int) -> None:
        """It was read so often, which took these seconds of a quiet machine, and may gain so many tokens per row."""
        self.added[self._bucket].count(added)
        self.seconds.setdefault(n_rows, DraftSeconds()).count(seconds, n_read)


class ChainSizer:
    """Chooses how many tokens a draft model drafts, from how often those of each place in a chain were accepted.

    Args:
        most: tokens of a chain.
        acceptance: mean acceptance probability of drafted tokens after training; None: not known.
    """

    def __init__(self, most: int, acceptance: float | None = None):
        self.most = most
        # What the chance of a first token starts from, and the number of seen tokens that this counts as. Each later
        # place starts from the chance of the place before, which counts as much.
        self.prior = (FIRST_CHANCE, KIND_TRIALS) if acceptance is None else (acceptance, TRAINED_TRIALS)
        self.hits, self.trials = np.zeros(most), np.zeros(most)
        self.times = StepTimes(most + 1)
        self.sampling: Sampling | None = None
        self._draft_times = DraftTimes()
        self._untimed = 0  # steps that do not count
        self._last: tuple[int, float, float] | None = None  # tokens of this step's chains, seconds

    def start(self, one_row: ForwardTimes, all_rows: ForwardTimes, n_rows: int) -> None:
        """Begin a generation; see `StepTimes.start`."""
        if n_rows != len(self.times.forwards):  # a token of so many rows costs something else
            self._draft_times = DraftTimes()
        self.times.start(one_row, all_rows, n_rows)
        self._last = None

    def join(self, sampling: Sampling) -> None:
        """Rows are decoded under this sampling; what was learnt under another one is forgotten."""
        if sampling != self.sampling:
            self.sampling = sampling
            self.hits[:] = self.trials[:] = 0

    def resume(self, n_steps: int = 1) -> None:
        """Do not time the next steps: they are the first ones, or follow steps without this method."""
        self._untimed = max(self._untimed, n_steps)

    def most_speed(self, n_rows: int) -> float:
        """The highest speed over plain decoding that the first estimate of acceptance allows if drafting is free."""
        seconds = self.times.seconds(n_rows)
        reached = self.prior[0] ** np.arange(1, self.most + 1)
        return float(np.max((1 + np.cumsum(reached)) * seconds[1] / seconds[2 : self.most + 2]))

    def begin(self, n_rows: int) -> int:
        """A step begins. Return the tokens to draft: at least one."""
        self._began = time.perf_counter()
        price = self.times.price(n_rows)[2:]  # of 1, 2, .. tokens
        rate = self.times.rate(n_rows)
        gained, reached, best, chosen = 0.0, 1.0, -np.inf, 1
        chance, worth = self.prior
        for place in range(self.most):
            chance = (self.hits[place] + worth * chance) / (self.trials[place] + worth)
            reached *= chance
            gained += n_rows * reached
            value = gained - price[place] - rate * self._draft_times.seconds(place + 1)
            if value > best:
                best, chosen, self._gained = value, place + 1, gained
        return chosen

    def drafted(self, n_tokens: int) -> None:
        """The chains have at most so many tokens."""
        self._last = n_tokens, time.perf_counter() - self._began, time.perf_counter()

    def end(self, emitted: Sequence[Sequence[int]]) -> None:
        """The step has ended: row b gained the tokens emitted[b]."""
        if self._last is None:
            return
        n_drafted, draft_s, since = self._last
        self._last = None
        for tokens in emitted:
            accepted = min(len(tokens) - 1, n_drafted)
            self.hits[:accepted] += 1
            self.trials[: min(accepted + 1, n_drafted)] += 1
        often = self.trials > MOST_TRIALS
        self.hits[often] *= 0.5
        self.trials[often] *= 0.5
        if self._untimed:
            self._untimed -= 1
            return
        if n_drafted:
            self._draft_times.count(n_drafted, draft_s / self.times.slowness.value)
        seconds, n_rows = (draft_s, time.perf_counter() - since), len(emitted)
        gained = self._gained if n_drafted else 0.0
        self.times.count(n_rows, 1 + n_drafted, 1, seconds, (sum(map(len, emitted)), n_rows + gained), n_drafted)
