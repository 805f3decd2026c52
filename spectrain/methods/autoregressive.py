"""Plain decoding, one token per step, through the same loop: the baseline that every speedup refers to."""

from __future__ import annotations

from spectrain.decoding import Context, Drafter
from spectrain.target import DraftTree


class Autoregressive(Drafter):
    """Proposes nothing: the target scores the root alone."""

    def propose(self, context: Context) -> DraftTree:
        return DraftTree.root_only(context.roots)
