"""Trains DFlash drafters: blocks from many roots of a row, whose later tokens weigh less."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from spectrain.errors import UserError
from spectrain.methods.dflash import DFlash
from spectrain.models.dflash import DFlashConfig, DFlashDrafter, default_layers, drafted
from spectrain.models.pruned_init import NEW
from spectrain.training.data import RowBatch
from spectrain.training.fusing import FusingExperiment, FusingTraining


class DFlashTraining(FusingTraining):
    """Trains a DFlash drafter: a token is learned at each place at which a block from one of the roots has it."""

    def states(self, batch: RowBatch, captured: Tensor, first_root: int) -> Tensor:
        drafts = drafted(self.drafter, batch.tokens, captured, self.roots_every, first_root, batch.starts)
        return torch.stack(drafts, dim=2)


class DFlashExperiment(FusingExperiment):
    """A DFlash drafter. Its blocks are Qwen 3's, whatever the target's are."""

    exports, drafter_type, method = "dflash", DFlashDrafter, DFlash
    of_config = ("unembedding", "n_layer", "block_tokens", "mask_token")

    def training(self, drafter: DFlashDrafter, is_new: bool) -> DFlashTraining:
        decay = math.exp(-1 / self.own.decay_tokens)
        return DFlashTraining(*self.of_training(drafter), self.own.roots_every, decay)

    def shape(self, kept: Tensor | None = None) -> DFlashConfig:
        own, draft_vocab = self.own, None if kept is None else len(kept)
        if own.init not in NEW:
            return replace(self.before.config, draft_vocab=draft_vocab)
        if own.init == "pruned":
            raise UserError("init=pruned is nothing for DFlash drafters; give init=random, or a folder")
        options = {name: getattr(own, name) for name in self.of_config}
        if own.mask_token is None:
            of_tokenizer = getattr(self.target.tokenizer, "mask_token_id", None)
            options["mask_token"] = self.target.vocab_size - 1 if of_tokenizer is None else of_tokenizer
        layers = self.layers_or(default_layers(self.target.n_layer, own.n_layer))
        return DFlashConfig(self.block_shape(qk_norm=True), layers, draft_vocab=draft_vocab, **options)
