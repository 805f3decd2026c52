"""What all methods with a draft model share: a chain of tokens, drawn one after the other for all rows at once.

Letters: n active rows, g draft length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spectrain.decoding.drafter import Context
from spectrain.decoding.tree import DraftTree
from spectrain.errors import check_whole


def gamma_within(gamma: int, max_nodes: int | None) -> int:
    """The draft length that a budget of `max_nodes` nodes, root and drafted tokens, leaves of `gamma`.

    Raises:
        UserError: gamma is below 1, or max_nodes has no room for a drafted token.
    """
    check_whole("gamma", gamma, 1)
    if max_nodes is None:
        return gamma
    check_whole("max_nodes", max_nodes, 2)
    return min(gamma, max_nodes - 1)


def draft_chain(context: Context, gamma: int, first: Callable[[], Tensor], step: Callable[[Tensor, int], Tensor]):
    """Drafts up to gamma tokens a row, fewer where a row may emit fewer.

    A row that stops early draws no more, so that its sample does not depend on its neighbours; the draft model runs on
    it all the same, and what it computes there is never read.

    Args:
        context: of the active rows.
        gamma: most tokens a row.
        first: logits [n, V] after each root.
        step: logits [n, V] after draft tokens [n], which are the i-th (from 1) of their chains. Not called on the last
            token drafted.
    """
    gammas = [min(gamma, room - 1) for room in context.room]
    longest = max(gammas)
    if longest < 1:
        return DraftTree.root_only(context.roots)
    tokens, probs = [], []
    logits = first()
    for i in range(1, longest + 1):
        token, q = context.draw(logits, None if min(gammas) >= i else [g >= i for g in gammas])
        tokens.append(token)
        probs.append(q)
        if i < longest:
            logits = step(token, i)
    lengths = torch.tensor(gammas, device=context.device) if min(gammas) < longest else None
    return DraftTree.chain(
        context.roots, torch.stack(tokens, dim=1), lengths, None if context.sampling.greedy else probs
    )
