"""What a page says of trainings: an overview of all, and a section for those that can be compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape

from spectrain.measure.results import BASELINE
from spectrain.reporting.formats import MISSING, bounds_of, count, estimate, fixed, number
from spectrain.reporting.found_runs import OWN_METHOD, Training, differences, groups, option_text
from spectrain.reporting.page import Markup, definitions, drawing, filled, folded, heading, link, note, table
from spectrain.reporting.training_overlay import training_plots

KINDS = {  # kind -> one, several
    "spire": ("SPIRe drafter", "SPIRe drafters"),
    "vanilla": ("vanilla drafter", "vanilla drafters"),
    "specdecpp": ("acceptance head", "acceptance heads"),
    "target": ("target", "targets"),
}
METRICS = {  # of validation -> head of its column
    "eval/loss": "held-out loss",
    "eval/alpha": "alpha",
    "eval/tau_expected": "tau expected\nfrom alpha",
    "eval/kl_binary": "KL to labels\nnats",
    "eval/predicted": "mean\nprediction",
    "eval/label": "mean label",
    "eval/calibration_error": "calibration\nerror",
}
OPTIONS_SHOWN = 6
MANY = 8  # runs of a group, whose options are then folded once more
OBJECTIVE = ("loss", "omega", "w_rej", "w_acc")  # with other ones, losses are on other scales
OTHER_SCALES = "Losses of different kinds or objectives (options loss, omega, w_rej) are not on one scale."


def overview(trainings: Sequence[Training]) -> str:
    """A line a training, those that can be compared next to one another."""
    heads = [
        "run",
        "kind",
        "target",
        "what is different",
        "steps",
        "tokens",
        "held-out loss",
        "tau",
        "started",
        "where",
    ]
    lines = []
    for runs in groups(trainings).values():
        told = differences(runs)
        for run in runs:
            loss = fixed(run.metrics.get("eval/loss"), 3)
            cells = [(run_link(run), "left"), (KINDS[run.kind][0], "left"), (run.target or MISSING, "left")]
            cells += [(_different(told[run.name], runs), "wrap"), steps_cell(run)]
            cells += [
                (_tokens(run.tokens), ""),
                (loss, ""),
                (best_tau(run), ""),
                (started(run), ""),
                (where(run), "left"),
            ]
            lines.append(("", cells))
    scales = {tuple(map(repr, map(run.options.get, OBJECTIVE))) for run in trainings}
    return table(heads, lines) + (note(OTHER_SCALES) if len(scales) > 1 else "")


def training_section(runs: Sequence[Training], number_of_group: int) -> tuple[str, str]:
    """Title and HTML of one group: plots, numbers, then each run's options.

    Args:
        runs: of one kind, for one target.
        number_of_group: tells its plots from those of other groups.
    """
    kind = KINDS[runs[0].kind]
    of = f" for {runs[0].target}" if runs[0].target else ""
    title = f"{kind[0][0].upper()}{kind[0][1:]}{of}" if len(runs) == 1 else f"{len(runs)} {kind[1]}{of}"
    parts = [
        _opening(runs),
        _numbers(runs),
        _taus(runs),
        *(drawing(plot, 3) for plot in training_plots(runs, f"g{number_of_group}-")),
        heading("Options and folders", 3),
        _all_details(runs),
    ]
    return title, "".join(parts)


def _opening(runs: Sequence[Training]) -> str:
    """What came out, in sentences."""
    sentences = []
    unfinished = [run for run in runs if run.result is None]
    if unfinished:
        names = ", ".join(run.name for run in unfinished[:8]) + (", ..." if len(unfinished) > 8 else "")
        sentences.append(f"Unfinished, so that their numbers are those of the last validation so far: {names}.")
    best = [
        (tau, setting, run) for run in runs for setting, one in run.tau.items() if (tau := number(one.get("value")))
    ]
    setting = next(iter(best), (0, "", None))[1]
    same = sorted(((tau, run) for tau, where, run in best if where == setting), key=lambda pair: -pair[0])
    if same:
        tau, first = same[0]
        whose = f"Highest tau ({setting}): run {first.name} with" if len(same) > 1 else f"tau ({setting}):"
        sentences.append(f"{whose} {estimate(first.tau[setting], 2)} tokens a target forward.")
        if len(same) > 1 and _overlap(first.tau[setting], same[1][1].tau[setting]):
            sentences.append("Its interval overlaps that of the next: the two are not told apart by these alone.")
    elif len(runs) > 1 and all(run.options.get(key) == runs[0].options.get(key) for run in runs for key in OBJECTIVE):
        losses = {run.name: loss for run in runs if (loss := number(run.metrics.get("eval/loss"))) is not None}
        if losses:
            least = min(losses, key=losses.__getitem__)
            sentences.append(f"Lowest loss on held-out rows: run {least} with {fixed(losses[least], 3)}.")
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


def _overlap(one: Mapping, other: Mapping) -> bool:
    a, b = (bounds_of((x.get("low"), x.get("high"))) for x in (one, other))
    return a is not None and b is not None and a[0] <= b[1] and b[0] <= a[1]


def _numbers(runs: Sequence[Training]) -> str:
    """What validation said of each run."""
    shown = [name for name in METRICS if any(number(run.metrics.get(name)) is not None for run in runs)]
    told = differences(runs)
    lines = []
    for run in runs:
        selected = (run.result or {}).get("selected") or {}
        tau = {"value": selected.get("tau"), "low": selected.get("low"), "high": selected.get("high")}
        cells = [(run_link(run), "left"), (_different(told[run.name], runs), "wrap"), steps_cell(run)]
        cells += [(_tokens(run.tokens), ""), (fixed(selected.get("step"), 0), ""), (estimate(tau, 2), "")]
        cells += [(fixed(run.metrics.get(name), 3), "") for name in shown]
        lines.append(("", cells))
    heads = ["run", "what is different", "steps", "tokens", "exported\nstep", "tau when\nit was chosen"]
    return heading("Numbers on held-out rows", 3) + table(*filled([*heads, *(METRICS[name] for name in shown)], lines))


def _taus(runs: Sequence[Training]) -> str:
    """tau of each run's drafter, of what was measured beside it, and tokens/s."""
    settings = list(dict.fromkeys(name for run in runs for name in run.tau))
    if not settings:
        return ""
    lines = []
    for run in runs:
        rates = (run.result or {}).get("tokens_per_s") or {}
        baseline = number((rates.get(BASELINE) or {}).get("value"))
        own = OWN_METHOD[run.kind]
        for method, found in ((run.result or {}).get("tau") or {}).items():
            if method == BASELINE:
                continue
            name = (
                run_link(run)
                if method == own
                else Markup(f"{escape(run.name)}<small>beside it: {escape(method)}</small>")
            )
            rate = number((rates.get(method) or {}).get("value"))
            cells = [(name, "left"), *((estimate(found.get(setting), 2), "") for setting in settings)]
            cells += [(f"{run.contexts or MISSING}", ""), (estimate(rates.get(method), 1), "")]
            cells += [(fixed(rate / baseline if rate and baseline else None, 2), "")]
            lines.append(("", cells))
    told = note(
        "tau: tokens that one forward of the target yields, its own token included; in brackets the 95 % interval, by "
        "a bootstrap over n held-out contexts a column; higher is better. Tokens/s and speedup over autoregressive "
        "decoding: one context at a time, greedy, on the machine of the training, both at that time: between runs "
        "compare speedups, not tokens/s."
    )
    heads = ["run", *(f"tau\n{setting}" for setting in settings), "n", "tokens/s", "speedup"]
    return heading("tau in the real loop", 3) + told + table(heads, lines)


