"""Plots of several trainings of one kind over one another: curves, acceptance by position, tau, calibration.

A run has the same colour in every plot. Of many runs the best keep a colour and a name, the others are grey.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spectrain.reporting.formats import bounds_of, number
from spectrain.reporting.found_runs import Training, differences, option_text
from spectrain.reporting.plots import STEP_METRIC
from spectrain.reporting.svg import COLOURS, DASHES, MAX_POINTS, WIDTH_IN, Plot, drawn, name_rows

NAMED = 16  # runs that keep a colour
GREY = "#c4c4c4"
LABEL_CHARACTERS = 60
HASHED_NAME = re.compile(r"-[0-9a-f]{8}$")
PANEL_IN = 2.5
ROW_IN = 0.2
CHARACTER_IN, HANDLE_IN, LINE_IN = 0.068, 0.55, 0.17  # of a legend
PANELS = {  # metric -> (what its axis says, whether points are joined by few marks)
    "train/loss": ("training loss (lower is better)", False),
    "eval/loss": ("loss on held-out rows (lower is better)", True),
    "eval/alpha": ("alpha on held-out rows (higher is better)", True),
    "eval/tau": ("tau in the real loop (higher is better)", True),
    "train/alpha": ("alpha on training rows (higher is better)", False),
    "eval/tau_expected": ("tau expected from alpha (higher is better)", True),
    "eval/kl_binary": ("KL of labels and predictions, nats (lower)", True),
    "eval/calibration_error": ("calibration error (lower is better)", True),
}
MAX_PANELS = 4


@dataclass(frozen=True)
class Look:
    """How the runs of one group are drawn."""

    runs: Sequence[Training]
    labels: Mapping[str, str]
    colours: Mapping[str, str]
    dashes: Mapping[str, object]

    @classmethod
    def of(cls, runs: Sequence[Training]) -> Look:
        named = [run.name for run in (runs if len(runs) <= NAMED else sorted(runs, key=_worse)[:NAMED])]
        colours = {run.name: GREY for run in runs} | {n: COLOURS[i % len(COLOURS)] for i, n in enumerate(named)}
        dashes = {run.name: "-" for run in runs} | {n: DASHES[i // 8 % len(DASHES)] for i, n in enumerate(named)}
        return cls(runs, run_labels(runs), colours, dashes)

    @property
    def n_grey(self) -> int:
        return sum(colour == GREY for colour in self.colours.values())

    def back_to_front(self) -> list[Training]:
        """Grey ones first, so that they lie behind."""
        return sorted(self.runs, key=lambda run: self.colours[run.name] != GREY)

    def legend(self, figure: Figure, axes: Sequence[Axes]) -> None:
        """One below the figure, of all runs that have a name; the figure grows by what it takes."""
        found = {}
        for ax in axes:
            for handle, text in zip(*ax.get_legend_handles_labels(), strict=True):
                found.setdefault(text, handle)
        if self.n_grey:
            (line,) = axes[0].plot([], [], color=GREY)
            found[f"{self.n_grey} others"] = line
        if not found:
            return
        width, height = figure.get_size_inches()
        n_columns = max(1, min(len(found), 4, int(width / (CHARACTER_IN * max(map(len, found)) + HANDLE_IN))))
        figure.set_size_inches(width, height + LINE_IN * -(-len(found) // n_columns))
        place = "outside lower center"
        figure.legend(found.values(), found, loc=place, ncols=n_columns, frameon=False, fontsize=8, handlelength=3)


def _worse(run: Training) -> float:
    """Sorts the best first: by tau, else by held-out loss."""
    taus = [value for one in run.tau.values() if (value := number(one.get("value"))) is not None]
    loss = number(run.metrics.get("eval/loss"))
    return -max(taus) if taus else loss if loss is not None else np.inf


def run_labels(runs: Sequence[Training]) -> dict[str, str]:
    """Run -> what a legend calls it: a name that is but a hash is told with the options that it stands for."""
    found = {}
    for name, options in differences(runs).items():
        told = ", ".join(option_text(key, value) for key, value in options.items())
        text = f"{name} ({told})" if told and HASHED_NAME.search(name) else name
        text = text if len(text) <= LABEL_CHARACTERS else f"{text[: LABEL_CHARACTERS - 1]}…"
        found[name] = text.replace("$", r"\$")
    return found


def training_plots(runs: Sequence[Training], prefix: str) -> list[Plot]:
    """The plots of a group; those that would be empty are left out.

    Args:
        runs: of one kind, for one target.
        prefix: of the ids within the plots.
    """
    look, axis = Look.of(runs), _axis(runs)
    views: list[tuple[str, str, Callable[[], Figure | None]]] = [
        (
            "Curves",
            f"Across: {axis}. Each panel says at its side what it shows and which way is better; training loss is the "
            "mean of some steps, the others are measured on rows that were never trained on. Losses of different "
            "objectives (options loss, omega, w_rej) are not on one scale; whiskers of tau are 95 % intervals.",
            lambda: _curves(look, axis),
        ),
        (
            "Acceptance by position in the draft",
            "Mean probability that the target accepts the drafted token at this place of a draft, on held-out rows; "
            "higher is better. Of the weights that are exported, or of the last validation so far.",
            lambda: _positions(look),
        ),
        (
            "tau after training",
            "Tokens that one forward of the target yields with this drafter, in the real loop, on held-out contexts of "
            "that length; further right is better, 1 is decoding without a drafter, lines are 95 % intervals.",
            lambda: _taus(look),
        ),
        (
            "Calibration",
            "Across: acceptance probability that the head predicts; up: the share that is accepted. A head with equal "
            "weights for both mistakes is best on the dashed diagonal; one with w_rej above w_acc lies above it on "
            "purpose.",
            lambda: _calibration(look),
        ),
    ]
    found = (drawn(title, told, draw, f"{prefix}t{i}-") for i, (title, told, draw) in enumerate(views))
    return [plot for plot in found if plot is not None]


def _axis(runs: Sequence[Training]) -> str:
    sizes = {run.tokens_a_step for run in runs}
    if len(sizes) > 1 and None not in sizes:
        return "million tokens trained on"
    each = f" (each of {sizes.pop():,} tokens)" if None not in sizes else ""
    return f"optimizer steps{each}"


def _points(run: Training, metric: str, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """[n] steps or million tokens, and [n] values."""
    points = [(step + 1, row[metric]) for step, row in run.curve.items() if number(row.get(metric)) is not None]
    if len(points) > MAX_POINTS:
        points = [points[i] for i in np.linspace(0, len(points) - 1, MAX_POINTS).astype(int)]
    steps, values = np.array(points, dtype=float).reshape(-1, 2).T
    return steps * (run.tokens_a_step / 1e6 if axis.startswith("million") else 1.0), values


def _curves(look: Look, axis: str) -> Figure | None:
    held = [name for name in PANELS if any(_moves(run, name) for run in look.runs)][:MAX_PANELS]
    if not held:
        return None
    n_rows, n_columns = -(-len(held) // 2), min(2, len(held))
    figure = Figure((WIDTH_IN, PANEL_IN * n_rows + 0.3), layout="constrained")
    grid = figure.subplots(n_rows, n_columns, sharex=True, squeeze=False)
    for ax, name in zip(grid.flat, held, strict=False):
        label, marked = PANELS[name]
        for run in look.back_to_front():
            x, y = _points(run, name, axis)
            if len(x):
                style = {"color": look.colours[run.name], "linestyle": look.dashes[run.name], "linewidth": 1.4}
                ax.plot(x, y, marker="o" if marked else None, markersize=3.5, **style, **_named(look, run))
                if name == "eval/tau":
                    _whiskers(ax, run, axis, look.colours[run.name])
        ax.set_ylabel(label, fontsize=8)
        ax.grid(color="#e5e5e5", linewidth=0.6)
        ax.tick_params(labelbottom=True)
    for ax in list(grid.flat)[len(held) :]:
        ax.set_visible(False)
    for ax in list(grid.flat)[: len(held)][-n_columns:]:
        ax.set_xlabel(axis)
    look.legend(figure, list(grid.flat)[: len(held)])
    return figure


def _moves(run: Training, metric: str) -> bool:
    """Whether there is more than a point; the end of a training is validated twice."""
    steps = [step for step, row in run.curve.items() if number(row.get(metric)) is not None]
    return bool(steps) and steps[-1] - steps[0] > 1


def _named(look: Look, run: Training) -> dict[str, str]:
    return {"label": look.labels[run.name]} if look.colours[run.name] != GREY else {}


def _whiskers(ax: Axes, run: Training, axis: str, colour: str) -> None:
    x, _ = _points(run, "eval/tau", axis)
    rows = [row for row in run.curve.values() if number(row.get("eval/tau")) is not None]
    for place, row in zip(x, rows, strict=False):
        bounds = bounds_of((row.get("eval/tau_low"), row.get("eval/tau_high")))
        if bounds:
            ax.plot((place, place), bounds, color=colour, linewidth=1.0)


def _positions(look: Look) -> Figure | None:
    curves = {}
    for run in look.back_to_front():
        found = {int(m[1]): number(v) for name, v in run.metrics.items() if (m := STEP_METRIC.fullmatch(name))}
        if found and None not in found.values():
            curves[run.name] = (run, [found[position] for position in sorted(found)])
    if not curves:
        return None
    figure = Figure((WIDTH_IN * 0.62, 3.0), layout="constrained")
    ax = figure.subplots()
    for name, (run, alphas) in curves.items():
        style = {"color": look.colours[name], "linestyle": look.dashes[name], "linewidth": 1.6}
        ax.plot(range(1, len(alphas) + 1), alphas, marker="o", markersize=4, **style, **_named(look, run))
    ax.set(xlabel="position in the draft", ylabel="acceptance probability alpha", ylim=(0, 1))
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(color="#e5e5e5", linewidth=0.6)
    look.legend(figure, [ax])
    return figure


def _taus(look: Look) -> Figure | None:
    runs = [run for run in look.runs if run.tau]
    settings = list(dict.fromkeys(name for run in runs for name in run.tau))[: 2 * MAX_PANELS]
    if not settings:
        return None
    n_columns = min(2, len(settings))
    n_rows = -(-len(settings) // n_columns)
    figure = Figure((WIDTH_IN, n_rows * (ROW_IN * len(runs) + 0.75)), layout="constrained")
    grid = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False)
    for ax, setting in zip(grid.flat, settings, strict=False):
        for y, run in enumerate(runs):
            one = run.tau.get(setting) or {}
            value, bounds = number(one.get("value")), bounds_of((one.get("low"), one.get("high")))
            colour = look.colours[run.name] if look.colours[run.name] != GREY else "#777777"
            if bounds:
                ax.plot(bounds, (y, y), color=colour, linewidth=1.6, solid_capstyle="butt")
            if value is not None:
                ax.plot(value, y, "o", color=colour, markersize=4.5)
                ax.annotate(f"{value:.2f}", (max(value, *(bounds or (value,))), y), (5, 0), **BESIDE)
        ax.axvline(1.0, color="#333333", linewidth=0.8, linestyle=(0, (4, 3)))
        ax.set_title(setting.replace("$", r"\$"), fontsize=9, loc="left")
        ax.tick_params(labelbottom=True)
    highs = [number(one.get(k)) for run in runs for one in run.tau.values() for k in ("value", "high")]
    grid[0, 0].set_xlim(0.9, 1.12 * max((high for high in highs if high is not None), default=1.0))
    name_rows(grid[0, 0], [look.labels[run.name] for run in runs])
    for ax in list(grid.flat)[len(settings) :]:
        ax.set_visible(False)
    figure.supxlabel("tau, tokens a target forward", fontsize=8.5)
    return figure


BESIDE = {"textcoords": "offset points", "va": "center", "fontsize": 7.5}


def _calibration(look: Look) -> Figure | None:
    lines = {}
    for run in look.back_to_front():
        bins = [one for one in (run.result or {}).get("reliability") or () if number(one.get("positions"))]
        if bins:
            lines[run.name] = (run, [one["predicted"] for one in bins], [one["label"] for one in bins])
    if not lines:
        return None
    figure = Figure((WIDTH_IN * 0.62, 3.6), layout="constrained")
    ax = figure.subplots()
    ax.plot((0, 1), (0, 1), color="#333333", linewidth=0.8, linestyle=(0, (4, 3)))
    for name, (run, predicted, labels) in lines.items():
        style = {"color": look.colours[name], "linestyle": look.dashes[name], "linewidth": 1.4}
        ax.plot(predicted, labels, marker="o", markersize=3, **style, **_named(look, run))
    ax.set(xlabel="predicted acceptance probability", ylabel="share accepted (mean label)", xlim=(0, 1), ylim=(0, 1))
    ax.grid(color="#e5e5e5", linewidth=0.6)
    look.legend(figure, [ax])
    return figure
