"""The plot of a budget measurement, in the form of SSSD's Figure 2: what nodes gain, what they cost, what is left."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spectrain.decoding.budget import NodeBudget
from spectrain.reporting.budget_report import plain_tokens_per_s
from spectrain.reporting.svg import COLOURS, DASHES
from spectrain.stores.budget_table import BudgetTable, CurveEntry

ORANGE, BLUE, GREEN = "#e69f00", "#0072b2", "#009e73"  # Okabe and Ito's, in the roles of the paper's figure
PANEL_IN = (2.7, 2.3)


def draw_budgets(table: BudgetTable, file: Path | IO[bytes]) -> None:
    """Writes a PNG: a row of panels a method, a panel a batch size, at the method's typical context."""
    batch_sizes, entries = table.cost.batch_sizes, table.entries
    size = (PANEL_IN[0] * len(batch_sizes) + 0.6, PANEL_IN[1] * len(entries) + 0.8)
    with matplotlib.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(size, layout="constrained")
        panels = figure.subplots(len(entries), len(batch_sizes), sharex=True, sharey="row", squeeze=False)
        for row, entry in zip(panels, entries, strict=True):
            for ax, batch_size in zip(row, batch_sizes, strict=True):
                _panel(ax, table, entry, batch_size)
            row[0].set_ylabel(f"{entry.name}\n(context {entry.curve.context_tokens})")
        for ax in panels[-1]:
            ax.set_xlabel("nodes of a tree, root included")
        handles, labels = panels[0][0].get_legend_handles_labels()
        n_columns = 4 if len(batch_sizes) > 3 else 2  # as wide as the panels
        figure.legend(handles, labels, loc="outside upper center", ncols=n_columns, frameon=False)
        figure.savefig(file, dpi=140)


def draw_acceptance(table: BudgetTable, file: Path | IO[bytes]) -> None:
    """Writes a PNG in the form of SSSD's Figure 4: accepted tokens of every method against the nodes it may use."""
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure((6.4, 4.2), layout="constrained")
        ax = figure.subplots()
        by_gain = sorted(table.entries, key=lambda entry: -entry.curve.tau[-1])
        for i, entry in enumerate(by_gain):
            label = entry.name + (f", {sampling}" if (sampling := entry.sampling.describe()) != "greedy" else "")
            dashes = DASHES[i // 8 % len(DASHES)]
            ax.plot(entry.curve.nodes, entry.curve.tau, "o", ls=dashes, color=COLOURS[i % 16], ms=4, label=label)
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.set_ylim(bottom=1)
        ax.set_xlabel("nodes of a tree, root included")
        ax.set_ylabel("accepted tokens a forward, bonus included")
        ax.grid(alpha=0.25)
        figure.legend(loc="outside right upper", frameon=False)
        figure.savefig(file, dpi=140)


def _panel(ax: Axes, table: BudgetTable, entry: CurveEntry, batch_size: int) -> None:
    """Everything relative to a step of one node: accepted tokens, forward cost, their quotient with all overheads."""
    curve, context = entry.curve, entry.curve.context_tokens
    rates = NodeBudget(cost=table.cost, curve=curve).rates(batch_size, context)
    nodes = np.array([rate.nodes for rate in rates])
    one_s = table.cost.at(1, batch_size, context)
    plain = plain_tokens_per_s(table, entry, batch_size, context)
    cost = np.array([table.cost.at(int(n), batch_size, context) / one_s for n in nodes])
    speedup = np.array([rate.tokens_per_s / plain for rate in rates])
    measured = np.isin(nodes, curve.nodes)
    ax.plot(nodes, [rate.tau for rate in rates], color=ORANGE, label="accepted tokens a forward")
    ax.plot(nodes[measured], curve.tau, "o", color=ORANGE, markersize=3.5)
    ax.plot(nodes, cost, color=BLUE, label="cost of a full forward, one node = 1")
    timed = [n for n in table.cost.nodes if nodes[0] <= n <= nodes[-1]]
    ax.plot(timed, [table.cost.at(n, batch_size, context) / one_s for n in timed], "o", color=BLUE, markersize=3.5)
    ax.plot(nodes, speedup, color=GREEN, linewidth=2, label="expected speedup")
    best = int(np.argmax(speedup))
    ax.plot(nodes[best], speedup[best], "*", color=GREEN, markersize=11, label="max_nodes=auto")
    text = f"{nodes[best]} nodes: {speedup[best]:.2f}×"
    ax.text(0.03, 0.98, text, transform=ax.transAxes, va="top", color=GREEN, fontweight="bold")
    ax.axhline(1, color="#bbbbbb", linewidth=0.7, zorder=0)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    # Forwards get far dearer than anything is gained: what matters is near the gain.
    ax.set_ylim(0, 1.35 * max(curve.tau))
    ax.set_title(f"batch {batch_size}", fontsize=8)
