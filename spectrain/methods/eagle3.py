"""`method=eagle3`: a chain of `gamma` tokens from an EAGLE-3 drafter (Li et al. 2025).

What it drafts with is `spectrain.drafting.model_drafter`: its keys are those of the whole text, or of the window where
the drafter was trained with one.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.drafting.folder_drafter import FolderDrafter
from spectrain.models.draft_states import RolloutStates
from spectrain.models.eagle3 import load, unrolled
from spectrain.target.fingerprint import module_fingerprint


class Eagle3States(RolloutStates):
    """An EAGLE-3 drafter, whose drafts begin at every `block_tokens`-th position of a text, but the first."""

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


class Eagle3(FolderDrafter):
    """Drafts with an `Eagle3Drafter`; see `ModelDrafter`."""

    load, states = staticmethod(load), Eagle3States


DRAFTER = "eagle3"
build, open_states, of_states, for_trees = Eagle3.build, Eagle3.open_states, Eagle3.of_states, Eagle3.for_trees
