"""How many tokens a step drafts: from what steps cost (`step_costs.py`) and counts of what was accepted.

The counts are by place in a chain (`ChainBudget`), or by kind and depth of a candidate (`ranking.py`), with a Beta
prior, corrected for each row.

All steps of a chain look alike before they are drafted, so the length with the most expected tokens per second of one
step is also the best in the long run. The candidates of a lookup differ from step to step: it scores as many as
maximise `tokens - rate x seconds`, where `rate` is its tokens per second so far by the table. In the long run this
maximises tokens per second (Dinkelbach 1967); the plain ratio of each step does not.

With a given table (SPECTRAIN_SECONDS) the same seed gives the same drafts at any load.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spectrain.decoding import Context, Drafter
from spectrain.drafting.ranking import LIKELIEST, MOST_ROW_TRIALS, MOST_TRIALS, ROW_TRIALS, Counts, Ranking
from spectrain.drafting.step_costs import Costs
from spectrain.target import KVCache, TargetModel, TargetOutput

AUTO = "auto"  # max_nodes: as many in each step as pay on this machine


class Budget:
    """Chooses how much is drafted."""

    costs: Costs  # of the steps of this generation
    must_draft = False  # a trial: each chain has at least one token, so its acceptance is learnt; trees learn without
    expected = 1.0  # tokens of a row in this step


class CountingDrafter(Drafter):
    """A method that may learn how often its drafts are accepted."""

    counts: Counts | None = None  # from which it learns; None: it does not
    budget: ChainBudget | TreeBudget | None = None  # chooses how much it drafts; None: that is fixed
    reads = 0  # of a draft model, in this step

    def start(self, target: TargetModel, cache: KVCache) -> None:
        if self.counts is not None:
            self.counts.begin_rows(cache.max_rows)

    def prefill(self, context: Context, output: TargetOutput | None, rows: range) -> None:
        if self.counts is not None:
            self.counts.join(rows, context.sampling)

    def free(self, row: int) -> None:
        if self.counts is not None:
            self.counts.free(row)

    def forget(self) -> None:
        if self.counts is not None:
            self.counts.forget()


class ChainBudget(Budget, Counts):
    """Chooses how many tokens a draft model drafts, from how often those of each place in a chain were accepted.

    Args:
        most: tokens of a chain.
        acceptance: mean acceptance probability of drafted tokens after training; None: not known.
    """

    FIRST_CHANCE, FIRST_TRIALS = 0.6, 8.0  # Beta prior of an unknown draft model's tokens: mean, and seen tokens
    TRAINED_TRIALS = 24.0  # that the acceptance of a training counts as

    def __init__(self, most: int, acceptance: float | None = None):
        self.most = most
        is_known = acceptance is not None
        # Each later place starts from the chance of the place before, which counts as many trials.
        self.prior = (acceptance, self.TRAINED_TRIALS) if is_known else (self.FIRST_CHANCE, self.FIRST_TRIALS)
        super().__init__((most,), (2,))  # of a row: accepted tokens, and expected ones

    def chances(self) -> np.ndarray:
        """Chance [most] that a token is accepted where those before it were, by its place."""
        found, (chance, worth) = np.empty(self.most), self.prior
        for place in range(self.most):
            chance = found[place] = (self.hits[place] + worth * chance) / (self.trials[place] + worth)
        return found

    def gained(self, n_rows: int) -> np.ndarray:
        """Drafted tokens [most + 1] of all rows that are accepted on average, by the length of the chains."""
        own = self.own[:n_rows]
        ratio = (own[:, :1] + ROW_TRIALS) / (own[:, 1:] + ROW_TRIALS)
        reached = np.minimum(ratio * self.chances(), LIKELIEST).cumprod(axis=1).sum(axis=0)
        return np.concatenate([[0.0], reached.cumsum()])

    def lengths(self) -> np.ndarray:
        """Lengths of chains that it chooses among."""
        lengths = self.costs.lengths
        return lengths[lengths <= self.most]

    def seconds(self, n_rows: int) -> np.ndarray:
        """Seconds [most + 1] of a step of n rows, by the length of their chains."""
        forward = self.costs.doubted_s(n_rows) if self.must_draft else self.costs.forward_s(n_rows)
        places = np.arange(self.most + 1)
        return forward[1 + places] + self.costs.draft_s(n_rows)[places]

    def first_speed(self, n_rows: int) -> float:
        """Tokens of a row in the time of a plain step, before any chain was drafted."""
        rates = (n_rows + self.gained(n_rows)) / self.seconds(n_rows)
        return float(rates[1:].max() * self.costs.forward_s(n_rows)[1] / n_rows)

    def choose(self, n_rows: int) -> int:
        """Return how many tokens to draft for each of n rows; 0: none pays."""
        gained, lengths = self.gained(n_rows), self.lengths()[self.must_draft :]
        rates = (n_rows + gained) / self.seconds(n_rows)
        best = int(lengths[rates[lengths].argmax()])
        self.expected = 1 + gained[best] / n_rows
        return best

    def learn(self, emitted: Sequence[Sequence[int]], n_drafted: int) -> None:
        """Row b of the step gained the tokens emitted[b], of n drafted ones and the bonus."""
        chances = self.chances()
        for own, tokens in zip(self.own, emitted, strict=False):
            accepted = min(len(tokens) - 1, n_drafted)
            tried = min(accepted + 1, n_drafted)
            self.hits[:accepted] += 1
            self.trials[:tried] += 1
            own += accepted, chances[:tried].sum()
            if own[1] > MOST_ROW_TRIALS:
                own *= 0.5
        often = self.trials > MOST_TRIALS
        self.hits[often] *= 0.5
        self.trials[often] *= 0.5


class TreeBudget(Budget, Ranking):
    """A `Ranking` of candidates that also chooses how many of the likeliest ones are scored."""

    WIDTHS = np.array([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 63])  # few: each is compiled
    FEWEST_CANDIDATES = 8
    RATE_STEPS = 48.0  # over which tokens per second are averaged

    def __init__(self, priors: Sequence[float], most_nodes: int):
        super().__init__(priors, most_nodes)
        self.n_candidates = 2 * self.FEWEST_CANDIDATES
        self._size = 1, 0  # nodes of this step's trees, and reads
        self._sums: dict[int, np.ndarray] = {}  # steps, tokens and seconds of late, by rows

    def first_speed(self, n_rows: int) -> float:
        """inf: nothing is known of candidates before any was found."""
        return float("inf")

    def rate(self, n_rows: int, least: int = 1) -> float:
        """Tokens per second of late, by the table; at least those of steps that score nothing."""
        plain = n_rows / self.costs.forward_s(n_rows)[least]
        _, tokens, seconds = self._sums.get(n_rows, (0.0, 0.0, 0.0))
        return max(plain, tokens / seconds) if seconds else plain

    def choices(self, n_rows: int, n_probes: int, n_nodes: int) -> tuple[np.ndarray, np.ndarray]:
        most, least = self.most_nodes - 1 - n_probes, 1 + n_probes
        seconds = self.costs.forward_s(n_rows)[: max(n_nodes, self.most_nodes) + 1]
        price = self.rate(n_rows, least) * (seconds - seconds[least])
        return self.WIDTHS[: np.searchsorted(self.WIDTHS, most, side="right")], price

    def chose(self, width: int, n_probes: int, gained: float, n_rows: int) -> None:
        self._size, self.expected = (1 + n_probes + width, 0), 1 + gained / n_rows
        wanted = min(self.most_nodes, max(self.FEWEST_CANDIDATES, 2 * (1 + width)))
        self.n_candidates += (wanted - self.n_candidates) // (1 if wanted > self.n_candidates else 8)

    def end(self, emitted: Sequence[Sequence[int]], reads: int = 0) -> None:
        super().end(emitted)
        n_rows = len(emitted)
        seconds = self.costs.step_s(n_rows, self._size[0], reads)
        sums = self._sums.setdefault(n_rows, np.zeros(3))
        sums *= 1 - 1 / self.RATE_STEPS
        sums += 1, sum(map(len, emitted)), seconds
