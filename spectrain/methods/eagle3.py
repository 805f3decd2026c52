"""`method=eagle3`: a chain of `gamma` tokens from an EAGLE-3 drafter (Li et al. 2025).

What it drafts with is `spectrain.drafting.model_drafter`: its keys are those of the whole text, or of the window where
the drafter was trained with one.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.config.values import Dtype, Nodes, Whole
from spectrain.drafting.budget import AUTO
from spectrain.drafting.draft_chain import lengths_of
from spectrain.drafting.model_drafter import ModelDrafter
from spectrain.drafting.stopping import StopRule
from spectrain.errors import UserError
from spectrain.models.artifacts import fastest_gamma, trained_acceptance
from spectrain.models.draft_states import DraftStates
from spectrain.models.eagle3 import Eagle3Drafter, load, unrolled
from spectrain.target import TargetModel
from spectrain.target.fingerprint import module_fingerprint

DRAFTER = "eagle3"
LONGER = 2  # a chain of adaptive length has at most so many times the k of training


class Eagle3(ModelDrafter):
    """Drafts with an `Eagle3Drafter`; see `ModelDrafter`."""


class Eagle3States(DraftStates):
    """An EAGLE-3 drafter, whose drafts begin at every `block_tokens`-th position of a text, but the first."""

    def __init__(self, drafter: Eagle3Drafter, block_tokens: int) -> None:
        if not 2 <= block_tokens <= (window := drafter.config.window_tokens):
            raise UserError(f"rollout_tokens={block_tokens} must be 2..{window}, the drafter's window_tokens")
        self.drafter, self.module, self.block_tokens = drafter, drafter, block_tokens
        self.hidden_size, self.max_positions = drafter.config.shape.hidden_size, drafter.config.shape.max_positions
        self.capture_layers = drafter.config.captured_layers

    def fingerprint(self) -> str:
        return module_fingerprint(self.drafter, asdict(self.drafter.config))

    def hidden(self, tokens: Tensor, captured: Tensor | None, text: Tensor | None = None) -> Tensor:
        k, text = self.block_tokens, tokens if text is None else text  # of which roots and context are
        states = unrolled(self.drafter, text, captured, k, every=k, drafted=tokens)
        return torch.stack(states, dim=2).flatten(1, 2)[:, : tokens.shape[1]]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.drafter.spread(F.linear(hidden, self.drafter.unembedding.to(hidden.dtype)))

    def reads_drafts(self, n_tokens: int, device: torch.device | str = "cpu") -> Tensor:
        later = torch.arange(n_tokens, device=device) >= self.block_tokens  # no draft begins at the first token
        return super().reads_drafts(n_tokens, device) & later


def build(
    target: TargetModel,
    drafter: str,
    gamma: Whole | None = None,
    max_nodes: Nodes | None = None,
    draft_dtype: Dtype = "auto",
    draft_vocab: Whole | Literal["auto"] | None = AUTO,
) -> Eagle3:
    """The method from an exported drafter, or from another project's; the options are those of `method=spire`."""
    loaded, fastest = load(Path(drafter), target), fastest_gamma(Path(drafter))
    k, window = loaded.config.k, loaded.config.window_tokens
    acceptance = trained_acceptance(Path(drafter))
    length, budget = lengths_of(gamma, max_nodes, fastest or k, min(LONGER * k, window), acceptance)
    return Eagle3(loaded, length, draft_dtype=draft_dtype, draft_vocab=draft_vocab, budget=budget)


def open_states(target: TargetModel, drafter: str, rollout_tokens: int) -> Eagle3States:
    """Open a drafter whose states an acceptance head reads."""
    loaded = load(Path(drafter), target).to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    return Eagle3States(loaded, min(rollout_tokens, loaded.config.window_tokens))


def of_states(states: Eagle3States, gamma: int, stop: StopRule | None, draft_dtype: str) -> Eagle3:
    """The method that drafts with these states: chains of at most gamma tokens, ended by the rule."""
    gamma = min(gamma, states.drafter.config.window_tokens)
    return Eagle3(states.drafter, gamma, stop=stop, draft_dtype=draft_dtype)


def for_trees(
    target: TargetModel, drafter: str, levels: int, branches: int, draft_dtype: str, draft_vocab: int | str | None
) -> Eagle3:
    """The model of a `TreeDrafter`. A tree has no more levels than tokens in the window."""
    loaded = load(Path(drafter), target)
    levels = min(levels, loaded.config.window_tokens)
    n_read = 1 + branches * (levels - 1)  # the root, and the branches of each level but the last
    return Eagle3(loaded, levels, draft_dtype=draft_dtype, draft_vocab=draft_vocab, tree_nodes=n_read)
