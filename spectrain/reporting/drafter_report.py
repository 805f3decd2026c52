"""A comparison of drafters as a table, as Markdown, as bars, and as JSON; beside it what the SPIRe paper reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from spectrain.measure.drafter_comparison import POOLED, Compared, Setting, resolved
from spectrain.measure.spire_paper import BATCH, CONTEXT_TOKENS, TAU, K, multiplier
from spectrain.measure.statistics import Estimate


@dataclass(frozen=True)
class Comparison:
    """Drafters of one target on the same contexts; the first is what others are held to."""

    drafters: Mapping[str, Compared]
    settings: Sequence[Setting]
    rows: int
    new_tokens: int
    gamma: int

    @property
    def first(self) -> str:
        return next(iter(self.drafters))

    @property
    def laws(self) -> list[str]:
        """ "greedy", "T=1"."""
        return list(dict.fromkeys(setting.name.split(", ")[1] for setting in self.settings))

    @property
    def columns(self) -> list[str]:
        """The settings, and where there are several lengths the pools over them."""
        several = len({setting.context_tokens for setting in self.settings}) > 1
        return [*(s.name for s in self.settings), *(f"{POOLED}, {law}" for law in self.laws if several)]

    def as_json(self) -> dict:
        return {
            "rows": self.rows,
            "new_tokens": self.new_tokens,
            "gamma": self.gamma,
            "contexts": {str(length): self.rows for length in {s.context_tokens: None for s in self.settings}},
            "first": self.first,
            "drafters": {name: one.as_json() for name, one in self.drafters.items()},
            "figures": [{"file": "drafters.png", "caption": caption(self)}],
        }


def caption(comparison: Comparison) -> str:
    """What the bars show, and the diamonds where there are any."""
    diamonds = " Diamonds: what the SPIRe paper reports, of a target of its own." if in_paper(comparison) else ""
    if modelled(comparison):
        diamonds = (
            f" Below: throughput by the paper's cost model for its target, batch {BATCH}, {CONTEXT_TOKENS} tokens, T=1."
            + diamonds
        )
    return (
        f"tau, tokens a target forward, of each drafter with {comparison.gamma} draft tokens a step: bars are pooled "
        f"over context lengths ({comparison.rows} held-out contexts of each, {comparison.new_tokens} new tokens), with "
        f"95 % bootstrap intervals; higher is better.{diamonds}"
    )


def in_paper(comparison: Comparison) -> list[str]:
    """Drafters that the paper has by this name; none where there is but one, which compares nothing."""
    known = [name for name in comparison.drafters if name in TAU]
    return known if len(known) > 1 else []


def render(comparison: Comparison) -> Table:
    """A row a drafter, tau and what it has more than the first, pooled over lengths; fits a terminal of 80 columns.

    Bold: the interval leaves 0 out.
    """
    lengths = ", ".join(str(length) for length in dict.fromkeys(s.context_tokens for s in comparison.settings))
    table = Table(
        title=f"tau on {comparison.rows} held-out contexts of {lengths} tokens each, in pairs with {comparison.first}"
    )
    table.add_column("drafter", no_wrap=True)
    columns = [f"{POOLED}, {law}" for law in comparison.laws]
    for law in comparison.laws:
        table.add_column(law, no_wrap=True, justify="right")
        table.add_column("difference", no_wrap=True, justify="right")
    for name, one in comparison.drafters.items():
        less = [marked(one.difference[c], "[bold]", "[/]") if one.difference else "" for c in columns]
        table.add_row(name, *(cell for c, d in zip(columns, less, strict=True) for cell in (in_short(one.tau[c]), d)))
    return table


def markdown(comparison: Comparison) -> str:
    """The same for a document, with the paper's values where the drafters are its own."""
    columns = comparison.columns
    lines = [f"| | {' | '.join(columns)} | paper, 512 tokens |", "|---" * (len(columns) + 2) + "|"]
    for name, one in comparison.drafters.items():
        cells = [in_short(one.tau[column]) for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} | {f'{TAU[name]:.3f}' if name in TAU else ''} |")
        if one.difference is not None:
            cells = [marked(one.difference[column], "**", "**") for column in columns]
            lines.append(f"| | {' | '.join(cells)} | {paper_difference(name, comparison.first)} |")
    throughput = modelled(comparison)
    if throughput:
        lines += [
            "",
            f"| modelled throughput at ({BATCH}, {CONTEXT_TOKENS}) | with our tau | with the paper's |",
            "|---|---|---|",
        ]
        lines += [f"| {name} | {ours.value:.2f} | {paper:.2f} |" for name, (ours, paper) in throughput.items()]
    return "\n".join(lines) + "\n"


