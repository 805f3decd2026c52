"""The throughput model's results as pictures: heat maps, curves over the context, where which method is fastest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, Colormap, ListedColormap, LogNorm, Normalize, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from spectrain.measure.cost_analysis import AUTOREGRESSIVE, Comparison, best_methods
from spectrain.measure.cost_tables import compact
from spectrain.reporting.svg import BASELINE_COLOUR, COLOURS

STYLE = {"font.size": 8.5, "axes.spines.top": False, "axes.spines.right": False}
COLOUR_OF = dict(zip(("vanilla", "magicdec", "spire", "spire_dense"), COLOURS, strict=False))
DPI = 130
MAP_POINTS = 240  # of the break-even map, each way


@dataclass(frozen=True)
class Scale:
    """How a heat map turns numbers into colours and text."""

    norm: Normalize
    colours: str
    text: Callable[[float], str]


def draw_multipliers(file: Path, found: Comparison) -> None:
    """Figure 4: a heat map a method, one colour scale for all, white where a method is as fast as plain decoding."""
    panels = {f"{m.name} (tau = {m.tau:.3f}, k = {m.k})": np.log2(found.multiplier(m)) for m in found.methods}
    reach = max(0.1, *(float(np.abs(log).max()) for log in panels.values()))
    scale = Scale(TwoSlopeNorm(0.0, -reach, reach), "RdBu", lambda log: f"{2**log:.2f}x")
    heading = f"{found.title}: throughput relative to autoregressive decoding"
    _heat_maps(file, found, heading, panels, scale, found.spot)


def draw_times(file: Path, found: Comparison) -> None:
    """Milliseconds of a step, if both peaks are reached: plain decoding first."""
    hardware = found.model.hardware
    steps = {m: found.model.step(m, found.batch, found.context_tokens) for m in found.methods}
    panels = {f"{AUTOREGRESSIVE}: one token a row": hardware.milliseconds(next(iter(steps.values())).target)}
    panels |= {f"{m.name}: {m.tau:.2f} tokens a row": hardware.milliseconds(step.step) for m, step in steps.items()}
    low, high = (pick(pick(ms.flat) for ms in panels.values()) for pick in (min, max))
    scale = Scale(LogNorm(low, max(high, 1.01 * low)), "YlGnBu", lambda ms: f"{ms:.3g}")
    _heat_maps(file, found, f"{found.title}: ms a step on {hardware.name}", panels, scale, None)


def _heat_maps(
    file: Path,
    found: Comparison,
    heading: str,
    panels: dict[str, np.ndarray],
    scale: Scale,
    spot: tuple[int, int] | None,
) -> None:
    """A panel a name, below one another as in the paper; every cell says its number, the spot is framed."""
    batch, contexts = found.batch, found.context_tokens
    size = (max(5.2, 1.6 + 0.62 * len(contexts)), 0.7 + len(panels) * (0.65 + 0.25 * len(batch)))
    with matplotlib.rc_context(STYLE):
        figure = Figure(size, layout="constrained")
        figure.suptitle(heading, fontsize=9)
        axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for ax, (name, cells) in zip(axes, panels.items(), strict=True):
            image = ax.imshow(cells, norm=scale.norm, cmap=scale.colours, aspect="auto")
            ax.set_title(name, fontsize=8.5)
            ax.set_xticks(range(len(contexts)), [compact(c) for c in contexts])
            ax.set_yticks(range(len(batch)), [str(b) for b in batch])
            ax.set_ylabel("batch")
            ax.tick_params(length=0)
            ax.spines[:].set_visible(False)
            for (i, j), cell in np.ndenumerate(cells):
                ink = _ink(image.cmap, scale.norm(cell))
                ax.text(j, i, scale.text(cell), ha="center", va="center", fontsize=7, color=ink)
            if spot and spot[0] in batch and spot[1] in contexts:
                corner = (contexts.index(spot[1]) - 0.5, batch.index(spot[0]) - 0.5)
                ax.add_patch(Rectangle(corner, 1, 1, fill=False, ec="black", lw=1.4))
        axes[-1].set_xlabel("context (tokens)")
        figure.savefig(file, dpi=DPI)


def _ink(colours: Colormap, place: float) -> str:
    """Black or white, whichever is read on this colour."""
    red, green, blue, _ = colours(float(place))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def draw_curves(file: Path, found: Comparison) -> None:
    """Figures 1 and 6: throughput over the context at the spot's batch size."""
    batch = found.spot[0]
    with matplotlib.rc_context(STYLE):
        figure = Figure((6.4, 3.8), layout="constrained")
        ax = figure.subplots()
        ax.axhline(1, color=BASELINE_COLOUR, ls="--", lw=1, label=AUTOREGRESSIVE)
        for method in found.methods:
            row = found.model.multiplier(method, [batch], found.context_tokens)[0]
            label = f"{method.name} (tau = {method.tau:.3f})"
            ax.plot(found.context_tokens, row, "o-", color=COLOUR_OF[method.name], ms=4, label=label)
        _log_axis(ax, found.context_tokens)
        ax.set_ylim(bottom=0)
        ax.set_xlabel("context (tokens)")
        ax.set_ylabel("times the throughput\nof autoregressive decoding")
        ax.set_title(f"{found.title}: batch {batch}", fontsize=9)
        ax.grid(alpha=0.25)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(file, dpi=DPI)


