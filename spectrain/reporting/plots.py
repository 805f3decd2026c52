"""Figures of benchmarks, trainings, and comparisons of drafters.

Functions take plain values and return a matplotlib `Figure`, or None where there is nothing to show. A method or run
has the same colour in every figure of a page. `cost_plots.py` has the figures of costs and stop rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import cycle

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from spectrain.decoding.tree import Source
from spectrain.measure.results import BASELINE
from spectrain.measure.spire_paper import paper_tau
from spectrain.reporting import drawing
from spectrain.reporting.drawing import COLOURS, STYLES, Line, bar_panels, line, line_panels, shortened
from spectrain.reporting.formats import bounds_of, estimate_of, measured, number
from spectrain.reporting.runs import Training, differences, option_text

MAX_POSITIONS = 16
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

# Benchmarks. Methods are the entry `methods` of results.json.


def ordered(methods: Mapping[str, Mapping]) -> list[str]:
    """Names of methods, fastest first; those without a speedup last."""
    return sorted(methods, key=lambda name: -(number(methods[name].get("speedup")) or 0.0))


def categories_of(methods: Mapping[str, Mapping]) -> list[str]:
    """Every category, in the order of the questions."""
    return list(dict.fromkeys(c for one in methods.values() for c in one.get("by_category") or {}))


def benchmark_plots(results: Mapping, rows: Sequence[Mapping], prefix: str = "") -> dict[str, Markup]:
    """Draw a benchmark: title -> SVG, without empty ones.

    `results` and `rows` are the content of results.json and questions.jsonl, `prefix` starts the ids within the plots.
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
    return drawing.inline_svgs(figures, prefix)


def method_styles(methods: Mapping[str, Mapping]) -> dict[str, dict]:
    """Colour and dashes of each method: its own in every figure, grey for autoregressive decoding."""
    others = [name for name in methods if name != BASELINE]
    return {BASELINE: {"color": drawing.BASELINE_COLOUR, "linestyle": "-"}} | dict(
        zip(others, cycle(STYLES), strict=False)
    )


def by_category(methods: Mapping[str, Mapping], measure: str, axis_label: str) -> Figure | None:
    """One panel for all questions and one for each category, with one bar per method."""
    names, categories, styles = ordered(methods), categories_of(methods), method_styles(methods)
    panels = {"all questions": [methods[name] for name in names]}
    if len(categories) > 1:
        panels |= {c: [(methods[n].get("by_category") or {}).get(c) or {} for n in names] for c in categories}
    bars = {title: [estimate_of(measured(one, measure)) for one in panel] for title, panel in panels.items()}
    rows = []
    for name in names:
        label, hatch = (" (baseline)", "////") if methods[name].get("kind") == "peer" else ("", "")
        rows.append((shortened(name) + label, {"color": styles[name]["color"], "hatch": hatch}))
    return bar_panels(bars, rows, axis_label, n_columns=3)


def by_position(methods: Mapping[str, Mapping]) -> Figure | None:
    """Acceptance rates: methods down, depths of the draft across."""
    shares = {n: [number(s) for s in methods[n].get("acceptance_by_position") or []] for n in ordered(methods)}
    shares = {name: row for name, row in shares.items() if any(share is not None for share in row)}
    longest = max(map(len, shares.values()), default=0)
    depths = [str(d + 1) for d in range(min(longest, MAX_POSITIONS))]
    more = f"; the first {MAX_POSITIONS} of {longest}" if longest > MAX_POSITIONS else ""
    return drawing.share_table(shares, depths, f"draft position (depth){more}")


def time_share(methods: Mapping[str, Mapping]) -> Figure | None:
    """Shares of the decoding time: methods down, stages across, and the sum of all but the target's forward pass."""
    stages, rows = ("forward", "draft", "verify", "commit", "other"), {}
    for name in ordered(methods):
        shares = [number((methods[name].get("time_share") or {}).get(stage)) for stage in stages]
        if shares[0] is not None:
            rows[name] = [*shares, sum(share or 0.0 for share in shares[1:])]
    return drawing.share_table(rows, [*stages, "outside the forward pass"], digits=1)


