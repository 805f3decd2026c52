"""Online training of a SPIRe drafter: the frozen target runs inside the step (methods.md section 4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor

from spectrain.decoding.target import TargetModel
from spectrain.models.spire import SpireDrafter
from spectrain.models.spire_rollout import rollout
from spectrain.training.data import RowBatch
from spectrain.training.losses import LossParts, LossSettings, Teacher, drafter_loss
from spectrain.training.optim import OptimizerSettings, lightning_optimizers


class SpireTraining(LightningModule):
    """Trains the drafter against the target's distribution on rows of tokens.

    The target is no submodule: it stays out of the optimizer and of checkpoints.

    Args:
        drafter: what is trained.
        target: frozen; captures the drafter's `target_layers`.
        loss: which loss.
        optimizer: which optimizer, learning rate and warm-up.
    """

    def __init__(
        self, drafter: SpireDrafter, target: TargetModel, loss: LossSettings, optimizer: OptimizerSettings
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.loss_settings = loss
        self.optimizer_settings = optimizer
        self._frozen = [target.with_capture(drafter.config.target_layers)]  # a list hides it from nn.Module

    @property
    def target(self) -> TargetModel:
        return self._frozen[0]

    def setup(self, stage: str) -> None:
        if not hasattr(self.target.model, "hf_device_map"):  # a sharded target stays where it is
            self.target.model.to(self.device)

    def parts(self, batch: RowBatch) -> LossParts:
        """Loss and acceptance of one batch of B rows of L tokens; alpha comes back as [B * L]."""
        tokens = batch.tokens
        with torch.no_grad():
            features = self.target.features(tokens)
        hidden = rollout(self.drafter, tokens, features.captured)
        teacher = Teacher(features.final_hidden.flatten(0, 1).to(self.device), self.target.unembedding.to(self.device))
        next_tokens = F.pad(tokens[:, 1:], (0, 1), value=-100).flatten()
        unembedding = self.drafter.lm_head.weight
        return drafter_loss(self.loss_settings, hidden.flatten(0, 1), unembedding, teacher, next_tokens)

    def training_step(self, batch: RowBatch, batch_idx: int) -> Tensor:
        parts, n_rows = self.parts(batch), len(batch.numbers)
        self.log("train/loss", parts.loss, prog_bar=True, batch_size=n_rows)
        self.log("train/cross_entropy", parts.cross_entropy, batch_size=n_rows)
        self.log("train/alpha", parts.alpha.mean(), prog_bar=True, batch_size=n_rows)
        return parts.loss

    def validation_step(self, batch: RowBatch, batch_idx: int) -> None:
        parts, mean = self.parts(batch), {"batch_size": len(batch.numbers), "sync_dist": True}
        self.log("eval/loss", parts.loss, **mean)
        self.log("eval/alpha", parts.alpha.mean(), prog_bar=True, **mean)
        k = self.drafter.config.k
        whole = batch.tokens.shape[1] // k * k
        by_step = parts.alpha.view(*batch.tokens.shape)[:, :whole].unflatten(1, (-1, k)).mean(dim=(0, 1))  # [k]
        for step, alpha in enumerate(by_step):
            self.log(f"eval/alpha_step_{step + 1}", alpha, **mean)
        self.log("eval/tau_expected", 1 + by_step.cumprod(0).sum(), prog_bar=True, **mean)

    def configure_optimizers(self) -> dict:
        return lightning_optimizers(
            self.drafter.named_parameters(), self.optimizer_settings, int(self.trainer.estimated_stepping_batches)
        )
