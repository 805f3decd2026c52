"""The parity of training, loop and transformers as a table and in words."""

from __future__ import annotations

import numpy as np
from rich.table import Table

from spectrain.measure.parity import LOGGED, Parity
from spectrain.measure.statistics import Estimate

CAPTION = (
    "Acceptance of the draft token at each position of those steps that came so far, with 95 % intervals over "
    "contexts. Sides of one sampling should agree, except for validation, which reads the data's text, and for the one "
    "computed everywhere: the loop begins drafts in harder places, after a rejection."
)


def render(parity: Parity) -> Table:
    """One row per side; fits a terminal of 80 columns for drafts of up to four tokens."""
    table = Table(
        title=f"acceptance by position in the draft: {parity.run}, {parity.contexts} held-out contexts of "
        f"{parity.context_tokens} tokens, {parity.new_tokens} new tokens; 95 % intervals over contexts"
    )
    table.add_column("side", no_wrap=True)
    for position in range(1, parity.gamma + 1):
        table.add_column(str(position), justify="right", no_wrap=True)
    table.add_column("tau", justify="right", no_wrap=True)
    if parity.logged:
        numbers = [*parity.logged.rates, parity.logged.tau]
        table.add_row("[bold]T=1[/]")
        table.add_row(LOGGED, *(f"{number:.3f}" for number in numbers), end_section=True)
    for setting, sides in parity.sides.items():
        table.add_row(f"[bold]{setting.sampling}[/]")
        for name, acceptance in sides.items():
            table.add_row(name, *(in_short(e) for e in [*acceptance.rates(), acceptance.tau()]))
        table.add_section()
    return table


def verdicts(parity: Parity) -> list[str]:
    """One sentence for each pair that should agree."""
    found = []
    for setting, name, difference in parity.differences():
        tau, steps = difference.tau(), difference.counts[:, 0]
        said = f"{setting.sampling}, {name} less the loop: tau {tau.value:+.3f} [{tau.low:+.3f}, {tau.high:+.3f}]"
        if not setting.temperature and np.array_equal(difference.counts, difference.other):
            found.append(f"{said}; equal in all {steps.sum():.0f} steps")
            continue
        apart = difference.apart()
        if not tau.low <= 0 <= tau.high:
            found.append(f"{said}: THEY DIFFER" + (f", at position {', '.join(map(str, apart))}" if apart else ""))
        elif apart:
            found.append(f"{said}, but position {', '.join(map(str, apart))} DIFFERS")
        else:
            found.append(f"{said}; no difference resolved, at no position")
    return found


def in_short(estimate: Estimate) -> str:
    half = (estimate.high - estimate.low) / 2
    if np.isnan(estimate.value):
        return "-"
    return f"{estimate.value:.3f}" + ("" if np.isnan(half) else f"±{half:.2f}".replace("±0.", "±."))
