"""What training reads of a target's whole texts: hidden states without logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.target.kv_cache import KVCache
from spectrain.target.lean import LeanEngine
from spectrain.target.llama import in_pieces
from spectrain.target.masks import MOST_MASKED, causal_mask, each_alone, packed_mask
from spectrain.target.memory import device_type
from spectrain.target.modules import TransformersEngine


@dataclass(frozen=True)
class Features:
    """What training reads from the target: hidden states without logits."""

    captured: Tensor | None  # [B, T, C, D] inputs of the blocks `capture_layers`
    final_hidden: Tensor  # [B, T, D] inputs of the unembedding: the last block's output after the final norm


@dataclass(frozen=True)
class TextReader:
    """Reads whole texts."""

    engine: LeanEngine | TransformersEngine
    capture_layers: Sequence[int]  # blocks whose inputs are kept
    piece: int  # tokens of a long text that the modules of transformers read at once

    def features(self, tokens: Tensor, starts: Tensor | None) -> Features:
        """Read rows of tokens; see `TargetModel.features`."""
        if starts is None:
            states = self._states_of_texts(tokens)
        elif device_type(self.engine.device) == "cpu" or starts.shape[1] > MOST_MASKED:
            states = each_alone(self._states_of_texts, tokens, starts)
        else:
            states = self._states(tokens, *packed_mask(starts))
        *captured, final = states
        return Features(captured[0] if captured else None, final)

    def _states_of_texts(self, tokens: Tensor) -> Sequence[Tensor]:
        """Return the captured states [B, T, C, D], if there are any, and the final ones [B, T, D]."""
        (n_rows, n_tokens), size = tokens.shape, self.piece
        if self.engine.name == "lean" or n_tokens <= MOST_MASKED:
            return self._states(tokens)
        # Modules of transformers would make masks of T x T for windows, so they read a long text piece by piece.
        cache, starts = KVCache(n_rows, n_tokens=n_tokens), iter(range(0, n_tokens, size))

        def states(tokens: Tensor, positions: Tensor) -> list[Tensor]:
            start, n = next(starts), tokens.shape[1]
            cache.begin(range(n_rows), [start] * n_rows, n)
            mask = causal_mask(n, start + n, tokens.device) if start else None
            return self._states(tokens, positions, mask, cache)

        return in_pieces(states, size, 1, tokens, torch.arange(n_tokens, device=tokens.device).expand(n_rows, -1))

    def _states(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> list[Tensor]:
        _, captured, final = self.engine.run(
            tokens, positions, cache, mask, self.capture_layers, kept=lambda hidden: hidden[:, :1]
        )
        return [stacked(captured), final] if captured else [final]


def stacked(captured: list[Tensor]) -> Tensor | None:  # [B, n, C, D]
    return torch.stack(captured, dim=2) if captured else None
