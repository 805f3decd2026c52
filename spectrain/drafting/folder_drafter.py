"""How methods that draft with our own blocks are opened: their chains, those of heads, and the models of trees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self

from spectrain.config.values import Dtype, Nodes, Whole
from spectrain.drafting.budget import AUTO
from spectrain.drafting.model_drafter import ModelDrafter
from spectrain.drafting.stopping import StopRule
from spectrain.models.draft_states import DraftStates
from spectrain.models.drafter_model import DrafterModel
from spectrain.target import TargetModel


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
        folder, options = Path(drafter), {"draft_dtype": draft_dtype, "draft_vocab": draft_vocab}
        return cls.of_folder(cls.load(folder, target), folder, gamma, max_nodes, **options)

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
        """The model of a `TreeDrafter`; `options` are draft_dtype and draft_vocab."""
        return cls.of_trees(cls.load(Path(drafter), target), levels, branches, **options)
