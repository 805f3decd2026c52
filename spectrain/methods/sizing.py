"""Choose how many nodes a step scores, from how often drafts were accepted and what a forward costs on this machine.

A method that looks its guesses up hands over more candidates than are scored, each with a kind: how it was found (which
source, how long a match, which rank). How often a candidate is right, given that its parent was, is learnt for each
kind and depth while the text is written, and corrected for each row, as texts differ. A candidate's chance is the
product along its path. The n likeliest ones of each row are scored for which

    tokens gained - rate x (seconds of n nodes - seconds of one)

is largest, where `rate` is the tokens per second of late. This choice of n maximises tokens per second in the long run
(Dinkelbach 1967). It may be the root alone. The emitted tokens say of all candidates on their way whether they were
right, whether these were scored or not; so nothing has to be tried out.

Letters: n nodes, b rows, N candidates and root, K kinds, D depths that are told apart, w width of the step's trees.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numba import njit

from spectrain.decoding.sampling import Sampling
from spectrain.decoding.tree import PADDING_PARENT
from spectrain.stores.forward_times import ForwardTimes

AUTO = "auto"  # max_nodes: as many in each step as pay on this machine
TOKENS, PARENTS, SOURCES, KINDS = range(4)  # of a draft [4, N]
DEPTHS = 6  # D: deeper candidates count as of the last
PRIOR_TRIALS = 4.0  # that the prior of a kind is worth
KIND_TRIALS = 8.0  # that a kind's mean is worth for each of its depths
ROW_TRIALS = 6.0  # that a ratio of 1 is worth for a row's own ratio to the mean
MOST_TRIALS = 512.0  # then counts are halved, so that what is older counts less
MOST_ROW_TRIALS = 24.0  # the same for a row
LIKELIEST = 0.98  # no candidate is held for more certain
OUTSIDE = 0.35, 0.6  # of a step without and with a draft, in forwards of one node, before any was timed
FIRST_CHANCE = 0.6  # that a draft model's token is accepted, before any was seen
WIDTH_STEPS = 8.0  # that the seconds guessed for a width are worth
MOST_WIDTH_STEPS = 400.0
LEVEL_STEPS = 6.0  # over which the machine's slowness is averaged
RATE_STEPS = 48.0  # over which tokens per second are averaged
TEXT_STEPS = 20.0  # the same where it is to follow the text
DISTURBED = 2.5  # a step that takes so many times the usual seconds was disturbed
DRAFT_STEPS = 32.0  # over which seconds of drafting are averaged
WIDTHS = np.array([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128])
FIRST_CANDIDATES = 16
FEWEST_CANDIDATES = 8


@njit(nogil=True, cache=True)
def _chance(kind, depth, hits, trials, prior):
    """The chance that a candidate of this kind and depth (from 0) is right where its parent is, for any row."""
    last = hits.shape[1] - 1  # where a kind's sum over depths stands
    of_kind = (hits[kind, last] + PRIOR_TRIALS * prior[kind]) / (trials[kind, last] + PRIOR_TRIALS)
    return (hits[kind, depth] + KIND_TRIALS * of_kind) / (trials[kind, depth] + KIND_TRIALS)


@njit(nogil=True, cache=True)
def _count(kind, depth, hit, hits, trials):
    for place in (depth, hits.shape[1] - 1):
        trials[kind, place] += 1.0
        hits[kind, place] += hit
        if trials[kind, place] > MOST_TRIALS:
            trials[kind, place] *= 0.5
            hits[kind, place] *= 0.5


@njit(nogil=True, cache=True)
def chances(drafts, sizes, n_probes, learnt, own, out):
    """Fill out [b, N] float64 with the chance that each candidate is accepted; probes and padding have 0.

    Args:
        drafts: [b, 4, N] int64.
        sizes: [b] int64 nodes of each, root and probes included.
        n_probes: nodes 1..P, which are not accepted.
        learnt: hits and trials [K, D + 1], prior [K].
        own: [b, 2, 2] right ones, and those expected, of each row: of the first token, of deeper ones.
        out: see above.
    """
    hits, trials, prior = learnt
    depths = np.zeros(drafts.shape[2], dtype=np.int64)
    for row in range(len(drafts)):
        draft, one = drafts[row], out[row]
        one[:] = 0.0
        one[0] = 1.0
        for i in range(1 + n_probes, sizes[row]):
            parent = draft[PARENTS, i]
            depth = depths[parent]
            depths[i] = depth + 1
            near = min(depth, 1)
            ratio = (own[row, near, 0] + ROW_TRIALS) / (own[row, near, 1] + ROW_TRIALS)
            chance = ratio * _chance(draft[KINDS, i], min(depth, DEPTHS - 1), hits, trials, prior)
            one[i] = one[parent] * min(chance, LIKELIEST)


@njit(nogil=True, cache=True)
def learn(draft, size, n_probes, emitted, learnt, own):
    """Count, of one row, which candidates the emitted tokens were."""
    hits, trials, prior = learnt
    node = 0
    for depth in range(len(emitted)):
        found, expected, least = -1, 0.0, min(depth, DEPTHS - 1)
        for i in range(max(node, n_probes) + 1, size):
            if draft[PARENTS, i] == node:
                kind = draft[KINDS, i]
                right = draft[TOKENS, i] == emitted[depth]
                expected += _chance(kind, least, hits, trials, prior)
                _count(kind, least, 1.0 if right else 0.0, hits, trials)
                if right and found < 0:
                    found = i
        if expected > 0:
            near = min(depth, 1)
            own[near, 0] += 1.0 if found >= 0 else 0.0
            own[near, 1] += min(expected, LIKELIEST)
            if own[near, 1] > MOST_ROW_TRIALS:
                own[near] *= 0.5
        if found < 0:
            break
        node = found


@njit(nogil=True, cache=True)
def cut(drafts, sizes, n_probes, likely, worth, widths, kept):
    """Keep the likeliest nodes of each row.

    Args:
        drafts: [b, 4, N] int64.
        sizes: [b] int64.
        n_probes: nodes 1..P, which are kept.
        likely: [b, N] of `chances`.
        worth: [N + 1] float64: tokens that a width must gain to be worth its seconds.
        widths: ascending, without the root and the probes.
        kept: [b, 3, N] int64, filled with tokens, parents and sources, padded.

    Returns:
        The width of the widest tree, its depth, whether all trees are chains, and the tokens gained on average.
    """
    n_rows, first = len(drafts), 1 + n_probes
    order = np.zeros(likely.shape, dtype=np.int64)
    widest = 0
    for row in range(n_rows):
        n = sizes[row] - first
        order[row, :n] = first + np.argsort(-likely[row, first : sizes[row]], kind="mergesort")
        widest = max(widest, n)
    best, best_width, best_gained, gained, done = 0.0, 0, 0.0, 0.0, 0
    for width in widths:
        top = min(width, widest)
        for place in range(done, top):
            for row in range(n_rows):
                if place < sizes[row] - first:
                    gained += likely[row, order[row, place]]
        done = top
        if gained - worth[first + top] > best:
            best, best_width, best_gained = gained - worth[first + top], top, gained
        if top == widest:
            break
    deepest, chains = 0, True
    places = np.zeros(likely.shape[1], dtype=np.int64)
    depths = np.zeros(likely.shape[1], dtype=np.int64)
    taken = np.zeros(likely.shape[1], dtype=np.bool_)
    for row in range(n_rows):
        n = min(best_width, sizes[row] - first)
        taken[:first] = True
        taken[first:] = False
        taken[order[row, :n]] = True
        end = 0
        for i in range(sizes[row]):
            if taken[i]:
                parent = drafts[row, PARENTS, i]
                above = places[parent] if i > 0 else parent
                kept[row, 0, end], kept[row, 1, end] = drafts[row, TOKENS, i], above
                kept[row, 2, end] = drafts[row, SOURCES, i]
                depths[i] = depths[parent] + 1 if i > 0 else 0
                deepest = max(deepest, depths[i])
                chains = chains and above == end - 1
                places[i] = end
                end += 1
        kept[row, 0, end:] = 0
        kept[row, 1, end:] = PADDING_PARENT
        kept[row, 2, end:] = 0
    return first + best_width, deepest, chains and n_probes == 0, best_gained


class Level:
    """How slow the machine is at the moment: seconds of late over those of a quiet one."""

    def __init__(self):
        self.value, self.is_known = 1.0, False
        self.is_shared = False  # whether someone else counts the steps without a draft

    def count(self, ratio: float, n_steps: float) -> None:
        """Steps took `ratio` times the seconds of a quiet machine; what took far longer than most was disturbed."""
        weight = 1 - (1 - 1 / LEVEL_STEPS) ** n_steps if self.is_known else 1.0
        self.is_known = True
        self.value += weight * (min(ratio, DISTURBED * self.value) - self.value)


class Mean:
    """A mean over the last steps."""

    def __init__(self, n_steps: float):
        self.most, self._n, self.value = n_steps, 0.0, 0.0

    def count(self, value: float) -> None:
        self._n = min(self._n + 1, self.most)
        self.value += (value - self.value) / self._n


class StepTimes:
    """Seconds of a step behind its draft on a quiet machine, by rows and width, and tokens per second of late.

    They begin as a guess from the forwards of this machine. What steps take is compared with what steps without a draft
    take at about the same time (`level`), as other work may slow all of them down for a while.

    Args:
        most_nodes: of a tree, root and probes included.
    """

    def __init__(self, most_nodes: int):
        self.most_nodes, self.level = most_nodes, Level()
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
        self.draft_s = [Mean(DRAFT_STEPS) for _ in range(n_rows)]
        self.expected, self.cost = ([Mean(TEXT_STEPS) for _ in range(n_rows)] for _ in range(2))  # behind the draft

    def seconds(self, n_rows: int, least: int = 1) -> np.ndarray:
        """Seconds by width [N + 1] of a step after its draft; `least` is the width without one."""
        forward = self.forwards[n_rows - 1]
        seconds = (forward + OUTSIDE[1] * forward[1]) * self.drafting[n_rows - 1] * self.ratios[n_rows - 1]
        seconds[: least + 1] = forward[: least + 1] + OUTSIDE[0] * forward[1]
        return seconds

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

        Of another number of rows, the nearest, where there were none of this one.
        """
        tried = [n for n, cost in enumerate(self.cost, 1) if cost.value]
        if tried and n_rows not in tried:
            nearest = min(tried, key=lambda n: abs(n - n_rows))
            share = self.seconds(nearest)[1] / self.seconds(n_rows)[1]
            return self.speed(nearest) * share * n_rows / nearest
        tokens = (self.expected[n_rows - 1].value + self.tokens[n_rows - 1].value) / 2  # of the text now, and what was
        return tokens / self.step_s(n_rows) if self.cost[n_rows - 1].value else None

    def step_s(self, n_rows: int) -> float:
        """Seconds of the last steps with this method; 0: there were none."""
        return self.cost[n_rows - 1].value + self.draft_s[n_rows - 1].value

    def count(
        self, n_rows: int, width: int, least: int, seconds: tuple[float, float], tokens: tuple[float, float]
    ) -> None:
        """A step has ended.

        Args:
            n_rows: of it.
            width: nodes of its trees.
            least: those without a draft.
            seconds: that it took to draft; then to score, verify and commit.
            tokens: that it gained; that it may gain on average.
        """
        n, expected_s = n_rows - 1, self.seconds(n_rows, least)[width]
        ratio = min(seconds[1] / expected_s, DISTURBED * self.level.value)
        if width <= least:
            if not self.level.is_shared:
                self.level.count(ratio, 1.0)
        else:
            self.counts[n, width] = min(self.counts[n, width] + 1, MOST_WIDTH_STEPS)
            self.counts[n, 0] = min(self.counts[n, 0] + 1, MOST_WIDTH_STEPS)
            change = ratio / self.level.value
            self.ratios[n, width] *= change ** (1 / (self.counts[n, width] + WIDTH_STEPS))
            self.drafting[n] *= change ** (1 / (self.counts[n, 0] + WIDTH_STEPS))
        draft_s, usual_s = seconds[0] / self.level.value, self.draft_s[n].value
        if draft_s < usual_s / DISTURBED:  # those before compiled something
            self.draft_s[n] = Mean(DRAFT_STEPS)
        elif usual_s:
            draft_s = min(draft_s, DISTURBED * usual_s)
        self.draft_s[n].count(draft_s)
        self.tokens[n].count(tokens[0])
        self.spent[n].count(draft_s + ratio * expected_s / self.level.value)
        self.expected[n].count(tokens[1])
        self.cost[n].count(expected_s)


