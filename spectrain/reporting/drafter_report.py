"""A comparison of drafters as a table and as Markdown, beside what the SPIRe paper reports."""

from __future__ import annotations

import math

from rich.table import Table

from spectrain.measure.spire_paper import in_paper, modelled, options, paper_tau
from spectrain.measure.statistics import Estimate
from spectrain.measure.tau import DrafterComparison


def caption(comparison: DrafterComparison) -> str:
    """What the bars show, and the diamonds where there are any."""
    spot, text = options()["spot"], ""
    if modelled(comparison):
        text = (
            f" Last panel: throughput by the paper's cost model for its target, batch {spot['batch']}, "
            f"{spot['context_tokens']} tokens, T=1."
        )
    if in_paper(comparison):
        text += " Diamonds: what the SPIRe paper reports, of a target of its own."
    return (
        f"tau, the tokens produced per target forward pass, of each drafter with {comparison.gamma} draft tokens per "
        f"step, by setting and pooled over settings ({comparison.rows} held-out contexts of each length, "
        f"{comparison.new_tokens} new tokens), with 95 % bootstrap intervals; higher is better.{text}"
    )


def render(comparison: DrafterComparison) -> Table:
    """One row per drafter: tau and its difference from the first drafter's, pooled over lengths, for 80 columns.

    A difference is bold where its interval excludes 0.
    """
    lengths = ", ".join(map(str, comparison.context_tokens))
    table = Table(
        title=f"tau on {comparison.rows} held-out contexts of {lengths} tokens each, in pairs with {comparison.first}"
    )
    table.add_column("drafter", no_wrap=True)
    for pool in comparison.pools:
        for head in (pool.sampling, "difference"):
            table.add_column(head, no_wrap=True, justify="right")
    for name, one in comparison.drafters.items():
        cells = []
        for pool in comparison.pools:
            cells += [in_short(one.tau[pool]), marked(one.difference[pool], "[bold]", "[/]") if one.difference else ""]
        table.add_row(name, *cells)
    return table


def markdown(comparison: DrafterComparison) -> str:
    """The same for a document, with the paper's values where the drafters are its own."""
    columns, paper, throughput = comparison.columns, paper_tau(), modelled(comparison)
    lines = [f"| | {' | '.join(s.name for s in columns)} | paper, 512 tokens |", "|---" * (len(columns) + 2) + "|"]
    for name, one in comparison.drafters.items():
        cells = [in_short(one.tau[column]) for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} | {f'{paper[name]:.3f}' if name in paper else ''} |")
        if one.difference is not None:
            cells = [marked(one.difference[column], "**", "**") for column in columns]
            known = name in paper and comparison.first in paper
            less = f"{paper[name] - paper[comparison.first]:+.3f}" if known else ""
            lines.append(f"| | {' | '.join(cells)} | {less} |")
    if throughput:
        spot = options()["spot"]
        head = f"modelled throughput at ({spot['batch']}, {spot['context_tokens']})"
        lines += ["", f"| {head} | with our tau | with the paper's |", "|---|---|---|"]
        lines += [f"| {name} | {ours.value:.2f} | {theirs:.2f} |" for name, (ours, theirs) in throughput.items()]
    return "\n".join(lines) + "\n"


def in_short(estimate: Estimate, sign: str = "") -> str:
    """The value and half the width of its interval, where it has one; `sign` "+" also marks positive values."""
    half = (estimate.high - estimate.low) / 2
    return f"{estimate.value:{sign}.3f}" + ("" if math.isnan(half) else f" ± {half:.2f}")


def marked(difference: Estimate, before: str, after: str) -> str:
    """A difference, between marks where it is resolved."""
    text = in_short(difference, "+")
    return f"{before}{text}{after}" if difference.resolved else text
