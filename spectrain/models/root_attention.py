"""Attention of drafts that begin at many roots of a row at once, in training. Memory is linear in the row.

Letters: as in docs/design.md; E width of a head, K key/value heads, R roots of a row, m queries and s own keys of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spectrain.target.device import device_type
from spectrain.target.llama import KeysValues

MOST_SCORES = {"cpu": 1 << 21}  # attention scores that lie in memory at the same time
MOST_SCORES_ELSEWHERE = 1 << 27


def attend(
    queries: Tensor, context: KeysValues, own: Sequence[KeysValues], roots: range, first: Tensor, reach: int
) -> Tensor:
    """Attend to the context before each root, and to what its own draft has.

    Args:
        queries: [B, H, R, m, E].
        context: K/V [B, K, L, E] of whole rows.
        own: K/V of each draft in parts [B, K, R, s, E], which only the queries of the same root see, all of them.
        roots: R positions.
        first: [B or 1, R] the first position of context that each root sees.
        reach: positions before its root that each root sees at the most.

    Returns:
        [B, R, m, H E].
    """
    n_tokens, device = context.keys.shape[2], queries.device
    most = MOST_SCORES.get(device_type(device), MOST_SCORES_ELSEWHERE)
    size, parts = max(1, most // (queries[:, :, 0, :, 0].numel() * n_tokens)), []
    every = torch.arange(roots.start, roots.stop, roots.step, device=device)
    for start in range(0, len(roots), size):
        part = slice(start, start + size)
        span = slice(max(0, roots[part][0] - reach), roots[part][-1])
        places, last = torch.arange(span.start, span.stop, device=device), every[part, None]
        seen = (places < last) & (places >= last - reach) & (places >= first[:, part, None])  # [B or 1, r, S]
        inputs = [seen, queries[:, :, part], context.keys[:, :, span], context.values[:, :, span]]
        inputs += [of[:, :, part] for one in own for of in (one.keys, one.values)]
        if torch.is_grad_enabled():  # scores are computed once more, not kept
            parts.append(checkpoint(_attend, *inputs, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_attend(*inputs))
    return torch.cat(parts, dim=1)


def _attend(seen: Tensor, queries: Tensor, keys: Tensor, values: Tensor, *own: Tensor) -> Tensor:
    """Return [B, r, m, H E] of queries [B, H, r, m, E] over keys [B, K, S, E], as `seen` says, and over their own."""
    own_keys, own_values = (torch.cat(parts, dim=3) for parts in (own[::2], own[1::2]))  # [B, K, r, s, E]
    m, n_groups = queries.shape[3], queries.shape[1] // keys.shape[1]
    queries = queries.unflatten(1, (-1, n_groups)).transpose(2, 3) * queries.shape[-1] ** -0.5
    queries = queries.flatten(3, 4)  # [B, K, r, G m, E]: the queries of a group read the same keys
    scores = (queries.flatten(2, 3) @ keys.mT).unflatten(2, queries.shape[2:4]).unflatten(3, (n_groups, m))
    scores = scores.masked_fill(~seen[:, None, :, None, None], -torch.inf).flatten(3, 4)  # [B, K, r, G m, S]
    weights = torch.cat([scores, queries @ own_keys.mT], dim=-1).softmax(-1, dtype=torch.float32).to(values.dtype)
    of_context, of_own = weights.split([keys.shape[2], own_keys.shape[3]], dim=-1)
    attended = (of_context.flatten(2, 3) @ values).unflatten(2, queries.shape[2:4])
    attended = (attended + of_own @ own_values).unflatten(3, (n_groups, m))  # [B, K, r, G, m, E]
    return attended.permute(0, 2, 4, 1, 3, 5).flatten(3)


def drafted_places(
    n_tokens: int, step: int, every: int, first_root: int, starts: Tensor | None, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return the positions [R] of a step of all drafts, cut to the row, and whether drafts reach them, [B or 1, R].

    A draft needs a state before its root, and ends with its document.
    """
    roots = torch.arange(first_root, n_tokens, every, device=device)
    starts = torch.zeros(1, n_tokens, dtype=torch.int64, device=device) if starts is None else starts
    places = (roots + step).clamp_max(n_tokens - 1)
    begins = starts[:, roots]
    return places, (roots + step < n_tokens) & (begins < roots) & (starts[:, places] == begins)
