"""Which positions attend to which: masks of bool for causal texts, trees behind cached tokens, and packed documents.

Letters: B rows, N nodes, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spectrain.decoding.tree import DraftTree


def tree_mask(tree: DraftTree, starts: Sequence[int], slots: Tensor, used: int) -> Tensor:
    """Return [B, 1, N, used] bool: each node attends to the row's committed tokens, its ancestors and itself.

    Row b has starts[b] committed tokens, and its nodes are at slots[b], [B, N]. Attention reads `used` slots.
    """
    n_rows, n_nodes = tree.shape
    device = tree.tokens.device
    if min(starts) == max(starts):
        if tree.is_chain:
            return causal_mask(n_nodes, used, device)
        committed = torch.ones(n_rows, n_nodes, starts[0], dtype=torch.bool, device=device)
        return torch.cat([committed, tree.ancestors], dim=2)[:, None]
    return nodes_mask(slots, tree.ancestors, used)


def nodes_mask(slots: Tensor, ancestors: Tensor, used: int) -> Tensor:
    """Return the mask of `tree_mask` from the nodes' slots [B, N] and ancestors [B, N, N]."""
    committed = torch.arange(used, device=slots.device) < slots[:, :1]  # [B, used]
    mask = committed[:, None].repeat(1, slots.shape[1], 1)
    return mask.scatter_(2, slots[:, None].expand_as(ancestors), ancestors)[:, None]


def causal_mask(n_queries: int, n_keys: int, device: torch.device) -> Tensor:
    """[1, 1, n_queries, n_keys] bool for the last n_queries of n_keys positions."""
    first = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None]
    return (torch.arange(n_keys, device=device) <= first)[None, None]


def packed_mask(starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return what keeps the documents of packed rows apart: position ids [B, T], and a mask [B, 1, T, T] bool.

    starts: [B, T] int64, where in the row each token's document begins. The mask takes memory quadratic in T.
    """
    positions = torch.arange(starts.shape[1], device=starts.device) - starts
    mask = causal_mask(starts.shape[1], starts.shape[1], starts.device)
    return positions, mask & (starts[:, None, :, None] == starts[:, None, None, :])
