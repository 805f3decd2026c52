"""Comparisons of drafters and of ways to measure acceptance, from what `drafters.json` and `parity.json` hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pandas import DataFrame

from spectrain.reporting.formats import bounds_of, fixed, interval, number
from spectrain.reporting.tables import table_of


def settings_of(content: Mapping) -> list[str]:
    """What each drafter was measured in: "256 tokens, greedy"; "all" are pools over these."""
    return list(dict.fromkeys(name for one in content["drafters"].values() for name in one.get("tau") or {}))


def drafters_table(content: Mapping, settings: Sequence[str], text: Callable[..., str] = interval) -> DataFrame:
    """tau of each drafter, and in the row below it the difference from the first one.

    Args:
        content: of `drafters.json`.
        settings: the columns.
        text: of a value with its interval: `interval` or `plus_minus`.
    """
    drafters, rows, names = content["drafters"], [], []
    counts = {
        setting: {number((one["tau"].get(setting) or {}).get("n")) for one in drafters.values()} - {None}
        for setting in settings
    }
    heads = {s: f"{s}\nn = {max(counts[s]):,.0f}" if counts[s] else s for s in settings}
    first = content.get("first")
    for name, one in drafters.items():
        rows.append({"drafter": f"{name}\n{one['kind']}" if one.get("kind") else name})
        rows[-1] |= {heads[s]: text(one["tau"].get(s), 2) for s in settings}
        names.append(name)
        if one.get("difference") and name != first:
            found = {heads[s]: difference_text(one["difference"].get(s), text) for s in settings}
            rows.append({"drafter": f"{name} - {first}"} | found)
            names.append(None)
    return table_of(rows, names)


def difference_text(one: Mapping | None, text: Callable[..., str]) -> str:
    bounds = bounds_of(((one or {}).get("low"), (one or {}).get("high")))
    unresolved = bounds is not None and bounds[0] <= 0 <= bounds[1]
    return f"{text(one, 2, '+')}{' unresolved' if unresolved else ''}"


def highest_tau(content: Mapping) -> str:
    """The best drafter in the first setting."""
    drafters = content["drafters"]
    for setting in settings_of(content)[:1]:
        found = {name: one["tau"].get(setting) or {} for name, one in drafters.items()}
        taus = {name: tau for name, one in found.items() if (tau := number(one.get("value"))) is not None}
        if taus:
            best = max(taus, key=taus.__getitem__)
            return f"highest tau ({setting}): {best} {interval(found[best], 2)}"
    return ""


def parity_table(
    rows: Mapping[str, Mapping], positions: Sequence[int], text: Callable[..., str] = interval
) -> DataFrame:
    """Acceptance by draft position, tau and steps; one row per way to measure.

    Args:
        rows: `rows` or `differences` of `parity.json`.
        positions: 1, 2, ..., k.
        text: of a value with its interval.
    """
    found = []
    for name, one in rows.items():
        row = {"measured by": name}
        row |= {f"position {p}": text(each, 3) for p, each in zip(positions, one.get("acceptance") or (), strict=False)}
        tau = one.get("tau")
        row |= {"tau": text(tau, 3) if isinstance(tau, Mapping) else fixed(tau, 3), "steps": fixed(one.get("steps"), 0)}
        found.append(row)
    return table_of(found)
