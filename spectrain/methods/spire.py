"""`method=spire`: a chain of `gamma` tokens from a SPIRe drafter (Neelam et al. 2025, section 3).

What it drafts with is `spectrain.drafting.model_drafter`: its keys are those of the sinks and the window.
"""

from __future__ import annotations

import torch

from spectrain.decoding import Context
from spectrain.drafting.folder_drafter import FolderDrafter
from spectrain.models.rollout import SpireStates, windowed_context
from spectrain.models.spire import load
from spectrain.target.llama import KeysValues


class Spire(FolderDrafter):
    """Drafts with a `SpireDrafter`; see `ModelDrafter`."""

    load, states = staticmethod(load), SpireStates

    def read_context(self, context: Context) -> None:
        """Without target activations: the drafter reads each row's text up to its root by itself.

        An ablation, so simple rather than fast: the whole text each step.
        """
        if self.method.capture_layers:
            return
        config = self.drafter.config
        self.keys.join(range(context.n_rows))
        for row in range(context.n_rows):
            length = context.n_tokens[row] - 1
            every = windowed_context(self.drafter, context.tokens[row, None, :length].to(context.device))
            n_sinks = min(config.sink_tokens, length)
            near = range(max(n_sinks, length - self.keys.ring_tokens), length)  # a slot is written once
            kept = torch.tensor([*range(n_sinks), *near], device=context.device)
            read = [KeysValues(kv.keys[:, :, kept], kv.values[:, :, kept]) for kv in every]
            self.keys.write(read, kept[None], slice(row, row + 1))


DRAFTER = "spire"
build, open_states, of_states, for_trees = Spire.build, Spire.open_states, Spire.of_states, Spire.for_trees
