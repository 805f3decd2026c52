"""Which positions attend to which: masks of bool for causal texts, trees behind cached tokens, and packed documents.

Packed documents can also be read without a mask, as texts of their own in batches of like length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from spectrain.target.tree import DraftTree

MAX_PADDING = 1 / 16  # largest share of padding in a row, once the batch is large enough
MOST_MASKED = 4096  # tokens of a row whose documents are kept apart by a mask, which takes memory quadratic in them
BUSY_PART = 8  # a batch keeps the device busy from 1 / 8 of the budget on


@dataclass(frozen=True)
class Nodes:
    """Which slots the nodes of trees see, in place of a mask: for attention that reads only the slots of each row."""

    lengths: Tensor  # [B] int64, committed tokens of each row, which all of its nodes see
    seen: Tensor  # [B, N, W] bool, which of the next W slots each node sees; of a tree its ancestors


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


def last_seen(mask: Tensor, window_tokens: int) -> Tensor:
    """Keep, of the keys that each query sees, the last ones: a window over a text, or over each path of a tree.

    A query sees each position of its text once and in order, so the last keys are those at the last positions.
    """
    if mask.shape[-1] <= window_tokens:
        return mask
    seen = mask.cumsum(-1, dtype=torch.int32)
    return mask & (seen[..., -1:] - seen < window_tokens)


def packed_mask(starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return what keeps the documents of packed rows apart: position ids [B, T], and a mask [B, 1, T, T] bool.

    starts: [B, T] int64, where in the row each token's document begins. The mask takes memory quadratic in T.
    """
    positions = torch.arange(starts.shape[1], device=starts.device) - starts
    mask = causal_mask(starts.shape[1], starts.shape[1], starts.device)
    return positions, mask & (starts[:, None, :, None] == starts[:, None, None, :])


def document_offsets(starts: Tensor) -> list[int]:
    """Return where the documents of packed rows begin among all tokens, row by row, and the number of tokens.

    starts: [B, T] int64, where in the row each token's document begins. Without values each row is one document, which
    takes the most arithmetic.
    """
    if starts.is_meta:
        return [*range(0, starts.numel() + 1, starts.shape[1])]
    begins = torch.ones_like(starts, dtype=torch.bool)
    begins[:, 1:] = starts[:, 1:] != starts[:, :-1]
    return [*begins.flatten().nonzero()[:, 0].tolist(), starts.numel()]


def each_alone(function: Callable[[Tensor], Sequence[Tensor]], tokens: Tensor, starts: Tensor) -> tuple[Tensor, ...]:
    """Return what a function returns, [B, T, ..] each, of the documents of packed rows as texts of their own.

    On a CPU this is faster than one forward behind a mask of T x T, for which long rows have no memory elsewhere.

    Args:
        function: called with texts [b, n] of similar length, padded on the right. Returns tensors [b, n, ..].
        tokens: [B, T] int64.
        starts: [B, T] int64, where in the row each token's document begins.
    """
    offsets, flat = document_offsets(starts), tokens.flatten()
    lengths, found = [stop - start for start, stop in pairwise(offsets)], {}
    for batch in length_buckets(lengths, tokens.numel()):
        texts = [flat[offsets[i] : offsets[i + 1]] for i in batch]
        parts = function(torch.nn.utils.rnn.pad_sequence(texts, batch_first=True))
        found |= {i: [part[row, : lengths[i]] for part in parts] for row, i in enumerate(batch)}
    by_place = (found[i] for i in range(len(lengths)))
    return tuple(torch.cat(parts).unflatten(0, tokens.shape) for parts in zip(*by_place, strict=True))


def length_buckets(lengths: Sequence[int], budget_tokens: int) -> Iterator[list[int]]:
    """Yield indices in batches of at most budget_tokens with padding, longest rows first; a longer row stands alone.

    A batch ends early before a row that would be more than a sixteenth padding, unless the batch is still so small that
    it would not keep the device busy.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        full = max(1, budget_tokens // longest)
        busy = max(1, full // BUSY_PART)
        end = min(start + full, len(order))
        shorter = (i for i in range(start + busy, end) if lengths[order[i]] < longest * (1 - MAX_PADDING))
        stop = next(shorter, end)
        yield order[start:stop]
        start = stop
