"""Figures of the throughput model."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap, LogNorm, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from spectrain.measure.cost_analysis import AUTOREGRESSIVE, CostGrid, best_methods
from spectrain.reporting import drawing
from spectrain.reporting.drawing import BASELINE_COLOUR, COLOURS, cell_panels, line, line_panels
from spectrain.reporting.formats import compact

COLOUR_OF = dict(zip(("vanilla", "magicdec", "spire", "spire_dense"), COLOURS, strict=False))
MAP_POINTS = 240  # of the map of the fastest methods, in each direction

# The throughput model


def multipliers(found: CostGrid) -> Figure:
    """SPIRe, Figure 4: one heat map per method, white where it is as fast as autoregressive decoding."""
    panels = {f"{m.name} (tau = {m.tau:.3f}, k = {m.k})": np.log2(found.multiplier(m)) for m in found.methods}
    reach = max(0.1, *(float(np.abs(log).max()) for log in panels.values()))
    look = TwoSlopeNorm(0.0, -reach, reach), "RdBu", lambda log: f"{2**log:.2f}x"
    figure = heat_maps(found, panels, "throughput relative to autoregressive decoding", *look)
    if found.spot[0] in found.batch and found.spot[1] in found.context_tokens:  # the cell of the cost analysis
        corner = (found.context_tokens.index(found.spot[1]) - 0.5, found.batch.index(found.spot[0]) - 0.5)
        for ax in figure.axes:
            ax.add_patch(Rectangle(corner, 1, 1, fill=False, ec="black", lw=1.4))
    return figure


def times(found: CostGrid) -> Figure | None:
    """Milliseconds per step if both peaks are reached, autoregressive decoding first; None without peaks."""
    hardware = found.model.hardware
    if hardware.flops_per_s is None:
        return None
    steps = {m: found.model.step(m, found.batch, found.context_tokens) for m in found.methods}
    panels = {f"{AUTOREGRESSIVE}: 1 token per step": hardware.milliseconds(next(iter(steps.values())).target)}
    panels |= {f"{m.name}: {m.tau:.2f} tokens per step": hardware.milliseconds(step.step) for m, step in steps.items()}
    low, high = (pick(pick(ms.flat) for ms in panels.values()) for pick in (min, max))
    look = LogNorm(low, max(high, 1.01 * low)), "YlGnBu", lambda ms: f"{ms:.3g}"
    return heat_maps(found, panels, f"ms per step on {hardware.name}", *look)


def heat_maps(found: CostGrid, panels: Mapping[str, np.ndarray], title: str, *look: object) -> Figure:
    """Panels of one batch size per row and one context length per column, as in the paper."""
    batches, contexts = [*map(str, found.batch)], [*map(compact, found.context_tokens)]
    panel_in = (max(5.2, 1.6 + 0.62 * len(contexts)), 0.65 + 0.25 * len(batches))
    figure = cell_panels(panels, batches, contexts, *look, panel_in, ylabel="batch size")
    figure.axes[-1].set_xlabel("context (tokens)")
    figure.suptitle(f"{found.title}: {title}", fontsize=9)
    return figure


def throughput_curves(found: CostGrid) -> Figure | None:
    """SPIRe, Figures 1 and 6: throughput over the context length at the batch size of the cost analysis."""
    batch, contexts = found.spot[0], found.context_tokens
    if len(contexts) == 1:
        return None
    lines = [line([(c, 1) for c in contexts], color=BASELINE_COLOUR, ls="--", label=AUTOREGRESSIVE)]
    for m in found.methods:
        points = zip(contexts, found.model.multiplier(m, [batch], contexts)[0], strict=True)
        lines.append(line(points, color=COLOUR_OF[m.name], marker="o", label=f"{m.name} (tau = {m.tau:.3f})"))
    labels = ("context (tokens)", "throughput relative to\nautoregressive decoding")
    ticks = {context: compact(context) for context in contexts}
    title = f"{found.title}: batch size {batch}"
    return line_panels({title: lines}, *labels, panel_in=(6.4, 3.4), log_ticks=ticks, ylim=(0, None))


def intensity(found: CostGrid) -> Figure | None:
    """SPIRe, Figure 3: operational intensity of verification by tokens verified together, one line per context."""
    if len(found.batch) == 1:
        return None
    k, contexts, limit = found.methods[0].k, found.context_tokens, found.model.hardware.operational_intensity
    tokens = [k * batch for batch in found.batch]
    lines = [line([(t, limit) for t in tokens], color="black", ls="--", label=f"compute-bound above {limit:.0f}")]
    shades = matplotlib.colormaps["viridis_r"](np.linspace(0.12, 1, len(contexts)))
    for column, context, shade in zip(found.model.intensity(found.batch, contexts, k).T, contexts, shades, strict=True):
        points = zip(tokens, column, strict=True)
        lines.append(line(points, marker="o", color=shade, label=f"context {compact(context)}"))
    labels = (f"tokens verified together: batch size times k = {k}", "FLOPs per byte")
    panels = {f"{found.title}: operational intensity of verification": lines}
    figure = line_panels(panels, *labels, panel_in=(6.8, 3.8), log_ticks={t: compact(t) for t in tokens})
    log_y(figure.axes[0])
    return figure


@drawing.styled
def fastest(found: CostGrid) -> Figure | None:
    """The fastest method at every batch size and context, with lines where each equals autoregressive decoding."""
    if len(found.batch) == 1 or len(found.context_tokens) == 1:
        return None
    model, methods = found.model, found.methods
    batches = np.geomspace(found.batch[0], found.batch[-1], MAP_POINTS)
    contexts = np.unique(np.geomspace(found.context_tokens[0], found.context_tokens[-1], MAP_POINTS).round())
    best = best_methods(model, methods, batches, contexts)
    names = [AUTOREGRESSIVE, *(method.name for method in methods)]
    hues = [BASELINE_COLOUR, *(COLOUR_OF[method.name] for method in methods)]
    handles = {f"{names[i]} is fastest": Rectangle((0, 0), 1, 1, fc=hues[i], alpha=0.35) for i in np.unique(best)}
    figure = Figure((6.6, 4.2))
    ax = figure.subplots()
    norm = BoundaryNorm(np.arange(len(names) + 1) - 0.5, len(names))
    ax.pcolormesh(contexts, batches, best, cmap=ListedColormap(hues), norm=norm, alpha=0.35, shading="nearest")
    for name, colour, method in zip(names[1:], hues[1:], methods, strict=True):
        values = model.multiplier(method, batches, contexts)
        if values.min() < 1 < values.max():
            ax.contour(contexts, batches, values, levels=[1.0], colors=[colour], linewidths=2)
            handles[f"{name} as fast as {AUTOREGRESSIVE}"] = Line2D([], [], color=colour, lw=2)
    ax.set_xscale("log", base=2)
    ax.set_xticks(found.context_tokens, map(compact, found.context_tokens))
    log_y(ax)
    ax.set_yticks(found.batch)
    ax.set(title=f"{found.title}: the fastest method", xlabel="context (tokens)", ylabel="batch size")
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=2)
    return figure


def log_y(ax: Axes) -> None:
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.minorticks_off()
