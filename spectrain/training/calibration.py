"""How far predicted probabilities are from what happens: a reliability diagram's numbers."""

from __future__ import annotations

import torch
from torch import Tensor

N_BINS = 15


class Reliability:
    """Sums of predictions and labels by bins of equal width, over many batches and ranks.

    The expected calibration error is the mean distance between a bin's mean prediction and its mean label, weighted by
    its positions (Guo et al. 2017); labels may be probabilities themselves.
    """

    def __init__(self) -> None:
        self.sums = torch.zeros(3, N_BINS, dtype=torch.float64)  # positions, predictions, labels

    def add(self, predicted: Tensor, labels: Tensor) -> None:
        """Takes predictions and labels, both [M] in [0, 1]."""
        bins = (predicted * N_BINS).long().clamp(0, N_BINS - 1).cpu()
        rows = torch.stack([torch.ones_like(predicted), predicted, labels]).double().cpu()
        self.sums.index_add_(1, bins, rows)

    @property
    def error(self) -> float:
        """Expected calibration error, 0 to 1; nan where nothing was added."""
        positions, predictions, labels = self.sums
        return float((predictions - labels).abs().sum() / positions.sum())

    def bins(self) -> list[dict[str, float]]:
        """Of each bin that has any position: positions, mean prediction, mean label."""
        return [{"positions": int(n), "predicted": float(f / n), "label": float(a / n)} for n, f, a in self.sums.T if n]
