"""The project's figures: bars with intervals, and lines.

Functions take the content of JSON files and return a matplotlib `Figure`, or None where there is nothing to show.
`svg` makes one part of a page, in the colours of its text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from itertools import cycle

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from spectrain.measure.tables import estimate_of, number, ordered
from spectrain.methods.registry import BASELINE

INK = "#1b1e24"  # of text and axes; a page draws them in the colour of its own text
GREY = "#8a8f98"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7a5fd0", "#a0522d")  # Okabe and Ito's
BAR_IN, PANEL_IN = 0.24, (5.0, 2.7)
MAX_POSITIONS = 16
TAU_AXIS = "acceptance length tau (tokens per target forward pass)"
styled = matplotlib.rc_context(
    {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "spectrain",  # the same figure gives the same ids
        "text.parse_math": False,  # a `$` in a name starts no formula
        "figure.constrained_layout.use": True,
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
    figure = Figure((PANEL_IN[0] * len(panels), BAR_IN * len(colours) + 0.9))
    axes = figure.subplots(1, len(panels), squeeze=False).flat
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
def positions(rates: Mapping[str, Sequence[float | None]], colours: Mapping[str, str]) -> Figure | None:
    """Draw the acceptance rate at each position of the draft, one line per method."""
    known = ({i: rate for i, rate in enumerate(of, 1) if number(rate) is not None} for of in rates.values())
    found = {name: points for name, points in zip(rates, known, strict=True) if points}
    if not found:
        return None
    figure = Figure((PANEL_IN[0], PANEL_IN[1] + 0.3))
    ax = figure.subplots()
    for name, points in found.items():
        label = shortened(name, 60)
        ax.plot([*points], [*points.values()], marker="o", markersize=3.5, color=colours[name], label=label)
    ax.set(xlabel="position in the draft", ylabel="acceptance rate", ylim=(-0.02, 1.02))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.grid(True)
    figure.legend(loc="outside lower center", ncols=3 if len(found) > 2 else 2)
    return figure


def benchmark_figures(methods: Mapping[str, Mapping]) -> dict[str, Figure]:
    """Draw a benchmark. Returns figures by title."""
    names, others = ordered(methods), cycle(COLOURS)
    colours = {name: GREY if name == BASELINE else next(others) for name in names}
    measures = {"speedup over autoregressive decoding": "speedup", TAU_AXIS: "mean_accepted"}
    panels = {title: {n: estimate_of(methods[n], measure) for n in names} for title, measure in measures.items()}
    for name, one in next(iter(panels.values())).items():
        one["why"] = methods[name].get("no_speedup")
    rates = {name: (methods[name].get("acceptance_by_position") or [])[:MAX_POSITIONS] for name in names}
    found = {
        "Speedup and acceptance length": bars(panels, {name: colours[name] for name in names}),
        "Acceptance by position in the draft": positions(rates, colours),
    }
    return {title: figure for title, figure in found.items() if figure is not None}
