"""How every figure looks, panels of bars, of lines and of cells, and how a figure gets into a page or a file."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, to_rgb
from matplotlib.figure import Figure

from spectrain.stores.writing import write_whole

BASELINE_COLOUR, GREY, INK = "#777777", "#c4c4c4", "#222222"
COLOURS = (  # for colour-blind readers: Okabe and Ito's without yellow and black, then Tol's muted ones
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#332288", "#882255"),
    *("#999933", "#44aa99", "#aa4499", "#117733", "#cc6677", "#661100", "#88ccee", "#ddcc77"),
)
DASHES = ("-", (0, (4, 1.5)))  # of the first eight colours and of the others
STYLES = tuple({"color": colour, "linestyle": DASHES[i // 8]} for i, colour in enumerate(COLOURS))
WIDTH_IN, ROW_IN = 10.4, 0.21  # of a page, and of a bar
LABEL_CHARACTERS, TITLE_CHARACTERS = 26, 70
MAX_POINTS = 400  # of a line

# Every figure is drawn and saved in this style. As a decorator it leaves matplotlib's own settings as they were.
styled = matplotlib.rc_context(
    {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "spectrain",  # the same figure gives the same ids
        "text.parse_math": False,  # a `$` in a name starts no formula
        "figure.constrained_layout.use": True,
        "figure.constrained_layout.h_pad": 0.08,
        "savefig.dpi": 130,
        "font.size": 8.5,
        "axes.titlesize": 9,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
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


class Line(NamedTuple):
    """Points (x, y) of a line, its style, and the whiskers (low, high) of the points or None."""

    points: Sequence[tuple[float, float]]
    style: Mapping
    whiskers: Iterable[tuple[float, float] | None]


def line(points: Iterable[tuple[float, float]], whiskers: Iterable = (), **style: object) -> Line:
    return Line(list(points), style, whiskers)


@styled
def inline_svgs(figures: Mapping[str, Figure | None], prefix: str) -> dict[str, Markup]:
    """Title -> SVG element for HTML of the figures that are not None; the same figure gives the same characters.

    Text stays text. The prefix is that of all their ids, different for each call of a page.
    """
    found = {}
    for title, figure in figures.items():
        if figure is not None:
            buffer = io.StringIO()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Glyph")  # the browser draws the text with its own fonts
                figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
            svg = buffer.getvalue()
            svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg[svg.index("<svg") :], count=2)  # HTML knows both
            own = f"{prefix}p{len(found)}-"
            found[title] = Markup(re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{own}", svg))
    return found


def write_png(figure: Figure, file: Path) -> None:
    """Write the figure as a PNG."""
    write_whole(file, png_bytes(figure))


@styled
def png_bytes(figure: Figure) -> bytes:
    """Return the figure as the content of a PNG."""
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def shortened(name: str, characters: int = LABEL_CHARACTERS) -> str:
    return name if len(name) <= characters else f"{name[: characters - 1]}…"


def thinned(values: Sequence) -> list:
    """At most MAX_POINTS of the values, evenly taken, with the first and the last."""
    return [values[int(i)] for i in np.linspace(0, len(values) - 1, min(len(values), MAX_POINTS))]


def grid_of(n: int, n_columns: int, panel_in: tuple[float, float], **share: bool) -> tuple[Figure, list[Axes]]:
    """A figure with n panels in rows; unused places of the grid stay empty."""
    n_columns = min(n_columns, n)
    n_rows = -(-n // n_columns)
    figure = Figure((panel_in[0] * n_columns, panel_in[1] * n_rows + 0.3))
    axes = list(figure.subplots(n_rows, n_columns, squeeze=False, **share).flat)
    for i, ax in enumerate(axes):
        ax.set_visible(i < n)
        ax.tick_params(labelbottom=True)
    return figure, axes[:n]


def name_rows(ax: Axes, labels: Sequence[str]) -> None:
    """Label the rows 0, 1, ... at the left, the first one on top."""
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.5, -0.5)


@styled
def cell_panels(
    panels: Mapping[str, np.ndarray],
    rows: Sequence[str],
    columns: Sequence[str],
    norm: Normalize,
    colours: str,
    text: Callable[[float], str],
    panel_in: tuple[float, float],
    **labels: object,
) -> Figure:
    """Heat maps below one another, whose cells say their number in dark or white; cells that are nan stay empty."""
    figure, axes = grid_of(len(panels), 1, panel_in)
    cmap = matplotlib.colormaps[colours]
    for ax, (title, cells) in zip(axes, panels.items(), strict=True):
        edges = [np.arange(n + 1) - 0.5 for n in cells.shape[::-1]]
        ax.pcolormesh(*edges, np.ma.masked_invalid(cells), norm=norm, cmap=cmap, edgecolors="white", linewidth=1.0)
        for (y, x), cell in np.ndenumerate(cells):
            if not np.isnan(cell):
                is_light = np.dot(to_rgb(cmap(float(norm(cell)))), (0.299, 0.587, 0.114)) > 0.5
                ax.text(x, y, text(cell), ha="center", va="center", fontsize=7.5, color=INK if is_light else "white")
        ax.set_xticks(range(len(columns)), columns)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
        name_rows(ax, rows)
        ax.set(title=title, **labels)
    return figure


def share_table(
    rows: Mapping[str, Sequence[float | None]], columns: Sequence[str], xlabel: str = "", digits: int = 0
) -> Figure | None:
    """A heat map of shares in per cent: name -> share in each column."""
    if not rows:
        return None
    cells = np.full((len(rows), len(columns)), np.nan)
    for y, row in enumerate(rows.values()):
        cells[y, : len(row)] = [np.nan if share is None else share for share in row[: len(columns)]]
    look = Normalize(0, 1.1), "Blues", lambda share: f"{100 * share:.{digits}f} %"
    panel_in = (WIDTH_IN, ROW_IN * 1.25 * len(rows) + 0.45)
    xlim = (-0.5, max(len(columns), 5) - 0.5)  # few columns do not become wide ones
    return cell_panels({"": cells}, [*map(shortened, rows)], columns, *look, panel_in, xlim=xlim, xlabel=xlabel)


@styled
def bar_panels(
    panels: Mapping[str, Sequence[tuple]],
    rows: Sequence[tuple[str, Mapping]],
    axis_label: str | None = None,
    n_columns: int = 2,
    marks: tuple[str, Mapping[str, Sequence[float | None]]] | None = None,
) -> Figure | None:
    """Horizontal bars with 95 % intervals and numbers; None without any value.

    Args:
        panels: title -> (value or None, bounds or None) of each row, and the bar's text where it is not the value.
        rows: label and style of each, the same in every panel.
        axis_label: of all panels, which then have one scale and a dashed line at 1, plain decoding; without it each
            title is the label of its panel's own axis.
        n_columns: of the grid of panels.
        marks: what diamonds mean, and title -> their values in the rows.
    """
    panels = {title: [(*one, None)[:3] for one in panel] for title, panel in panels.items()}
    if all(value is None for panel in panels.values() for value, *_ in panel):
        return None
    mark_label, places = marks or ("", {})
    size = (WIDTH_IN / min(n_columns, len(panels)), ROW_IN * len(rows) + 0.6)
    figure, axes = grid_of(len(panels), n_columns, size, sharex=axis_label is not None, sharey=True)
    limits = dict(zip(panels, map(_limit, panels.values()), strict=True))
    for ax, (title, panel) in zip(axes, panels.items(), strict=True):
        limit = max(limits.values()) if axis_label else limits[title]
        diamonds = places.get(title) or [None] * len(rows)
        for y, ((value, bounds, text), (_, style), mark) in enumerate(zip(panel, rows, diamonds, strict=True)):
            ax.barh(y, value or 0.0, 0.72, edgecolor="white", **style)
            if value is not None and bounds:
                ax.plot(bounds, (y, y), color=INK, linewidth=1.0, solid_capstyle="butt", zorder=3)
            if mark is not None:
                handle = ax.plot(mark, y, "D", color="black", markersize=4, zorder=5)
            end = max(value or 0.0, mark or 0.0, min(bounds[1], limit) if value is not None and bounds else 0.0)
            text = text or ("not measured" if value is None else f"{value:.2f}")
            text += f" (paper {mark:.2f})" if mark is not None else ""
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # hides the dashed line
            ax.text(end + 0.025 * limit, y, text, va="center", fontsize=7.5, zorder=4, bbox=paper)
        if axis_label:
            ax.axvline(1.0, color="#333333", linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        ax.set(
            xlim=(0, (1.4 if places else 1.2) * limit),
            **{"title" if axis_label else "xlabel": shortened(title, TITLE_CHARACTERS)},
        )
        ax.tick_params(axis="y", length=0)
    figure.supxlabel(axis_label or "", fontsize=8.5)
    name_rows(axes[0], [label for label, _ in rows])
    if places:
        figure.legend(handle, [mark_label], loc="outside upper right")
    return figure


def _limit(panel: Sequence[tuple]) -> float:
    """The end of a panel's longest bar or interval; an interval far beyond all bars is cut off."""
    longest = max([value for value, *_ in panel if value is not None], default=0.0)
    highs = [bounds[1] for _, bounds, _ in panel if bounds]
    return max(0.1, longest, min(max(highs, default=0.0), 1.5 * longest))


