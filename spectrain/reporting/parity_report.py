"""The parity of training, loop and transformers as a table, a picture, JSON, and in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from spectrain.decoding import Sampling
from spectrain.measure.parity import Acceptance
from spectrain.measure.statistics import Estimate

LOGGED = "validation"  # on the data's text
EVERYWHERE = "computed, all text"  # at every position of what the loop wrote
AT_STEPS = "computed, steps"  # at the steps that the loop took
LOOP = "the loop"
ASSISTED = "assisted (HF)"

Sides = Mapping[str, Acceptance]  # by the names above


@dataclass(frozen=True)
class Logged:
    """What validation said of the exported weights: acceptance wherever the data's text puts a draft token."""

    rates: list[float]
    tau: float  # expected of drafts whose positions are accepted independently


@dataclass(frozen=True)
class Parity:
    """One drafter from all sides."""

    run: str
    drafter_kind: str
    gamma: int
    contexts: int
    context_tokens: int
    new_tokens: int
    logged: Logged | None
    sides: Mapping[Sampling, Sides]

    def differences(self) -> Iterator[tuple[Sampling, str, Acceptance]]:
        """What should be nothing but chance: each side less the loop."""
        for law, sides in self.sides.items():
            for name in (AT_STEPS, ASSISTED):
                if name in sides:
                    yield law, name, sides[name].minus(sides[LOOP])


def render(parity: Parity) -> Table:
    """Rows are sides; fits a terminal of 80 columns for drafts of up to four tokens."""
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
    for law, sides in parity.sides.items():
        table.add_row(f"[bold]{short(law)}[/]")
        for name, acceptance in sides.items():
            table.add_row(name, *(in_short(e) for e in [*acceptance.rates(), acceptance.tau()]))
        table.add_section()
    return table


def verdicts(parity: Parity) -> list[str]:
    """One sentence for each pair that should agree."""
    found = []
    for law, name, difference in parity.differences():
        tau, steps = difference.tau(), difference.counts[:, 0]
        said = f"{short(law)}, {name} less the loop: tau {tau.value:+.3f} [{tau.low:+.3f}, {tau.high:+.3f}]"
        if law.greedy and np.array_equal(difference.counts, difference.other):
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


def as_json(parity: Parity) -> dict:
    """Plain values; `nan` becomes null."""
    rows = {f"T=1, {LOGGED}": _logged(parity.logged)} if parity.logged else {}
    rows |= {f"{short(law)}, {name}": _row(a) for law, sides in parity.sides.items() for name, a in sides.items()}
    return {
        "run": parity.run,
        "drafter_kind": parity.drafter_kind,
        "positions": list(range(1, parity.gamma + 1)),
        "contexts": parity.contexts,
        "context_tokens": parity.context_tokens,
        "new_tokens": parity.new_tokens,
        "rows": rows,
        "differences": {f"{short(law)}, {name} less the loop": _row(a) for law, name, a in parity.differences()},
        "figures": [
            {
                "file": "parity.png",
                "caption": "Acceptance of the draft token at each position of those steps that came so far, with 95 % "
                "intervals over contexts. Sides of one sampling should lie on each other, but for validation, which "
                "reads the data's text, and for the one computed everywhere: the loop begins drafts in harder places, "
                "behind a rejection.",
            }
        ],
    }


def draw(file: Path, parity: Parity) -> None:
    """Acceptance by position, a panel a sampling."""
    figure = Figure(figsize=(5 * len(parity.sides), 4), layout="constrained")
    panels = figure.subplots(1, len(parity.sides), sharey=True, squeeze=False)[0]
    for axes, (law, sides) in zip(panels, parity.sides.items(), strict=True):
        positions = np.arange(1, parity.gamma + 1)
        if parity.logged and law == Sampling(temperature=1.0):
            axes.plot(positions, parity.logged.rates, color="0.6", linestyle="--", marker=".", label=LOGGED)
        for i, (name, acceptance) in enumerate(sides.items()):
            _draw_side(axes, positions + 0.06 * (i - 1), name, acceptance)
        axes.set(title=short(law), xlabel="position in the draft", ylim=(0, 1), xticks=positions)
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="accepted, of steps that came so far")
    panels[-1].legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=130)


COLOURS = {EVERYWHERE: "C7", AT_STEPS: "C0", LOOP: "C1", ASSISTED: "C2"}


def _draw_side(axes: Axes, positions: np.ndarray, name: str, acceptance: Acceptance) -> None:
    rates = acceptance.rates()
    errors = [[r.value - r.low for r in rates], [r.high - r.value for r in rates]]
    style = {"marker": "o", "markersize": 4, "linewidth": 1, "capsize": 2, "color": COLOURS[name]}
    axes.errorbar(positions, [r.value for r in rates], np.nan_to_num(np.clip(errors, 0, None)), label=name, **style)


def short(law: Sampling) -> str:
    return "greedy" if law.greedy else f"T={law.temperature:g}"


def in_short(estimate: Estimate) -> str:
    half = (estimate.high - estimate.low) / 2
    if np.isnan(estimate.value):
        return "-"
    return f"{estimate.value:.3f}" + ("" if np.isnan(half) else f"±{half:.2f}".replace("±0.", "±."))


def _row(acceptance: Acceptance) -> dict:
    return {
        "acceptance": [estimate.as_json() for estimate in acceptance.rates()],
        "tau": acceptance.tau().as_json(),
        "steps": int(acceptance.counts[:, 0].sum()),
    }


def _logged(logged: Logged) -> dict:
    alone = {"low": None, "high": None}
    return {"acceptance": [{"value": rate} | alone for rate in logged.rates], "tau": {"value": logged.tau} | alone}
