"""Sums over a validation: the loss and acceptance of drafters, and the predictions and labels of acceptance heads.

Letters: B rows, L tokens per row, M positions with a prediction.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

N_BINS = 15  # of a reliability diagram


class ValidationSums(Metric):
    """Loss and acceptance by rollout position, summed over all positions of a validation, and the tau expected of it.

    The result does not depend on the batches and the number of ranks, over which `compute` adds up.

    Args:
        k: positions of a rollout; position t of a row is drafted as number t mod k.
    """

    full_state_update = False

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        for name, size in (("loss", 1), ("positions", 1), ("alpha", k), ("drafted", k)):
            self.add_state(name, torch.zeros(size, dtype=torch.float64), dist_reduce_fx="sum")

    def reset(self) -> None:
        super().reset()
        for name in self._defaults:  # DeepSpeed's precision plugin casts whatever the module holds
            setattr(self, name, getattr(self, name).double())

    def update(self, loss: Tensor, counted: Tensor, alpha: Tensor | None = None, starts: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            loss: scalar, the mean over the counted positions.
            counted: [B, L] bool: no padding.
            alpha: [B, L] float32, the acceptance probability at each position; None: not known.
            starts: [B, L] int64, where the document of each token begins; None: each row is a document.
        """
        n_positions = counted.sum()
        if n_positions:  # else a mean of nothing, which is no number
            self.loss += loss.double() * n_positions
        self.positions += n_positions
        if alpha is None:
            return
        place = torch.arange(alpha.shape[1], device=alpha.device)
        number = (place % self.k).expand_as(counted)
        if starts is not None:  # a document that begins inside a block begins a rollout
            number = torch.minimum(number, place - starts)
        self.alpha.index_add_(0, number.flatten(), torch.where(counted, alpha.double(), 0.0).flatten())
        self.drafted.index_add_(0, number.flatten(), counted.double().flatten())

    def compute(self) -> dict[str, float]:
        """Metrics by name; of acceptance only what is known. tau_expected = 1 + sum_j prod_{i <= j} alpha_i."""
        found = {"eval/loss": self.loss / self.positions}
        if self.drafted.sum() > 0:
            by_step = self.alpha / self.drafted.clamp_min(1)
            found["eval/alpha"] = self.alpha.sum() / self.drafted.sum()
            found |= {f"eval/alpha_step_{step + 1}": alpha for step, alpha in enumerate(by_step)}
            found["eval/tau_expected"] = 1 + by_step.cumprod(0).sum()
        return {name: float(value) for name, value in found.items()}


class Reliability:
    """Sums of predictions and labels by bins of equal width: the numbers of a reliability diagram.

    The expected calibration error is the mean distance between a bin's mean prediction and its mean label, weighted by
    its positions (Guo et al. 2017); labels may be probabilities themselves.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sums = torch.zeros(3, N_BINS, dtype=torch.float64)  # positions, predictions, labels

    def update(self, predicted: Tensor, labels: Tensor) -> None:
        """Add predictions and labels, both [M] in [0, 1]."""
        bins = (predicted * N_BINS).long().clamp(0, N_BINS - 1).cpu()
        rows = torch.stack([torch.ones_like(predicted), predicted, labels]).double().cpu()
        self.sums.index_add_(1, bins, rows)

    def compute(self) -> dict[str, float]:
        """The expected calibration error, 0 to 1; nan where nothing was added."""
        positions, predictions, labels = self.sums
        return {"eval/calibration_error": float((predictions - labels).abs().sum() / positions.sum())}

    def bins(self) -> list[dict[str, float]]:
        """Positions, mean prediction and mean label of each bin that has any position."""
        return [{"positions": int(n), "predicted": float(f / n), "label": float(a / n)} for n, f, a in self.sums.T if n]
