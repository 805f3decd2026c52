"""The reliability diagram of an acceptance head: what it predicts against what happens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure


def plot_reliability(
    file: Path, bins: Sequence[dict[str, float]], error: float, w_rej: float = 1.0, w_acc: float = 1.0
) -> None:
    """Draws a PNG: mean label by mean prediction, and below it the share of positions.

    A weighted loss is least not at f = a but at f = w_acc a / (w_acc a + w_rej (1 - a)); that curve is drawn, too.

    Args:
        file: is written.
        bins: `positions`, `predicted` and `label` (means) of each bin that has any position.
        error: expected calibration error.
        w_rej, w_acc: weights of the loss.
    """
    predicted, labels = [b["predicted"] for b in bins], [b["label"] for b in bins]
    whole = sum(b["positions"] for b in bins)
    figure = Figure(figsize=(5, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    above.plot([0, 1], [0, 1], color="0.6", linestyle="--", label="calibrated")
    if w_rej != w_acc:
        a = np.linspace(0, 1, 101)
        aim = w_acc * a / (w_acc * a + w_rej * (1 - a))
        above.plot(aim, a, color="0.3", linestyle=":", label=f"what w_rej = {w_rej:g}, w_acc = {w_acc:g} aims at")
    above.plot(predicted, labels, marker="o", color="C0", label=f"head, calibration error {error:.3f}")
    above.set(ylabel="mean acceptance probability (label)", xlim=(0, 1), ylim=(0, 1))
    above.legend(loc="lower right", frameon=False)
    below.bar(predicted, [b["positions"] / whole for b in bins], width=0.04, color="C0")
    below.set(xlabel="predicted acceptance probability", ylabel="share of positions")
    figure.savefig(file, dpi=130)
