"""Figures of benchmarks, trainings, and comparisons of drafters.

Functions take plain values and return a matplotlib `Figure`, or None where there is nothing to show.
`drawing.inline_svg` puts a figure into an HTML page, `drawing.write_png` into a file. A method or run has the same
colour in every figure of a page. `cost_plots.py` has the figures of costs, node budgets and stop rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from spectrain.decoding.tree import Source
from spectrain.measure.results import BASELINE
from spectrain.measure.spire_paper import paper_tau
from spectrain.reporting.drawing import (
    BASELINE_COLOUR,
    COLOURS,
    DASHES,
    GREY,
    ROW_IN,
    WIDTH_IN,
    Plot,
    bar_panels,
    draw_cells,
    ink_on,
    line_panels,
    name_rows,
    plots_of,
    shortened,
    styled,
    thinned,
)
from spectrain.reporting.formats import bounds_of, number
from spectrain.reporting.found_runs import Training, differences, option_text

STAGES = {"draft": "#d55e00", "forward": "#a9bfd3", "verify": "#009e73", "commit": "#cc79a7", "other": "#555555"}
PERCENT = {0: "0", 0.25: "25 %", 0.5: "50 %", 0.75: "75 %", 1.0: "100 %"}  # ticks of a share
MAX_POSITIONS = 16
NAMED_RUNS = 16  # runs that keep a colour of their own; the others are grey
RUN_CHARACTERS = 60
HASHED_NAME = re.compile(r"-[0-9a-f]{8}$")
STEP_METRIC = re.compile(r"eval/alpha_step_(\d+)")
MAX_PANELS = 4
METRICS = {  # of a training -> title of their panel
    "train/loss": "training loss (lower is better)",
    "eval/loss": "loss on held-out rows (lower is better)",
    "eval/alpha": "alpha on held-out rows (higher is better)",
    "eval/tau": "tau measured in the decoding loop (higher is better)",
    "train/alpha": "alpha on training rows (higher is better)",
    "eval/tau_expected": "tau expected from alpha (higher is better)",
    "eval/kl_binary": "KL of labels and predictions, nats (lower is better)",
    "eval/calibration_error": "calibration error (lower is better)",
}
TAU_AXIS = "acceptance length tau (tokens per target forward pass)"
EXPLANATIONS = {
    "Speedup": "How many times as fast as autoregressive decoding (dashed line) each method answered the same "
    "questions, with 95 % intervals.",
    "Acceptance length (tau)": "Tokens produced per target forward pass, the target's own token included, with 95 % "
    "intervals. Autoregressive decoding has 1 (dashed line).",
    "Acceptance by draft position": "Of the steps that drafted a token at this depth, the share in which the target "
    "accepted one there. A cell is empty where a method never drafts that deep.",
    "Acceptance by source": "Left: the share of each source's drafted tokens that the target accepted. Right: how many "
    "accepted tokens the source adds per step.",
    "Accepted drafted tokens over steps": "Each accepted token saves one target forward pass. A question that has "
    "ended keeps its total, and a line stops where half of the questions have ended.",
    "Where the time goes": "Share of the decoding time after the prompt was read. Everything except the target's "
    "forward pass is the price of speculation and of the loop.",
    "Curves": "Training values are means of some steps; all others are measured on rows that were never trained on. "
    "Losses of different objectives (options loss, omega, w_rej) are not on one scale. Whiskers are 95 % intervals.",
    "Acceptance by position in the draft": "Mean probability that the target accepts the drafted token at this "
    "position, on held-out rows, for the exported weights or the last validation so far. Higher is better.",
    "tau after training": "Tokens produced per target forward pass, measured in the decoding loop on held-out contexts "
    "of this length, with 95 % intervals. Higher is better, and 1 is decoding without a drafter.",
    "Calibration": "Left: the share that was accepted over the probability that the head predicts. Equal weights for "
    "both mistakes are best on the diagonal; a head with w_rej above w_acc lies above it on purpose.",
}


# Benchmarks


def ordered(methods: Mapping[str, Mapping]) -> list[str]:
    """Names of methods, fastest first; those without a speedup last."""
    return sorted(methods, key=lambda name: -(number(methods[name].get("speedup")) or 0.0))


def categories_of(methods: Mapping[str, Mapping]) -> list[str]:
    """Every category, in the order of the questions."""
    return list(dict.fromkeys(c for one in methods.values() for c in one.get("by_category") or {}))


def benchmark_plots(results: Mapping, rows: Sequence[Mapping], prefix: str = "") -> list[Plot]:
    """The plots of a benchmark; those that would be empty are left out.

    Args:
        results: the content of `results.json`.
        rows: the lines of `questions.jsonl`.
        prefix: of the ids within the plots, where a page shows several benchmarks.
    """
    methods = results.get("methods") or {}
    figures = {
        "Speedup": by_category(methods, "speedup", "speedup over autoregressive decoding"),
        "Acceptance length (tau)": by_category(methods, "mean_accepted", TAU_AXIS),
        "Acceptance by draft position": by_position(methods),
        "Acceptance by source": by_source(methods),
        "Accepted drafted tokens over steps": cumulative(methods, rows),
        "Where the time goes": time_share(methods),
    }
    return plots_of(figures, EXPLANATIONS, prefix)


def method_styles(methods: Mapping[str, Mapping]) -> dict[str, dict]:
    """Colour and dashes of each method: its own in every figure, grey for autoregressive decoding."""
    others = [name for name in methods if name != BASELINE]
    styles = {n: {"color": COLOURS[i % 16], "linestyle": DASHES[i // 8 % 3]} for i, n in enumerate(others)}
    return {BASELINE: {"color": BASELINE_COLOUR, "linestyle": "-"}} | styles


def by_category(methods: Mapping[str, Mapping], measure: str, axis_label: str) -> Figure | None:
    """One panel for all questions and one for each category, with one bar per method."""
    names, categories, styles = ordered(methods), categories_of(methods), method_styles(methods)
    panels = {"all questions": [methods[name] for name in names]}
    if len(categories) > 1:
        panels |= {c: [(methods[n].get("by_category") or {}).get(c) or {} for n in names] for c in categories}
    values = {
        title: [(number(one.get(measure)), bounds_of(one.get(f"{measure}_ci95"))) for one in panel]
        for title, panel in panels.items()
    }
    rows = []
    for name in names:
        is_peer = methods[name].get("kind") == "peer"
        label = shortened(name) + (" (peer)" if is_peer else "")
        rows.append((label, {"color": styles[name]["color"], "hatch": "////" if is_peer else ""}))
    return bar_panels(values, rows, axis_label, n_columns=3)


@styled
def by_position(methods: Mapping[str, Mapping]) -> Figure | None:
    """A heat map of shares: methods down, depths across."""
    shares = {n: [number(s) for s in methods[n].get("acceptance_by_position") or []] for n in ordered(methods)}
    shares = {name: row for name, row in shares.items() if any(share is not None for share in row)}
    if not shares:
        return None
    longest = max(map(len, shares.values()))
    depths = min(MAX_POSITIONS, longest)
    cells = np.full((len(shares), depths), np.nan)
    for y, row in enumerate(shares.values()):
        cells[y, : len(row)] = [np.nan if s is None else s for s in row[:depths]]
    figure = Figure((WIDTH_IN, ROW_IN * 1.25 * len(shares) + 0.75))
    ax = figure.subplots()
    draw_cells(ax, cells, Normalize(0, 1.1), "Blues", lambda share: f"{100 * share:.0f} %")
    ax.set_xlim(-0.5, max(depths, 5) - 0.5)  # few columns do not become wide ones
    ax.set_xticks(range(depths), [str(d + 1) for d in range(depths)])
    ax.set_xlabel("draft position (depth)" + (f"; the first {depths} of {longest}" if longest > depths else ""))
    name_rows(ax, [shortened(name) for name in shares])
    return figure


def by_source(methods: Mapping[str, Mapping]) -> Figure | None:
    """Two panels with one row per method and source."""
    known, styles = [source.name.lower() for source in Source], method_styles(methods)
    rows, shares, gains = [], [], []
    for name in ordered(methods):
        found = methods[name].get("acceptance_by_source") or {}
        steps = number(methods[name].get("target_forwards"))
        for source in sorted(found, key=lambda one: known.index(one) if one in known else len(known)):
            accepted, drafted = (number(found[source].get(key)) or 0.0 for key in ("accepted", "drafted"))
            if drafted:
                rows.append((f"{shortened(name)} · {shortened(source)}", {"color": styles[name]["color"]}))
                shares.append((accepted / drafted, None, f"{100 * accepted / drafted:.0f} % of {drafted:,.0f}"))
                gains.append((accepted / steps if steps else None, None))
    panels = {"share of this source's drafted tokens that was accepted": shares, "accepted tokens per step": gains}
    return bar_panels(panels, rows, plain_decoding=None)


def cumulative_accepted(accepted: Sequence[Sequence[int]]) -> np.ndarray:
    """[n]: drafted tokens accepted in the first n steps, mean over questions; entry 0 is 0.

    A question that has ended keeps its total. The curve stops where half of the questions have ended.
    """
    n_steps = sorted(map(len, accepted))[len(accepted) // 2]
    totals = [np.cumsum([0, *counts[:n_steps]]) for counts in accepted]
    return np.mean([np.pad(total, (0, n_steps + 1 - len(total)), mode="edge") for total in totals], axis=0)


def cumulative(methods: Mapping[str, Mapping], rows: Sequence[Mapping]) -> Figure | None:
    """One line for each method that drafts; the legend starts with the highest gain per step."""
    styles, lines = method_styles(methods), []
    for name in methods:
        accepted = [r["accepted"] for r in rows if r.get("method") == name and not r.get("error") and r.get("accepted")]
        if accepted and number(methods[name].get("drafted")):
            rate = sum(map(sum, accepted)) / sum(map(len, accepted))
            points = thinned(list(enumerate(cumulative_accepted(accepted))))
            label = f"{shortened(name)} ({rate:.2f} per step)"
            lines.append((rate, {"points": points, "label": label, **styles[name]}))
    lines = [line for _, line in sorted(lines, key=lambda pair: -pair[0])]
    return line_panels(
        {"": lines},
        "steps (target forward passes after the prompt)",
        "drafted tokens accepted so far (mean over questions)",
        panel_in=(6.6, 3.4),
        xlim=(0, None),
        ylim=(0, None),
    )


@styled
def time_share(methods: Mapping[str, Mapping]) -> Figure | None:
    """One stacked bar per method; what is not the target's forward pass is added up at its end."""
    shares = {name: methods[name].get("time_share") or {} for name in ordered(methods)}
    shares = {name: share for name, share in shares.items() if number(share.get("forward")) is not None}
    if not shares:
        return None
    figure = Figure((WIDTH_IN, ROW_IN * 1.15 * len(shares) + 0.9))
    ax = figure.subplots()
    for y, share in enumerate(shares.values()):
        begin = 0.0
        for stage, colour in STAGES.items():
            part = number(share.get(stage)) or 0.0
            ax.barh(y, part, 0.76, left=begin, color=colour, label=stage if y == 0 else "")
            if part >= 0.05:
                centre = {"ha": "center", "va": "center", "fontsize": 7.5}
                ax.text(begin + part / 2, y, f"{100 * part:.0f} %", color=ink_on(colour), **centre)
            begin += part
        outside = f"{100 * (begin - share['forward']):.1f} % outside the forward pass"
        ax.text(max(begin, 1.0) + 0.01, y, outside, va="center", fontsize=7.5)
    ax.set_xlim(0, 1.25)
    ax.set_xticks(list(PERCENT), PERCENT.values())
    figure.legend(loc="outside upper left", ncols=len(STAGES))
    name_rows(ax, [shortened(name) for name in shares])
    return figure