def _all_details(runs: Sequence[Training]) -> str:
    """What the runs have in common, then each; folded once more where there are many."""
    told = differences(runs)
    options = runs[0].options
    same = {k: v for k, v in options.items() if len(runs) > 1 and all(run.options.get(k, ...) == v for run in runs)}
    each = "".join(_details(run, told[run.name], same) for run in runs)
    if len(runs) > MANY:
        each = folded(f"Each of the {len(runs)} runs", each)
    return (folded(f"Options that all {len(runs)} share", _listed(same)) if same else "") + each


def _details(run: Training, told: Mapping[str, object], shared: Mapping[str, object]) -> str:
    """A run's own facts, and its options that are not shared by all, folded."""
    facts = {"folder": str(run.folder), "state": state(run)}
    if run.target_fingerprint:
        facts["target"] = f"{(run.config.get('target') or {}).get('path')} (fingerprint {run.target_fingerprint})"
    if run.command:
        facts["command, from its options"] = Markup(f"<code>{escape(run.command)}</code>")
    own = _listed({key: value for key, value in run.options.items() if key not in shared})
    summary = f"{run.name}: {options_text(told)}" if told else run.name
    return f'<div id="{run.anchor}">{folded(summary, definitions(facts.items()) + own)}</div>'


def _listed(options: Mapping[str, object]) -> str:
    """A line an option, as in its config.yaml."""
    lines = "\n".join(f"{key}: {json.dumps(value)}" for key, value in options.items())
    return f"<pre>{escape(lines)}</pre>" if lines else ""


