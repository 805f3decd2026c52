"""Read whole texts through a target, as trainings do: hidden states without logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.target.device import device_type
from spectrain.target.kv_cache import KVCache
from spectrain.target.lean import LeanEngine
from spectrain.target.llama import in_pieces
from spectrain.target.masks import MOST_MASKED, causal_mask, each_alone, packed_mask
from spectrain.target.modules import TransformersEngine


@dataclass(frozen=True)
class Features:
    """What training reads from the target: hidden states without logits."""

    captured: Tensor | None  # [B, T, C, D] inputs of the blocks `capture_layers`
    final_hidden: Tensor  # [B, T, D] inputs of the unembedding: the last block's output after the final norm


def read_texts(
    engine: LeanEngine | TransformersEngine, layers: Sequence[int], size: int, tokens: Tensor, starts: Tensor | None
) -> Features:
    """Read whole texts with the inputs of these blocks; see `TargetModel.features`. `size`: tokens of a piece."""

    def states(tokens: Tensor, positions=None, mask=None, cache=None) -> list[Tensor]:
        _, captured, final = engine.run(tokens, positions, cache, mask, layers, kept=lambda hidden: hidden[:, :1])
        return [stacked(captured), final] if captured else [final]

    def of_texts(tokens: Tensor) -> Sequence[Tensor]:
        n_rows, n_tokens = tokens.shape
        if engine.name == "lean" or n_tokens <= MOST_MASKED:
            return states(tokens)
        # Modules of transformers would make masks of T x T for windows, so they read a long text piece by piece.
        cache, begins = KVCache(n_rows, n_tokens=n_tokens), iter(range(0, n_tokens, size))

        def of_piece(tokens: Tensor, positions: Tensor) -> list[Tensor]:
            start, n = next(begins), tokens.shape[1]
            cache.begin(range(n_rows), [start] * n_rows, n)
            return states(tokens, positions, causal_mask(n, start + n, tokens.device) if start else None, cache)

        return in_pieces(of_piece, size, 1, tokens, torch.arange(n_tokens, device=tokens.device).expand(n_rows, -1))

    if starts is None:
        found = of_texts(tokens)
    elif device_type(engine.device) == "cpu" or starts.shape[1] > MOST_MASKED:
        found = each_alone(of_texts, tokens, starts)
    else:
        found = states(tokens, *packed_mask(starts))
    *captured, final = found
    return Features(captured[0] if captured else None, final)


def stacked(captured: list[Tensor]) -> Tensor | None:  # [B, n, C, D]
    return torch.stack(captured, dim=2) if captured else None
