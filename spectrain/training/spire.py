"""Training of a SPIRe drafter (methods.md section 4): the frozen target runs inside the step; or what it says was
stored beforehand (`data_prep.activations`), and its body never runs.

Letters: B rows, L tokens a row, C captured layers, D hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor

from spectrain.decoding.target import Features, TargetModel
from spectrain.models.rollout import rollout
from spectrain.models.spire import SpireDrafter
from spectrain.training.data import RowBatch
from spectrain.training.losses import LossParts, LossSettings, Teacher, drafter_loss
from spectrain.training.optim import OptimizerSettings, lightning_optimizers
from spectrain.training.validation import ValidationSums, log_sums

STORED_DTYPE = torch.bfloat16  # of features, as `spectrain.stores.features` keeps them


class SpireTraining(LightningModule):
    """Trains the drafter against the target's distribution on rows of tokens.

    The target is no submodule: it stays out of the optimizer and of checkpoints.

    Args:
        drafter: what is trained.
        target: frozen; it captures what the drafter reads of it.
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
        self.sums = ValidationSums(drafter.config.k)
        self._frozen = [target.with_capture(drafter.config.captured_layers)]  # a list hides it from nn.Module

    @property
    def target(self) -> TargetModel:
        return self._frozen[0]

    def setup(self, stage: str) -> None:
        if not hasattr(self.target.model, "hf_device_map"):  # a sharded target stays where it is
            self.target.model.to(self.device)

    def features(self, batch: RowBatch) -> Features:
        """What the target says of a batch: stored, or computed now and rounded likewise, so that losses agree."""
        if batch.final_hidden is not None:
            found = Features(batch.captured, batch.final_hidden)
        else:
            with torch.no_grad():
                found = self.target.features(batch.tokens)
        captured = None if found.captured is None else found.captured.to(STORED_DTYPE)
        unembedding = self.target.unembedding
        return Features(captured, found.final_hidden.to(self.device, STORED_DTYPE).to(unembedding.dtype))

    def parts(self, batch: RowBatch) -> LossParts:
        """Loss and acceptance of one batch of B rows of L tokens; alpha comes back as [B * L], 0 at padding."""
        tokens, features = batch.tokens, self.features(batch)
        hidden = rollout(self.drafter, tokens, features.captured).flatten(0, 1)
        teacher = Teacher(features.final_hidden.flatten(0, 1), self.target.unembedding.to(self.device))
        next_tokens = F.pad(tokens[:, 1:], (0, 1), value=-100)
        unembedding = self.drafter.lm_head.weight
        if batch.is_token is None:
            return drafter_loss(self.loss_settings, hidden, unembedding, teacher, next_tokens.flatten())
        next_tokens = next_tokens.masked_fill(~F.pad(batch.is_token[:, 1:], (0, 1)), -100)
        kept = batch.is_token.flatten().nonzero()[:, 0]
        teacher = Teacher(teacher.hidden[kept], teacher.unembedding)
        parts = drafter_loss(self.loss_settings, hidden[kept], unembedding, teacher, next_tokens.flatten()[kept])
        alpha = parts.alpha.new_zeros(tokens.numel()).index_copy(0, kept, parts.alpha)
        return LossParts(parts.loss, parts.cross_entropy, alpha)

    def training_step(self, batch: RowBatch, batch_idx: int) -> Tensor:
        parts, mean = self.parts(batch), {"batch_size": len(batch.numbers), "sync_dist": True}
        self.log("train/loss", parts.loss, prog_bar=True, **mean)
        self.log("train/cross_entropy", parts.cross_entropy, **mean)
        self.log("train/alpha", parts.alpha.sum() / batch.numel(), prog_bar=True, **mean)
        return parts.loss

    def on_validation_epoch_start(self) -> None:
        self.sums.reset()

    def validation_step(self, batch: RowBatch, batch_idx: int) -> None:
        parts = self.parts(batch)
        self.sums.update(parts.loss, batch.counted(), parts.alpha.view(batch.tokens.shape))

    def on_validation_epoch_end(self) -> None:
        log_sums(self, self.sums)

    def recompute_activations(self) -> None:
        """From now on the inside of a block is not kept for the backward pass but computed again."""
        self.drafter.recomputes = True

    def configure_optimizers(self) -> dict:
        return lightning_optimizers(
            self.drafter.named_parameters(), self.optimizer_settings, int(self.trainer.estimated_stepping_batches)
        )
