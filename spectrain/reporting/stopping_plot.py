"""Discard rate against verification rate of stop rules, as SpecDec++'s Figure 3."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spectrain.measure.stop_simulation import FIXED, HEAD

# Shades and shapes differ as well as colours: the plot is read in grayscale, too.
STYLES = {
    FIXED: {"color": "#0072b2", "marker": "s", "linestyle": "--"},
    "confidence": {"color": "#e69f00", "marker": "^", "linestyle": ":"},
    "entropy": {"color": "#009e73", "marker": "v", "linestyle": "-."},
}
HEADROOM = 1.15  # of the largest fixed length's discard rate; what lies above is cut off


def draw_fronts(results: Mapping, file: Path | IO[bytes]) -> None:
    """Writes a PNG of `stopping_results`: every setting, and the front of all heads together."""
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure((7.6, 4.6), layout="constrained")
        ax = figure.subplots()
        _heads(ax, results)
        for family, style in STYLES.items():
            own = [one for one in results["settings"] if one["family"] == family]
            if own:
                own.sort(key=lambda one: one["value"])
                ax.plot(*_points(own), **style, ms=4.5, lw=1.2, label=family)
        for one in results["settings"]:
            if one["family"] == FIXED:
                place = (one["verification_rate"], one["discard_rate"])
                text = f"{one['value']:g}"
                colour = STYLES[FIXED]["color"]
                ax.annotate(text, place, (4, 4), textcoords="offset points", color=colour, fontsize=8)
        if results["oracle"] is not None:
            rate = results["oracle"]["verification_rate"]
            ax.plot(rate, 0, "*", color="black", ms=13, label="oracle", clip_on=False, zorder=5)
        fixed = [one["discard_rate"] for one in results["settings"] if one["family"] == FIXED]
        ax.set_ylim(0, max(HEADROOM * max(fixed), 0.1))
        ax.set_xlabel("verification rate (target calls a token)")
        ax.set_ylabel("discard rate (discarded tokens a token)")
        ax.grid(alpha=0.25)
        facts = f"{results['texts']} texts, {results['sampling']}, {results['drafter']['kind']} drafter"
        ax.set_title(f"{results['prompts']}\n{facts}".replace("$", r"\$"), fontsize=9, loc="left")
        figure.legend(loc="outside right upper", frameon=False)
        figure.savefig(file, dpi=140)


def _heads(ax: Axes, results: Mapping) -> None:
    """Heads as light points, and their common front in bold."""
    own = [one for one in results["settings"] if one["family"] == HEAD]
    for judge, marker in (("current", "o"), ("previous", "x")):
        points = [one for one in own if one["judge"] == judge]
        if points:
            ax.plot(*_points(points), marker, color="#b0b0b0", ms=3, lw=0, label=f"{HEAD}, {judge}: each head")
    names = set(results["fronts"][HEAD])
    best = sorted((one for one in own if one["name"] in names), key=lambda one: one["verification_rate"])
    ax.plot(*_points(best), "-o", color="#882255", lw=2.4, ms=4, label=f"{HEAD}: front", zorder=4)


def _points(settings: list[Mapping]) -> tuple[list[float], list[float]]:
    return [one["verification_rate"] for one in settings], [one["discard_rate"] for one in settings]
