"""Comparisons of drafters as tables for terminal, Markdown and page, and in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from pandas import DataFrame

from spectrain.reporting.formats import MISSING, estimate_of, fixed, interval, number, percent, plus_minus
from spectrain.reporting.tables import table_of

TWO_DIGITS = partial(interval, digits=2)


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


def tau_table(content: Mapping) -> tuple[str, DataFrame]:
    """tau of methods side by side, one row per setting, and tokens/s, as `measure_tau` gives them; with a title."""
    tau, settings = content["tau"], content["settings"]
    first = next(iter(tau))
    rows = [{"context, sampling": s} | {name: plus_minus(row[s], 2) for name, row in tau.items()} for s in tau[first]]
    rates = {name: one["value"] for name, one in content["tokens_per_s"].items()}
    rows += [
        {"context, sampling": "tokens/s after prefill, batch 1, greedy"}
        | {name: fixed(rate, 0) for name, rate in rates.items()},
        {"context, sampling": f"relative to {first}"}
        | {n: f"{rate / rates[first]:.2f}x" if rate and rates[first] else MISSING for n, rate in rates.items()},
    ]
    title = (
        f"tau: tokens produced per target forward pass ({settings['contexts']} held-out contexts each, "
        f"{settings['new_tokens']} new tokens, 95 % intervals over contexts)"
    )
    return title, table_of(rows)


def gamma_table(content: Mapping) -> tuple[str, DataFrame]:
    """One row per draft length of `measure_gammas`: tau, acceptance and speed. The title names the fastest length."""
    rows = [
        {"sampling": sampling, "gamma": gamma, "tau": plus_minus(one["tau"], 2)}
        | {"accepted": percent(one["acceptance"]["value"], 0), "tokens/s": fixed(one["tokens_per_s"]["value"], 0)}
        | {"speedup": plus_minus(one["speedup"], 2)}
        for sampling, by_gamma in content["gammas"].items()
        for gamma, one in by_gamma.items()
    ]
    fastest = content["fastest_gamma"]
    return f"drafts of gamma tokens, one context at a time; the fastest, exported as the default: {fastest}", table_of(
        rows
    )
