"""Next-token training of an ordinary causal LM: the bundled target and the vanilla drafter (methods.md section 2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor
from transformers import PreTrainedModel

from spectrain.decoding.target import TargetModel
from spectrain.training.data import RowBatch
from spectrain.training.optim import OptimizerSettings, lightning_optimizers
from spectrain.training.validation import ValidationSums, log_sums


class LanguageModelTraining(LightningModule):
    """Cross-entropy on data.

    Args:
        model: any Hugging Face causal LM.
        optimizer: which optimizer, learning rate and warm-up.
        target: frozen; where given, validation says how often it would accept the model's tokens.
        gamma: drafted tokens for which validation computes the expected tau.
    """

    def __init__(
        self, model: PreTrainedModel, optimizer: OptimizerSettings, target: TargetModel | None = None, gamma: int = 4
    ) -> None:
        super().__init__()
        self.model = model
        self.optimizer_settings = optimizer
        self.sums = ValidationSums(gamma)
        self._frozen = [target]  # a list hides it from nn.Module

    @property
    def target(self) -> TargetModel | None:
        return self._frozen[0]

    def setup(self, stage: str) -> None:
        if self.target and not hasattr(self.target.model, "hf_device_map"):  # a sharded target stays where it is
            self.target.model.to(self.device)

    def loss(self, tokens: Tensor) -> Tensor:  # tokens [B, L] int64 -> scalar float32, nats a token
        return next_token_loss(self.model(input_ids=tokens, use_cache=False).logits, tokens)

    def training_step(self, batch: RowBatch, batch_idx: int) -> Tensor:
        loss = self.loss(batch.tokens)
        self.log("train/loss", loss, prog_bar=True, sync_dist=True, batch_size=len(batch.numbers))  # of all ranks' rows
        return loss

    def on_validation_epoch_start(self) -> None:
        self.sums.reset()

    def validation_step(self, batch: RowBatch, batch_idx: int) -> None:
        logits = self.model(input_ids=batch.tokens, use_cache=False).logits  # [B, L, V]
        alpha = self.alpha(batch.tokens, logits) if self.target else None
        self.sums.update(next_token_loss(logits, batch.tokens), batch.counted(), alpha)

    def alpha(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Probability [B, L] float32 that the target accepts what these logits [B, L, V] draw, teacher forced."""
        found = []
        for i in range(len(tokens)):  # row by row: the probabilities of a batch may not fit beside its logits
            p = self.target.forward(tokens[i : i + 1]).logits.float().softmax(-1)
            found.append(torch.minimum(p, logits[i : i + 1].float().softmax(-1)).sum(-1))
        return torch.cat(found)

    def on_validation_epoch_end(self) -> None:
        log_sums(self, self.sums)

    def recompute_activations(self) -> None:
        """From now on the inside of a block is not kept for the backward pass but computed again."""
        self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def configure_optimizers(self) -> dict:
        return lightning_optimizers(
            self.named_parameters(), self.optimizer_settings, int(self.trainer.estimated_stepping_batches)
        )

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("train/lr", optimizer.param_groups[0]["lr"])


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy, nats a token, of logits [B, L, V] with the tokens [B, L] that follow."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
