"""Seconds of a step and of its draft on this machine, from timed forwards and from the steps themselves.

Letters: n nodes, b rows, w width of a step's trees, g drafted tokens.
"""

from __future__ import annotations

import numpy as np

from spectrain.stores.forward_times import ForwardTimes

OUTSIDE_S = 0.15e-3, 0.25e-3  # of a step beside its forward, without and with a draft, until steps have been timed
WIDTH_STEPS = 8.0  # that the seconds guessed for a width are worth
MOST_WIDTH_STEPS = 400.0
SLOWNESS_STEPS = 6.0  # over which the machine's slowness is averaged
RATE_STEPS = 48.0  # over which tokens per second are averaged
TEXT_STEPS = 20.0  # the same where it is to follow the text
DISTURBED = 2.5  # a step that takes so many times the usual seconds was disturbed
DRAFT_STEPS = 32.0  # over which seconds of drafting are averaged
FIRST_STEPS = 4.0  # that the guess about other lengths of drafts is worth


class Slowness:
    """How slow the machine is at the moment: seconds of late over those of a quiet one."""

    def __init__(self):
        self.value, self.is_known = 1.0, False
        self.is_shared = False  # whether someone else counts the steps without a draft

    def count(self, ratio: float, n_steps: float) -> None:
        """Steps took `ratio` times the seconds of a quiet machine; what took far longer than most was disturbed."""
        weight = 1 - (1 - 1 / SLOWNESS_STEPS) ** n_steps if self.is_known else 1.0
        self.is_known = True
        self.value += weight * (min(ratio, DISTURBED * self.value) - self.value)


class Mean:
    """A mean over the last steps."""

    def __init__(self, most_steps: float):
        self.most_steps, self.n_steps, self.value = most_steps, 0.0, 0.0

    def count(self, value: float) -> None:
        self.n_steps = min(self.n_steps + 1, self.most_steps)
        self.value += (value - self.value) / self.n_steps

    def count_usual(self, seconds: float) -> float:
        """Count seconds, but not how far something else disturbed them. Return what was counted."""
        if seconds < self.value / DISTURBED:  # those before compiled something
            self.n_steps, self.value = 0.0, 0.0
        elif self.value:
            seconds = min(seconds, DISTURBED * self.value)
        self.count(seconds)
        return seconds


class DraftSeconds:
    """Seconds of drafting on average, told apart by how often a draft model was read, or by the tokens it drafted."""

    def __init__(self) -> None:
        self.means: dict[int, Mean] = {}
        self.shares: dict[int, float] = {}  # of the last steps
        self.n_steps = 0.0

    @property
    def value(self) -> float:
        known = {n: share for n, share in self.shares.items() if self.means[n].n_steps}
        return sum(share * self.means[n].value for n, share in known.items()) / (sum(known.values()) or 1.0)

    def count(self, seconds: float, n_read: int) -> float:
        """Count a step. Return its seconds, but not how far something else disturbed them.

        What is done for the first time may have written a program, so its seconds say nothing about the next time.
        """
        self.n_steps = min(self.n_steps + 1, DRAFT_STEPS)
        for n in {*self.shares, n_read}:
            before = self.shares.get(n, 0.0)
            self.shares[n] = before + ((n == n_read) - before) / self.n_steps
        if n_read in self.means:
            return self.means[n_read].count_usual(seconds)
        usual = max((mean.value for mean in self.means.values()), default=0.0)
        self.means[n_read] = Mean(DRAFT_STEPS)
        return min(seconds, DISTURBED * usual) if usual else seconds


