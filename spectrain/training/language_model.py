"""Next-token training of an ordinary causal LM: the bundled target and the vanilla drafter (methods.md section 2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor
from transformers import PreTrainedModel

from spectrain.training.data import RowBatch
from spectrain.training.optim import OptimizerSettings, lightning_optimizers


class LanguageModelTraining(LightningModule):
    """Cross-entropy on data.

    Args:
        model: any Hugging Face causal LM.
        optimizer: which optimizer, learning rate and warm-up.
    """

    def __init__(self, model: PreTrainedModel, optimizer: OptimizerSettings) -> None:
        super().__init__()
        self.model = model
        self.optimizer_settings = optimizer

    def loss(self, tokens: Tensor) -> Tensor:  # tokens [B, L] int64 -> scalar float32, nats a token
        logits = self.model(input_ids=tokens, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def training_step(self, batch: RowBatch, batch_idx: int) -> Tensor:
        loss = self.loss(batch.tokens)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch.numbers))
        return loss

    def validation_step(self, batch: RowBatch, batch_idx: int) -> None:
        loss = self.loss(batch.tokens)
        self.log("eval/loss", loss, prog_bar=True, sync_dist=True, batch_size=len(batch.numbers))

    def configure_optimizers(self) -> dict:
        return lightning_optimizers(
            self.named_parameters(), self.optimizer_settings, int(self.trainer.estimated_stepping_batches)
        )

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("train/lr", optimizer.param_groups[0]["lr"])