@styled
def line_panels(
    panels: Mapping[str, Sequence[Line]],
    xlabel: str,
    ylabel: str = "",
    n_columns: int = 3,
    panel_in: tuple[float, float] = (WIDTH_IN / 2, 2.6),
    log_ticks: Mapping[float, str] | None = None,
    **limits: object,
) -> Figure | None:
    """Lines with markers and whiskers, and one legend below all panels; None without any line.

    Args:
        panels: title -> lines.
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
        for points, style, whiskers in lines:
            (handle,) = ax.plot(*zip(*points, strict=True), **style)
            handles.setdefault(style.get("label"), handle)
            for (x, _), bounds in zip(points, whiskers, strict=False):
                if bounds:
                    ax.plot((x, x), bounds, color=handle.get_color(), linewidth=1.0)
        if log_ticks:
            ax.set_xscale("log", base=2)
            ax.set_xticks(list(log_ticks), log_ticks.values())
            ax.minorticks_off()
        ax.set(title=title, xlabel=xlabel, ylabel=ylabel if ax.get_subplotspec().is_first_col() else "", **limits)
        ax.grid()
    handles.pop(None, None)
    if handles:  # the figure grows by what its legend takes
        width, height = figure.get_size_inches()
        n_columns = max(1, min(len(handles), 4, int(width / (0.068 * max(map(len, handles)) + 0.55))))
        figure.set_size_inches(width, height + 0.17 * -(-len(handles) // n_columns) + 0.1)
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=n_columns)
    return figure