# Trainings. A curve is what was logged: step -> metric -> value. Lightning gives the first step number 0.


def training_plots(runs: Sequence[Training], prefix: str = "") -> list[Plot]:
    """The plots of several trainings of one kind for one target, drawn over one another; empty ones are left out."""
    styles = run_styles(runs)
    tokens = {run.tokens_a_step for run in runs}
    in_tokens = len(tokens) > 1 and None not in tokens
    each = f" (each of {next(iter(tokens)):,} tokens)" if len(tokens) == 1 and None not in tokens else ""
    axis = "million tokens trained on" if in_tokens else f"optimizer steps{each}"
    widths = [run.tokens_a_step / 1e6 if in_tokens else 1.0 for run in runs]
    taus = {setting: [interval(run.tau.get(setting)) for run in runs] for run in runs for setting in run.tau}
    rows = [(shortened(run.name, RUN_CHARACTERS), {"color": styles[run.name]["color"]}) for run in runs]
    bins = {run.name: (run.result or {}).get("reliability") or () for run in runs}
    figures = {
        "Curves": curves([(run.curve, w, styles[run.name]) for run, w in zip(runs, widths, strict=True)], axis),
        "Acceptance by position in the draft": positions([(run.metrics, styles[run.name]) for run in runs]),
        "tau after training": bar_panels(taus, rows, TAU_AXIS),
        "Calibration": calibration(bins, styles),
    }
    return plots_of(figures, EXPLANATIONS | {"Curves": f"Across: {axis}. {EXPLANATIONS['Curves']}"}, prefix)


