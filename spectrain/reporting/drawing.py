"""How every figure looks, panels of bars and of lines, and how a figure gets into a page or a file."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

BASELINE_COLOUR, GREY, INK = "#777777", "#c4c4c4", "#222222"
COLOURS = (  # for colour-blind readers: Okabe and Ito's without yellow and black, then Tol's muted ones
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#332288", "#882255"),
    *("#999933", "#44aa99", "#aa4499", "#117733", "#cc6677", "#661100", "#88ccee", "#ddcc77"),
)
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)))  # of lines 1 to 8, 9 to 16, ...
WIDTH_IN, ROW_IN, PNG_DPI = 10.4, 0.21, 130
LABEL_CHARACTERS = 26
MAX_POINTS = 400  # of a line

# Every figure is drawn and saved in this style. As a decorator it leaves matplotlib's own settings as they were.
styled = matplotlib.rc_context(
    {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "spectrain",  # the same figure gives the same ids
        "text.parse_math": False,  # a `$` in a name starts no formula
        "figure.constrained_layout.use": True,
        "font.size": 8.5,
        "axes.titlesize": 9,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.prop_cycle": matplotlib.cycler(color=COLOURS),
        "grid.color": "#e5e5e5",
        "grid.linewidth": 0.6,
        "hatch.linewidth": 0.6,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "legend.handlelength": 2.8,
        "lines.linewidth": 1.4,
        "lines.markersize": 3.5,
    }
)


@dataclass(frozen=True)
class Plot:
    """A figure for a page, and what a reader must know to read it."""

    title: str
    explanation: str
    svg: Markup


def plots_of(figures: Mapping[str, Figure | None], explanations: Mapping[str, str], prefix: str) -> list[Plot]:
    """Figures with their titles as plots for a page; None is left out. The prefix is that of the ids within them."""
    found = {title: figure for title, figure in figures.items() if figure is not None}
    return [Plot(t, explanations[t], inline_svg(f, f"{prefix}p{i}-")) for i, (t, f) in enumerate(found.items())]


@styled
def inline_svg(figure: Figure, prefix: str = "") -> Markup:
    """The figure as an SVG element for HTML, with text as text; the same figure gives the same characters.

    Args:
        figure: to draw.
        prefix: of its ids, different for each figure of a page.
    """
    buffer = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the reader's browser draws the text with its own fonts
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = buffer.getvalue()
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg[svg.index("<svg") :], count=2)  # HTML knows both
    return Markup(re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{prefix}", svg))


@styled
def write_png(figure: Figure, file: Path | IO[bytes]) -> None:
    """Write the figure as a PNG."""
    figure.savefig(file, format="png", dpi=PNG_DPI)


def shortened(name: str, characters: int = LABEL_CHARACTERS) -> str:
    return name if len(name) <= characters else f"{name[: characters - 1]}…"


def thinned(values: Sequence) -> list:
    """At most MAX_POINTS of the values, evenly taken, with the first and the last."""
    return [values[int(i)] for i in np.linspace(0, len(values) - 1, min(len(values), MAX_POINTS))]


def ink_on(colour: object) -> str:
    """Dark or white, whichever can be read on this colour."""
    red, green, blue = to_rgb(colour)
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def grid_of(n: int, n_columns: int, panel_in: tuple[float, float], **share: object) -> tuple[Figure, list[Axes]]:
    """A figure with n panels in rows; unused places of the grid stay empty."""
    n_columns = min(n_columns, n)
    n_rows = -(-n // n_columns)
    figure = Figure((panel_in[0] * n_columns, panel_in[1] * n_rows + 0.3))
    figure.get_layout_engine().set(h_pad=0.08)
    axes = list(figure.subplots(n_rows, n_columns, squeeze=False, **share).flat)
    for i, ax in enumerate(axes):
        ax.set_visible(i < n)
        ax.tick_params(labelbottom=True)
    return figure, axes[:n]


def name_rows(ax: Axes, labels: Sequence[str]) -> None:
    """Label the rows 0, 1, ... at the left, the first one on top."""
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)


def draw_cells(ax: Axes, cells: np.ndarray, norm: Normalize, colours: str, text: Callable[[float], str]) -> None:
    """Draw a heat map whose cells say their number; cells that are nan stay empty."""
    cmap, (height, width) = matplotlib.colormaps[colours], cells.shape
    edges = np.arange(width + 1) - 0.5, np.arange(height + 1) - 0.5
    ax.pcolormesh(*edges, np.ma.masked_invalid(cells), norm=norm, cmap=cmap, edgecolors="white", linewidth=1.0)
    for (y, x), cell in np.ndenumerate(cells):
        if not np.isnan(cell):
            colour = ink_on(cmap(float(norm(cell))))
            ax.text(x, y, text(cell), ha="center", va="center", color=colour, fontsize=7.5)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


@styled
def bar_panels(
    panels: Mapping[str, Sequence[tuple]],
    rows: Sequence[tuple[str, Mapping]],
    axis_label: str | None = None,
    *,
    n_columns: int = 2,
    plain_decoding: float | None = 1.0,
    marks: Mapping[str, Sequence[float | None]] | None = None,
    mark_label: str = "",
) -> Figure | None:
    """Horizontal bars with 95 % intervals and numbers; None without any value.

    Args:
        panels: title -> (value or None, bounds or None) of each row, and the bar's text where it is not the value.
        rows: label and style of each, the same in every panel.
        axis_label: below all panels, which then have one scale; without, the titles are the labels of the axes.
        n_columns: of the grid of panels.
        plain_decoding: where a dashed line is drawn.
        marks: title -> values of the rows that are drawn as diamonds.
        mark_label: what the diamonds are.
    """
    if not any(value is not None for panel in panels.values() for value, *_ in panel):
        return None
    share = {"sharex": axis_label is not None, "sharey": True}
    figure, axes = grid_of(
        len(panels), n_columns, (WIDTH_IN / min(n_columns, len(panels)), ROW_IN * len(rows) + 0.6), **share
    )
    limits = [limit_of(panel) for panel in panels.values()]
    for ax, (title, panel), limit in zip(axes, panels.items(), limits, strict=True):
        limit = max(limits) if axis_label else limit
        for y, ((value, bounds, *text), (_, style)) in enumerate(zip(panel, rows, strict=True)):
            ax.barh(y, value or 0.0, 0.72, edgecolor="white", **style)
            if value is not None and bounds:
                ax.plot(bounds, (y, y), color=INK, linewidth=1.0, solid_capstyle="butt", zorder=3)
            mark = (marks or {}).get(title, [None] * len(rows))[y] or 0.0
            end = max(value or 0.0, mark, min(bounds[1], limit) if value is not None and bounds else 0.0)
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # hides the dashed line
            text = text[0] if text else "not measured" if value is None else f"{value:.2f}"
            ax.text(end + 0.025 * limit, y, text, va="center", fontsize=7.5, zorder=4, bbox=paper)
            if mark:
                ax.plot(mark, y, "D", color="black", markersize=4, zorder=5)
        if plain_decoding is not None:
            ax.axvline(plain_decoding, color="#333333", linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        ax.set(xlim=(0, 1.2 * limit), **{"title" if axis_label else "xlabel": shortened(title, 70)})
        ax.tick_params(axis="y", length=0)
    figure.supxlabel(axis_label or "", fontsize=8.5)
    name_rows(axes[0], [label for label, _ in rows])
    if marks:
        handle = Line2D([], [], color="black", marker="D", linestyle="", markersize=4)
        figure.legend([handle], [mark_label], loc="outside upper right")
    return figure


def limit_of(panel: Sequence[tuple]) -> float:
    """The end of a panel's longest bar or interval; an interval far beyond all bars is cut off."""
    values = [value for value, *_ in panel if value is not None]
    highs = [bounds[1] for _, bounds, *_ in panel if bounds]
    return max(0.1, *values, min(max(highs, default=0.0), 1.5 * max(values, default=0.0)))