def draw_intensity(file: Path, found: Comparison) -> None:
    """Figure 3: operational intensity of verification over its batch k x B, a line a context."""
    k, contexts = found.methods[0].k, found.context_tokens
    values = found.model.intensity(found.batch, contexts, k)
    tokens = np.asarray(found.batch) * k
    hoi = found.model.hardware.operational_intensity
    shades = matplotlib.colormaps["viridis_r"](np.linspace(0.12, 1, len(contexts)))
    with matplotlib.rc_context(STYLE):
        figure = Figure((6.8, 4.2), layout="constrained")
        ax = figure.subplots()
        ax.axhline(hoi, color="black", ls="--", lw=1, label=f"compute-bound above {hoi:.0f}")
        for column, context, shade in zip(values.T, contexts, shades, strict=True):
            ax.plot(tokens, column, "o-", ms=3, color=shade, label=f"context {compact(context)}")
        _log_axis(ax, tokens)
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.tick_params(axis="x", labelsize=7)
        ax.set_xlabel(f"tokens verified together: batch x k, k = {k}")
        ax.set_ylabel("FLOPs a byte")
        ax.set_title(f"{found.title}: operational intensity of verification", fontsize=9)
        ax.grid(alpha=0.25)
        figure.legend(loc="outside right upper", frameon=False)
        figure.savefig(file, dpi=DPI)


def draw_break_even(file: Path, found: Comparison) -> None:
    """Which method is fastest at every batch and context, and the lines at which each is as fast as plain decoding."""
    model, methods = found.model, found.methods
    rows = np.geomspace(found.batch[0], found.batch[-1], MAP_POINTS)
    contexts = np.unique(np.geomspace(*found.ends, MAP_POINTS).round())
    best = best_methods(model, methods, rows, contexts)
    names = [AUTOREGRESSIVE, *(method.name for method in methods)]
    hues = [BASELINE_COLOUR, *(COLOUR_OF[method.name] for method in methods)]
    handles = {f"{names[i]} is fastest": Rectangle((0, 0), 1, 1, fc=hues[i], alpha=0.35) for i in np.unique(best)}
    with matplotlib.rc_context(STYLE):
        figure = Figure((6.6, 4.2), layout="constrained")
        ax = figure.subplots()
        norm = BoundaryNorm(np.arange(len(names) + 1) - 0.5, len(names))
        ax.pcolormesh(contexts, rows, best, cmap=ListedColormap(hues), norm=norm, alpha=0.35, shading="nearest")
        for method in methods:
            values = model.multiplier(method, rows, contexts)
            if values.min() < 1 < values.max():
                colour = COLOUR_OF[method.name]
                ax.contour(contexts, rows, values, levels=[1.0], colors=[colour], linewidths=2)
                handles[f"{method.name} = {AUTOREGRESSIVE}"] = Line2D([], [], color=colour, lw=2)
        _log_axis(ax, found.context_tokens)
        ax.set_yscale("log", base=2)
        ax.set_yticks(found.batch, [str(b) for b in found.batch])
        ax.minorticks_off()
        ax.set_xlabel("context (tokens)")
        ax.set_ylabel("batch")
        ax.set_title(f"{found.title}: where which is fastest", fontsize=9)
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(file, dpi=DPI)


def _log_axis(ax: Axes, values: Sequence[float]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(values), [compact(value) for value in values])
    ax.minorticks_off()
