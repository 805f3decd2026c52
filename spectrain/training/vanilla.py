"""Trains vanilla drafters: small ordinary Llamas (Leviathan et al. 2023), by cross-entropy on the data."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from spectrain.decoding import Drafter
from spectrain.methods.speculative import Speculative
from spectrain.models.vanilla import new_vanilla
from spectrain.target import TargetModel
from spectrain.target.llama import in_pieces
from spectrain.target.masks import MOST_MASKED, each_alone, packed_mask
from spectrain.target.modules import find_blocks
from spectrain.training.base import Experiment, Parts, Training, compile_methods
from spectrain.training.checkpoints import load_weights
from spectrain.training.data import RowBatch
from spectrain.training.losses import next_token_loss, with_next
from spectrain.training.optim import OptimizerSettings
from spectrain.training.sums import ValidationSums

ALPHA_TOKENS = 1024  # whose probabilities lie in memory at the same time
GAMMA = 4  # drafted tokens, for the tau that validation expects


class LanguageModelTraining(Training):
    """Next-token training of a Llama of Hugging Face: the bundled target and the vanilla drafter.

    Where a target is given, validation says how often it would accept the model's tokens, and which tau is expected
    for drafts of GAMMA tokens.
    """

    def __init__(self, model: PreTrainedModel, optimizer: OptimizerSettings, target: TargetModel | None = None) -> None:
        super().__init__(optimizer, ValidationSums(GAMMA), target)
        self.model = model

    def training_step(self, batch: RowBatch, batch_idx: int) -> Tensor:
        weight = with_next(batch.counted()).sum()
        return self.summed(loss=(self.objective(batch) * weight, weight))

    def validation_step(self, batch: RowBatch, batch_idx: int) -> None:
        states = self.states(batch)
        alpha = self.alpha(batch, states) if self.target else None
        weight = with_next(batch.counted()).sum()
        self.sums.update(self.loss(states, batch), batch.counted(), alpha, batch.starts, weight)

    def loss(self, states: Tensor, batch: RowBatch) -> Tensor:
        unembedding = self.model.get_output_embeddings().weight
        return next_token_loss(states, unembedding, batch.tokens, batch.counted(), self.chunk_loss)

    def states(self, batch: RowBatch) -> Tensor:
        """The final states [B, L, D] of the model, whose products with the unembedding are its logits."""

        def states(tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> list[Tensor]:
            inputs = {"input_ids": tokens, "position_ids": positions, "attention_mask": mask}
            return [self.model.base_model(**inputs, use_cache=False).last_hidden_state]

        tokens, starts = batch.tokens, batch.starts
        if starts is not None and starts.shape[1] > MOST_MASKED:
            return each_alone(states, tokens, starts)[0]
        return states(tokens, *(() if starts is None else packed_mask(starts)))[0]

    def alpha(self, batch: RowBatch, states: Tensor) -> Tensor:
        """Probability [B, L] float32 that the target accepts what is drawn after final states [B, L, D]."""
        unembedding = self.model.get_output_embeddings().weight.to(states.dtype)

        def shared(final: Tensor, states: Tensor) -> list[Tensor]:
            p, q = self.target.logits_of(final), F.linear(states, unembedding)
            return [torch.minimum(p.float().softmax(-1), q.float().softmax(-1)).sum(-1)]

        final = self.target.features_of_own(batch.tokens, batch.starts).final_hidden
        size = max(1, ALPHA_TOKENS // len(states))  # the probabilities of a batch may not fit into memory
        return in_pieces(shared, size, 1, final, states)[0]

    def objective(self, batch: RowBatch) -> Tensor:
        return self.loss(self.states(batch), batch)

    @property
    def width(self) -> int:
        return self.model.config.hidden_size

    @property
    def plain_blocks(self) -> list[nn.Module]:
        return list(find_blocks(self.model))

    def recompute_activations(self) -> None:
        self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def compile_blocks(self, backend: str = "inductor") -> None:
        super().compile_blocks(backend)
        compile_methods(find_blocks(self.model), ("forward",), backend)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        self.log("train/lr", optimizer.param_groups[0]["lr"])


class VanillaExperiment(Experiment):
    """A small Llama for any target."""

    exports, drafts = "vanilla", True

    def prepare(self) -> Parts:
        return Parts(self.blank(), self.data.drafter_rows(self.run, self.target, ()))

    def blank(self) -> LanguageModelTraining:
        return LanguageModelTraining(self.new(), self.own.optimizer, self.target)

    def new(self) -> PreTrainedModel:
        """A new model; by default it has half the target's layers and half its width."""
        return new_vanilla(self.target.model, self.own.n_layer, self.own.hidden_size)

    def model(self, weights: dict[str, Tensor]) -> PreTrainedModel:
        """The model of a training's weights."""
        return load_weights(self.new(), weights, "model")

    def drafter(self, weights: dict[str, Tensor]) -> Drafter:
        model = self.model(weights).to(self.target.device).eval()
        return Speculative(TargetModel(model, self.target.tokenizer), draft_dtype="auto")

    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        self.model(weights).save_pretrained(folder)
