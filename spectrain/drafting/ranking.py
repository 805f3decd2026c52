"""How likely each candidate of a draft tree is right, and which ones are scored.

A lookup hands over more candidates than are scored, each with a kind: how it was found (which source, how long a match,
which rank). How often a candidate is right, given that its parent was, is learnt for each kind and depth while the text
is written, and corrected for each row, as texts differ. A candidate's chance is the product along its path. The emitted
tokens say of all candidates on their way whether they were right, whether these were scored or not; so nothing has to
be tried out.

Letters: b rows, N candidates and root, K kinds, D depths that are told apart, w width of the step's trees.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spectrain.compiled import compiled, inner, order_by
from spectrain.decoding.sampling import RowSampling, Sampling
from spectrain.target.tree import PADDING_PARENT

TOKENS, PARENTS, SOURCES, KINDS = range(4)  # of a draft [4, N]
DEPTHS = 6  # D: deeper candidates count as of the last
PRIOR_TRIALS = 4.0  # that the prior of a kind is worth
KIND_TRIALS = 8.0  # that a kind's mean is worth for each of its depths
ROW_TRIALS = 6.0  # that a ratio of 1 is worth for a row's own ratio to the mean
MOST_TRIALS = 512.0  # then counts are halved, so that what is older counts less
MOST_ROW_TRIALS = 24.0  # the same for a row
LIKELIEST = 0.98  # no candidate is held for more certain
CANDIDATES = 2  # times the nodes that are scored, where their number is fixed


@inner
def _chance(kind, depth, hits, trials, prior):
    """The chance that a candidate of this kind and depth (from 0) is right where its parent is, for any row."""
    last = hits.shape[1] - 1  # where a kind's sum over depths stands
    of_kind = (hits[kind, last] + PRIOR_TRIALS * prior[kind]) / (trials[kind, last] + PRIOR_TRIALS)
    return (hits[kind, depth] + KIND_TRIALS * of_kind) / (trials[kind, depth] + KIND_TRIALS)


@inner
def _count(kind, depth, hit, hits, trials):
    for place in (depth, hits.shape[1] - 1):
        trials[kind, place] += 1.0
        hits[kind, place] += hit
        if trials[kind, place] > MOST_TRIALS:
            trials[kind, place] *= 0.5
            hits[kind, place] *= 0.5


@compiled
def chances(drafts, sizes, n_probes, learnt, own, out):
    """Fill out [b, N] float64 with the chance that each candidate is accepted; probes and padding have 0.

    Args:
        drafts: [b, 4, N] int64.
        sizes: [b] int64 nodes of each, root and probes included.
        n_probes: nodes 1..P, which are not accepted.
        learnt: hits and trials [K, D + 1], and prior [K].
        own: [b, 2, 2] right ones, and those expected, of each row: of the first token, of deeper ones.
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
            chance = min(ratio * _chance(draft[KINDS, i], min(depth, DEPTHS - 1), hits, trials, prior), LIKELIEST)
            one[i] = one[parent] * chance


@compiled
def learn(draft, size, n_probes, emitted, learnt, own, first_kind=0):
    """Count for one row which candidates were emitted; kinds below `first_kind` are not counted."""
    hits, trials, prior = learnt
    node = 0
    for depth in range(len(emitted)):
        found, expected, least = -1, 0.0, min(depth, DEPTHS - 1)
        for i in range(max(node, n_probes) + 1, size):
            if draft[PARENTS, i] == node:
                kind = draft[KINDS, i]
                right = draft[TOKENS, i] == emitted[depth]
                expected += _chance(kind, least, hits, trials, prior)
                if kind >= first_kind:
                    _count(kind, least, 1.0 if right else 0.0, hits, trials)
                if right and found < 0:
                    found = i
        if expected > 0:
            near = min(depth, 1)
            own[near, 0] += 1.0 if found >= 0 else 0.0
            own[near, 1] += min(expected, LIKELIEST)
            if own[near, 1] > MOST_ROW_TRIALS:
                own[near, 0] *= 0.5
                own[near, 1] *= 0.5
        if found < 0:
            break
        node = found


