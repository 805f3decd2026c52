"""The reliability diagram of an acceptance head: what it predicts against what happens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure


def plot_reliability(file: Path, bins: Sequence[dict[str, float]], error: float) -> None:
    """Draws a PNG: mean label by mean prediction, and below it the share of positions.

    Args:
        file: is written.
        bins: `positions`, `predicted` and `label` (means) of each bin that has any position.
        error: expected calibration error.
    """
    predicted, labels = [b["predicted"] for b in bins], [b["label"] for b in bins]
    whole = sum(b["positions"] for b in bins)
    figure = Figure(figsize=(5, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    above.plot([0, 1], [0, 1], color="0.6", linestyle="--", label="calibrated")
    above.plot(predicted, labels, marker="o", color="C0", label=f"head, calibration error {error:.3f}")
    above.set(ylabel="mean acceptance probability (label)", xlim=(0, 1), ylim=(0, 1))
    above.legend(loc="upper left", frameon=False)
    below.bar(predicted, [b["positions"] / whole for b in bins], width=0.04, color="C0")
    below.set(xlabel="predicted acceptance probability", ylabel="share of positions")
    figure.savefig(file, dpi=130)