def run_link(run: Training) -> Markup:
    """The name, as a link to the run's options; where it is unfinished, this is said."""
    state_of = "<small>unfinished</small>" if run.result is None else ""
    return Markup(f"{link(run.name, run.anchor)}{state_of}")


def steps_cell(run: Training) -> tuple[str, str]:
    """Steps done, of how many where the run is unfinished."""
    if run.result is not None:
        return f"{run.steps:,}", ""
    return f"{run.steps:,} of {run.asked_steps:,}" if run.asked_steps else f"{run.steps:,} so far", ""


def state(run: Training) -> str:
    """In words."""
    if run.result is not None:
        return f"finished, {count(run.steps, 'step')}"
    asked = f" of {run.asked_steps:,}" if run.asked_steps else ""
    return f"unfinished: {run.steps:,}{asked} steps; last written {run.seen or 'at an unknown time'}"


def options_text(options: Mapping[str, object]) -> str:
    """Options in which a run differs; the last ones are only counted where there are many."""
    told = [option_text(key, value) for key, value in options.items()]
    more = f", and {len(told) - OPTIONS_SHOWN} more" if len(told) > OPTIONS_SHOWN else ""
    return ", ".join(told[:OPTIONS_SHOWN]) + more if told else MISSING


def _different(options: Mapping[str, object], runs: Sequence[Training]) -> str:
    """In what a run differs from its group; a dash where it is alone."""
    return options_text(options) if options or len(runs) < 2 else "as most"


def best_tau(run: Training) -> str:
    """The first of its measurements, and of what."""
    if not run.tau:
        return MISSING
    setting, one = next(iter(run.tau.items()))
    contexts = f", n = {run.contexts}" if run.contexts else ""
    return f"{estimate(one, 2)}\n{setting}{contexts}"


def started(run: Training) -> str:
    """When its first attempt began, else when it was last written to."""
    first = next((str(a["started"]) for a in run.attempts if a.get("started")), None)
    if first:
        return first[:16].replace("T", " ") + "\nUTC"
    return f"{run.seen}\nlast written" if run.seen else MISSING


def where(run: Training) -> str:
    """Devices and ranks of the last attempt."""
    environment = (run.attempts[-1].get("environment") or {}) if run.attempts else {}
    devices = environment.get("devices") or []
    if not devices:
        return str((run.config.get("trainer") or {}).get("accelerator") or MISSING)
    ranks = number(environment.get("ranks")) or 1
    kinds = ", ".join(
        f"{devices.count(one)} x {one}" if devices.count(one) > 1 else str(one) for one in dict.fromkeys(devices)
    )
    return f"{kinds}\n{count(int(ranks), 'rank')} on {environment.get('host')}"


def _tokens(n: int | None) -> str:
    if n is None:
        return MISSING
    return f"{n / 1e6:,.2f} M" if n >= 1e5 else f"{n:,}"