@compiled
def best_width(sizes, n_probes, likely, worth, widths, order):
    """Find how many of the likeliest candidates of each row are worth scoring.

    Args:
        sizes: [b] int64 nodes of each row, root and probes included.
        n_probes: P.
        likely: [b, N] of `chances`.
        worth: [>= N + 1] float64: tokens that a width must gain to be worth its seconds.
        widths: ascending, without the root and the probes.
        order: [b, N] int64, filled with each row's candidates, the likeliest first.

    Returns:
        The width, the tokens that it gains on average, and these less what they must be.
    """
    n_rows, first = len(sizes), 1 + n_probes
    widest = 0
    for row in range(n_rows):
        n = sizes[row] - first
        for i in range(n):
            order[row, i] = first + i
        order_by(likely[row], order[row, :n])
        widest = max(widest, n)
    best, chosen, best_gained, gained, done = 0.0, 0, 0.0, 0.0, 0
    for width in widths:
        top = min(width, widest)
        for place in range(done, top):
            for row in range(n_rows):
                if place < sizes[row] - first:
                    gained += likely[row, order[row, place]]
        done = top
        if gained - worth[first + top] > best:
            best, chosen, best_gained = gained - worth[first + top], top, gained
        if top == widest:
            break
    return chosen, best_gained, best


@compiled
def cut(drafts, sizes, n_probes, order, width, kept):
    """Keep the likeliest candidates of each row.

    Args:
        drafts: [b, 4, N] int64.
        sizes: [b] int64.
        n_probes: nodes 1..P, which are kept.
        order: [b, N] of `best_width`.
        width: how many candidates are kept.
        kept: [b, 3, N] int64, filled with tokens, parents and sources, padded.

    Returns:
        The depth of the deepest tree, and whether all trees are chains.
    """
    n_rows, first = len(drafts), 1 + n_probes
    deepest, chains = 0, True
    places = np.zeros(order.shape[1], dtype=np.int64)
    depths = np.zeros(order.shape[1], dtype=np.int64)
    taken = np.zeros(order.shape[1], dtype=np.bool_)
    for row in range(n_rows):
        n = min(width, sizes[row] - first)
        taken[:first] = True
        taken[first:] = False
        for i in range(n):
            taken[order[row, i]] = True
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
    return deepest, chains and n_probes == 0


class Counts:
    """How often what was drafted was right: for all rows together, and for each row beside what was expected of it.

    They serve many generations. What was learnt under one sampling is forgotten under another.

    Args:
        shape: of hits and trials.
        own_shape: of what is counted for each row.
    """

    def __init__(self, shape: tuple[int, ...], own_shape: tuple[int, ...]):
        self.hits, self.trials = np.zeros(shape), np.zeros(shape)
        self.own, self.n_rows = np.zeros((0, *own_shape)), 0
        self.sampling: Sampling | RowSampling | None = None

    def begin_rows(self, n_rows: int) -> None:
        """Begin a generation of at most so many rows."""
        self.own, self.n_rows = np.zeros((n_rows, *self.own.shape[1:])), 0

    def join(self, rows: range, sampling: Sampling | RowSampling) -> None:
        """New rows are decoded under this sampling."""
        self.own[rows.start : rows.stop], self.n_rows = 0, rows.stop
        if sampling != self.sampling:
            self.sampling = sampling
            self.hits[:] = self.trials[:] = 0

    def free(self, row: int) -> None:
        """A row ended: the last one moves into its place."""
        self.n_rows -= 1
        self.own[row] = self.own[self.n_rows]

    def forget(self) -> None:
        """Forget everything when the next rows join."""
        self.sampling = None