@styled
def line_panels(
    panels: Mapping[str, Sequence[Mapping]],
    xlabel: str,
    ylabel: str = "",
    *,
    n_columns: int = 3,
    panel_in: tuple[float, float] = (WIDTH_IN / 2, 2.6),
    log_ticks: Mapping[float, str] | None = None,
    **limits: object,
) -> Figure | None:
    """Lines with markers and whiskers, and one legend below all panels; None without any line.

    Args:
        panels: title -> lines: `points` (x, y), `bounds` of the points where they are known, and a style.
        xlabel, ylabel: of the axes.
        n_columns: of the grid of panels.
        panel_in: width and height of each.
        log_ticks: of an x-axis in powers of 2.
        limits: further properties of the axes, such as `ylim`.
    """
    if not any(panels.values()):
        return None
    figure, axes = grid_of(len(panels), n_columns, panel_in)
    handles = {}
    for ax, (title, lines) in zip(axes, panels.items(), strict=True):
        for line in lines:
            style = {key: value for key, value in line.items() if key not in ("points", "bounds")}
            (handle,) = ax.plot(*zip(*line["points"], strict=True), **style)
            for (x, _), bounds in zip(line["points"], line.get("bounds", ()), strict=False):
                if bounds:
                    ax.plot((x, x), bounds, color=handle.get_color(), linewidth=1.0)
            if "label" in style:
                handles.setdefault(style["label"], handle)
        if log_ticks:
            ax.set_xscale("log", base=2)
            ax.set_xticks(list(log_ticks), log_ticks.values())
            ax.minorticks_off()
        ax.set(title=title, xlabel=xlabel, **limits)
        ax.grid()
        if ax.get_subplotspec().is_first_col():
            ax.set_ylabel(ylabel)
    if handles:  # the figure grows by what its legend takes
        width, height = figure.get_size_inches()
        n_columns = max(1, min(len(handles), 4, int(width / (0.068 * max(map(len, handles)) + 0.55))))
        figure.set_size_inches(width, height + 0.17 * -(-len(handles) // n_columns) + 0.1)
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=n_columns)
    return figure
