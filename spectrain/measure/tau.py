"""tau of several methods on the same contexts, with the real decoding loop (paper section 4; methods.md section 10)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from spectrain.decoding import Drafter, Generation, Sampling, TargetModel, generate
from spectrain.decoding.errors import UserError, check_whole
from spectrain.measure.statistics import Estimate, acceptance_length, tokens_per_s_micro


@dataclass(frozen=True)
class TauSettings:
    """Which contexts are continued, and how far.

    Args:
        context_tokens: context lengths.
        contexts: contexts of each length; each is the beginning of one held-out row.
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
    """tau by method and setting, tokens/s by method."""

    tau: dict[str, dict[str, Estimate]]  # method -> "256 tokens, greedy" -> estimate
    tokens_per_s: dict[str, Estimate]  # at batch 1, greedy
    settings: TauSettings

    def as_dict(self) -> dict:
        """Plain values, for JSON."""
        return {
            "tau": {m: {name: asdict(e) for name, e in row.items()} for m, row in self.tau.items()},
            "tokens_per_s": {method: asdict(e) for method, e in self.tokens_per_s.items()},
            "settings": asdict(self.settings),
        }

    def render(self) -> Table:
        """Methods side by side; fits a terminal of 80 columns."""
        s = self.settings
        table = Table(
            title=f"tau: tokens a target forward ({s.contexts} held-out contexts each, {s.new_tokens} new tokens, "
            "95 % intervals over contexts)"
        )
        table.add_column("context, sampling", no_wrap=True)
        for method in self.tau:
            table.add_column(method, justify="right", no_wrap=True)
        for name in next(iter(self.tau.values())):
            estimates = [self.tau[method][name] for method in self.tau]
            table.add_row(name, *(f"{e.value:.2f} ± {(e.high - e.low) / 2:.2f}" for e in estimates))
        table.add_section()
        rates = [e.value for e in self.tokens_per_s.values()]
        table.add_row("tokens/s, batch 1, greedy", *(f"{rate:.0f}" for rate in rates))
        table.add_row(f"against {next(iter(self.tau))}", *(f"{rate / rates[0]:.2f}x" for rate in rates))
        return table


def measure_tau(
    target: TargetModel,
    drafters: dict[str, Drafter],
    rows: Sequence[Sequence[int]],
    settings: TauSettings,
    seed: int = 0,
) -> TauTable:
    """Decodes the same held-out contexts with every method.

    Args:
        target: the target.
        drafters: by method name; the first is what speedups are relative to.
        rows: [n, L] tokens that no training saw; contexts are their first tokens.
        settings: how many, how long.
        seed: of the samples.
    """
    tau: dict[str, dict[str, Estimate]] = {name: {} for name in drafters}
    for length in settings.context_tokens:
        contexts = [list(row[:length]) for row in rows[: settings.contexts]]
        for temperature in settings.temperatures:
            column = f"{length} tokens, {'greedy' if temperature == 0 else f'T={temperature:g}'}"
            for name, drafter in drafters.items():
                found = _continue(target, drafter, contexts, temperature, settings, seed, settings.batch_size)
                tau[name][column] = acceptance_length(found)
    settings = dataclasses.replace(settings, contexts=min(settings.contexts, len(rows)))
    return TauTable(tau, _tokens_per_s(target, drafters, rows, settings), settings)


def tau_of(target: TargetModel, drafter: Drafter, rows: Sequence[Sequence[int]], settings: TauSettings) -> Estimate:
    """tau of one drafter under the first of the settings' lengths and temperatures: no other method, no clock."""
    contexts = [list(row[: settings.context_tokens[0]]) for row in rows[: settings.contexts]]
    found = _continue(target, drafter, contexts, settings.temperatures[0], settings, 0, settings.batch_size)
    return acceptance_length(found)


def _tokens_per_s(
    target: TargetModel, drafters: dict[str, Drafter], rows: Sequence[Sequence[int]], settings: TauSettings
) -> dict[str, Estimate]:
    """Greedy, one context at a time; methods take turns, so that a drifting machine hurts all alike."""
    length = settings.context_tokens[0]
    found: dict[str, list[Generation]] = {name: [] for name in drafters}
    for number, row in enumerate(rows[: settings.timed_contexts + 1]):
        for name, drafter in drafters.items():
            generations = _continue(target, drafter, [list(row[:length])], 0.0, settings, 0, 1)
            if number > 0:  # the first is the warm-up
                found[name] += generations
    return {name: tokens_per_s_micro(generations) for name, generations in found.items()}


def _continue(
    target: TargetModel,
    drafter: Drafter,
    contexts: list[list[int]],
    temperature: float,
    settings: TauSettings,
    seed: int,
    batch_size: int,
) -> list[Generation]:
    """Always `new_tokens` tokens: an end of text does not end the continuation, so that all contexts weigh alike."""
    return generate(
        target,
        drafter,
        contexts,
        settings.new_tokens,
        Sampling(temperature=temperature),
        seed=seed,
        batch_size=batch_size,
        stop_token_ids=(),
    )
