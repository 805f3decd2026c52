"""Read prompts into the KV cache, piece by piece."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial

import torch
from torch import Tensor

from spectrain.target.kv_cache import KVCache
from spectrain.target.lean import LeanEngine
from spectrain.target.masks import causal_mask
from spectrain.target.modules import TransformersEngine

NEAR = 16  # tokens between two parts of a prompt, which are read with them rather than the parts alone


def read_prompts(
    engine: LeanEngine | TransformersEngine,
    layers: Sequence[int],
    size: int,
    tokens: Tensor,
    lengths: Sequence[int],
    cache: KVCache,
    rows: range,
    read: Tensor | None,
    known: int,
) -> Generator[None, None, tuple[Tensor, Tensor | None, Tensor]]:
    """Read prompts in pieces of at most `size` tokens, and capture the inputs of these blocks.

    For the other arguments, and what is returned, see `TargetModel.reading`.
    """
    assert rows.start == cache.n_rows, (rows, cache.n_rows)
    assert not known or len(rows) == 1, (known, rows)
    n_rows, n_tokens = tokens.shape
    positions = torch.arange(n_tokens, device=tokens.device).expand(n_rows, -1)
    read = positions if read is None else read
    wanted = read if known and layers else None
    parts = [(0, n_tokens)] if not known else unread_parts(wanted, known, n_tokens)
    if engine.reads_prompts:
        found = yield from engine.read_prompts(tokens, lengths, cache, rows, layers, read, parts)
        cache.join(lengths)
        return *found, read
    last = torch.tensor(lengths, device=tokens.device) - 1
    logits, captured = None, None
    for start, stop in ((i, min(i + size, end)) for first, end in parts for i in range(first, end, size)):
        cache.begin(rows, [start] * n_rows, stop - start)
        piece, states, _ = engine.run(
            tokens[:, start:stop],
            positions[:, start:stop],
            cache,
            causal_mask(stop - start, stop, tokens.device) if start else None,
            layers,
            kept=partial(_at_positions, (last - start)[:, None]),
        )
        here = ((last >= start) & (last < stop))[:, None, None]
        logits = piece if logits is None else torch.where(here, piece, logits)
        if states:
            found = torch.stack([_at_positions(read - start, one) for one in states], dim=2)
            inside = ((read >= start) & (read < stop))[:, :, None, None]
            captured = found if captured is None else torch.where(inside, found, captured)
        if stop < n_tokens:
            yield
    cache.join(lengths)
    return logits, captured, read


def unread_parts(wanted: Tensor | None, known: int, n_tokens: int) -> list[tuple[int, int]]:
    """Return the parts of a prompt of n tokens that have to be read though the first `known` ones have been.

    `wanted` [1, P] int64 are positions whose states are needed, -1 for none; None: no states are.
    """
    parts: list[tuple[int, int]] = []
    again = [] if wanted is None else sorted(place for place in wanted[0].tolist() if 0 <= place < known)
    for start, stop in (*((place, place + 1) for place in again), (known, n_tokens)):
        near = parts and start <= parts[-1][1] + NEAR
        parts[-1:] = [(parts[-1][0], stop)] if near else [*parts[-1:], (start, stop)]
    return parts


def _at_positions(positions: Tensor, hidden: Tensor) -> Tensor:  # [R, P], [R, T, D] -> [R, P, D]
    index = positions.clamp(0, hidden.shape[1] - 1).to(hidden.device)
    return hidden.gather(1, index[:, :, None].expand(-1, -1, hidden.shape[-1]))
