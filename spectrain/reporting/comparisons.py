"""Comparisons of drafters, and of ways to measure acceptance, as tables for terminal, Markdown and page, and in words.

A table is of what `drafters.json` or `parity.json` holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from pandas import DataFrame

from spectrain.reporting.formats import estimate_of, fixed, interval, number, percent, plus_minus
from spectrain.reporting.tables import table_of

TWO_DIGITS, THREE_DIGITS = partial(interval, digits=2), partial(interval, digits=3)
NARROW = partial(plus_minus, digits=3)
PARITY_CAPTION = (
    "Acceptance of the draft token at each position of those steps that came so far, with 95 % intervals over "
    "contexts. Sides of one sampling should agree, except for validation, which reads the data's text, and for the one "
    "computed everywhere: the loop begins drafts in harder places, after a rejection."
)


def drafters_table(content: Mapping, settings: Sequence[str], text: Callable[..., str] = TWO_DIGITS) -> DataFrame:
    """tau of each drafter of `drafters.json`, and in the row below it the difference from the first one.

    `settings` are the columns ("256 tokens, greedy"; "all" are pools); `text` writes a value with its interval.
    """
    drafters, first, rows, names = content["drafters"], content.get("first"), [], []
    for name, one in drafters.items():
        kind = f"\n{one['kind']}" if one.get("kind") not in (None, name) else ""
        rows.append({"drafter": f"{name}{kind}"} | {s: text(one["tau"].get(s)) for s in settings})
        names.append(name)
        if (other := one.get("difference")) and name != first:
            rows.append({"drafter": f"{name} - {first}"} | {s: difference_text(other.get(s), text) for s in settings})
            names.append("")
    counts = {s: [number((one["tau"].get(s) or {}).get("n")) for one in drafters.values()] for s in settings}
    heads = {s: f"{s}\nn = {max(n):,.0f}" for s, n in counts.items() if None not in n}
    return table_of(rows, names).rename(columns=heads)


def difference_text(one: Mapping | None, text: Callable[..., str]) -> str:
    low, high = estimate_of(one)[1] or (1, 1)
    return f"{text(one, sign='+')}{' unresolved' if low <= 0 <= high else ''}"


def settings_of(content: Mapping) -> list[str]:
    return list(dict.fromkeys(name for one in content["drafters"].values() for name in one.get("tau") or {}))


def highest_tau(content: Mapping) -> str:
    """The best drafter in the first setting."""
    for setting in settings_of(content)[:1]:
        taus = {name: one["tau"].get(setting) or {} for name, one in content["drafters"].items()}
        best = max(taus, key=lambda name: number(taus[name].get("value")) or 0.0)
        return f"highest tau ({setting}): {best} {interval(taus[best], 2)}"
    return ""


def parity_table(
    rows: Mapping[str, Mapping], positions: Sequence[int], text: Callable[..., str] = THREE_DIGITS
) -> DataFrame:
    """Acceptance by draft position 1, ..., k, tau and steps; one row per way to measure.

    `rows` are the `rows` or `differences` of parity.json; `text` writes a value with its interval.
    """
    found = []
    for name, one in rows.items():
        tau = one["tau"] if isinstance(one.get("tau"), Mapping) else {"value": one.get("tau")}
        rates = zip(positions, one.get("acceptance") or (), strict=False)
        row = {"measured by": name} | {f"position {p}": text(rate) for p, rate in rates}
        found.append(row | {"tau": text(tau), "steps": fixed(one.get("steps"), 0)})
    return table_of(found)


def tau_table(content: Mapping) -> tuple[str, DataFrame]:
    """tau of methods side by side, one row per setting, as `measure_tau` gives them; with a title."""
    tau, settings = content["tau"], content["settings"]
    names = next(iter(tau.values()))
    rows = [{"context, sampling": s} | {name: plus_minus(row[s], 2) for name, row in tau.items()} for s in names]
    title = (
        f"tau: tokens produced per target forward pass ({settings['contexts']} held-out contexts each, "
        f"{settings['new_tokens']} new tokens, 95 % intervals over contexts)"
    )
    return title, table_of(rows)


def speed_table(content: Mapping) -> tuple[str, DataFrame]:
    """Speed of methods and draft lengths as `measure_speed` gives it; the title names the fastest length."""
    own = set(content["settings"]["gamma"]) - {"speculative"} or {"speculative"}
    rows = []
    for sampling, by_method in content["speeds"].items():
        named = {name: row for name, row in by_method.items() if name not in own}
        named |= {f"gamma {gamma}": row for gamma, row in content["gammas"][sampling].items()}
        rows += [
            {"sampling": sampling, "drafts": name, "tau": plus_minus(one["tau"], 2)}
            | {"accepted": percent(one["acceptance"]["value"], 0), "tokens/s": fixed(one["tokens_per_s"]["value"], 0)}
            | {"times plain": plus_minus(one["speedup"], 2)}
            for name, one in named.items()
        ]
    n, fastest = content["settings"]["timed_contexts"], content["fastest_gamma"]
    title = f"speed, in turns on {n} contexts one at a time, 95 % intervals; the fastest gamma, exported as the default"
    return f"{title}: {fastest}", table_of(rows)
