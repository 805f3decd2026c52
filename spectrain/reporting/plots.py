"""Plots of a benchmark's results as inline SVG, for `report.html`.

A method has the same colour and the same place in every plot: fastest first. Peers (Hugging Face's own generation) are
hatched, and dashes help the eye where there are more than eight lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from spectrain.decoding.tree import Source
from spectrain.measure.results import BASELINE
from spectrain.reporting.formats import bounds_of, number
from spectrain.reporting.svg import (
    BASELINE_COLOUR,
    COLOURS,
    DASHES,
    MAX_POINTS,
    WIDTH_IN,
    Plot,
    drawn,
    name_rows,
    plot_text,
)

STAGE_COLOURS = {
    "draft": "#d55e00",
    "forward": "#a9bfd3",
    "verify": "#009e73",
    "commit": "#cc79a7",
    "other": "#555555",
}
SOURCES = [source.name.lower() for source in Source if source is not Source.ROOT]
ROW_IN = 0.21  # of a bar
MAX_POSITIONS = 16


def ordered(methods: Mapping[str, Mapping]) -> list[str]:
    """Names of methods, fastest first; those without a speedup last."""
    return sorted(methods, key=lambda name: -(number(methods[name].get("speedup")) or 0.0))


def categories_of(methods: Mapping[str, Mapping]) -> list[str]:
    """Every category, in the order of the questions."""
    return list(dict.fromkeys(c for one in methods.values() for c in one.get("by_category") or {}))


def draw_plots(results: Mapping, rows: Sequence[Mapping], prefix: str = "") -> list[Plot]:
    """The plots of a report; those that would be empty are left out.

    Args:
        results: the content of `results.json`.
        rows: the lines of `questions.jsonl`.
        prefix: of the ids within the plots, where a page shows several benchmarks.
    """
    methods = results.get("methods") or {}
    views: list[tuple[str, str, Callable[[], Figure | None]]] = [
        (
            "Speedup",
            "How many times as fast as autoregressive decoding (dashed line) each method answered the same questions; "
            "whiskers are 95 % intervals.",
            lambda: _by_category(methods, "speedup", "times the speed of autoregressive decoding"),
        ),
        (
            "Mean accepted tokens",
            "Tokens that one forward of the target yields, its own token included; autoregressive decoding has 1 "
            "(dashed line), and whiskers are 95 % intervals.",
            lambda: _by_category(methods, "mean_accepted", "tokens a target forward"),
        ),
        (
            "Acceptance by draft position",
            "Of the steps that drafted a token at this depth behind the last known token, the share in which the "
            "target accepted one there; a cell is empty where a method never drafts so deep.",
            lambda: _by_position(methods),
        ),
        (
            "Acceptance by source",
            "Left, the share of each source's drafted tokens that the target accepted; right, how many accepted "
            "tokens the source adds to a step.",
            lambda: _by_source(methods),
        ),
        (
            "Accepted drafted tokens against steps",
            "Mean over questions of the drafted tokens accepted in the first n steps, each of which saves one target "
            "forward; a question that has ended keeps its total, and a line stops where half of them have ended.",
            lambda: _cumulative(methods, rows),
        ),
        (
            "Where the time goes",
            "Share of the decoding time after the prompt was read; all but the target's forward is the price of "
            "speculation and of the loop.",
            lambda: _time_share(methods),
        ),
    ]
    found = (drawn(title, explanation, draw, f"{prefix}p{i}-") for i, (title, explanation, draw) in enumerate(views))
    return [plot for plot in found if plot is not None]


def _by_category(methods: Mapping[str, Mapping], measure: str, axis_label: str) -> Figure | None:
    """A panel for all questions and one a category; in each a bar a method."""
    names, categories = ordered(methods), categories_of(methods)
    panels = [("all questions", [methods[name] for name in names])]
    if len(categories) > 1:
        panels += [(c, [(methods[n].get("by_category") or {}).get(c) or {} for n in names]) for c in categories]
    values = [v for _, panel in panels for one in panel if (v := number(one.get(measure))) is not None]
    if not values:
        return None
    highs = [ci[1] for _, panel in panels for one in panel if (ci := _interval(one, measure))]
    limit = max(1.0, *values, min(max(highs, default=0.0), 1.5 * max(values)))
    n_columns = min(3, len(panels))
    n_rows = -(-len(panels) // n_columns)
    figure = Figure((WIDTH_IN, n_rows * (ROW_IN * len(names) + 0.55) + 0.25), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.09)
    figure.supxlabel(axis_label, fontsize=8.5)
    grid = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False)
    colours = _colours(methods)
    for ax, (title, panel) in zip(grid.flat, panels, strict=False):
        ax.set_title(plot_text(title), fontsize=9, loc="left", fontweight="bold" if ax is grid[0, 0] else "normal")
        _bars(ax, panel, measure, limit, [colours[name] for name in names], [_is_peer(methods[name]) for name in names])
        ax.axvline(1.0, color="#333333", linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        ax.tick_params(labelbottom=True)
        ax.tick_params(axis="y", length=0)
    grid[0, 0].set_xlim(0, limit * 1.2)
    name_rows(grid[0, 0], [_method_label(name, methods[name]) for name in names])
    for ax in list(grid.flat)[len(panels) :]:
        ax.set_visible(False)
    return figure


def _bars(
    ax: Axes, panel: Sequence[Mapping], measure: str, limit: float, colours: Sequence[str], peers: Sequence[bool]
) -> None:
    """Values as horizontal bars, each with its interval and its number behind it."""
    values = [number(one.get(measure)) for one in panel]
    hatches = ["////" if peer else "" for peer in peers]
    ax.barh(range(len(panel)), [v or 0.0 for v in values], 0.72, color=colours, hatch=hatches, edgecolor="white")
    for y, (value, one) in enumerate(zip(values, panel, strict=True)):
        interval = _interval(one, measure)
        end = value or 0.0
        if value is not None and interval:
            ax.plot(interval, (y, y), color="#222222", linewidth=1.0, solid_capstyle="butt", zorder=3)
            end = max(value, min(interval[1], limit))
        text = "not measured" if value is None else f"{value:.2f}"
        paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # hides the line at 1
        ax.text(end + 0.025 * limit, y, text, va="center", fontsize=7.5, zorder=4, bbox=paper)


def _by_position(methods: Mapping[str, Mapping]) -> Figure | None:
    """A table of shares, shaded: rows are methods, columns depths."""
    shares = {n: [number(s) for s in methods[n].get("acceptance_by_position") or []] for n in ordered(methods)}
    shares = {name: row for name, row in shares.items() if any(share is not None for share in row)}
    if not shares:
        return None
    depths = min(MAX_POSITIONS, max(map(len, shares.values())))
    cells = np.full((len(shares), depths), np.nan)
    for y, row in enumerate(shares.values()):
        cells[y, : len(row)] = [np.nan if s is None else s for s in row[:depths]]
    figure = Figure((WIDTH_IN, ROW_IN * 1.25 * len(shares) + 0.75), layout="constrained")
    ax = figure.subplots()
    ax.pcolormesh(np.ma.masked_invalid(cells), cmap="Blues", vmin=0, vmax=1.1, edgecolors="white", linewidth=1.5)
    for (y, x), share in np.ndenumerate(cells):
        if not np.isnan(share):
            colour = "white" if share > 0.72 else "#222222"
            ax.text(x + 0.5, y + 0.5, f"{100 * share:.0f} %", ha="center", va="center", color=colour, fontsize=8)
    ax.set_xlim(0, max(depths, 5))  # few columns do not become wide ones
    ax.set_xticks(np.arange(depths) + 0.5, [str(d + 1) for d in range(depths)])
    longest = max(map(len, shares.values()))
    ax.set_xlabel("draft position (depth)" + (f"; the first {depths} of {longest}" if longest > depths else ""))
    name_rows(ax, [_method_label(name, methods[name]) for name in shares], offset=0.5)
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)
    return figure


def _by_source(methods: Mapping[str, Mapping]) -> Figure | None:
    """Two panels that share their rows, one row a method and source."""
    rows = []
    for name in ordered(methods):
        found = methods[name].get("acceptance_by_source") or {}
        known = [s for s in SOURCES if s in found] + [s for s in found if s not in SOURCES]
        rows += [(name, source, found[source]) for source in known if number(found[source].get("drafted"))]
    if not rows:
        return None
    colours = _colours(methods)
    figure = Figure((WIDTH_IN, ROW_IN * len(rows) + 0.7), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    gains = []
    for y, (name, _, counts) in enumerate(rows):
        accepted, drafted = number(counts.get("accepted")) or 0.0, number(counts["drafted"])
        steps = number(methods[name].get("target_forwards"))
        share, gain = accepted / drafted, accepted / steps if steps else 0.0
        gains.append(gain)
        for ax, length in ((left, share), (right, gain)):
            ax.barh(y, length, 0.72, color=colours[name])
        left.text(share + 0.01, y, f"{100 * share:.0f} % of {drafted:,.0f}", va="center", fontsize=7.5)
        right.annotate(f"{gain:.2f}", (gain, y), (3, 0), textcoords="offset points", va="center", fontsize=7.5)
    left.set_xlim(0, 1.3)
    left.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25 %", "50 %", "75 %", "100 %"])
    left.set_xlabel("accepted, of the tokens drafted from this source")
    right.set_xlim(0, max(*gains, 0.1) * 1.15)
    right.set_xlabel("accepted tokens a step")
    right.tick_params(axis="y", length=0)
    for y in range(1, len(rows)):
        if rows[y][0] != rows[y - 1][0]:
            for ax in (left, right):
                ax.axhline(y - 0.5, color="#cccccc", linewidth=0.6)
    name_rows(left, [f"{plot_text(name)} · {plot_text(source)}" for name, source, _ in rows])
    return figure


def cumulative_accepted(accepted: Sequence[Sequence[int]]) -> np.ndarray:
    """[n]: drafted tokens accepted in the first n steps, mean over questions; entry 0 is 0.

    A question that has ended keeps its total. The curve stops where half of the questions have ended.
    """
    lengths = sorted(map(len, accepted))
    n_steps = lengths[len(lengths) // 2]
    totals = np.zeros(n_steps + 1)
    for counts in accepted:
        own = np.cumsum([0, *counts[:n_steps]])
        totals += np.pad(own, (0, n_steps + 1 - len(own)), mode="edge")
    return totals / len(accepted)


def _cumulative(methods: Mapping[str, Mapping], rows: Sequence[Mapping]) -> Figure | None:
    """A line a method that drafts; the legend is in the order of what they gain a step."""
    curves, rates = {}, {}
    for name in methods:
        accepted = [r["accepted"] for r in rows if r.get("method") == name and not r.get("error") and r.get("accepted")]
        if accepted and number(methods[name].get("drafted")):
            curves[name] = cumulative_accepted(accepted)
            rates[name] = sum(map(sum, accepted)) / sum(map(len, accepted))
    if not curves:
        return None
    colours, dashes = _colours(methods), _dashes(methods)
    figure = Figure((WIDTH_IN, max(3.6, 0.2 * len(curves) + 0.8)), layout="constrained")
    ax = figure.subplots()
    for name in sorted(curves, key=lambda name: -rates[name]):
        curve = curves[name]
        steps = np.unique(np.linspace(0, len(curve) - 1, min(len(curve), MAX_POINTS)).astype(int))
        label = f"{plot_text(name)} ({rates[name]:.2f} a step)"
        ax.plot(steps, curve[steps], color=colours[name], linestyle=dashes[name], linewidth=1.7, label=label)
        ax.plot(steps[-1], curve[-1], "o", color=colours[name], markersize=4)
    ax.set_xlabel("steps (target forwards after the prompt)")
    ax.set_ylabel("drafted tokens accepted so far\n(mean over questions)")
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.grid(color="#e5e5e5", linewidth=0.6)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8, handlelength=2.8)
    return figure


def _time_share(methods: Mapping[str, Mapping]) -> Figure | None:
    """A stacked bar a method; what is not the forward is added up at its end."""
    shares = {name: methods[name].get("time_share") or {} for name in ordered(methods)}
    shares = {name: share for name, share in shares.items() if number(share.get("forward")) is not None}
    if not shares:
        return None
    figure = Figure((WIDTH_IN, ROW_IN * 1.15 * len(shares) + 0.9), layout="constrained")
    ax = figure.subplots()
    for y, share in enumerate(shares.values()):
        begin = 0.0
        for stage, colour in STAGE_COLOURS.items():
            part = number(share.get(stage)) or 0.0
            ax.barh(y, part, 0.76, left=begin, color=colour, label=stage if y == 0 else "")
            if part >= 0.05:
                ink = "#222222" if sum(to_rgb(colour)) > 1.5 else "white"
                ax.text(begin + part / 2, y, f"{100 * part:.0f} %", ha="center", va="center", fontsize=7.5, color=ink)
            begin += part
        outside = begin - (number(share.get("forward")) or 0.0)
        ax.text(max(begin, 1.0) + 0.01, y, f"{100 * outside:.1f} % outside the forward", va="center", fontsize=7.5)
    ax.set_xlim(0, 1.25)
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25 %", "50 %", "75 %", "100 %"])
    figure.legend(loc="outside upper left", ncols=len(STAGE_COLOURS), frameon=False, fontsize=8)
    name_rows(ax, [plot_text(name) for name in shares])
    return figure


def _colours(methods: Mapping[str, Mapping]) -> dict[str, str]:
    others = [name for name in methods if name != BASELINE]
    return {BASELINE: BASELINE_COLOUR} | {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(others)}


def _dashes(methods: Mapping[str, Mapping]) -> dict[str, object]:
    others = [name for name in methods if name != BASELINE]
    return {BASELINE: "-"} | {name: DASHES[i // 8 % len(DASHES)] for i, name in enumerate(others)}


def _is_peer(method: Mapping) -> bool:
    return method.get("kind") == "peer"


def _interval(one: Mapping, measure: str) -> tuple[float, float] | None:
    return bounds_of(one.get(f"{measure}_ci95"))


def _method_label(name: str, method: Mapping) -> str:
    return plot_text(name) + (" (peer)" if _is_peer(method) else "")
