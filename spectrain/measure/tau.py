"""The acceptance length tau of drafters on the same contexts, with the real decoding loop (SPIRe, section 4).

Contexts are the first tokens of held-out rows. Each is continued by the same number of tokens: an end of text does not
end it, so that all weigh alike.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from typing import NamedTuple

from spectrain.config.training import Tau as TauSettings
from spectrain.config.training import Train
from spectrain.decoding import Drafter, Generation, Sampling, generate
from spectrain.errors import UserError
from spectrain.measure.statistics import Estimate, acceptance_length, ratio_of_sums, speedup
from spectrain.target import TargetModel
from spectrain.terminal import stage


class Setting(NamedTuple):
    """Contexts of one length under one temperature."""

    context_tokens: int
    temperature: float  # 0: greedy

    @property
    def name(self) -> str:
        """The name in files, such as "256 tokens, greedy"."""
        return f"{self.context_tokens} tokens, {self.sampling}"

    @property
    def sampling(self) -> str:
        return f"T={self.temperature:g}" if self.temperature else "greedy"


def tau_settings(config: Train, target: TargetModel) -> TauSettings:
    """Check what is measured after a training."""
    settings, row_tokens = config.tau, config.data.row_tokens
    longest, given = max(settings.context_tokens), f"tau.context_tokens={settings.context_tokens}"
    if longest > row_tokens:
        raise UserError(f"{given} must not exceed data.row_tokens={row_tokens}; lower the one or raise the other")
    if longest + settings.new_tokens > target.max_positions:
        raise UserError(
            f"{given} and tau.new_tokens={settings.new_tokens} exceed the target's context of {target.max_positions}; "
            "lower them"
        )
    return settings


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
    contexts = [list(row[: setting.context_tokens]) for row in rows]
    numbers = range(first_number, first_number + len(rows))
    sampling = Sampling(temperature=setting.temperature)
    options = {"seed": seed, "prompt_numbers": numbers, "batch_size": batch_size, "stop_token_ids": ()}
    # Token by token, as the papers measure tau.
    return generate(target, drafter, contexts, new_tokens, sampling, verification="token", **options)


def tau_estimate(generations: Sequence[Generation]) -> Estimate:
    """Estimate tau from continuations: tokens after the first per target forward pass."""
    return acceptance_length([len(g.tokens) - 1 for g in generations], [g.target_forwards for g in generations])


def measure_tau(
    target: TargetModel,
    drafters: dict[str, Drafter],
    rows: Sequence[Sequence[int]],
    settings: TauSettings,
    seed: int = 0,
    ends_s: float | None = None,
) -> dict[str, dict]:
    """Decode the same held-out rows of tokens with every method.

    Each setting and method has a batch of them in turn, and after `ends_s` (of `time.monotonic`) no other one begins.

    Returns `tau` by method and name of the setting, and `settings`, as results of a training hold them. Their `gamma`
    is how many tokens each method drafts.
    """
    asked = [Setting(length, t) for length in settings.context_tokens for t in settings.temperatures]
    rows, n_done, size = rows[: settings.contexts], 0, settings.batch_size
    found: dict[str, dict[Setting, list[Generation]]] = {name: {one: [] for one in asked} for name in drafters}
    with stage("measuring tau", len(rows) * len(asked) * len(drafters), target.leads) as advance:
        for start in range(0, len(rows), size):
            if start and is_past(ends_s, target):
                break
            part = rows[start : start + size]
            for setting, (name, drafter) in product(asked, drafters.items()):
                numbered = {"seed": seed, "first_number": start}
                found[name][setting] += continue_rows(
                    target, drafter, part, setting, settings.new_tokens, size, **numbered
                )
                advance(len(part), f"{name}, {setting.name}")
            n_done = start + len(part)
    tau = {
        name: {setting.name: tau_estimate(generations).as_json() for setting, generations in of_method.items()}
        for name, of_method in found.items()
    }
    measured = asdict(settings) | {"contexts": n_done}
    measured["gamma"] = {name: drafter.gamma for name, drafter in drafters.items() if hasattr(drafter, "gamma")}
    return {"tau": tau, "settings": measured}


def measure_speed(
    target: TargetModel,
    drafters: dict[str, Drafter],
    own: str,
    rows: Sequence[Sequence[int]],
    settings: TauSettings,
    seed: int = 0,
    ends_s: float | None = None,
) -> dict[str, dict]:
    """Time all methods, interleaved, one context [L] at a time. The first method decodes plainly.

    After `ends_s` (of `time.monotonic`) no context begins but the first ones.

    The drafter named `own` drafts 1 to `gamma` tokens, each length in a turn of its own. The longest is its default.

    Returns `tokens_per_s` (greedy, or at the first temperature, without prefill) by method, and `speeds` and `gammas`,
    each by name of the sampling: the first by method, the second by draft length of `own`. Their rows hold `tau`,
    `acceptance` (accepted / drafted), `tokens_per_s` and `speedup` over plain decoding. And `fastest_gamma` by
    tokens/s; None: none is faster than the longest beyond the intervals.
    """
    longest, plain = drafters[own].gamma, next(iter(drafters))
    turns: dict[Hashable, tuple[Drafter, int | None]] = {n: (d, None) for n, d in drafters.items() if n != own}
    turns |= {gamma: (drafters[own], gamma) for gamma in range(1, longest + 1)}
    speeds, gammas = {}, {}
    try:
        for n_done, temperature in enumerate(settings.temperatures):
            until_s = ends_s and time.monotonic() + (ends_s - time.monotonic()) / (len(settings.temperatures) - n_done)
            setting = Setting(settings.context_tokens[0], temperature)
            timed = _in_turns(target, turns, rows, settings, setting, seed, until_s)
            baseline, name = _tokens_and_seconds(timed[plain]), setting.sampling
            found = {turn: _speed_row(generations, baseline) for turn, generations in timed.items()}
            gammas[name] = {str(gamma): found.pop(gamma) for gamma in range(1, longest + 1)}
            speeds[name] = found | {own: gammas[name][str(longest)]}
    finally:
        drafters[own].gamma = longest
    first = next(iter(speeds))
    rates = {int(gamma): row["tokens_per_s"] for gamma, row in gammas[first].items()}
    return {
        "tokens_per_s": {name: row["tokens_per_s"] for name, row in speeds[first].items()},
        "speeds": speeds,
        "gammas": gammas,
        "fastest_gamma": significantly_fastest(rates),
        "timed_contexts": min(map(len, timed.values())),
    }


def significantly_fastest(rates: Mapping[int, Mapping]) -> int | None:
    """Return the draft length of the highest rate, if its interval lies above that of the longest; else None."""
    best = max(rates, key=lambda gamma: rates[gamma]["value"] or 0.0)
    low, high = rates[best]["low"], rates[max(rates)]["high"]
    return best if low is not None and high is not None and low > high else None


def _speed_row(generations: Sequence[Generation], plain: tuple[list[float], list[float]]) -> dict:
    tokens, seconds = _tokens_and_seconds(generations)
    accepted, drafted = [sum(g.accepted) for g in generations], [sum(g.drafted) for g in generations]
    return {
        "tau": tau_estimate(generations).as_json(),
        "acceptance": ratio_of_sums(accepted, drafted).as_json(),
        "tokens_per_s": ratio_of_sums(tokens, seconds).as_json(),
        "speedup": speedup(tokens, seconds, *plain).as_json(),
    }


def _in_turns(
    target: TargetModel,
    turns: Mapping[Hashable, tuple[Drafter, int | None]],
    rows: Sequence[Sequence[int]],
    settings: TauSettings,
    setting: Setting,
    seed: int,
    ends_s: float | None,
) -> dict[Hashable, list[Generation]]:
    """Continue one context at a time. Methods take turns, so that a drifting machine hurts all alike.

    `turns` are drafters by any name, each with the gamma that it drafts with; None: as it is.
    """
    timed: dict[Hashable, list[Generation]] = {name: [] for name in turns}
    rows = rows[: settings.timed_contexts + 1]
    with stage(f"measuring speed, {setting.sampling}", len(rows) * len(turns), target.leads) as advance:
        for number, row in enumerate(rows):
            if number > 1 and is_past(ends_s, target):
                break
            for name, (drafter, gamma) in turns.items():
                if gamma is not None:
                    drafter.gamma = gamma
                numbered = {"seed": seed, "first_number": number}
                generations = continue_rows(target, drafter, [row], setting, settings.new_tokens, 1, **numbered)
                timed[name] += generations if number > 0 else []  # the first is the warm-up
                advance()
    return timed


def is_past(ends_s: float | None, target: TargetModel) -> bool:
    """Return whether it is later than `ends_s`; ranks that share the target agree."""
    return ends_s is not None and target.agreed(time.monotonic() > ends_s)


def _tokens_and_seconds(generations: Sequence[Generation]) -> tuple[list[float], list[float]]:
    """Return the tokens of each continuation and the seconds of its steps, both without those of the prefill."""
    return [len(g.tokens) - 1 for g in generations], [sum(g.time_s.values()) for g in generations]
