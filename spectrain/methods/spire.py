"""`method=spire`: a chain of `gamma` tokens from a SPIRe drafter (Neelam et al. 2025, section 3).

What it drafts with is `spectrain.drafting.model_drafter`: its keys are those of the sinks and the window.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

from spectrain.config.values import Dtype, Nodes, Whole
from spectrain.decoding import Context
from spectrain.drafting.budget import AUTO
from spectrain.drafting.model_drafter import ModelDrafter
from spectrain.drafting.stopping import StopRule
from spectrain.models.rollout import SpireStates, chunk_tokens, windowed_states
from spectrain.models.spire import load
from spectrain.target import TargetModel
from spectrain.target.llama import KeysValues


def build(
    target: TargetModel,
    drafter: str,
    gamma: Whole | None = None,
    max_nodes: Nodes | None = None,
    draft_dtype: Dtype = "auto",
    draft_vocab: Whole | Literal["auto"] | None = AUTO,
) -> Spire:
    """The method from an exported drafter; raises UserError where it was trained for another target.

    gamma: None takes, with max_nodes "auto", as many tokens in each step as pay; else the number that was the fastest
    after training, which is in the export. For the others see `Spire`.
    """
    options = {"draft_dtype": draft_dtype, "draft_vocab": draft_vocab}
    return Spire.of_folder(load(Path(drafter), target), Path(drafter), gamma, max_nodes, **options)


def open_states(target: TargetModel, drafter: str, rollout_tokens: int) -> SpireStates:
    """Open an exported drafter whose states an acceptance head reads."""
    loaded = load(Path(drafter), target).to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    return SpireStates(loaded, min(rollout_tokens, loaded.config.window_tokens))


def of_states(states: SpireStates, gamma: int, stop: StopRule | None, draft_dtype: str) -> Spire:
    """The method that drafts with these states: chains of at most gamma tokens, ended by the rule."""
    gamma = min(gamma, states.drafter.config.window_tokens)
    return Spire(states.drafter, gamma, stop=stop, draft_dtype=draft_dtype)


def for_trees(
    target: TargetModel, drafter: str, levels: int, branches: int, draft_dtype: str, draft_vocab: int | str | None
) -> Spire:
    """The model of a `TreeDrafter`."""
    options = {"draft_dtype": draft_dtype, "draft_vocab": draft_vocab}
    return Spire.of_trees(load(Path(drafter), target), levels, branches, **options)


DRAFTER = "spire"


class Spire(ModelDrafter):
    """Drafts with a `SpireDrafter`; see `ModelDrafter`."""

    def read_context(self, context: Context) -> None:
        """Without target activations: the drafter reads each row's text up to its root by itself.

        An ablation, so simple rather than fast: the whole text each step.
        """
        if self.method.capture_layers:
            return
        config = self.drafter.config
        for row in range(context.n_rows):
            length = context.n_tokens[row] - 1
            chunk = chunk_tokens(config, length)
            tokens = context.tokens[row, :length].to(context.device)
            padded = F.pad(tokens, (0, -length % chunk))[None]
            _, every = windowed_states(self.drafter, self.drafter.embed(padded), chunk)
            n_sinks = min(config.sink_tokens, length)
            near = range(max(n_sinks, length - self.keys.ring_tokens), length)  # a slot is written once
            kept = torch.tensor([*range(n_sinks), *near], device=context.device)
            self.keys.forget(row)
            read = [KeysValues(kv.keys[:, :, kept], kv.values[:, :, kept]) for kv in every]
            self.keys.write(read, kept[None], slice(row, row + 1))