class StepTimes:
    """Seconds of a step behind its draft on a quiet machine, by rows and width, and tokens per second of late.

    They begin as a guess from the forwards of this machine. What steps take is compared with what steps without a draft
    take at about the same time (`slowness`), as other work may slow all of them down for a while.

    Args:
        most_nodes: of a tree, root and probes included.
    """

    def __init__(self, most_nodes: int):
        self.most_nodes, self.slowness = most_nodes, Slowness()
        self.forwards: list[np.ndarray] = []  # seconds by nodes, for each number of rows
        self._of: tuple | None = None  # what they were made from

    def start(self, one_row: ForwardTimes, all_rows: ForwardTimes, n_rows: int) -> None:
        """Begin a generation of at most so many rows: what forwards of one and of all rows cost."""
        if (one_row, all_rows, n_rows) == self._of:
            return
        self._of = one_row, all_rows, n_rows
        few, many = one_row.up_to(self.most_nodes), all_rows.up_to(self.most_nodes)
        shares = [row / max(1, n_rows - 1) for row in range(n_rows)]
        self.forwards = [few + share * (many - few) for share in shares]
        self.ratios, self.counts = np.ones((n_rows, self.most_nodes + 1)), np.zeros((n_rows, self.most_nodes + 1))
        self.drafting = np.ones(n_rows)  # ratio of all widths with a draft
        self.tokens, self.spent = ([Mean(RATE_STEPS) for _ in range(n_rows)] for _ in range(2))  # per step
        self.draft_s = [DraftSeconds() for _ in range(n_rows)]
        self.expected, self.cost = ([Mean(TEXT_STEPS) for _ in range(n_rows)] for _ in range(2))  # behind the draft

    def seconds(self, n_rows: int, least: int = 1) -> np.ndarray:
        """Seconds by width [N + 1] of a step after its draft; `least` is the width without one."""
        forward = self.forwards[n_rows - 1]
        seconds = (forward + OUTSIDE_S[1]) * self._drafting(n_rows) * self.ratios[n_rows - 1]
        seconds[: least + 1] = forward[: least + 1] + OUTSIDE_S[0]
        return seconds

    def _drafting(self, n_rows: int) -> float:
        """The ratio of all widths with a draft: that of the nearest number of rows that steps were drafted with."""
        if not self.counts[n_rows - 1, 0] and (tried := np.flatnonzero(self.counts[:, 0])).size:
            return self.drafting[tried[np.abs(tried - (n_rows - 1)).argmin()]]
        return self.drafting[n_rows - 1]

    def rate(self, n_rows: int, least: int = 1) -> float:
        """Tokens per second of late."""
        spent = self.spent[n_rows - 1].value
        return self.tokens[n_rows - 1].value / spent if spent else n_rows / self.seconds(n_rows, least)[least]

    def price(self, n_rows: int, least: int = 1) -> np.ndarray:
        """Tokens that a step of each width must gain over one of `least` nodes, [N + 1]."""
        seconds = self.seconds(n_rows, least)
        return self.rate(n_rows, least) * (seconds - seconds[least])

    def speed(self, n_rows: int) -> float | None:
        """Tokens per second that the last steps with this method may have had on average; None: there were none.

        Of another number of rows, the nearest, where there were none of this one. Steps then cost as those of two nodes
        do: the more rows there are, the dearer a draft is beside a plain step.
        """
        tried = [n for n, cost in enumerate(self.cost, 1) if cost.value]
        if tried and n_rows not in tried:
            nearest = min(tried, key=lambda n: abs(n - n_rows))
            width = min(2, self.most_nodes)
            share = self.seconds(nearest)[width] / self.seconds(n_rows)[width]
            return self.speed(nearest) * share * n_rows / nearest
        expected, gained = self.expected[n_rows - 1].value, self.tokens[n_rows - 1]
        # What a few steps gained may be luck, so that what was expected counts more at first.
        weight = gained.n_steps / (gained.n_steps + RATE_STEPS)
        tokens = expected + weight * (gained.value - expected)
        return tokens / self.step_s(n_rows) if self.cost[n_rows - 1].value else None

    def step_s(self, n_rows: int) -> float:
        """Seconds of the last steps with this method; 0: there were none."""
        return self.cost[n_rows - 1].value + self.draft_s[n_rows - 1].value

    def count(
        self,
        n_rows: int,
        width: int,
        least: int,
        seconds: tuple[float, float],
        tokens: tuple[float, float],
        n_read: int = 0,
    ) -> None:
        """A step has ended.

        Args:
            n_rows: of it.
            width: nodes of its trees.
            least: those without a draft.
            seconds: that it took to draft; then to score, verify and commit.
            tokens: that it gained; that it may gain on average.
            n_read: times that a draft model was read, where that varies.
        """
        n, expected_s = n_rows - 1, self.seconds(n_rows, least)[width]
        ratio = min(float(seconds[1] / expected_s), DISTURBED * self.slowness.value)
        if width <= least:
            if not self.slowness.is_shared:
                self.slowness.count(ratio, 1.0)
        else:
            self.drafting[n] = self._drafting(n_rows)
            self.counts[n, width] = min(self.counts[n, width] + 1, MOST_WIDTH_STEPS)
            self.counts[n, 0] = min(self.counts[n, 0] + 1, MOST_WIDTH_STEPS)
            change = ratio / self.slowness.value
            self.ratios[n, width] *= change ** (1 / (self.counts[n, width] + WIDTH_STEPS))
            self.drafting[n] *= change ** (1 / (self.counts[n, 0] + WIDTH_STEPS))
        draft_s = self.draft_s[n].count(seconds[0] / self.slowness.value, n_read)
        self.tokens[n].count(tokens[0])
        self.spent[n].count(draft_s + ratio * expected_s / self.slowness.value)
        self.expected[n].count(tokens[1])
        self.cost[n].count(expected_s)


class DraftTimes:
    """Seconds of drafting g tokens, as first + more x g: a line through those measured of late."""

    def __init__(self):
        self._sums = np.zeros(5)  # 1, g, g^2, seconds, g x seconds of the steps of late
        self._first = self._more = 0.0

    def seconds(self, n_tokens: int) -> float:
        return max(0.0, self._first + self._more * n_tokens)

    def count(self, n_tokens: int, seconds: float) -> None:
        expected = self.seconds(n_tokens)
        if seconds < expected / DISTURBED:  # those before compiled something
            self._sums[:] = 0
        elif expected > 0:
            seconds = min(seconds, DISTURBED * expected)
        g = n_tokens
        self._sums = (1 - 1 / DRAFT_STEPS) * self._sums + np.array([1.0, g, g * g, seconds, g * seconds])
        one, of_g, squares, total, by_g = self._sums.tolist()
        # Least squares, with a weight on first = more, which alone says what other lengths cost where g is the same.
        one, of_g, squares = one + FIRST_STEPS, of_g - FIRST_STEPS, squares + FIRST_STEPS
        spread = one * squares - of_g**2
        self._first = (squares * total - of_g * by_g) / spread
        self._more = (one * by_g - of_g * total) / spread