class Sizer:
    """Chooses the trees of a step, and learns from what became of them. One object serves many generations.

    Args:
        priors: [K] chance of each kind's candidates before any was seen.
        most_nodes: of a tree, root and probes included.
    """

    def __init__(self, priors: Sequence[float], most_nodes: int):
        shape = len(priors), DEPTHS + 1
        self.learnt = np.zeros(shape), np.zeros(shape), np.array(priors, dtype=np.float64)
        self.times = StepTimes(most_nodes)
        self.own = np.zeros((0, 2, 2))  # see `chances`
        self.sampling: Sampling | None = None
        self.n_candidates = FIRST_CANDIDATES  # that are worth looking for
        self._untimed = 0  # steps that do not count
        self._last: tuple | None = None  # drafts, sizes, probes, width and tokens gained of this step

    def start(self, one_row: ForwardTimes, all_rows: ForwardTimes, n_rows: int) -> None:
        """Begin a generation; see `StepTimes.start`."""
        self.times.start(one_row, all_rows, n_rows)
        self.own, self._last = np.zeros((n_rows, 2, 2)), None

    def join(self, rows: range, sampling: Sampling) -> None:
        """New rows are decoded under this sampling; what was learnt under another one is forgotten."""
        self.own[rows.start : rows.stop] = 0
        if sampling != self.sampling:
            self.sampling = sampling
            self.learnt[0][:] = self.learnt[1][:] = 0

    def free(self, row: int, last: int) -> None:
        self.own[row] = self.own[last]

    def resume(self, n_steps: int = 1) -> None:
        """Do not time the next steps: they are the first ones, or follow steps without this method."""
        self._untimed = n_steps

    def begin(self) -> None:
        """A step begins."""
        self._began = time.perf_counter()

    def trees(self, drafts: np.ndarray, sizes: np.ndarray, n_probes: int = 0) -> tuple[np.ndarray, int, bool]:
        """Choose among the candidates of all rows.

        Args:
            drafts: [b, 4, N] int64: tokens, parents, sources and kinds. Node 0 is the root, then come P probes; parents
                stand before children.
            sizes: [b] int64: nodes of each.
            n_probes: P.

        Returns:
            Tokens, parents and sources [b, 3, w] int64; the depth; and whether all are chains.
        """
        n_rows, n_nodes, most = len(drafts), drafts.shape[2], self.times.most_nodes
        likely, kept = np.empty((n_rows, n_nodes)), np.empty((n_rows, 3, n_nodes), dtype=np.int64)
        chances(drafts, sizes, n_probes, self.learnt, self.own, likely)
        widths = WIDTHS[: np.searchsorted(WIDTHS, most - 1 - n_probes, side="right")]
        price = self.times.price(n_rows, 1 + n_probes)
        width, depth, chains, gained = cut(drafts, sizes, n_probes, likely, price, widths, kept)
        self._last = drafts, sizes, n_probes, width, gained
        wanted = min(most, max(FEWEST_CANDIDATES, 2 * (width - n_probes)))
        self.n_candidates += (wanted - self.n_candidates) // (1 if wanted > self.n_candidates else 8)
        self._drafted = time.perf_counter()
        return kept[:, :, :width], depth, bool(chains)

    def end(self, emitted: Sequence[Sequence[int]]) -> None:
        """The step has ended: row b gained the tokens emitted[b]."""
        if self._last is None:
            return
        drafts, sizes, n_probes, width, gained = self._last
        self._last = None
        for row, tokens in enumerate(emitted):
            learn(drafts[row], sizes[row], n_probes, np.array(tokens), self.learnt, self.own[row])
        seconds = self._drafted - self._began, time.perf_counter() - self._drafted
        tokens = sum(map(len, emitted)), len(emitted) + gained
        if self._untimed:
            self._untimed -= 1
        else:
            self.times.count(len(emitted), width, 1 + n_probes, seconds, tokens)


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
        one, of_g, squares = one + PRIOR_TRIALS, of_g - PRIOR_TRIALS, squares + PRIOR_TRIALS
        spread = one * squares - of_g**2
        self._first = (squares * total - of_g * by_g) / spread
        self._more = (one * by_g - of_g * total) / spread


class ChainSizer:
    """Chooses how many tokens a draft model drafts, from how often those of each place in a chain were accepted.

    Args:
        most: tokens of a chain.
    """

    def __init__(self, most: int):
        self.most = most
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
        self._untimed = n_steps

    def begin(self, n_rows: int) -> int:
        """A step begins. Return the tokens to draft: at least one."""
        self._began = time.perf_counter()
        price = self.times.price(n_rows)[2:]  # of 1, 2, .. tokens
        rate = self.times.rate(n_rows)
        gained, reached, best, chosen = 0.0, 1.0, -np.inf, 1
        chance = FIRST_CHANCE
        for place in range(self.most):
            chance = (self.hits[place] + KIND_TRIALS * chance) / (self.trials[place] + KIND_TRIALS)
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
            self._draft_times.count(n_drafted, draft_s / self.times.level.value)
        seconds, n_rows = (draft_s, time.perf_counter() - since), len(emitted)
        gained = self._gained if n_drafted else 0.0
        self.times.count(n_rows, 1 + n_drafted, 1, seconds, (sum(map(len, emitted)), n_rows + gained))
