"""The acceptance length tau of drafters on the same contexts, with the real decoding loop (SPIRe, section 4).

Contexts are the first tokens of held-out rows. Each is continued by the same number of tokens: an end of text does not
end it, so that all weigh alike. Differences between drafters are paired: what both find hard cancels out.

Letters: R rows, each with one context per length.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from rich.table import Table

from spectrain.decoding import Drafter, Generation, Sampling, TargetModel, generate
from spectrain.decoding.errors import UserError, check_whole
from spectrain.measure.statistics import Estimate, acceptance_length, decode_s, difference_of_ratios, ratio_of_sums

POOLED = "all"
COMPARISON_RESAMPLES = 4000


@dataclass(frozen=True)
class Setting:
    """Contexts of one length under one temperature; None: of all lengths, or of all temperatures."""

    context_tokens: int | None
    temperature: float | None  # 0: greedy

    @property
    def name(self) -> str:
        """As files name it: "256 tokens, greedy", "all, T=1", "all"."""
        length = POOLED if self.context_tokens is None else f"{self.context_tokens} tokens"
        return length if self.temperature is None else f"{length}, {self.sampling}"

    @property
    def sampling(self) -> str:
        return "greedy" if not self.temperature else f"T={self.temperature:g}"

    @classmethod
    def named(cls, name: str) -> Setting:
        """The setting of one length that has this name. Raises ValueError where there is none."""
        parts = re.fullmatch(r"(\d+) tokens, (?:greedy|T=([\d.]+))", name)
        if parts is None:
            raise ValueError(f"setting {name!r}")
        return cls(int(parts[1]), float(parts[2] or 0))


@dataclass(frozen=True)
class TauSettings:
    """Which contexts are continued, and how far.

    Args:
        context_tokens: context lengths.
        contexts: number of contexts of each length.
        new_tokens: tokens generated after each (the paper's G = 64).
        temperatures: 0 is greedy.
        batch_size: contexts decoded together.
        timed_contexts: contexts decoded greedily one at a time for tokens/s, methods taking turns.
    """

    context_tokens: tuple[int, ...] = (256, 512)
    contexts: int = 64
    new_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 1.0)
    batch_size: int = 8
    timed_contexts: int = 8

    def __post_init__(self) -> None:
        for name in ("contexts", "new_tokens", "batch_size", "timed_contexts"):
            check_whole(f"tau.{name}", getattr(self, name), 1)
        if not self.context_tokens or not self.temperatures:
            raise UserError("tau.context_tokens and tau.temperatures must name at least one value each")
        for length in self.context_tokens:
            check_whole("tau.context_tokens", length, 1)
        for temperature in self.temperatures:
            Sampling(temperature=temperature)


@dataclass(frozen=True)
class TauTable:
    """tau by method and setting, and tokens/s by method."""

    tau: dict[str, dict[Setting, Estimate]]
    tokens_per_s: dict[str, Estimate]  # at batch 1, greedy
    settings: TauSettings

    def as_dict(self) -> dict:
        """Plain values, for JSON."""
        return {
            "tau": {m: {s.name: estimate.as_json() for s, estimate in row.items()} for m, row in self.tau.items()},
            "tokens_per_s": {method: estimate.as_json() for method, estimate in self.tokens_per_s.items()},
            "settings": asdict(self.settings),
        }

    def render(self) -> Table:
        """Show the methods side by side on a terminal of 80 columns."""
        table = Table(
            title=f"tau: tokens produced per target forward pass ({self.settings.contexts} held-out contexts each, "
            f"{self.settings.new_tokens} new tokens, 95 % intervals over contexts)"
        )
        table.add_column("context, sampling", no_wrap=True)
        for method in self.tau:
            table.add_column(method, justify="right", no_wrap=True)
        first = next(iter(self.tau))
        for setting in self.tau[first]:
            estimates = [row[setting] for row in self.tau.values()]
            table.add_row(setting.name, *(f"{e.value:.2f} ± {(e.high - e.low) / 2:.2f}" for e in estimates))
        table.add_section()
        rates = [e.value for e in self.tokens_per_s.values()]
        table.add_row("tokens/s, batch 1, greedy", *(f"{rate:.0f}" for rate in rates))
        table.add_row(f"relative to {first}", *(f"{rate / rates[0]:.2f}x" for rate in rates))
        return table


def continue_rows(
    target: TargetModel,
    drafter: Drafter,
    rows: Sequence[Sequence[int]],
    setting: Setting,
    new_tokens: int,
    batch_size: int,
    *,
    seed: int = 0,
    first_number: int = 0,
) -> list[Generation]:
    """Continue the beginning of each row.

    `first_number` is the first row's number, by which its sample is drawn: parts of the rows give the same samples as
    all rows together.
    """
    return generate(
        target,
        drafter,
        [list(row[: setting.context_tokens]) for row in rows],
        new_tokens,
        Sampling(temperature=setting.temperature),
        seed=seed,
        prompt_numbers=range(first_number, first_number + len(rows)),
        batch_size=batch_size,
        stop_token_ids=(),
    )


def counts_of(generations: Sequence[Generation]) -> np.ndarray:
    """Count the tokens after the first, and the target forwards, of each continuation, [R, 2] float64."""
    return np.array([(len(g.tokens) - 1, g.target_forwards) for g in generations], dtype=np.float64).reshape(-1, 2)


def tau_estimate(counts: np.ndarray, other: np.ndarray | None = None, n_resamples: int = 2000) -> Estimate:
    """Estimate tau from counts [R, 2]; or how much larger it is than that of another drafter on the same rows."""
    if other is None:
        return acceptance_length(*counts.T, n_resamples=n_resamples)
    return difference_of_ratios(*counts.T, *other.T, n_resamples=n_resamples)


def measure_tau(
    target: TargetModel,
    drafters: dict[str, Drafter],
    rows: Sequence[Sequence[int]],
    settings: TauSettings,
    seed: int = 0,
) -> TauTable:
    """Decode the same held-out contexts with every method.

    Args:
        target: the target.
        drafters: by method name; the first is what speedups are relative to.
        rows: [R, L] tokens that no training saw.
        settings: how many, how long.
        seed: of the samples.
    """
    tau: dict[str, dict[Setting, Estimate]] = {name: {} for name in drafters}
    some, size = rows[: settings.contexts], settings.batch_size
    for setting in (Setting(length, t) for length in settings.context_tokens for t in settings.temperatures):
        for name, drafter in drafters.items():
            generations = continue_rows(target, drafter, some, setting, settings.new_tokens, size, seed=seed)
            tau[name][setting] = tau_estimate(counts_of(generations))
    # Greedy, one context at a time. Methods take turns, so that a drifting machine hurts all alike.
    timed: dict[str, list[Generation]] = {name: [] for name in drafters}
    greedy = Setting(settings.context_tokens[0], 0.0)
    for number, row in enumerate(rows[: settings.timed_contexts + 1]):
        for name, drafter in drafters.items():
            generations = continue_rows(target, drafter, [row], greedy, settings.new_tokens, 1)
            timed[name] += generations if number > 0 else []  # the first is the warm-up
    rates = {
        name: ratio_of_sums([len(g.tokens) for g in generations], [decode_s(g) for g in generations])
        for name, generations in timed.items()
    }
    return TauTable(tau, rates, dataclasses.replace(settings, contexts=len(some)))


def tau_of(target: TargetModel, drafter: Drafter, rows: Sequence[Sequence[int]], settings: TauSettings) -> Estimate:
    """Measure tau of one drafter under the first of the settings' lengths and temperatures, without a clock."""
    setting = Setting(settings.context_tokens[0], settings.temperatures[0])
    some = rows[: settings.contexts]
    return tau_estimate(
        counts_of(continue_rows(target, drafter, some, setting, settings.new_tokens, settings.batch_size))
    )


@dataclass(frozen=True)
class PairedTau:
    """tau of one drafter, and how much larger it is than the first drafter's, by setting with all pools."""

    tau: dict[Setting, Estimate]
    difference: dict[Setting, Estimate] | None  # None of the first itself


@dataclass(frozen=True)
class DrafterComparison:
    """Drafters of one target on the same contexts; all are compared with the first.

    Args:
        drafters: by name.
        settings: that were measured, without pools.
        rows: contexts of each length.
        new_tokens: after each context.
        gamma: drafted tokens per step.
    """

    drafters: Mapping[str, PairedTau]
    settings: Sequence[Setting]
    rows: int
    new_tokens: int
    gamma: int

    @property
    def first(self) -> str:
        return next(iter(self.drafters))

    @property
    def context_tokens(self) -> list[int]:
        return list(dict.fromkeys(setting.context_tokens for setting in self.settings))

    @property
    def pools(self) -> list[Setting]:
        """The pools over context lengths, one per temperature."""
        return list(dict.fromkeys(Setting(None, setting.temperature) for setting in self.settings))

    @property
    def columns(self) -> list[Setting]:
        """The settings, and the pools where there are several lengths."""
        return [*self.settings, *(self.pools if len(self.context_tokens) > 1 else ())]

    def as_json(self) -> dict:
        drafters = {
            name: {
                part: {setting.name: estimate.as_json() for setting, estimate in estimates.items()}
                for part, estimates in (("tau", one.tau), ("difference", one.difference))
                if estimates is not None
            }
            for name, one in self.drafters.items()
        }
        return {
            "rows": self.rows,
            "new_tokens": self.new_tokens,
            "gamma": self.gamma,
            "contexts": {str(length): self.rows for length in self.context_tokens},
            "first": self.first,
            "drafters": drafters,
        }


def compare(counts: Mapping[str, Mapping[Setting, np.ndarray]]) -> dict[str, PairedTau]:
    """Compare drafters with the first of them.

    Args:
        counts: of each drafter, [R, 2] per setting, of the same rows in the same settings.
    """
    pooled = {name: with_pools(own) for name, own in counts.items()}
    first = next(iter(pooled))
    return {
        name: PairedTau(
            {s: tau_estimate(c, None, COMPARISON_RESAMPLES) for s, c in own.items()},
            None
            if name == first
            else {s: tau_estimate(c, pooled[first][s], COMPARISON_RESAMPLES) for s, c in own.items()},
        )
        for name, own in pooled.items()
    }


def with_pools(counts: Mapping[Setting, np.ndarray]) -> dict[Setting, np.ndarray]:
    """Add the sums over all lengths of each temperature, and over all settings, row by row."""
    temperatures = dict.fromkeys(setting.temperature for setting in counts)
    pools = {Setting(None, t): sum(c for s, c in counts.items() if s.temperature == t) for t in temperatures}
    return {**counts, **pools, Setting(None, None): sum(counts.values())}
