"""Trains EAGLE-3 drafters by the training-time test (EAGLE-3, Li et al. 2025, section 3.2)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from spectrain.config.values import shown
from spectrain.decoding import Drafter
from spectrain.errors import UserError
from spectrain.methods.eagle3 import Eagle3
from spectrain.models.eagle3 import (
    Eagle3Config,
    Eagle3Drafter,
    default_layers,
    drafted_places,
    load,
    save,
    unrolled,
)
from spectrain.models.pruned_init import draw_weights
from spectrain.models.rollout import root_of_epoch
from spectrain.target import TargetModel
from spectrain.target.lean import shape_of
from spectrain.target.llama import LlamaShape
from spectrain.target.loading import DTYPES
from spectrain.training.base import compile_methods
from spectrain.training.checkpoints import load_weights
from spectrain.training.data import RowBatch, Rows
from spectrain.training.drafters import Drafted, DrafterExperiment, DrafterTraining, drafted_tokens
from spectrain.training.losses import LossSettings
from spectrain.training.optim import OptimizerSettings

OF_CONFIG = ("window_tokens", "unembedding", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


class Eagle3Training(DrafterTraining):
    """Trains an EAGLE-3 drafter: a token is learned at each depth at which a draft reaches it.

    Args:
        roots_every: distance of two roots of drafts. Beyond 1 they begin elsewhere in each epoch.
        decay: weight of a drafted token in the loss over that of the one before it.
    """

    def __init__(
        self,
        drafter: Eagle3Drafter,
        target: TargetModel,
        loss: LossSettings,
        optimizer: OptimizerSettings,
        seed: int = 0,
        roots_every: int = 1,
        decay: float = 0.8,
    ) -> None:
        super().__init__(drafter, target, loss, optimizer)
        self.seed, self.roots_every, self.decay = seed, roots_every, decay

    def states(self, batch: RowBatch, captured: Tensor, first_root: int) -> Tensor:
        """Return the inputs of the unembedding [B, R, k, D] of each draft."""
        k = self.drafter.config.k
        drafts = unrolled(self.drafter, batch.tokens, captured, k, self.roots_every, first_root, batch.starts)
        return torch.stack(drafts, dim=2)

    def drafted(self, states: Tensor, places: Tensor, batch: RowBatch, first_root: int) -> Drafted:
        (n_rows, n_roots, k), every, n_tokens = states.shape[:3], self.roots_every, batch.tokens.shape[1]
        row, behind = places // n_tokens, places % n_tokens - first_root
        steps = (behind % every)[:, None] + torch.arange(0, k, every, device=places.device)  # [N, J]
        roots = (behind[:, None] - steps) // every
        found = (steps < k) & (roots >= 0)
        steps = steps.clamp_max(k - 1)
        entries = (row[:, None] * n_roots + roots.clamp_min(0)) * k + steps
        options = every, first_root, batch.starts, places.device
        reaches = torch.stack([drafted_places(n_tokens, step, *options)[1] for step in range(k)], dim=-1)
        reached = found & reaches.expand(n_rows, -1, -1).flatten()[entries]
        hidden = states.flatten(0, 2).index_select(0, entries.flatten()).unflatten(0, entries.shape)
        return Drafted(hidden, steps, reached, reached * self.decay**steps)

    def first_root(self) -> int:
        return root_of_epoch(self.roots_every, self.seed, self.current_epoch)

    def compile_blocks(self, backend: str = "inductor") -> None:
        super().compile_blocks(backend)
        compile_methods(self.drafter.blocks, ("keys_values", "queries_keys_values", "after_attention"), backend)
        compile_methods([self.drafter], ("fused",), backend)


class Eagle3Experiment(DrafterExperiment):
    """An EAGLE-3 drafter. Its block is a Llama's, whatever the target's are."""

    exports = "eagle3"

    def block_layers(self) -> tuple[int, ...]:
        n_layer, asked = self.target.n_layer, self.own.target_layers
        layers = tuple(asked) if asked else default_layers(n_layer)
        if layers != tuple(sorted({*layers})) or not 0 <= layers[0] <= layers[-1] < n_layer:
            raise UserError(
                f"target_layers={shown(asked)} must be blocks 0 to {n_layer - 1}, each once and in order; give others"
            )
        return layers

    def empty(self, kept: Tensor | None) -> Eagle3Drafter:
        return Eagle3Drafter(self.shape(kept), self.target)

    def training(self, drafter: Eagle3Drafter, is_new: bool) -> Eagle3Training:
        own, loss = self.own, LossSettings(self.own.loss, self.own.omega)
        if own.roots_every > own.ttt_steps:
            raise UserError(f"roots_every={own.roots_every} is more than ttt_steps={own.ttt_steps}; lower it")
        how = own.optimizer, self.config.seed, own.roots_every, own.decay
        return Eagle3Training(drafter, self.target, loss, *how)

    def new(self, rows: Rows) -> Eagle3Drafter:
        """A new drafter. Norm and unembedding begin as the target's."""
        kept = drafted_tokens(self.own.draft_vocab, rows, self.target)
        drafter = self.empty(kept).apply(draw_weights)
        if kept is not None:
            drafter.kept.copy_(kept)
        drafter.norm.load_state_dict(self.target.model.model.norm.state_dict())
        if self.own.unembedding == "trained":
            drafter.lm_head.load_state_dict(drafter.tables.unembedding_layer(kept).state_dict())
        return drafter