class Ranking(Counts):
    """Chooses the likeliest nodes of a step, and learns from what became of them. It serves many generations.

    Args:
        priors: [K] chance of each kind's candidates before any was seen.
        most_nodes: of a tree, root and probes included.
    """

    def __init__(self, priors: Sequence[float], most_nodes: int):
        super().__init__((len(priors), DEPTHS + 1), (2, 2))
        self.most_nodes = most_nodes
        self.learnt = self.hits, self.trials, np.array(priors, dtype=np.float64)  # see `chances`
        self.n_candidates = CANDIDATES * most_nodes  # that are worth looking for
        self.value = 0.0  # tokens that the step's trees may gain on average, less what its nodes must gain
        # What the emitted tokens of this step are learnt from: drafts, sizes, probes, and the first kind that counts.
        self._last: list[tuple[np.ndarray, np.ndarray, int, int]] = []

    def begin_rows(self, n_rows: int) -> None:
        super().begin_rows(n_rows)
        self._last = []

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
        n_rows, n_nodes = len(drafts), drafts.shape[2]
        kept = np.empty((n_rows, 3, n_nodes), dtype=np.int64)
        (width, gained, self.value), order, _ = self._widths(drafts, sizes, n_probes)
        depth, chains = cut(drafts, sizes, n_probes, order, width, kept)
        self._last = [(drafts, sizes, n_probes, 0)]
        self.chose(width, n_probes, gained, n_rows)
        return kept[:, :, : 1 + n_probes + width], depth, bool(chains)

    def learn_also(self, drafts: np.ndarray, sizes: np.ndarray, n_kinds: int) -> None:
        """Learn kinds 0 .. n_kinds - 1 from these candidates. The step's trees, where they got others, teach the rest.

        Arguments are those of `trees`, but for `n_kinds`.
        """
        tree, n_nodes, n_probes, _ = self._last[0]
        self._last = [(tree, n_nodes, n_probes, n_kinds), (drafts, sizes, 0, 0)]

    def value_of(self, drafts: np.ndarray, sizes: np.ndarray) -> tuple[float, float, np.ndarray]:
        """Return what trees of these candidates would gain. For the arguments see `trees`.

        Returns:
            The tokens gained on average, these less what the nodes must gain, and the chance [b, N] of each candidate.
        """
        (_, gained, value), _, likely = self._widths(drafts, sizes, 0)
        return gained, value, likely

    def _widths(
        self, drafts: np.ndarray, sizes: np.ndarray, n_probes: int
    ) -> tuple[tuple[int, float, float], np.ndarray, np.ndarray]:
        """Return the result of `best_width`, the order that it fills, and the chances of the candidates."""
        likely = self.likely(drafts, sizes, n_probes)
        order = np.zeros(likely.shape, dtype=np.int64)
        widths, price = self.choices(len(drafts), n_probes, drafts.shape[2])
        return best_width(sizes, n_probes, likely, price, widths, order), order, likely

    def likely(self, drafts: np.ndarray, sizes: np.ndarray, n_probes: int = 0) -> np.ndarray:
        """Return the chance [b, N] that each candidate is accepted, 1 for the roots. For the arguments see `trees`."""
        likely = np.empty((len(drafts), drafts.shape[2]))
        chances(drafts, sizes, n_probes, self.learnt, self.own, likely)
        return likely

    def choices(self, n_rows: int, n_probes: int, n_nodes: int) -> tuple[np.ndarray, np.ndarray]:
        """Widths to choose among, without the root and the probes, and what each must gain, see `best_width`."""
        return np.array([self.most_nodes - 1 - n_probes]), np.zeros(n_nodes + 1)

    def chose(self, width: int, n_probes: int, gained: float, n_rows: int) -> None:
        """The trees score so many candidates, and may gain so many tokens on average, those of all rows together."""

    def end(self, emitted: Sequence[Sequence[int]], reads: int = 0) -> None:
        """The step has ended: row b gained the tokens emitted[b]. A draft model was read so often in it."""
        for i, (drafts, sizes, n_probes, first_kind) in enumerate(self._last):
            own = self.own if i == 0 else self.own.copy()  # a row's own ratio is that of its trees
            for row, tokens in enumerate(emitted):
                learn(drafts[row], sizes[row], n_probes, np.array(tokens), self.learnt, own[row], first_kind)
        self._last = []