def by_source(methods: Mapping[str, Mapping]) -> Figure | None:
    """Two panels with one row per method and source of drafted tokens."""
    known, styles = [source.name.lower() for source in Source], method_styles(methods)
    rows, shares, gains = [], [], []
    for name in ordered(methods):
        found, steps = methods[name].get("acceptance_by_source") or {}, number(methods[name].get("target_forwards"))
        for source in sorted(found, key=lambda one: known.index(one) if one in known else len(known)):
            accepted, drafted = (number(found[source].get(key)) or 0.0 for key in ("accepted", "drafted"))
            if drafted:
                rows.append((f"{shortened(name)} · {shortened(source)}", {"color": styles[name]["color"]}))
                shares.append((accepted / drafted, None, f"{100 * accepted / drafted:.0f} % of {drafted:,.0f}"))
                gains.append((accepted / steps if steps else None, None))
    panels = {"share of this source's drafted tokens that was accepted": shares, "accepted tokens per step": gains}
    return bar_panels(panels, rows)


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
            points = drawing.thinned(list(enumerate(cumulative_accepted(accepted))))
            lines.append((rate, line(points, label=f"{shortened(name)} ({rate:.2f} per step)", **styles[name])))
    panels = {"": [one for _, one in sorted(lines, key=lambda pair: -pair[0])]}
    labels = ("steps (target forward passes after the prompt)", "drafted tokens accepted so far\n(mean over questions)")
    return line_panels(panels, *labels, panel_in=(7.0, 3.4), xlim=(0, None), ylim=(0, None))


# Trainings. A curve is what was logged: step -> metric -> value. Lightning gives the first step number 0.


def training_plots(runs: Sequence[Training], prefix: str = "") -> dict[str, Markup]:
    """Draw trainings of one kind for one target over one another: title -> SVG, without empty ones."""
    styles = run_styles(runs)
    tokens = {run.tokens_per_step for run in runs}
    in_tokens = len(tokens) > 1 and None not in tokens
    each = f" (each of {next(iter(tokens)):,} tokens)" if len(tokens) == 1 and None not in tokens else ""
    axis = "million tokens trained on" if in_tokens else f"optimizer steps{each}"
    curve_of = [(run.curve, run.tokens_per_step / 1e6 if in_tokens else 1.0, styles[run.name]) for run in runs]
    taus = {setting: [estimate_of(run.tau.get(setting)) for run in runs] for run in runs for setting in run.tau}
    rows = [(shortened(n, drawing.TITLE_CHARACTERS), {"color": style["color"]}) for n, style in styles.items()]
    figures = {
        "Curves": curves(curve_of, axis),
        "Acceptance by position in the draft": positions([(run.metrics, styles[run.name]) for run in runs]),
        "tau after training": bar_panels(taus, rows, TAU_AXIS),
        "Calibration": calibration({run.name: (run.result or {}).get("reliability") or () for run in runs}, styles),
    }
    return drawing.inline_svgs(figures, prefix)


def run_styles(runs: Sequence[Training]) -> dict[str, dict]:
    """The line style of each run. The best runs have a colour and a name, by tau or else by held-out loss.

    A name that is only a hash is followed by the options in which the run differs.
    """

    def rank(run: Training) -> float:
        taus = [value for one in run.tau.values() if (value := number(one.get("value"))) is not None]
        loss = number(run.metrics.get("eval/loss"))
        return -max(taus) if taus else np.inf if loss is None else loss

    named = runs if len(runs) <= len(STYLES) else sorted(runs, key=rank)[: len(STYLES)]
    others = {"color": drawing.GREY, "zorder": 1, "label": f"{len(runs) - len(named)} others"}
    styles, told = {run.name: others for run in runs}, differences(runs) if runs else {}
    for style, name in zip(STYLES, [run.name for run in named], strict=False):
        options = ", ".join(option_text(key, value) for key, value in told[name].items())
        label = f"{name} ({options})" if options and HASHED_NAME.search(name) else name
        styles[name] = style | {"zorder": 2, "label": shortened(label, 60)}
    return styles


def curves(runs: Sequence[tuple[Mapping, float, Mapping]], axis: str = "optimizer steps") -> Figure | None:
    """What trainings logged: one panel for each metric, those first that have several points.

    `runs` are (curve, width of a step on the x-axis, line style) of each.
    """
    panels: dict[str, list[Line]] = {}
    for metric, title in METRICS.items():
        for curve, width, style in runs:
            rows = [((step + 1) * width, row) for step, row in curve.items() if number(row.get(metric)) is not None]
            if rows := drawing.thinned(rows):
                ends = [bounds_of((row.get(f"{metric}_low"), row.get(f"{metric}_high"))) for _, row in rows]
                marker = "" if metric.startswith("train/") else "o"
                one = line([(x, row[metric]) for x, row in rows], ends, marker=marker, **style)
                panels.setdefault(title, []).append(one)
    several = [title for title, lines in panels.items() if any(len(one.points) > 1 for one in lines)]
    shown = list(dict.fromkeys([*several, *panels]))[:MAX_PANELS]
    return line_panels({title: panels[title] for title in shown}, axis, n_columns=2)


