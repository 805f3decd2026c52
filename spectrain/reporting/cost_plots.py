"""Figures of the throughput model, of node budgets, and of stop rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.colors import BoundaryNorm, ListedColormap, LogNorm, Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from spectrain.decoding.budget import NodeBudget
from spectrain.measure.cost_analysis import AUTOREGRESSIVE, CostGrid, best_methods
from spectrain.measure.stopping_results import FIXED, HEAD
from spectrain.reporting.budget_report import plain_tokens_per_s
from spectrain.reporting.cost_tables import compact
from spectrain.reporting.drawing import BASELINE_COLOUR, COLOURS, DASHES, draw_cells, grid_of, line_panels, styled
from spectrain.stores.budget_table import BudgetTable, CurveEntry, sampling_name

COLOUR_OF = dict(zip(("vanilla", "magicdec", "spire", "spire_dense"), COLOURS, strict=False))
MAP_POINTS = 240  # of the break-even map, in each direction
BLUE, GREEN, ORANGE = "#0072b2", "#009e73", "#e69f00"
RULES = {  # stop rules differ in shades and markers as well as in colours, for readers in grayscale
    FIXED: {"color": BLUE, "marker": "s", "linestyle": "--"},
    "confidence": {"color": ORANGE, "marker": "^", "linestyle": ":"},
    "entropy": {"color": GREEN, "marker": "v", "linestyle": "-."},
}
HEADROOM = 1.15  # of the largest fixed length's discard rate; what lies above is cut off

# The throughput model


def multipliers(found: CostGrid) -> Figure:
    """SPIRe, Figure 4: one heat map per method, white where it is as fast as autoregressive decoding."""
    panels = {f"{m.name} (tau = {m.tau:.3f}, k = {m.k})": np.log2(found.multiplier(m)) for m in found.methods}
    reach = max(0.1, *(float(np.abs(log).max()) for log in panels.values()))
    heading = f"{found.title}: throughput relative to autoregressive decoding"
    return heat_maps(found, heading, panels, TwoSlopeNorm(0.0, -reach, reach), "RdBu", lambda log: f"{2**log:.2f}x")


def times(found: CostGrid) -> Figure:
    """Milliseconds per step if both peaks are reached, autoregressive decoding first."""
    hardware = found.model.hardware
    steps = {m: found.model.step(m, found.batch, found.context_tokens) for m in found.methods}
    panels = {f"{AUTOREGRESSIVE}: 1 token per step": hardware.milliseconds(next(iter(steps.values())).target)}
    panels |= {f"{m.name}: {m.tau:.2f} tokens per step": hardware.milliseconds(step.step) for m, step in steps.items()}
    low, high = (pick(pick(ms.flat) for ms in panels.values()) for pick in (min, max))
    heading = f"{found.title}: ms per step on {hardware.name}"
    return heat_maps(
        found, heading, panels, LogNorm(low, max(high, 1.01 * low)), "YlGnBu", lambda ms: f"{ms:.3g}", False
    )


@styled
def heat_maps(
    found: CostGrid, heading: str, panels: Mapping[str, np.ndarray], norm: Normalize, colours: str, text, spot=True
) -> Figure:
    """One panel per name, below one another as in the paper. The cell of the cost analysis is framed if `spot`."""
    batch, contexts = found.batch, found.context_tokens
    width = max(5.2, 1.6 + 0.62 * len(contexts))
    figure, axes = grid_of(len(panels), 1, (width, 0.65 + 0.25 * len(batch)))
    figure.suptitle(heading, fontsize=9)
    for ax, (name, cells) in zip(axes, panels.items(), strict=True):
        draw_cells(ax, cells, norm, colours, text)
        ax.set(title=name, ylabel="batch size")
        ax.set_xticks(range(len(contexts)), map(compact, contexts))
        ax.set_yticks(range(len(batch)), batch)
        ax.set_ylim(len(batch) - 0.5, -0.5)
        if spot and found.spot[0] in batch and found.spot[1] in contexts:
            corner = (contexts.index(found.spot[1]) - 0.5, batch.index(found.spot[0]) - 0.5)
            ax.add_patch(Rectangle(corner, 1, 1, fill=False, ec="black", lw=1.4))
    axes[-1].set_xlabel("context (tokens)")
    return figure


def throughput_curves(found: CostGrid) -> Figure:
    """SPIRe, Figures 1 and 6: throughput over the context length at the batch size of the cost analysis."""
    batch, contexts = found.spot[0], found.context_tokens
    plain = {"points": [(c, 1) for c in contexts], "color": BASELINE_COLOUR, "ls": "--", "label": AUTOREGRESSIVE}
    lines = [
        {
            "points": list(zip(contexts, found.model.multiplier(m, [batch], contexts)[0], strict=True)),
            "color": COLOUR_OF[m.name],
            "marker": "o",
            "label": f"{m.name} (tau = {m.tau:.3f})",
        }
        for m in found.methods
    ]
    return line_panels(
        {f"{found.title}: batch size {batch}": [plain, *lines]},
        "context (tokens)",
        "throughput relative to\nautoregressive decoding",
        panel_in=(6.4, 3.4),
        log_ticks={c: compact(c) for c in contexts},
        ylim=(0, None),
    )


def intensity(found: CostGrid) -> Figure:
    """SPIRe, Figure 3: operational intensity of verification by tokens verified together, one line per context."""
    k, contexts = found.methods[0].k, found.context_tokens
    tokens = [k * batch for batch in found.batch]
    limit = found.model.hardware.operational_intensity
    bound = {"points": [(t, limit) for t in tokens], "color": "black", "ls": "--"}
    lines = [bound | {"label": f"compute-bound above {limit:.0f}"}]
    shades = matplotlib.colormaps["viridis_r"](np.linspace(0.12, 1, len(contexts)))
    for column, context, shade in zip(found.model.intensity(found.batch, contexts, k).T, contexts, shades, strict=True):
        points = list(zip(tokens, column, strict=True))
        lines.append({"points": points, "marker": "o", "color": shade, "label": f"context {compact(context)}"})
    figure = line_panels(
        {f"{found.title}: operational intensity of verification": lines},
        f"tokens verified together: batch size times k = {k}",
        "FLOPs per byte",
        panel_in=(6.8, 3.8),
        log_ticks={t: compact(t) for t in tokens},
    )
    log_y(figure.axes[0])
    return figure


def log_y(ax, ticks: Sequence[int] | None = None) -> None:
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if ticks:
        ax.set_yticks(ticks)
    ax.minorticks_off()


@styled
def fastest(found: CostGrid) -> Figure:
    """The fastest method at every batch size and context, with lines where each equals autoregressive decoding."""
    model, methods = found.model, found.methods
    batches = np.geomspace(found.batch[0], found.batch[-1], MAP_POINTS)
    contexts = np.unique(np.geomspace(*found.ends, MAP_POINTS).round())
    best = best_methods(model, methods, batches, contexts)
    names = [AUTOREGRESSIVE, *(method.name for method in methods)]
    hues = [BASELINE_COLOUR, *(COLOUR_OF[method.name] for method in methods)]
    handles = {f"{names[i]} is fastest": Rectangle((0, 0), 1, 1, fc=hues[i], alpha=0.35) for i in np.unique(best)}
    figure = Figure((6.6, 4.2))
    ax = figure.subplots()
    norm = BoundaryNorm(np.arange(len(names) + 1) - 0.5, len(names))
    ax.pcolormesh(contexts, batches, best, cmap=ListedColormap(hues), norm=norm, alpha=0.35, shading="nearest")
    for method in methods:
        values = model.multiplier(method, batches, contexts)
        if values.min() < 1 < values.max():
            colour = COLOUR_OF[method.name]
            ax.contour(contexts, batches, values, levels=[1.0], colors=[colour], linewidths=2)
            handles[f"{method.name} = {AUTOREGRESSIVE}"] = Line2D([], [], color=colour, lw=2)
    ax.set_xscale("log", base=2)
    ax.set_xticks(found.context_tokens, map(compact, found.context_tokens))
    log_y(ax, found.batch)
    ax.set(title=f"{found.title}: the fastest method", xlabel="context (tokens)", ylabel="batch size")
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=2)
    return figure


# Node budgets


def budgets(table: BudgetTable) -> Figure:
    """SSSD, Figure 2: what nodes gain and cost. One row of panels per method, one column per batch size."""
    sizes = table.cost.batch_sizes
    panels = {
        f"{entry.name}, batch size {size}\n(context {entry.curve.context_tokens})": budget_lines(table, entry, size)
        for entry in table.entries
        for size in sizes
    }
    figure = line_panels(
        panels,
        "nodes of a tree, root included",
        "relative to a step of one node",
        n_columns=len(sizes),
        panel_in=(2.8, 2.4),
        log_ticks=node_ticks(table),
    )
    for ax, lines, entry in zip(figure.axes, panels.values(), np.repeat(table.entries, len(sizes)), strict=False):
        ((nodes, speedup),) = lines[-1]["points"]
        text = {"transform": ax.transAxes, "va": "top", "color": GREEN, "fontweight": "bold"}
        ax.text(0.03, 0.98, f"{nodes} nodes: {speedup:.2f}×", **text)
        ax.axhline(1, color="#bbbbbb", linewidth=0.7, zorder=0)
        # A forward pass costs far more than is gained in the end; the interesting part is near the gain.
        ax.set_ylim(0, 1.35 * max(entry.curve.tau))
    return figure


def budget_lines(table: BudgetTable, entry: CurveEntry, batch_size: int) -> list[dict]:
    """Acceptance length, cost of a forward pass and speedup, relative to a step of one node; the last is the best."""
    curve, context = entry.curve, entry.curve.context_tokens
    rates = NodeBudget(cost=table.cost, curve=curve).rates(batch_size, context)
    plain, one_s = plain_tokens_per_s(table, entry, batch_size, context), table.cost.at(1, batch_size, context)
    tau = {"points": [(rate.nodes, rate.tau) for rate in rates], "color": ORANGE, "label": "acceptance length (tau)"}
    cost = {
        "points": [(rate.nodes, table.cost.at(rate.nodes, batch_size, context) / one_s) for rate in rates],
        "color": BLUE,
        "label": "cost of a full forward pass (one node = 1)",
    }
    speedup = [(rate.nodes, rate.tokens_per_s / plain) for rate in rates]
    measured = [(tau, curve.nodes), (cost, table.cost.nodes)]
    best = max(speedup, key=lambda point: point[1])
    return [
        tau | {"markevery": []},
        cost,
        *(
            {"points": [p for p in line["points"] if p[0] in nodes], "color": line["color"], "marker": "o", "ls": ""}
            for line, nodes in measured
        ),
        {"points": speedup, "color": GREEN, "lw": 2, "label": "expected speedup"},
        {"points": [best], "color": GREEN, "marker": "*", "ms": 11, "ls": "", "label": "chosen by max_nodes=auto"},
    ]


def budget_acceptance(table: BudgetTable) -> Figure:
    """SSSD, Figure 4: acceptance length of every method over the nodes that it may use."""
    lines = []
    for i, entry in enumerate(sorted(table.entries, key=lambda entry: -entry.curve.tau[-1])):
        label = entry.name + (f", {sampling}" if (sampling := sampling_name(entry.sampling)) != "greedy" else "")
        style = {"marker": "o", "linestyle": DASHES[i // 8 % 3], "color": COLOURS[i % 16], "label": label}
        lines.append({"points": list(zip(entry.curve.nodes, entry.curve.tau, strict=True)), **style})
    return line_panels(
        {"": lines},
        "nodes of a tree, root included",
        "acceptance length tau\n(tokens per target forward pass)",
        panel_in=(6.4, 3.6),
        log_ticks=node_ticks(table),
        ylim=(1, None),
    )


def node_ticks(table: BudgetTable) -> dict[int, str]:
    return {n: str(n) for n in sorted({n for entry in table.entries for n in entry.curve.nodes})}


# Stop rules


def stopping_fronts(results: Mapping) -> Figure:
    """SpecDec++, Figure 3: discard rate over verification rate of every setting, and the front of all heads."""
    settings, lines = results["settings"], []
    own = [one for one in settings if one["family"] == HEAD]
    for judge, marker in (("current", "o"), ("previous", "x")):
        points = rates_of(one for one in own if one["judge"] == judge)
        if points:
            label = f"{HEAD}, {judge}: each head"
            lines.append({"points": points, "marker": marker, "ls": "", "color": "#b0b0b0", "ms": 3, "label": label})
    front = rates_of(one for one in own if one["name"] in set(results["fronts"][HEAD]))
    style = {"marker": "o", "color": "#882255", "lw": 2.4, "zorder": 4, "label": f"{HEAD}: front"}
    lines.append({"points": sorted(front), **style})
    for family, style in RULES.items():
        members = sorted((one for one in settings if one["family"] == family), key=lambda one: one["value"])
        if members:
            lines.append({"points": rates_of(members), "label": family, "lw": 1.2, **style})
    if results["oracle"] is not None:
        star = {"marker": "*", "color": "black", "ms": 13, "ls": "", "clip_on": False, "zorder": 5, "label": "oracle"}
        lines.append({"points": [(results["oracle"]["verification_rate"], 0)], **star})
    fixed = [one for one in settings if one["family"] == FIXED]
    facts = f"{results['texts']} texts, {results['sampling']}, {results['drafter']['kind']} drafter"
    figure = line_panels(
        {f"{results['prompts']}\n{facts}": [line for line in lines if line["points"]]},
        "verification rate (target calls per token)",
        "discard rate (discarded tokens per token)",
        panel_in=(7.6, 4.2),
        ylim=(0, max(HEADROOM * max(one["discard_rate"] for one in fixed), 0.1)),
    )
    beside = {"xytext": (4, 4), "textcoords": "offset points", "color": BLUE, "fontsize": 8}
    for one, point in zip(fixed, rates_of(fixed), strict=True):
        figure.axes[0].annotate(f"{one['value']:g}", point, **beside)
    return figure


def rates_of(settings) -> list[tuple[float, float]]:
    return [(one["verification_rate"], one["discard_rate"]) for one in settings]
