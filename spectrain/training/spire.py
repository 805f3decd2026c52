"""Trains SPIRe drafters (SPIRe, Neelam et al. 2025)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from spectrain.config.training import Train
from spectrain.errors import UserError
from spectrain.methods.spire import Spire
from spectrain.models.pruned_init import InputFit, last_layers, new_drafter
from spectrain.models.rollout import rollout
from spectrain.models.spire import SpireConfig, SpireDrafter, load
from spectrain.target.lean import shape_of
from spectrain.target.target import FINAL
from spectrain.training.base import Parts, compile_methods
from spectrain.training.data import RowBatch, Rows
from spectrain.training.drafters import DrafterExperiment, DrafterTraining, check_alike, cut_as_asked, drafted_tokens

OF_SHAPE = ("k", "window_tokens", "sink_tokens", "own_key", "feedback", "target_activations", "input", "unembedding")
ADAPTED = {"own_key": False, "sink_tokens": 0}  # which a trained drafter may be adapted to: see conf/engine/


class SpireTraining(DrafterTraining):
    """Trains a SPIRe drafter, after its input was fitted to the target's where it is a new one."""

    def input_fit(self) -> InputFit:
        return InputFit(self.drafter, last_layers(self.target.model, self.drafter.config.n_layer)[0])

    def states(self, batch: RowBatch, captured: Tensor | None, first_root: int) -> Tensor:
        return rollout(self.drafter, batch.tokens, captured, None, first_root, batch.starts)

    def compile_blocks(self, backend: str = "inductor") -> None:
        super().compile_blocks(backend)
        # Not whole blocks: keys are of another number in each pass, and attention is a kernel of its own anyway.
        compile_methods(self.drafter.blocks, ("queries_keys_values", "after_attention"), backend)
        compile_methods([self.drafter], ("of_context", "of_memories"), backend)


class SpireExperiment(DrafterExperiment):
    """A SPIRe drafter for a target whose blocks it can have."""

    exports, drafter_type, method = "spire", SpireDrafter, Spire

    @staticmethod
    def needs_blocks(config: Train) -> bool:
        return DrafterExperiment.needs_blocks(config) or not config.own.target_activations

    def prepare(self) -> Parts:
        if (memories := self.own.memories) != "blocks" and self.config.data.source != "online":
            raise UserError(f"memories={memories} is an ablation that needs the target itself; give data=online")
        return super().prepare()

    def training(self, drafter: SpireDrafter, is_new: bool) -> SpireTraining:
        fits_input = is_new and drafter.config.input != "tied"  # one that was trained before has its input
        roots_every = drafter.config.k if self.own.shifted_blocks else 1
        return SpireTraining(*self.of_training(drafter), roots_every, fits_input=fits_input)

    def new(self, rows: Rows) -> SpireDrafter:
        kept = drafted_tokens(self.own.draft_vocab, rows, self.target)
        return new_drafter(self.target, self.shape(kept), self.own.init, kept)

    def trained_before(self) -> SpireDrafter:
        folder, asked = self.own.init, self.own.draft_vocab
        drafter = cut_as_asked(load(Path(folder), self.target, "init"), asked, folder)
        config = self.shape(drafter.kept)
        adapted = {name: value for name, value in ADAPTED.items() if getattr(config, name) == value}
        drafter.config = replace(drafter.config, **adapted)
        found, wanted = ({**vars(one), "n_layer": one.n_layer} for one in (drafter.config, config))
        layers = found.pop("target_layers"), wanted.pop("target_layers")
        check_alike(folder, found, wanted)
        if layers[0] != layers[1]:
            raise UserError(f"init={folder} was trained with other memories; give the same option memories=")
        return drafter

    def shape(self, kept: Tensor | None = None) -> SpireConfig:
        """The shape of the drafter for this target, which can draft the tokens `kept` [K]; None: all."""
        own = self.own
        options = {name: getattr(own, name) for name in OF_SHAPE}
        reads_previous = own.previous_state
        if reads_previous is None:
            reads_previous = own.input != "tied" and own.target_activations
        options |= {"previous_state": reads_previous, "draft_vocab": None if kept is None else len(kept)}
        options |= {"unembedding": "trained"} if own.input == "tied" else {}
        layers = last_layers(self.target.model, own.n_layer)
        if own.memories != "blocks":
            layers = len(layers) * (FINAL if own.memories == "final" else 0,)
        return SpireConfig(shape_of(self.target.model), layers, **options)
