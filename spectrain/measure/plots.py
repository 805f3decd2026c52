"""The project's figures: bars with intervals, and lines.

Functions take the content of JSON files and return a matplotlib `Figure`, or None where there is nothing to show.
`svg` makes one part of a page, in the colours of its text, and `write_png` a file.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from spectrain.measure.tables import estimate_of, number, ordered
from spectrain.methods.registry import BASELINE
from spectrain.stores.files import write_whole

INK = "#1b1e24"  # of text and axes; a page draws them in the colour of its own text
GREY = "#8a8f98"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7a5fd0", "#a0522d")  # Okabe and Ito's
BAR_IN, PANEL_IN = 0.24, (5.0, 2.7)
MAX_POSITIONS = 16
ALPHA_STEP = re.compile(r"eval/alpha_step_(\d+)")
TAU_AXIS = "acceptance length tau (tokens per target forward pass)"
CURVES = {  # metric of a training -> title of its panel
    "train/loss": "training loss (lower is better)",
    "eval/loss": "loss on held-out rows (lower is better)",
    "eval/alpha": "acceptance rate on held-out rows (higher is better)",
    "eval/tau_expected": "tau expected on held-out rows (higher is better)",
    "eval/kl_binary": "KL of labels and predictions, nats (lower is better)",
    "eval/calibration_error": "calibration error (lower is better)",
}
styled = matplotlib.rc_context(
    {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "spectrain",  # the same figure gives the same ids
        "text.parse_math": False,  # a `$` in a name starts no formula
        "figure.constrained_layout.use": True,
        "savefig.dpi": 130,
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.color": "#80808040",
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    }
)


class Line(NamedTuple):
    """A line of a figure: points (x, y), name and colour."""

    points: Sequence[tuple[float, float]]
    label: str | None = None
    colour: str = COLOURS[0]
    style: str = "-"


@styled
def svg(figure: Figure, prefix: str) -> Markup:
    """Return an SVG element for HTML. All its ids begin with the prefix, which no other figure of the page has."""
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    text = buffer.getvalue()
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text[text.index("<svg") :], count=2)  # HTML knows both
    return Markup(re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{prefix}", text).replace(INK, "currentColor"))


@styled
def write_png(figure: Figure, file: Path) -> None:
    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_whole(file, content.getvalue())


def grid_of(n: int, width_in: float, height_in: float) -> tuple[Figure, list[Axes]]:
    """Make a figure with n panels of this size, two beside each other; unused places of the grid stay empty."""
    n_columns, n_rows = min(2, n), -(-n // 2)
    figure = Figure((width_in * n_columns, height_in * n_rows + 0.3))
    axes = list(figure.subplots(n_rows, n_columns, squeeze=False).flat)
    for ax in axes[n:]:
        ax.set_visible(False)
    return figure, axes[:n]


def shortened(name: str, characters: int = 32) -> str:
    return name if len(name) <= characters else f"{name[: characters - 1]}…"


@styled
def bars(panels: Mapping[str, Mapping[str, Mapping]], colours: Mapping[str, str]) -> Figure | None:
    """Draw horizontal bars with 95 % intervals and numbers, and a dashed line at 1, plain decoding.

    Args:
        panels: title -> name -> estimate, or `why` there is none. All panels have the same names.
        colours: by name.
    """
    if not any(number(one.get("value")) for panel in panels.values() for one in panel.values()):
        return None
    figure, axes = grid_of(len(panels), PANEL_IN[0], BAR_IN * len(colours) + 0.6)
    for i, (ax, (title, panel)) in enumerate(zip(axes, panels.items(), strict=True)):
        values = [number(one.get("value")) or 0.0 for one in panel.values()]
        end = 1.3 * max(values)
        for y, (name, one) in enumerate(panel.items()):
            value, low, high = (number(one.get(key)) for key in ("value", "low", "high"))
            ax.barh(y, value or 0.0, 0.72, color=colours[name])
            if None not in (low, high):
                ax.plot((low, high), (y, y), color=INK, linewidth=1.0)
            text = one.get("why") or "not measured" if value is None else f"{value:.2f}"
            ax.text(max(value or 0.0, min(high or 0.0, end)) + 0.02 * end, y, text, va="center", fontsize=8)
        ax.axvline(1.0, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
        ax.set_yticks(range(len(panel)), [shortened(name) if i % 2 == 0 else "" for name in panel])
        ax.tick_params(axis="y", length=0)
        ax.set(title=title, xlim=(0, end), ylim=(len(panel) - 0.5, -0.5))
    return figure


@styled
def lines(panels: Mapping[str, Sequence[Line]], xlabel: str, ylabel: str = "", **limits: object) -> Figure | None:
    """Draw lines, and one legend below all panels. `limits` are further properties of the axes."""
    panels = {title: panel for title, panel in panels.items() if panel}
    if not panels:
        return None
    figure, axes = grid_of(len(panels), *PANEL_IN)
    handles = {}
    for ax, (title, panel) in zip(axes, panels.items(), strict=True):
        for points, label, colour, style in panel:
            marker = "o" if len(points) <= 40 else ""
            (handle,) = ax.plot(*zip(*points, strict=True), style, color=colour, marker=marker, markersize=3.5)
            handles.setdefault(label, handle)
        ax.set(title=title, xlabel=xlabel, ylabel=ylabel, **limits)
        if "xlim" not in limits:  # steps, positions and draft lengths
            ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        ax.grid(True)
    handles.pop(None, None)
    if handles:
        names = [shortened(name, 60) for name in handles]
        figure.legend(handles.values(), names, loc="outside lower center", ncols=3 if len(names) > 2 else 2)
    return figure


# Benchmarks. `methods` is that of results.json.


def benchmark_figures(methods: Mapping[str, Mapping]) -> dict[str, Figure]:
    """Draw a benchmark. Returns figures by title."""
    names, others = ordered(methods), cycle(COLOURS)
    colours = {name: GREY if name == BASELINE else next(others) for name in names}
    measures = {"speedup over autoregressive decoding": "speedup", TAU_AXIS: "mean_accepted"}
    panels = {title: {n: estimate_of(methods[n], measure) for n in names} for title, measure in measures.items()}
    for name, one in next(iter(panels.values())).items():
        one["why"] = methods[name].get("no_speedup")
    positions = []
    for name in names:
        rates = (methods[name].get("acceptance_by_position") or [])[:MAX_POSITIONS]
        points = [(i, rate) for i, rate in enumerate(rates, 1) if number(rate) is not None]
        if points:
            positions.append(Line(points, label=name, colour=colours[name]))
    found = {
        "Speedup and acceptance length": bars(panels, {name: colours[name] for name in names}),
        "Acceptance by position in the draft": positions_figure(positions),
    }
    return {title: figure for title, figure in found.items() if figure is not None}


def positions_figure(panel: Sequence[Line]) -> Figure | None:
    return lines({"": panel}, "position in the draft", "acceptance rate", ylim=(-0.02, 1.02))


# Trainings


def training_pictures(curve: Mapping[int, Mapping]) -> dict[str, Figure]:
    """Draw what a training logged, step -> metric -> value: its "curve", and the "acceptance" by position.

    The acceptance is that of the last validation.
    """
    panels = {
        title: [Line(points)]
        for metric, title in CURVES.items()
        if (points := [(step + 1, row[metric]) for step, row in curve.items() if number(row.get(metric)) is not None])
    }
    rates = [{int(m[1]): row[key] for key in row if (m := ALPHA_STEP.fullmatch(key))} for row in curve.values()]
    points = sorted(next((found for found in reversed(rates) if found), {}).items())
    found = {
        "curve": lines(panels, "optimizer steps"),
        "acceptance": positions_figure([Line(points)] if points else []),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def calibration(bins: Sequence[Mapping]) -> Figure | None:
    """Draw the mean label of an acceptance head by its mean prediction, and how many positions lie there.

    Args:
        bins: with `positions`, `predicted` and `label`.
    """
    bins = [one for one in bins if number(one.get("positions"))]
    if not bins:
        return None
    total = sum(one["positions"] for one in bins)
    panels = {
        "share accepted (mean label)": [
            Line([(0, 0), (1, 1)], label="calibrated", colour=GREY, style="--"),
            Line([(one["predicted"], one["label"]) for one in bins], label="head"),
        ],
        "share of positions": [Line([(one["predicted"], one["positions"] / total) for one in bins], label="head")],
    }
    return lines(panels, "predicted acceptance probability", xlim=(0, 1))
