"""Trainings of one kind for one target, side by side: what came out, and their numbers."""

from __future__ import annotations

from collections.abc import Sequence

from spectrain.reporting.formats import estimate_of, number
from spectrain.reporting.runs import Training, differences, option_text

KINDS = {"spire": "SPIRe drafter", "vanilla": "vanilla drafter", "specdecpp": "acceptance head", "target": "target"}
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
OBJECTIVE = ("loss", "omega", "w_rej", "w_acc")  # where these differ, losses are on different scales


def shared_options(runs: Sequence[Training]) -> dict[str, object]:
    """The options that all of several runs have in common."""
    options = runs[0].options.items() if len(runs) > 1 else ()
    return {key: value for key, value in options if all(run.options.get(key, ...) == value for run in runs)}


def metrics_of(runs: Sequence[Training]) -> dict[str, str]:
    """Metric -> head of its column, of those that validation measured."""
    return {m: head for m, head in METRICS.items() if any(number(run.metrics.get(m)) is not None for run in runs)}


def title_of(runs: Sequence[Training]) -> str:
    kind = KINDS[runs[0].kind]
    name = f"{kind[0].upper()}{kind[1:]}" if len(runs) == 1 else f"{len(runs)} {kind}s"
    return f"{name} for {runs[0].target}" if runs[0].target else name


def outcome(runs: Sequence[Training]) -> dict:
    """The best run: by tau in the first setting that was measured, or else by loss where losses can be compared."""
    known = [(setting, run, *estimate_of(one)) for run in runs for setting, one in run.tau.items()]
    known = [one for one in known if one[2] is not None]
    if known:
        setting = known[0][0]
        ranked = sorted((one for one in known if one[0] == setting), key=lambda one: -one[2])
        bounds = [bounds for *_, bounds in ranked[:2]]
        overlaps = len(bounds) == 2 and None not in bounds and bounds[0][0] <= bounds[1][1]
        return {"best": ranked[0][1], "setting": setting, "ranked": len(ranked), "overlaps": overlaps}
    losses = {run.name: loss for run in runs if (loss := number(run.metrics.get("eval/loss"))) is not None}
    if len(runs) < 2 or not losses or not on_one_scale(runs):
        return {}
    return {"lowest": min(losses, key=losses.__getitem__), "loss": min(losses.values())}


def on_one_scale(runs: Sequence[Training]) -> bool:
    """Whether the losses of these runs can be compared."""
    return len({tuple(repr(run.options.get(key)) for key in OBJECTIVE) for run in runs}) < 2


def different(runs: Sequence[Training]) -> dict[str, str]:
    """Run -> in what it differs from most of the others, as typed; of many options the last are only counted."""
    texts = {}
    for name, options in differences(runs).items():
        told = [option_text(key, value) for key, value in options.items()]
        more = f", and {len(told) - OPTIONS_SHOWN} more" if len(told) > OPTIONS_SHOWN else ""
        texts[name] = ", ".join(told[:OPTIONS_SHOWN]) + more
    return texts
