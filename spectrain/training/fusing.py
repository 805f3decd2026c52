"""What trainings of drafters that read states of several layers of the target share (EAGLE-3, DFlash)."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from spectrain.config.values import shown
from spectrain.errors import UserError
from spectrain.models.drafter_model import FusingDrafter, plain_shape
from spectrain.models.kinds import module_of
from spectrain.models.pruned_init import NEW, copy_ends, draw_weights
from spectrain.models.published import read
from spectrain.models.root_attention import drafted_places
from spectrain.target.lean import shape_of
from spectrain.target.llama import LlamaShape
from spectrain.target.loading import fetched
from spectrain.training.base import compile_methods
from spectrain.training.data import RowBatch, Rows
from spectrain.training.drafters import (
    Drafted,
    DrafterExperiment,
    DrafterTraining,
    check_alike,
    cut_as_asked,
    drafted_tokens,
)


class FusingTraining(DrafterTraining):
    """Trains a drafter on drafts from many roots of a row: each token at each depth at which one reaches it."""

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

    def compile_blocks(self, backend: str = "inductor") -> None:
        super().compile_blocks(backend)
        compile_methods(self.drafter.blocks, ("keys_values", "queries_keys_values", "after_attention"), backend)
        compile_methods([self.drafter], ("fused",), backend)


class FusingExperiment(DrafterExperiment):
    """A drafter that reads states of several layers of the target, which may be another project's."""

    # Options of the run that are fields of the drafter's config, and cannot be changed when it is trained further.
    of_config: tuple[str, ...]

    def blank(self) -> DrafterTraining:
        return super().blank() if self.own.init in NEW else self.training(self.trained_before(), is_new=False)

    def new(self, rows: Rows) -> FusingDrafter:
        """Return a drafter whose last norm and unembedding begin as the target's."""
        kept = drafted_tokens(self.own.draft_vocab, rows, self.target)
        drafter = self.empty(kept).apply(draw_weights)
        if kept is not None:
            drafter.kept.copy_(kept)
        copy_ends(drafter, self.target.model)
        return drafter

    def trained_before(self) -> FusingDrafter:
        own, before = self.own, self.before.config
        has = {name: getattr(before, name) for name in self.of_config}
        has |= {"target_layers": list(before.target_layers), "intermediate_size": before.shape.intermediate_size}
        check_alike(own.init, has, {name: value for name in has if (value := getattr(own, name)) is not None})
        drafter = cut_as_asked(self.before, None if own.draft_vocab == "auto" else own.draft_vocab, own.init)
        drafter.config = self.shape(drafter.kept)
        if before.own_embedding:
            drafter.embed_tokens.requires_grad_(False)
        return drafter

    @cached_property
    def before(self) -> FusingDrafter:
        """The drafter of the folder `init`, which says itself what it is; in a plan it has no values."""
        kind = module_of(self.exports)
        if self.target.device.type == "meta":
            with torch.device("cpu"):
                fields, _ = read(kind.read, fetched(self.own.init, "init"), f"init={self.own.init}", self.target)
            return self.drafter_type(self.drafter_type.config_type(**fields), self.target)
        return kind.load(Path(self.own.init), self.target, "init")

    def layers_or(self, default: tuple[int, ...]) -> tuple[int, ...]:
        """Return the option target_layers."""
        layers, n_layer = tuple(self.own.target_layers or default), self.target.n_layer
        if list(layers) != sorted({*layers}) or not 0 <= layers[0] <= layers[-1] < n_layer:
            raise UserError(f"target_layers={shown(list(layers))} must be of 0..{n_layer - 1}, each once and in order")
        return layers

    def block_shape(self, qk_norm: bool = False) -> LlamaShape:
        """Return the dimensions of a block, of the width that the options say."""
        shape = plain_shape(shape_of(self.target.model), qk_norm)
        return replace(shape, intermediate_size=self.own.intermediate_size or shape.intermediate_size)
