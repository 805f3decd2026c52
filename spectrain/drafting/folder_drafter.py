"""How methods that draft with our own blocks are opened: their chains, those of heads, and the models of trees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self

from spectrain.config.values import Dtype, Nodes, Whole
from spectrain.drafting.budget import AUTO
from spectrain.drafting.draft_chain import lengths_of
from spectrain.drafting.model_drafter import ModelDrafter
from spectrain.drafting.stopping import StopRule
from spectrain.models.artifacts import fastest_gamma, trained_acceptance
from spectrain.models.draft_states import DraftStates
from spectrain.models.drafter_model import DrafterModel
from spectrain.target import TargetModel

LONGER = 2  # times the k of training a chain may have that adapts


class FolderDrafter(ModelDrafter):
    """A `ModelDrafter` of a kind, whose folders are opened by `load`. The module of a method has these by their names.

    Every one raises UserError where the drafter was trained for another target.
    """

    load: Callable[[Path, TargetModel], DrafterModel]
    states: type[DraftStates]  # that acceptance heads read, made of a drafter and the tokens of its rollouts

    @classmethod
    def build(
        cls,
        target: TargetModel,
        drafter: str,
        gamma: Whole | None = None,
        max_nodes: Nodes | None = None,
        draft_dtype: Dtype = "auto",
        draft_vocab: Whole | Literal["auto"] | None = AUTO,
    ) -> Self:
        """The method from an exported drafter, or one of another project that its kind reads.

        gamma: None takes, with max_nodes "auto", as many tokens in each step as pay; else the number that was the
        fastest after training, which is in the export. For the others see `ModelDrafter`.
        """
        folder, loaded = Path(drafter), cls.load(Path(drafter), target)
        lengths = fastest_gamma(folder) or loaded.config.k, cls.longest(loaded), trained_acceptance(folder)
        length, budget = lengths_of(gamma, max_nodes, *lengths)
        return cls(loaded, length, budget=budget, draft_dtype=draft_dtype, draft_vocab=draft_vocab)

    @staticmethod
    def longest(drafter: DrafterModel) -> int:
        """Return the most tokens of a chain whose length is chosen step by step."""
        return min(LONGER * drafter.config.k, drafter.config.window_tokens)

    @classmethod
    def open_states(cls, target: TargetModel, drafter: str, rollout_tokens: int) -> DraftStates:
        """Open an exported drafter whose states an acceptance head reads."""
        loaded = cls.load(Path(drafter), target).to(device=target.device, dtype=target.dtype)
        return cls.states(loaded.eval().requires_grad_(False), min(rollout_tokens, loaded.config.window_tokens))

    @classmethod
    def of_states(cls, states: DraftStates, gamma: int, stop: StopRule | None, draft_dtype: str) -> Self:
        """The method that drafts with these states: chains of at most gamma tokens, ended by the rule."""
        gamma = min(gamma, states.drafter.config.window_tokens)
        return cls(states.drafter, gamma, stop=stop, draft_dtype=draft_dtype)

    @classmethod
    def for_trees(cls, target: TargetModel, drafter: str, levels: int, branches: int, **options: object) -> Self:
        """The model of a `TreeDrafter`; `options` are draft_dtype and draft_vocab.

        A tree has no more levels than tokens in the window.
        """
        loaded = cls.load(Path(drafter), target)
        levels = min(levels, loaded.config.window_tokens)
        n_read = 1 + branches * (levels - 1)  # the root, and the branches of each level but the last
        return cls(loaded, levels, tree_nodes=n_read, **options)
