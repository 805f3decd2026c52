"""`method=dflash`: a chain of at most B - 1 tokens, all of which one pass of a DFlash drafter drafts.

What it keeps of a text is `spectrain.drafting.model_drafter`'s: keys and values of the target's states, in each block.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from spectrain.decoding import Context
from spectrain.drafting.draft_chain import DraftStep
from spectrain.drafting.folder_drafter import FolderDrafter
from spectrain.errors import UserError
from spectrain.models.dflash import DFlashDrafter, load
from spectrain.target import DraftTree, TargetModel
from spectrain.target.llama import additive


class DFlash(FolderDrafter):
    """Drafts with a `DFlashDrafter`: one pass reads a whole block, however many of its tokens are drafted.

    The distribution q_j of a block's token j depends on the text and its root alone, not on what was drawn before it.
    So drawing each token from its own q_j draws the chain from q_1 q_2 .., in which token j has the distribution q_j
    whatever the tokens before it are: what the verification of drawn chains assumes. Samples keep the target's
    distribution; that the tokens of a draft may not fit each other costs acceptance only.

    Raises:
        UserError: a block has fewer than gamma tokens.
    """

    load = staticmethod(load)

    def __init__(self, drafter: DFlashDrafter, gamma: int | None = None, **options: object) -> None:
        super().__init__(drafter, gamma, **options)
        if self.gamma > (k := drafter.config.k):
            raise UserError(f"gamma={self.gamma} must be 1..{k}: a block of this drafter has {k} tokens to draft")

    @classmethod
    def for_trees(cls, target: TargetModel, drafter: str, levels: int, branches: int, **options: object) -> DFlash:
        """Nodes of one depth have the same candidates. A tree has no more levels than k."""
        loaded = cls.load(Path(drafter), target)
        return cls(loaded, min(levels, loaded.config.k), **options)

    @staticmethod
    def longest(drafter: DFlashDrafter) -> int:
        return drafter.config.k

    def _next(self, tokens: Tensor, positions: Tensor, i: int) -> DraftStep:
        if i == 0:
            self.state = self.runtime.run("blocks", self._logits, tokens, positions)
        return DraftStep(self.drafter.spread(self.state[:, i]))

    def _in_graph(self, i: int, tokens: Tensor, positions: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        block = state if i else self._logits(tokens[:, 0], positions)
        return self.drafter.spread(block[:, i]), block

    def read_roots(self, context: Context) -> Tensor:
        self._catch_up(context)
        self.state = self.runtime.run("blocks", self._logits, context.roots, self._roots(context))
        return self.state[:, 0]

    def read_nodes(self, context: Context, tree: DraftTree, n_new: int) -> Tensor:
        depth = tree.depth[:, -n_new:, None]
        return self.state.gather(1, depth.expand(-1, -1, self.state.shape[2]))

    def _logits(self, roots: Tensor, positions: Tensor) -> Tensor:
        """Return what the blocks of roots [n] at positions [n] say of their tokens, logits [n, B - 1, K]."""
        model, keys, size = self.drafter, self.keys, self.drafter.config.block_tokens
        unmarked = torch.zeros(len(roots), 1, keys.n_marks, dtype=torch.bool, device=roots.device)
        past, seen = keys.context(unmarked, positions)
        seen = torch.cat([seen, seen.new_ones(len(roots), 1, size)], dim=2).expand(-1, size, -1)
        rope = model.rope(positions[:, None] + torch.arange(size, device=roots.device))
        states, _ = model.step(model.block_of(roots), rope, past, additive(seen[:, None], model.norm.weight.dtype))
        return model.kept_logits(states[:, 1:])


DRAFTER = "dflash"
build, for_trees = DFlash.build, DFlash.for_trees
