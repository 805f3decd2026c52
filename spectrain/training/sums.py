"""Sums over a validation: loss and acceptance of drafters, predictions and labels of acceptance heads."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

N_BINS = 15  # of a reliability diagram


class Sums(Metric):
    """Sums in float64 over a validation. `compute` adds up the ranks', so neither they nor batches change the result.

    Args:
        sizes: of each sum, by name.
    """

    full_state_update = False

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.add_state(name, torch.zeros(size, dtype=torch.float64), dist_reduce_fx="sum")

    def reset(self) -> None:
        super().reset()
        for name in self._defaults:  # DeepSpeed's precision plugin casts whatever the module holds
            setattr(self, name, getattr(self, name).double())


class ValidationSums(Sums):
    """Loss and acceptance by rollout position, summed over all positions of a validation, and the tau expected of it.

    Args:
        k: positions of a rollout; position t of a row is drafted as number t mod k.
    """

    def __init__(self, k: int) -> None:
        super().__init__(loss=1, positions=1, alpha=k, drafted=k)
        self.k = k

    def update(
        self,
        loss: Tensor,
        counted: Tensor,
        alpha: Tensor | None = None,
        starts: Tensor | None = None,
        weight: Tensor | None = None,
        steps: Tensor | None = None,
    ) -> None:
        """Add a batch.

        Args:
            loss: scalar, the mean over as many positions as `weight`, or None: over the counted ones.
            counted: [B, L] bool: no padding.
            alpha: [B, L] float32, the acceptance probability at each position; None: not known.
            starts: [B, L] int64, where the document of each token begins; None: each row is a document.
            steps: int64, which token of its draft each is, 0 .. k - 1; `counted` and `alpha` are of its shape then.
                None: by its position.
        """
        n_positions = counted.sum() if weight is None else weight
        if n_positions:  # else a mean of nothing, which is no number
            self.loss += loss.double() * n_positions
        self.positions += n_positions
        if alpha is None:
            return
        number = steps
        if steps is None:
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


class Reliability(Sums):
    """Sums of predictions and labels by bins of equal width: the numbers of a reliability diagram. Also the loss.

    The expected calibration error is the mean distance between a bin's mean prediction and its mean label, weighted by
    its positions (Guo et al. 2017). Labels may be probabilities, which torchmetrics' BinaryCalibrationError refuses.
    """

    def __init__(self) -> None:
        super().__init__(positions=N_BINS, predictions=N_BINS, labels=N_BINS, loss=1, weight=1, kl=1)
        # Positions, mean prediction and mean label of each bin that has any position, of all ranks, as last computed.
        self.bins: list[dict[str, float]] = []

    def update(self, predicted: Tensor, labels: Tensor, **sums: Tensor) -> None:
        """Add predictions and labels, both [M] in [0, 1], and sums over them: `loss`, its `weight`, and `kl`."""
        for name, value in sums.items():
            getattr(self, name).add_(value)
        bins = (predicted * N_BINS).long().clamp(0, N_BINS - 1)
        for name, values in (("positions", torch.ones_like(predicted)), ("predictions", predicted), ("labels", labels)):
            getattr(self, name).index_add_(0, bins, values.double())

    def compute(self) -> dict[str, float]:
        """Metrics by name; nan where nothing was added. The expected calibration error is 0 to 1."""
        sums = zip(self.positions.tolist(), self.predictions.tolist(), self.labels.tolist(), strict=True)
        self.bins = [{"positions": int(n), "predicted": float(f / n), "label": float(a / n)} for n, f, a in sums if n]
        n_positions = self.positions.sum()
        found = {
            "eval/loss": self.loss / self.weight,
            "eval/kl_binary": self.kl / n_positions,
            "eval/label": self.labels.sum() / n_positions,
            "eval/predicted": self.predictions.sum() / n_positions,
            "eval/calibration_error": (self.predictions - self.labels).abs().sum() / n_positions,
        }
        return {name: float(value) for name, value in found.items()}
