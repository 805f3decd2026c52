"""Figures as inline SVG for HTML pages, their colours and labels."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BASELINE_COLOUR = "#777777"
COLOURS = (  # for the colour-blind: Okabe and Ito's without yellow and black, then Tol's muted ones
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#332288", "#882255"),
    *("#999933", "#44aa99", "#aa4499", "#117733", "#cc6677", "#661100", "#88ccee", "#ddcc77"),
)
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)))
WIDTH_IN = 10.4
LABEL_CHARACTERS = 26
MAX_POINTS = 400  # of a line
STYLE = {
    "svg.fonttype": "none",
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
}


@dataclass(frozen=True)
class Plot:
    """A figure and what a reader must know to read it."""

    title: str
    explanation: str
    svg: str


def drawn(title: str, explanation: str, draw: Callable[[], Figure | None], prefix: str) -> Plot | None:
    """The plot that `draw` makes, or None where it has nothing to show.

    Args:
        title: its heading.
        explanation: what is on its axes, and what is better.
        draw: makes the figure.
        prefix: of the ids within the SVG; no two figures of a page share one.
    """
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": title}):
        figure = draw()
        return Plot(title, explanation, svg_of(figure, prefix)) if figure is not None else None


def svg_of(figure: Figure, prefix: str) -> str:
    """The figure as an SVG element, whose ids differ from those of the other figures of the page."""
    buffer = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # text is drawn by the reader's browser and fonts
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg, count=2)  # HTML knows both
    return re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{prefix}", svg)


def plot_text(name: str) -> str:
    """A name as plot text: cut to a length, and no `$` starts a formula."""
    name = name if len(name) <= LABEL_CHARACTERS else f"{name[: LABEL_CHARACTERS - 1]}…"
    return name.replace("$", r"\$")


def name_rows(ax: Axes, labels: Sequence[str], offset: float = 0.0) -> None:
    """Row names at the left, the first row on top."""
    ax.set_yticks(np.arange(len(labels)) + offset, labels)
    ax.set_ylim(len(labels) - 0.5 + offset, -0.5 + offset)
    ax.tick_params(axis="y", length=0)
