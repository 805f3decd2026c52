"""Search for SSSD's discounts, and calibrate its sources, on texts that the target wrote.

Every combination of a grid is tried on half of the texts by simulation. The best one is calibrated, and what was chosen
is compared with the method's own options on the other half. The best is what writes most tokens per second: simulated
tokens per step over the seconds of forwards of so many nodes on this machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.progress import track

from spectrain.measure.simulation import Text, simulate
from spectrain.measure.statistics import ratio_of_sums
from spectrain.methods.sssd import Sssd, SssdOptions
from spectrain.retrieval.calibration import calibrate

NEUTRAL = ("input_scale", "input_prefix_decay", "input_depth_decay", "datastore_prefix_decay", "datastore_depth_decay")


@dataclass(frozen=True)
class Clock:
    """What steps cost, and which ones to choose among.

    Args:
        seconds: [N + 1] float64, of a forward of 0..N nodes of each of `n_rows` rows.
        n_rows: decoded together.
        budgets: nodes per row, the root included.
    """

    seconds: np.ndarray
    n_rows: int
    budgets: Sequence[int]

    @property
    def plain_tokens_per_s(self) -> float:
        """Tokens per second without a draft."""
        return float(self.n_rows / self.seconds[1])

    def of_widths(self, widths: np.ndarray) -> np.ndarray:
        """Return the mean seconds of a step in which one row has 0..N nodes, [N + 1] float64.

        The batch is padded to its widest row. widths: [steps] int64, what the other rows are drawn from.
        """
        counts = np.bincount(widths, minlength=len(self.seconds))
        below = (np.cumsum(counts) / len(widths)) ** (self.n_rows - 1)  # that no other row is wider
        beyond = np.append(np.cumsum((np.diff(below) * self.seconds[1:])[::-1])[::-1], 0.0)
        return below * self.seconds + beyond

    def totals(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the tokens, seconds and steps of each text, [texts, 3] float64, from its steps of `simulate`.

        The seconds are the text's share of those that its batch takes.
        """
        seconds = self.of_widths(np.concatenate(texts)[:, 1]) / self.n_rows
        return np.array([(steps[:, 0].sum(), seconds[steps[:, 1]].sum(), len(steps)) for steps in texts])


@dataclass(frozen=True)
class Choice:
    """What a method does on texts with its best number of nodes."""

    nodes: int
    tau: float
    tokens_per_s: float


def with_options(opened: Sssd, options: Mapping) -> Sssd:
    """The method over the datastore that is open already, with the options of a yaml."""
    own = {name: value for name, value in options.items() if name in SssdOptions.__dataclass_fields__}
    return Sssd(opened.store, SssdOptions(**own), opened.max_nodes)


def simulated(drafter: Sssd, texts: Sequence[Text], budgets: Sequence[int]) -> list[list[np.ndarray]]:
    """Simulate the method on texts. Returns the steps of each text, by budget."""
    return list(map(list, zip(*(simulate(drafter, text, budgets) for text in texts), strict=True)))


def best_choice(drafter: Sssd, texts: Sequence[Text], clock: Clock) -> Choice:
    """Find the number of nodes with which the method writes the most tokens per second; of equal ones the smallest."""
    by_budget = [clock.totals(one).sum(0) for one in simulated(drafter, texts, clock.budgets)]
    rates = [tokens / seconds for tokens, seconds, _ in by_budget]
    best = int(np.argmax(rates))
    tokens, _, steps = by_budget[best]
    return Choice(clock.budgets[best], float(tokens / steps), float(rates[best]))


def rates_of(drafter: Sssd, texts: Sequence[Text], clock: Clock, nodes: int) -> dict:
    """Tau and tokens per second with so many nodes, with their intervals over texts, for JSON."""
    tokens, seconds, steps = clock.totals(simulated(drafter, texts, [nodes])[0]).T
    rates = {"tau": ratio_of_sums(tokens, steps), "tokens_per_s": ratio_of_sums(tokens, seconds)}
    return {"nodes": nodes} | {name: one.as_json() for name, one in rates.items()}


def choose_options(
    opened: Sssd, method: Mapping, grid: Mapping[str, Sequence], texts: Sequence[Text], clock: Clock
) -> dict:
    """Choose the options that write the most tokens per second, each with its best number of nodes.

    Args:
        opened: the method over its datastore.
        method: its yaml; gives the options that are not in the grid.
        grid: option -> values to try.
        texts: two answers of the target or more; every other one decides, the rest tell the result.
        clock: see there.

    Returns:
        `options`: those chosen; `candidates`: `rates_of` of each of the three on the texts that did not decide;
        `winner`: the name of the chosen one; `tried`: nodes, tau and tokens/s of each combination; `responses`: texts
        of both halves.
    """
    deciding, telling = texts[::2], texts[1::2]
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    found = [
        best_choice(with_options(opened, {**method, **changes}), deciding, clock)
        for changes in track(combinations, "combinations", console=Console(stderr=True))
    ]
    fastest = max(range(len(found)), key=lambda i: found[i].tokens_per_s)
    best_discounts = {**method, **combinations[fastest]}
    lookup = with_options(opened, best_discounts)
    factors = calibrate(
        *([(text.prompt, text.response) for text in deciding], lookup.retrievers[0]),
        *(lookup.options.max_prefix, lookup.branch_tokens),
    )
    # Measured factors take the place of the discounts.
    calibration = {**(best_discounts.get("calibration") or {}), **factors}
    calibrated = {**best_discounts, **dict.fromkeys(NEUTRAL, 1.0), "calibration": calibration}
    candidates = {"defaults": method, "best discounts": best_discounts, "calibrated": calibrated}
    drafters = {name: with_options(opened, options) for name, options in candidates.items()}
    decided = {name: best_choice(drafter, deciding, clock) for name, drafter in drafters.items()}
    winner = max(decided, key=lambda name: decided[name].tokens_per_s)  # of equal ones the plainest, which stands first
    return {
        "options": candidates[winner],
        "candidates": {name: rates_of(one, telling, clock, decided[name].nodes) for name, one in drafters.items()},
        "winner": winner,
        "tried": [{**changes, **asdict(one)} for changes, one in zip(combinations, found, strict=True)],
        "responses": [len(deciding), len(telling)],
    }