def interval(one: Mapping | None) -> tuple[float | None, tuple[float, float] | None]:
    """Value and bounds of an estimate as files hold it."""
    one = one or {}
    return number(one.get("value")), bounds_of((one.get("low"), one.get("high")))


def run_styles(runs: Sequence[Training]) -> dict[str, dict]:
    """The line style of each run. The best runs have a colour and a name, by tau or else by held-out loss.

    A name that is only a hash is followed by the options in which the run differs.
    """

    def rank(run: Training) -> float:
        taus = [value for one in run.tau.values() if (value := number(one.get("value"))) is not None]
        loss = number(run.metrics.get("eval/loss"))
        return -max(taus) if taus else np.inf if loss is None else loss

    styles = {run.name: {"color": GREY, "zorder": 1} for run in runs}
    named = runs if len(runs) <= NAMED_RUNS else sorted(runs, key=rank)[:NAMED_RUNS]
    told = differences(runs) if runs else {}
    for i, name in enumerate(run.name for run in named):
        options = ", ".join(option_text(key, value) for key, value in told[name].items())
        label = f"{name} ({options})" if options and HASHED_NAME.search(name) else name
        styles[name] = {"color": COLOURS[i % 16], "linestyle": DASHES[i // 8 % 3], "zorder": 2}
        styles[name]["label"] = shortened(label, RUN_CHARACTERS)
    if len(runs) > len(named):
        next(style for style in styles.values() if "label" not in style)["label"] = f"{len(runs) - len(named)} others"
    return styles


def curves(runs: Sequence[tuple[Mapping, float, Mapping]], axis: str = "optimizer steps") -> Figure | None:
    """What trainings logged, over their steps: one panel for each metric, those first that have several points.

    Args:
        runs: (curve, width of a step on the axis, line style) of each.
        axis: label of the x-axis.
    """
    panels = {}
    for metric, title in METRICS.items():
        lines = []
        for curve, width, style in runs:
            rows = [(step, row) for step, row in curve.items() if number(row.get(metric)) is not None]
            bounds = [bounds_of((row.get(f"{metric}_low"), row.get(f"{metric}_high"))) for _, row in rows]
            points = [((step + 1) * width, row[metric]) for step, row in rows]
            marker = "" if metric.startswith("train/") else "o"
            if points:
                found = zip(*thinned(list(zip(points, bounds, strict=True))), strict=True)
                lines.append(dict(zip(("points", "bounds"), found, strict=True)) | {"marker": marker, **style})
        if lines:
            panels[title] = lines
    moving = [title for title, lines in panels.items() if any(len(line["points"]) > 1 for line in lines)]
    shown = list(dict.fromkeys([*moving, *panels]))[:MAX_PANELS]
    return line_panels({title: panels[title] for title in shown}, axis, n_columns=2)


def positions(runs: Sequence[tuple[Mapping, Mapping]]) -> Figure | None:
    """Acceptance rate by position in the draft: (metrics, line style) of each run or validation."""
    lines = []
    for metrics, style in runs:
        found = {int(match[1]): number(v) for name, v in metrics.items() if (match := STEP_METRIC.fullmatch(name))}
        if found and None not in found.values():
            lines.append({"points": sorted(found.items()), "marker": "o", **style})
    return position_panels({"": lines})


def position_panels(panels: Mapping[str, Sequence[Mapping]]) -> Figure | None:
    last = max((round(x) for lines in panels.values() for line in lines for x, _ in line["points"]), default=1)
    axes = {"xticks": range(1, last + 1), "xlim": (0.7, last + 0.3), "ylim": (-0.02, 1.02)}
    return line_panels(panels, "position in the draft", "acceptance rate alpha", panel_in=(5.0, 3.0), **axes)


def training_pictures(curve: Mapping[int, Mapping]) -> dict[str, Figure]:
    """What a run folder shows of one training: its "curve", and "acceptance" by position for each validation."""
    validations = [step for step, row in curve.items() if any(map(STEP_METRIC.fullmatch, row))]
    styles = [{"color": COLOURS[0], "alpha": 0.2 + 0.5 * i / len(validations)} for i in range(len(validations))]
    if styles:
        styles[-1]["alpha"] = 1.0  # the last validation is the darkest
        for i in {0, len(styles) - 1}:
            styles[i]["label"] = f"step {validations[i] + 1:,}"
    found = {
        "curve": curves([(curve, 1.0, {})]),
        "acceptance": positions([(curve[step], style) for step, style in zip(validations, styles, strict=True)]),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


@styled
def calibration(
    bins: Mapping[str, Sequence[Mapping]], styles: Mapping[str, Mapping], w_rej: float = 1.0, w_acc: float = 1.0
) -> Figure | None:
    """Reliability diagram of acceptance heads: mean label by mean prediction, and below it the share of positions.

    A weighted loss is least not at the prediction f = a but at f = w_acc a / (w_acc a + w_rej (1 - a)). With unequal
    weights that curve is drawn, too.

    Args:
        bins: of each head: `positions`, `predicted` and `label` (means) of each bin.
        styles: of the lines, by head.
        w_rej, w_acc: weights of the loss.
    """
    lines, shares = [{"points": [(0, 0), (1, 1)], "color": "#333333", "linestyle": "--", "label": "calibrated"}], []
    if w_rej != w_acc:
        aims = [(w_acc * a / (w_acc * a + w_rej * (1 - a)), a) for a in np.linspace(0, 1, 101)]
        label = f"optimum of the loss with w_rej = {w_rej:g}, w_acc = {w_acc:g}"
        lines.append({"points": aims, "color": "#777777", "linestyle": ":", "label": label})
    for name, found in bins.items():
        found = [one for one in found if number(one.get("positions"))]
        if found:
            whole = sum(one["positions"] for one in found)
            lines.append({"points": [(one["predicted"], one["label"]) for one in found], "marker": "o", **styles[name]})
            points = [(one["predicted"], one["positions"] / whole) for one in found]
            shares.append({"points": points, "marker": "o", **styles[name]})
    if not shares:
        return None
    panels = {"share accepted (mean label)": lines, "share of positions": shares}
    figure = line_panels(panels, "predicted acceptance probability", n_columns=2, xlim=(0, 1), ylim=(0, 1))
    figure.axes[1].set_ylim(0, 1.1 * max(share for line in shares for _, share in line["points"]))
    return figure


# Comparisons of drafters


def drafters(content: Mapping, modelled: Mapping[str, tuple[Mapping, float]] | None = None) -> Figure | None:
    """tau of each drafter in each setting, as `drafters.json` holds it; the SPIRe paper's values are diamonds.

    Args:
        content: of the file.
        modelled: drafter -> throughput by the paper's cost model, with this tau and with the paper's own.
    """
    found = content["drafters"]
    rows = [(shortened(name), {"color": COLOURS[i % 16]}) for i, name in enumerate(found)]
    settings = dict.fromkeys(setting for one in found.values() for setting in one.get("tau") or {})
    panels = {s: [interval((one.get("tau") or {}).get(s)) for one in found.values()] for s in settings}
    paper = paper_tau()
    known = [paper.get(name) for name in found] if sum(name in paper for name in found) > 1 else []
    marks = {setting: known for setting in settings if setting.endswith("T=1")} if known else {}
    if modelled:
        title = "modelled throughput, times plain decoding (paper's cost model)"
        panels[title] = [interval(modelled[name][0]) if name in modelled else (None, None) for name in found]
        marks[title] = [modelled[name][1] if name in modelled else None for name in found]
    return bar_panels(panels, rows, TAU_AXIS, marks=marks, mark_label="reported by the SPIRe paper (its own target)")


def parity(content: Mapping) -> Figure | None:
    """Acceptance rate by position as each side measured it, as `parity.json` holds it: one panel per sampling."""
    panels: dict[str, list] = {}
    sides = list(dict.fromkeys(name.partition(", ")[2] for name in content["rows"]))
    for name, one in content["rows"].items():
        sampling, _, side = name.partition(", ")
        i = sides.index(side)
        values = [
            (p + 0.06 * (i - len(sides) / 2), *interval(each))
            for p, each in zip(content["positions"], one.get("acceptance") or (), strict=False)
        ]
        values = [each for each in values if each[1] is not None]
        if values:
            line = {"points": [(x, y) for x, y, _ in values], "bounds": [bounds for *_, bounds in values]}
            panels.setdefault(sampling, []).append(line | {"color": COLOURS[i], "marker": "o", "label": side})
    return position_panels(panels)


draw_plots = benchmark_plots  # the name that bench_page.py calls until it is rewritten
