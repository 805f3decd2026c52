"""`method=magicdec`: the target drafts for itself with a sparse view of its own KV cache.

MagicDec (Chen et al. 2024) with StreamingLLM's view: a draft reads the first tokens of the text (the sink), the last
ones before the root (the window) and the drafts before it, never the rest. At each step K and V of sink and window are
copied from the target's cache into a small one, so a draft forward costs the same at any context length. Verification
reads the full cache.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from spectrain.config.values import Count, Nodes, Whole
from spectrain.decoding import Context
from spectrain.drafting.draft_chain import ChainDrafter, Chains, DraftStep, draft_chain, lengths_of
from spectrain.errors import UserError
from spectrain.target import DraftTree, KVCache, TargetModel

GAMMA = 4  # the k of SPIRe's comparison with MagicDec
MOST = 8  # of a chain that adapts


class MagicDec(ChainDrafter):
    """Drafts with the target itself, which reads sink and window only.

    Args:
        gamma: drafted tokens per step; fewer where a row has less room. None: GAMMA, or with max_nodes "auto" as many
            as pay.
        sink_tokens: first tokens of the text that a draft reads.
        window_tokens: last tokens before the root that a draft reads. The view stands still while a chain is drafted.
        positions: "cache" numbers the view 0, 1, 2, .. and turns the copied keys accordingly, as StreamingLLM does;
            "text" keeps keys and positions of the text.
        max_nodes: nodes that the target may score, root and drafted tokens; caps gamma. None: gamma + 1.
    """

    def __init__(
        self,
        gamma: Whole | None = None,
        sink_tokens: Count = 1,
        window_tokens: Count = 64,
        positions: Literal["cache", "text"] = "cache",
        max_nodes: Nodes | None = None,
    ):
        super().__init__(*lengths_of(gamma, max_nodes, GAMMA, MOST))
        self.describe(joins_late=True)
        self.sink_tokens = sink_tokens
        self.window_tokens = window_tokens
        self.positions = positions
        self.reader: TargetModel | None = None  # the target, which drafts
        self.full: KVCache | None = None  # the target's own, read only
        self.cache: KVCache | None = None  # sink, window, root and drafts
        self._inv_freq: Tensor | None = None  # [F] of the target that was checked last

    def start(self, target: TargetModel, cache: KVCache) -> None:
        super().start(target, cache)
        if self.positions == "cache" and (self.reader is None or self.reader.config is not target.config):
            self._inv_freq = rotary_frequencies(target)
        if self.cache is not None:
            self.reader.caches.keep(self.cache)
        self.reader, self.full = target, cache
        n_slots = self.sink_tokens + self.window_tokens + self.gamma  # the root and gamma - 1 drafts are fed
        self.cache = target.caches.new(cache.max_rows, n_slots, n_slots)

    def draft(self, context: Context, gamma: int) -> DraftTree:
        # The sparse cache is copied anew here, so there is nothing to do when drafts are rejected or rows end.
        roots = context.lengths[:, None] - 1  # [n, 1] positions

        def first() -> DraftStep:
            lengths = self.full.lengths
            kept = [min(length, self.sink_tokens + self.window_tokens) for length in lengths]
            self._copy_view(self.full.lengths_on(self.reader.device), max(kept), kept != lengths)
            self.cache.hold(kept)
            return self._read(context.roots, roots)

        whole = self._graph_chain if self.replays(context, self.reader.graphs, self.reader.vocab_size) else None
        return draft_chain(context, gamma, first, lambda tokens, i: self._read(tokens, roots + i), whole=whole)

    def _graph_chain(self, context: Context, n_steps: int, lengths: Tensor | None) -> Chains:
        most = self.sink_tokens + self.window_tokens
        n_view = min(most, self.full.capacity)
        self.cache.hold([min(length, most) for length in self.full.lengths])
        used = self.reader.reach(self.cache, n_steps)

        def read(i: int, tokens: Tensor, positions: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            roots = positions - i
            if i == 0:
                self._copy_view(roots, n_view, turns=True)
            at = None if self.positions == "cache" else positions[:, None].clamp_max(self.reader.max_positions - 1)
            logits, _, _ = self.reader.score_at(roots.clamp_max(most) + i, tokens, self.cache, used, at)
            return logits[:, 0], state

        starts = context.roots[:, None], context.lengths - 1, context.lengths.new_zeros(context.n_rows, 0)
        key = "chain", self.cache.storage, self.full.storage, used
        return self.replayed(self.reader.graphs, key, read, context, n_steps, lengths, starts)

    def _read(self, tokens: Tensor, text_positions: Tensor) -> DraftStep:
        """Read one token per row, [n], at text positions [n, 1], and keeps it."""
        positions = None
        if self.positions == "text":  # a row without room is read on with its neighbours, past the context even
            positions = text_positions.clamp_max(self.reader.max_positions - 1)
        output = self.reader.score(DraftTree.root_only(tokens), self.cache, positions)
        self.cache.keep(1)
        return DraftStep(output.logits[:, 0])

    def _copy_view(self, lengths: Tensor, n_view: int, turns: bool) -> None:
        """Fill the sparse cache with sink and window of rows of lengths [n]; a shorter row gives all its tokens.

        The view has at most `n_view` tokens. It `turns` where a row may be longer and positions are those of the cache.
        """
        left_out = (lengths - self.sink_tokens - self.window_tokens).clamp_min(0)[:, None]
        view = torch.arange(n_view, device=lengths.device).expand(len(lengths), -1)
        skipped = left_out * (view >= self.sink_tokens)  # [n, K] text position less position in the view
        slots = view + skipped  # past a short row's end they hold rubbish, which its length hides
        turn = rotation(-skipped, self._inv_freq) if turns and self.positions == "cache" else None
        for layer_idx in range(len(self.full)):
            keys, values = self.full.read(layer_idx, slots)
            self.cache.fill(layer_idx, keys if turn is None else turned(keys, turn), values)


def rotation(by: Tensor, inv_freq: Tensor) -> Tensor:
    """Cosines and sines [2, n, 1, K, F] float32 of a move by [n, K] int64 positions; inv_freq: [F]."""
    angles = by[:, None, :, None] * inv_freq.to(by.device, torch.float32)
    return torch.stack([angles.cos(), angles.sin()])


def turned(keys: Tensor, turn: Tensor) -> Tensor:
    """Moves cached keys to other positions: RoPE turns a key in proportion to its position, so turns add up.

    Args:
        keys: [n, H, K, D_head], rotated already; the first 2 F entries in two halves (Llama, GPT-NeoX).
        turn: [2, n, 1, K, F] of `rotation`.

    Returns:
        Keys as they were given, in shape and dtype.
    """
    cos, sin = turn.to(keys.device)
    n_freq = turn.shape[-1]
    first, second = keys[..., :n_freq].float(), keys[..., n_freq : 2 * n_freq].float()
    moved = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(keys.dtype)
    return torch.cat([moved, keys[..., 2 * n_freq :]], dim=-1)


def rotary_frequencies(target: TargetModel) -> Tensor:
    """The inv_freq [F] by which the target's keys can be turned, tried out on every block.

    A text of one token attends to itself alone, so what its key is in any block depends on its position by the rotation
    only: the keys at one position, turned, must equal those at another.

    Raises:
        UserError: they do not: another layout, frequencies that change with the length, blocks without RoPE.
    """
    low, high = 1, min(21, target.max_positions - 1)
    tokens = torch.linspace(0, target.vocab_size - 1, 8, device=target.device).long()
    at_low, at_high = _keys_at(target, tokens, low), _keys_at(target, tokens, high)
    tolerance = max(1e-3, 4 * torch.finfo(target.dtype).eps)
    by = torch.full((len(tokens), 1), high - low, device=target.device)

    def fits(inv_freq: Tensor) -> bool:
        if 2 * inv_freq.shape[0] > at_low[0].shape[-1]:
            return False
        errors = [
            (turned(here, rotation(by, inv_freq)) - there).abs().max() / there.abs().max()
            for here, there in zip(at_low, at_high, strict=True)
        ]
        return all(float(error) < tolerance for error in errors)

    for module in target.model.modules():
        inv_freq, rope_type = getattr(module, "inv_freq", None), str(getattr(module, "rope_type", "default"))
        fixed = "dynamic" not in rope_type and "longrope" not in rope_type  # the same at any length
        if isinstance(inv_freq, Tensor) and fixed and fits(inv_freq):
            return inv_freq
    raise UserError(
        f"the keys of {type(target.model).__name__} cannot be moved to other positions (no RoPE, not in every block, "
        "or of another layout or scaling); use method.positions=text"
    )


@torch.inference_mode()
def _keys_at(target: TargetModel, tokens: Tensor, position: int) -> list[Tensor]:
    """Keys [n, H, 1, D_head] of each block for texts of one token [n] that stands at `position`."""
    cache = KVCache(len(tokens), block_tokens=1)
    cache.lengths = [0] * len(tokens)
    target.without_graphs().score(DraftTree.root_only(tokens), cache, torch.full_like(tokens[:, None], position))
    return [keys.float() for keys in cache.keys]
