"""What a validation adds up, over all rows and ranks: loss, acceptance by rollout position, the tau expected from it.

Sums, not means of batches: a number is that of the whole validation, whatever the batches and on any number of ranks.
"""

from __future__ import annotations

import torch
from lightning import LightningModule
from torch import Tensor
from torchmetrics import Metric


class ValidationSums(Metric):
    """Sums over the positions of a validation; `compute` adds up all ranks.

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

    def update(self, loss: Tensor, counted: Tensor, alpha: Tensor | None = None) -> None:
        """Adds a batch.

        Args:
            loss: scalar, the mean over the counted positions.
            counted: [B, L] bool: no padding.
            alpha: [B, L] float32, the acceptance probability at each position; None: not known.
        """
        n_positions = counted.sum()
        if n_positions:  # else a mean of nothing, which is no number
            self.loss += loss.double() * n_positions
        self.positions += n_positions
        if alpha is None:
            return
        number = torch.arange(alpha.shape[1], device=alpha.device) % self.k
        self.alpha.index_add_(0, number, torch.where(counted, alpha.double(), 0.0).sum(0))
        self.drafted.index_add_(0, number, counted.double().sum(0))

    def compute(self) -> dict[str, float]:
        """By metric name; of acceptance only what is known. tau_expected = 1 + sum_j prod_{i <= j} alpha_i."""
        found = {"eval/loss": self.loss / self.positions}
        if self.drafted.sum() > 0:
            by_step = self.alpha / self.drafted.clamp_min(1)
            found["eval/alpha"] = self.alpha.sum() / self.drafted.sum()
            found |= {f"eval/alpha_step_{step + 1}": alpha for step, alpha in enumerate(by_step)}
            found["eval/tau_expected"] = 1 + by_step.cumprod(0).sum()
        return {name: float(value) for name, value in found.items()}


def log_sums(module: LightningModule, sums: ValidationSums) -> None:
    """Logs what a validation added up, the same on all ranks."""
    for name, value in sums.compute().items():
        module.log(name, value, sync_dist=True, prog_bar=name in ("eval/alpha", "eval/tau_expected"))
