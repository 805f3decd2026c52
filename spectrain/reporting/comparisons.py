"""Comparisons of drafters, and of ways to measure acceptance, as tables for terminal, Markdown and page, and in words.

A table is of what `drafters.json` or `parity.json` holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from pandas import DataFrame

from spectrain.measure.parity import Parity
from spectrain.measure.spire_paper import in_paper, modelled, options, paper_tau
from spectrain.measure.tau import DrafterComparison
from spectrain.reporting.formats import bounds_of, fixed, interval, number, plus_minus
from spectrain.reporting.tables import as_markdown, table_of

TWO_DIGITS, THREE_DIGITS = partial(interval, digits=2), partial(interval, digits=3)
NARROW = partial(plus_minus, digits=3)
PARITY_CAPTION = (
    "Acceptance of the draft token at each position of those steps that came so far, with 95 % intervals over "
    "contexts. Sides of one sampling should agree, except for validation, which reads the data's text, and for the one "
    "computed everywhere: the loop begins drafts in harder places, after a rejection."
)


def drafters_table(content: Mapping, settings: Sequence[str], text: Callable[..., str] = TWO_DIGITS) -> DataFrame:
    """tau of each drafter, and in the row below it the difference from the first one.

    Args:
        content: of `drafters.json`.
        settings: the columns, "256 tokens, greedy"; "all" are pools over these.
        text: of a value with its interval.
    """
    drafters, first, rows, names = content["drafters"], content.get("first"), [], []
    for name, one in drafters.items():
        kind = f"\n{one['kind']}" if one.get("kind") not in (None, name) else ""
        rows.append({"drafter": f"{name}{kind}"} | {s: text(one["tau"].get(s)) for s in settings})
        names.append(name)
        if one.get("difference") and name != first:
            found = {s: difference_text(one["difference"].get(s), text) for s in settings}
            rows.append({"drafter": f"{name} - {first}"} | found)
            names.append("")
    counts = {s: [number((one["tau"].get(s) or {}).get("n")) for one in drafters.values()] for s in settings}
    heads = {s: f"{s}\nn = {max(n):,.0f}" for s, n in counts.items() if None not in n}
    return table_of(rows, names).rename(columns=heads)


def difference_text(one: Mapping | None, text: Callable[..., str]) -> str:
    low, high = bounds_of(((one or {}).get("low"), (one or {}).get("high"))) or (1, 1)
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


def drafters_for_terminal(comparison: DrafterComparison) -> list[tuple[str, DataFrame]]:
    """tau pooled over context lengths."""
    lengths = ", ".join(map(str, comparison.context_tokens))
    title = f"tau on {comparison.rows} held-out contexts of {lengths} tokens each, in pairs with {comparison.first}"
    return [(title, drafters_table(comparison.as_json(), [pool.name for pool in comparison.pools], NARROW))]


def drafters_markdown(comparison: DrafterComparison) -> str:
    """The same for a document in all settings, with the paper's values where the drafters are its own."""
    frame = drafters_table(comparison.as_json(), [setting.name for setting in comparison.columns], NARROW)
    paper, throughput = paper_tau(), modelled(comparison)
    reported = {name: f"{tau:.3f}" for name, tau in paper.items()}
    if comparison.first in paper:
        reported |= {f"{n} - {comparison.first}": f"{tau - paper[comparison.first]:+.3f}" for n, tau in paper.items()}
    frame["paper, 512 tokens"] = [reported.get(name, "") for name in frame["drafter"]]
    if not throughput:
        return as_markdown(frame)
    head = "modelled throughput at ({batch}, {context_tokens})".format(**options()["spot"])
    rows = [
        {head: name, "with our tau": f"{ours.value:.2f}", "with the paper's": f"{theirs:.2f}"}
        for name, (ours, theirs) in throughput.items()
    ]
    return f"{as_markdown(frame)}\n{as_markdown(table_of(rows))}"


def drafters_caption(comparison: DrafterComparison) -> str:
    """What the bars show, and the diamonds where there are any."""
    spot = (
        " Last panel: throughput by the paper's cost model for its target, batch {batch}, {context_tokens} tokens, T=1."
    )
    return (
        f"tau, the tokens produced per target forward pass, of each drafter with {comparison.gamma} draft tokens per "
        f"step, by setting and pooled over settings ({comparison.rows} held-out contexts of each length, "
        f"{comparison.new_tokens} new tokens), with 95 % bootstrap intervals; higher is better."
        + (spot.format(**options()["spot"]) if modelled(comparison) else "")
        + (" Diamonds: what the SPIRe paper reports, of a target of its own." if in_paper(comparison) else "")
    )


def parity_table(
    rows: Mapping[str, Mapping], positions: Sequence[int], text: Callable[..., str] = THREE_DIGITS
) -> DataFrame:
    """Acceptance by draft position, tau and steps; one row per way to measure.

    Args:
        rows: `rows` or `differences` of `parity.json`.
        positions: 1, 2, ..., k.
        text: of a value with its interval.
    """
    found = []
    for name, one in rows.items():
        tau = one["tau"] if isinstance(one.get("tau"), Mapping) else {"value": one.get("tau")}
        rates = zip(positions, one.get("acceptance") or (), strict=False)
        row = {"measured by": name} | {f"position {p}": text(rate) for p, rate in rates}
        found.append(row | {"tau": text(tau), "steps": fixed(one.get("steps"), 0)})
    return table_of(found)


def parity_for_terminal(parity: Parity) -> list[tuple[str, DataFrame | None]]:
    """Acceptance by position, then one sentence for each pair that should agree."""
    content = parity.as_json()
    title = (
        f"Acceptance by position in the draft: {parity.run}, {parity.contexts} held-out contexts of "
        f"{parity.context_tokens} tokens, {parity.new_tokens} new tokens; 95 % intervals over contexts"
    )
    parts = [(title, parity_table(content["rows"], content["positions"], NARROW))]
    for setting, name, difference in parity.differences():
        tau, steps = difference.tau(), difference.counts[:, 0]
        said = f"{setting.sampling}, {name} less the loop: tau {tau.value:+.3f} [{tau.low:+.3f}, {tau.high:+.3f}]"
        apart = ", ".join(map(str, difference.apart()))
        if not setting.temperature and np.array_equal(difference.counts, difference.other):
            said += f"; equal in all {steps.sum():.0f} steps"
        elif not tau.low <= 0 <= tau.high:
            said += ": THEY DIFFER" + (f", at position {apart}" if apart else "")
        else:
            said += f", but position {apart} DIFFERS" if apart else "; no difference resolved, at no position"
        parts.append((said, None))
    return parts