def paper_difference(name: str, first: str) -> str:
    return f"{TAU[name] - TAU[first]:+.3f}" if name in TAU and first in TAU else ""


def modelled(comparison: Comparison) -> dict[str, tuple[Estimate, float]]:
    """Throughput at (64, 512) by the paper's cost model: with these tau, and with the paper's own (Figure 5).

    tau of contexts of 512 tokens under T = 1, as in the paper; empty where these were not measured with its k.
    """
    setting = Setting(CONTEXT_TOKENS, 1.0)
    if comparison.gamma != K or setting not in comparison.settings:
        return {}
    found = {}
    for name in in_paper(comparison):
        tau = comparison.drafters[name].tau[setting.name]
        a_token = multiplier(name, 1.0)  # throughput is in proportion to tau
        ours = Estimate(*(a_token * value for value in (tau.value, tau.low, tau.high)))
        found[name] = ours, multiplier(name, TAU[name])
    return found


def draw(file: Path, comparison: Comparison) -> None:
    """Bars of tau, a group a drafter, a bar a sampling; below them modelled throughput. Diamonds are the paper's."""
    names, throughput = list(comparison.drafters), modelled(comparison)
    figure = Figure(figsize=(max(6, 1.1 * len(names) + 1), 7.5 if throughput else 4.2), layout="constrained")
    panels = figure.subplots(2 if throughput else 1, 1, squeeze=False)[:, 0]
    for i, law in enumerate(comparison.laws):
        places = np.arange(len(names)) + (i - (len(comparison.laws) - 1) / 2) * 0.8 / len(comparison.laws)
        found = [comparison.drafters[name].tau[f"{POOLED}, {law}"] for name in names]
        _bars(panels[0], places, 0.8 / len(comparison.laws), found, law)
    _diamonds(panels[0], {names.index(name): TAU[name] for name in in_paper(comparison)})
    panels[0].set(ylabel="tau, tokens a target forward", ylim=(1, comparison.gamma + 1))
    if throughput:
        _bars(panels[1], [names.index(n) for n in throughput], 0.5, [o for o, _ in throughput.values()], "with our tau")
        _diamonds(panels[1], {names.index(name): paper for name, (_, paper) in throughput.items()})
        panels[1].axhline(1, color="k", linewidth=0.8)
        panels[1].set(ylabel=f"modelled throughput, times plain\ndecoding (batch {BATCH}, {CONTEXT_TOKENS} tokens)")
    for axes in panels:
        axes.set_xticks(range(len(names)), [name.replace("_", "\n") for name in names])
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
        axes.legend(frameon=False, ncols=3, loc="upper right")
    figure.savefig(file, dpi=130)


def _bars(axes: Axes, places: Sequence[float], width: float, estimates: Sequence[Estimate], label: str) -> None:
    errors = [[e.value - e.low for e in estimates], [e.high - e.value for e in estimates]]
    axes.bar(places, [e.value for e in estimates], width, yerr=np.nan_to_num(errors), capsize=2, label=label)


def _diamonds(axes: Axes, values: Mapping[int, float]) -> None:
    if values:
        label = "paper (its own target)"
        axes.scatter(values.keys(), values.values(), marker="D", color="k", s=20, zorder=3, label=label)


def in_short(estimate: Estimate, sign: str = "") -> str:
    """The value and half the width of its interval, where it has one; `sign` "+" tells positive values, too."""
    half = (estimate.high - estimate.low) / 2
    return f"{estimate.value:{sign}.3f}" + ("" if np.isnan(half) else f" ± {half:.2f}")


def marked(difference: Estimate, before: str, after: str) -> str:
    """A difference; between marks where it is resolved."""
    text = in_short(difference, "+")
    return f"{before}{text}{after}" if resolved(difference) else text
