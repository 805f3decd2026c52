"""Trains EAGLE-3 drafters by the training-time test (EAGLE-3, Li et al. 2025, section 3.2)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from spectrain.errors import UserError
from spectrain.methods.eagle3 import Eagle3
from spectrain.models.drafter_model import FusingDrafter
from spectrain.models.eagle3 import Eagle3Config, Eagle3Drafter, default_layers, unrolled
from spectrain.models.eagle3_init import FusionFit, copy_last_block
from spectrain.models.pruned_init import NEW
from spectrain.training.data import RowBatch, Rows
from spectrain.training.fusing import FusingExperiment, FusingTraining


class Eagle3Training(FusingTraining):
    """Trains an EAGLE-3 drafter: a token is learned at each depth at which a draft reaches it.

    Args:
        options: of `FusingTraining`.
        fits_input: whether what the drafter reads is fitted first, see `FusionFit`.
    """

    def __init__(self, *options: object, fits_input: bool = False) -> None:
        super().__init__(*options)
        self.fits_input = fits_input

    def begin(self, rows: Rows) -> None:
        if self.fits_input:
            self.fit(FusionFit(self.drafter, self.target.n_layer - 1), rows)

    def states(self, batch: RowBatch, captured: Tensor, first_root: int) -> Tensor:
        """Return the inputs of the unembedding [B, R, k, D] of each draft."""
        k = self.drafter.config.k
        drafts = unrolled(self.drafter, batch.tokens, captured, k, self.roots_every, first_root, batch.starts)
        return torch.stack(drafts, dim=2)


class Eagle3Experiment(FusingExperiment):
    """An EAGLE-3 drafter. Its block is a Llama's, whatever the target's are."""

    exports, drafter_type, method = "eagle3", Eagle3Drafter, Eagle3
    of_config = ("unembedding", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

    def training(self, drafter: Eagle3Drafter, is_new: bool) -> Eagle3Training:
        own = self.own
        if own.roots_every > own.ttt_steps:
            raise UserError(f"roots_every={own.roots_every} is more than ttt_steps={own.ttt_steps}; lower it")
        options = *self.of_training(drafter), own.roots_every, own.decay
        return Eagle3Training(*options, fits_input=own.init == "pruned")

    def new(self, rows: Rows) -> FusingDrafter:
        drafter = super().new(rows)
        if self.own.init == "pruned":
            copy_last_block(drafter, self.target.model)
        return drafter

    def shape(self, kept: Tensor | None = None) -> Eagle3Config:
        """The config of the drafter for this target, which can draft the tokens `kept` [K]; None: all."""
        own, n_layer = self.own, self.target.n_layer
        of_run = {"k": own.ttt_steps, "draft_vocab": None if kept is None else len(kept)}
        if own.init not in NEW:
            before = self.before.config
            return replace(before, window_tokens=own.window_tokens or before.window_tokens, **of_run)
        options = {name: getattr(own, name) for name in ("window_tokens", *self.of_config)}
        return Eagle3Config(self.block_shape(), self.layers_or(default_layers(n_layer)), **options, **of_run)
