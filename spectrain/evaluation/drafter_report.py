"""A comparison of drafters as a table, as Markdown, as bars, and as JSON; beside it what the SPIRe paper reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from spectrain.evaluation.drafter_comparison import POOLED, Compared, Setting, resolved
from spectrain.evaluation.metrics import Estimate

# tau that the SPIRe paper reports at k = 4 and contexts of 512 tokens: Table 1, Figure 5; names as in conf/ablation/.
# Of a dense cache it assumes SPIRe's own ("conservatively").
PAPER = {
    "spire": 3.401,
    "random_init": 3.105,
    "distill": 3.375,
    "hard": 3.069,
    "no_feedback": 3.352,
    "no_target_activations": 2.959,
    "dense_kv": 3.401,
    "vanilla": 2.647,
    "magicdec": 3.891,
}


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
    return (
        f"tau, tokens a target forward, of each drafter with {comparison.gamma} draft tokens a step: bars are pooled "
        f"over context lengths ({comparison.rows} held-out contexts of each, {comparison.new_tokens} new tokens), with "
        "95 % bootstrap intervals; higher is better. Diamonds: what the SPIRe paper reports of its own, larger target."
    )


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
        lines.append(f"| {name} | {' | '.join(cells)} | {PAPER.get(name, '')} |")
        if one.difference is not None:
            cells = [marked(one.difference[column], "**", "**") for column in columns]
            lines.append(f"| | {' | '.join(cells)} | {paper_difference(name, comparison.first)} |")
    return "\n".join(lines) + "\n"


def paper_difference(name: str, first: str) -> str:
    return f"{PAPER[name] - PAPER[first]:+.3f}" if name in PAPER and first in PAPER else ""


def draw(file: Path, comparison: Comparison) -> None:
    """Bars of tau, a group a drafter, a bar a sampling; the paper's values as diamonds."""
    names, laws = list(comparison.drafters), comparison.laws
    figure = Figure(figsize=(max(6, 1.1 * len(names) + 1), 4.2), layout="constrained")
    axes, width = figure.subplots(), 0.8 / len(laws)
    for i, law in enumerate(laws):
        places = np.arange(len(names)) + (i - (len(laws) - 1) / 2) * width
        found = [comparison.drafters[name].tau[f"{POOLED}, {law}"] for name in names]
        errors = [[e.value - e.low for e in found], [e.high - e.value for e in found]]
        axes.bar(places, [e.value for e in found], width, yerr=np.nan_to_num(errors), capsize=2, label=law)
    paper = [(i, PAPER[name]) for i, name in enumerate(names) if name in PAPER]
    if len(paper) > 1:
        axes.scatter(*zip(*paper, strict=True), marker="D", color="k", s=20, zorder=3, label="paper (its own target)")
    axes.set_xticks(range(len(names)), [name.replace("_", "\n") for name in names])
    axes.set(ylabel="tau, tokens a target forward", ylim=(1, comparison.gamma + 1))
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, ncols=3, loc="upper right")
    figure.savefig(file, dpi=130)


def in_short(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} ± {(estimate.high - estimate.low) / 2:.2f}"


def marked(difference: Estimate, before: str, after: str) -> str:
    text = f"{difference.value:+.3f} ± {(difference.high - difference.low) / 2:.2f}"
    return f"{before}{text}{after}" if resolved(difference) else text