def positions(runs: Sequence[tuple[Mapping, Mapping]]) -> Figure | None:
    """Acceptance rate by position in the draft: (metrics, line style) of each run or validation."""
    lines = []
    for metrics, style in runs:
        found = {int(match[1]): number(v) for name, v in metrics.items() if (match := STEP_METRIC.fullmatch(name))}
        if found and None not in found.values():
            lines.append(line(sorted(found.items()), marker="o", **style))
    return position_panels({"": lines})


def position_panels(panels: Mapping[str, Sequence[Line]]) -> Figure | None:
    last = max((round(x) for lines in panels.values() for one in lines for x, _ in one.points), default=1)
    axes = {"xticks": range(1, last + 1), "xlim": (0.7, last + 0.3), "ylim": (-0.02, 1.02)}
    return line_panels(panels, "position in the draft", "acceptance rate alpha", panel_in=(5.0, 3.0), **axes)


def training_pictures(curve: Mapping[int, Mapping]) -> dict[str, Figure]:
    """What a run folder shows of one training: its "curve", and "acceptance" by position for each validation."""
    steps, validations = [step for step, row in curve.items() if any(map(STEP_METRIC.fullmatch, row))], []
    for i, step in enumerate(steps, 1):  # the last is the darkest
        style = {"color": COLOURS[0], "alpha": 1.0 if i == len(steps) else 0.2 + 0.5 * (i - 1) / len(steps)}
        label = {"label": f"step {step + 1:,}"} if i in (1, len(steps)) else {}
        validations.append((curve[step], style | label))
    found = {"curve": curves([(curve, 1.0, {"color": COLOURS[0]})]), "acceptance": positions(validations)}
    return {name: figure for name, figure in found.items() if figure is not None}


def calibration(
    bins: Mapping[str, Sequence[Mapping]], styles: Mapping[str, Mapping], w_rej: float = 1.0, w_acc: float = 1.0
) -> Figure | None:
    """Reliability diagram of acceptance heads: mean label by mean prediction, and beside it the share of positions.

    `bins` and `styles` are by head; a bin has `positions`, `predicted` and `label` (means). The loss of acceptance a is
    least at the prediction w_acc a / (w_acc a + w_rej (1 - a)), a curve that is drawn where the weights differ.
    """
    lines, shares = [line([(0, 0), (1, 1)], color="#333333", linestyle="--", label="calibrated")], []
    if w_rej != w_acc:
        aims = [(w_acc * a / (w_acc * a + w_rej * (1 - a)), a) for a in np.linspace(0, 1, 101)]
        label = f"optimum of the loss with w_rej = {w_rej:g}, w_acc = {w_acc:g}"
        lines.append(line(aims, color="#777777", linestyle=":", label=label))
    for name, found in bins.items():
        found = [one for one in found if number(one.get("positions"))]
        if found:
            whole, style = sum(one["positions"] for one in found), {"marker": "o", **styles[name]}
            lines.append(line([(one["predicted"], one["label"]) for one in found], **style))
            shares.append(line([(one["predicted"], one["positions"] / whole) for one in found], **style))
    if not shares:
        return None
    panels = {"share accepted (mean label)": lines, "share of positions": shares}
    figure = line_panels(panels, "predicted acceptance probability", n_columns=2, xlim=(0, 1), ylim=(0, 1))
    figure.axes[1].set_ylim(0, 1.1 * max(share for one in shares for _, share in one.points))
    return figure


# Comparisons of drafters


def drafters(content: Mapping, modelled: Mapping[str, tuple[Mapping, float]] | None = None) -> Figure | None:
    """tau of each drafter in each setting, as `drafters.json` holds it; the SPIRe paper's values are diamonds.

    `modelled` is the throughput of drafters by the paper's cost model, with their tau and with the paper's own.
    """
    found = content["drafters"]
    rows = [(shortened(name), {"color": COLOURS[i % 16]}) for i, name in enumerate(found)]
    settings = dict.fromkeys(setting for one in found.values() for setting in one.get("tau") or {})
    panels = {s: [estimate_of((one.get("tau") or {}).get(s)) for one in found.values()] for s in settings}
    known, marks = [paper_tau().get(name) for name in found], {}
    if sum(tau is not None for tau in known) > 1:
        marks = {setting: known for setting in settings if setting.endswith("T=1")}
    if modelled:
        title, each = "modelled throughput, times plain decoding (paper's cost model)", map(modelled.get, found)
        ours, papers = zip(*((None, None) if one is None else one for one in each), strict=True)
        panels[title], marks[title] = [*map(estimate_of, ours)], papers
    return bar_panels(panels, rows, TAU_AXIS, marks=("reported by the SPIRe paper (its own target)", marks))
