"""Pictures of a training: loss and tau over steps, and acceptance by the position in a draft."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Curve = Mapping[int, Mapping[str, float]]  # step -> metric -> value

STEP_METRIC = re.compile(r"eval/alpha_step_(\d+)")


def plot_training(folder: Path, curve: Curve) -> dict[str, Path]:
    """Draws what a curve holds.

    Args:
        folder: PNG files are written there.
        curve: what was logged, by step.

    Returns:
        By name; "acceptance" only where validation measured it.
    """
    found = {"curve": folder / "curve.png"}
    draw_curve(found["curve"], curve)
    by_position = acceptance_by_position(curve)
    if by_position:
        found["acceptance"] = folder / "acceptance.png"
        draw_acceptance(found["acceptance"], by_position)
    return found


def draw_curve(file: Path, curve: Curve) -> None:
    """Loss of training and validation over steps; below it tau, expected and measured, where there is any."""
    with_tau = any(name.startswith("eval/tau") for row in curve.values() for name in row)
    figure = Figure(figsize=(7, 6 if with_tau else 4), layout="constrained")
    rows = figure.subplots(2 if with_tau else 1, 1, sharex=True, squeeze=False)[:, 0]
    _line(rows[0], curve, "train/loss", "training", color="C0", linewidth=1)
    _line(rows[0], curve, "eval/loss", "held-out rows", color="C1", marker="o")
    rows[0].set(ylabel="loss")
    if with_tau:
        _line(rows[1], curve, "eval/tau_expected", "expected from acceptance", color="C2", marker="o")
        measured = _points(curve, "eval/tau")
        if measured:
            low, high = (dict(_points(curve, f"eval/tau_{end}")) for end in ("low", "high"))
            # not below 0, which matplotlib refuses: of one context the interval is no number
            errors = [[max(0.0, t - low[s]) for s, t in measured], [max(0.0, high[s] - t) for s, t in measured]]
            rows[1].errorbar(*zip(*measured, strict=True), errors, color="C3", marker="s", capsize=3, label="measured")
        rows[1].set(ylabel="tau, tokens a target forward")
    for axes in rows:
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)
    rows[-1].set(xlabel="optimizer step")
    figure.savefig(file, dpi=130)


def draw_acceptance(file: Path, by_position: Mapping[int, list[float]]) -> None:
    """Acceptance probability by the position in a draft, a line a validation, the last ones darker."""
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    for i, (step, alphas) in enumerate(by_position.items()):
        newest = i + 1 == len(by_position)
        opacity = 1.0 if newest else 0.2 + 0.5 * i / len(by_position)
        label = f"step {step}" if newest or i == 0 else None
        axes.plot(range(1, len(alphas) + 1), alphas, marker="o", color="C0", alpha=opacity, label=label)
    axes.set(xlabel="position in the draft", ylabel="acceptance probability alpha", ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=130)


def acceptance_by_position(curve: Curve) -> dict[int, list[float]]:
    """alpha of positions 1.. of each validation, by its step."""
    found = {}
    for step, row in curve.items():
        numbered = {int(match[1]): v for name, v in row.items() if (match := STEP_METRIC.fullmatch(name))}
        if numbered:
            found[step] = [numbered[position] for position in sorted(numbered)]
    return found


def _points(curve: Curve, name: str) -> list[tuple[int, float]]:
    return [(step, row[name]) for step, row in curve.items() if name in row]


def _line(axes: Axes, curve: Curve, name: str, label: str, **style: object) -> None:
    points = _points(curve, name)
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **style)
