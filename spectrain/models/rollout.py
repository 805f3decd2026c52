"""The k-step training rollout of SPIRe, over all L / k blocks of a row at once (SPIRe, section 3).

A row of L tokens is cut into blocks of k. Pass j runs token j of every block, teacher forced: its keys are the target's
activations of everything before its block (under sink and window), the memories of the block's earlier tokens, and its
own input. The k passes, over L / k queries each, cost as much arithmetic as one ordinary forward.

Blocks are grouped into chunks at least as long as the window, so that no L x L mask is ever built: the queries of a
chunk see only the sinks, the chunk before, their own chunk, and their own block. Memory is linear in L.

Letters: as in `spire.py`; C tokens per chunk, c chunks per row, n = C / k blocks per chunk, s sinks, W window.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.decoding.llama import KeysValues, grouped
from spectrain.models.spire import SpireConfig, SpireDrafter


def rollout(
    drafter: SpireDrafter,
    tokens: Tensor,
    captured: Tensor | None,
    block_tokens: int | None = None,
    first_root: int = 0,
) -> Tensor:
    """Return the drafter's final hidden state after each token, as decoding computes it from the root of its block.

    Args:
        drafter: the model.
        tokens: [B, L] int64. Token t is at position t.
        captured: [B, L, C, D] of the target, its `captured_layers`; None if the drafter does not use target
            activations.
        block_tokens: tokens of a block, at most the window; None: the k that it is trained with.
        first_root: root of the first block, 0 .. k - 1. Entries before it are meaningless.

    Returns:
        [B, L, D]: entry t predicts token t + 1. Multiply by the unembedding for logits.
    """
    config = drafter.config if block_tokens is None else replace(drafter.config, k=block_tokens)
    assert 0 <= first_root < config.k
    lead = -first_root % config.k  # the rest of a block, at negative positions, which no real query sees
    n_tokens = tokens.shape[1]
    chunk = chunk_tokens(config, n_tokens)
    missing = -(lead + n_tokens) % chunk  # queries past the end are computed and cut; no real query sees keys past it
    if not config.target_activations:
        x = drafter.embed(F.pad(tokens, (0, -n_tokens % chunk)))
        return windowed_states(drafter, x, chunk)[0][:, :n_tokens]
    x = drafter.embed(F.pad(tokens, (lead, missing)))  # [B, L, D]
    assert captured.shape[2] == len(config.captured_layers), "rollout needs the target's captured_layers"
    captured = F.pad(captured, (0, 0, 0, 0, lead, missing))
    n_rows, n_padded = x.shape[:2]
    n_chunks, n_blocks = n_padded // chunk, chunk // config.k
    positions = torch.arange(n_padded, device=x.device) - lead
    cos, sin = drafter.rope(positions[None])  # [1, L, D_head]

    past = []  # of each block of the model, [B * c, H_kv, s + 2C, D_head]: context as the target saw it
    for i, block in enumerate(drafter.blocks):
        context = block.keys_values(captured[:, :, i].to(x.dtype), (cos, sin))
        past.append(_around(context, chunk, config.sink_tokens, own=True, lead=lead))

    by_pass = x.view(n_rows * n_chunks, n_blocks, config.k, -1)
    state = None  # final states one token earlier: of roots the target's
    if config.previous_state:
        state = F.pad(captured[:, :-1, -1], (0, 0, 1, 0)).view_as(by_pass)[:, :, 0]
    ropes = [part.view(n_chunks, n_blocks, config.k, -1).repeat(n_rows, 1, 1, 1) for part in (cos, sin)]
    hidden = []
    for j in range(config.k):
        mask = _rollout_mask(config, j, n_chunks, chunk, lead, x.device).repeat(n_rows, 1, 1)[:, None]
        rope = (ropes[0][:, :, j], ropes[1][:, :, j])
        last = j + 1 == config.k
        state, memories = drafter.step(drafter.joined(by_pass[:, :, j], state), rope, past, mask, last)
        hidden.append(state)
        if not last:
            past = [KeysValues.cat([p, m]) for p, m in zip(past, memories, strict=True)]
    return torch.stack(hidden, dim=2).reshape(n_rows, n_padded, -1)[:, lead : lead + n_tokens]


def chunk_tokens(config: SpireConfig, n_tokens: int) -> int:
    """Tokens per chunk: the smallest multiple of k that holds the window or the whole row."""
    wanted = min(config.window_tokens, n_tokens)
    return config.k * max(1, -(-wanted // config.k))


def windowed_states(drafter: SpireDrafter, x: Tensor, chunk: int) -> tuple[Tensor, list[KeysValues]]:
    """Run the drafter as an ordinary sparse Transformer over its own activations (`target_activations=false`).

    L, of the embeddings x [B, L, D], is a multiple of `chunk`, which holds the window or the whole row. Returns the
    final hidden states [B, L, D], and for each block the K/V of all tokens, [B, H_kv, L, D_head].
    """
    n_rows, n_tokens = x.shape[:2]
    n_chunks = n_tokens // chunk
    rope = drafter.rope(torch.arange(n_tokens, device=x.device)[None])
    in_chunks = tuple(part.view(n_chunks, chunk, -1).repeat(n_rows, 1, 1) for part in rope)
    queries = torch.arange(n_tokens, device=x.device).view(n_chunks, chunk)
    keys = _key_positions(n_chunks, chunk, drafter.config.sink_tokens, x.device)
    sees = _sees(drafter.config, keys, queries, before=queries + 1)  # [c, C, s + 2C]
    mask = grouped(sees.repeat(n_rows, 1, 1)[:, None], drafter.config.shape)
    every = []
    for block in drafter.blocks:
        every.append(block.keys_values(x, rope))
        past = _around(every[-1], chunk, drafter.config.sink_tokens, own=False)
        x, _ = drafter.run_block(block, x.reshape(n_rows * n_chunks, chunk, -1), in_chunks, past, mask)
        x = x.view(n_rows, n_tokens, -1)
    return drafter.norm(x), every


def _around(context: KeysValues, chunk: int, n_sinks: int, own: bool, lead: int = 0) -> KeysValues:
    """Gather the keys that the queries of each chunk may see: sinks, the chunk before and (`own`) the chunk itself.

    context: [B, H_kv, L, D_head]; position 0 is entry `lead`. Returns [B * c, H_kv, s + C or 2C, D_head].
    """

    def gather(t: Tensor) -> Tensor:
        n_rows, n_heads, n_tokens, d_head = t.shape
        n_chunks = n_tokens // chunk
        chunks = t.view(n_rows, n_heads, n_chunks, chunk, d_head)
        before = F.pad(chunks[:, :, :-1], (0, 0, 0, 0, 1, 0))
        sinks = t[:, :, None, lead : lead + n_sinks].expand(-1, -1, n_chunks, -1, -1)
        parts = torch.cat([sinks, before, chunks] if own else [sinks, before], dim=3)
        return parts.transpose(1, 2).flatten(0, 1)

    return KeysValues(gather(context.keys), gather(context.values))


def _key_positions(n_chunks: int, chunk: int, n_sinks: int, device: torch.device, lead: int = 0) -> Tensor:
    """Positions of the keys of `_around` and of the chunk itself, [c, s + 2C]; negative before the text."""
    starts = torch.arange(n_chunks, device=device)[:, None] * chunk - lead
    sinks = torch.arange(n_sinks, device=device).expand(n_chunks, -1)
    return torch.cat([sinks, starts - chunk + torch.arange(2 * chunk, device=device)], dim=1)


def _sees(config: SpireConfig, keys: Tensor, queries: Tensor, before: Tensor) -> Tensor:
    """Return [c, n, K] bool: a query may see the keys inside its window, and the sinks that have left the window.

    A sink inside the window is also among the near keys, and seen there. keys: [c, K] positions; queries: [c, n]
    positions; before: [c, n], only keys at smaller positions are seen.
    """
    keys, queries, before = keys[:, None], queries[..., None], before[..., None]
    inside = keys > queries - config.window_tokens
    is_sink_slot = torch.arange(keys.shape[-1], device=keys.device) < config.sink_tokens
    return (inside ^ is_sink_slot) & (keys >= 0) & (keys < before)


def _rollout_mask(config: SpireConfig, j: int, n_chunks: int, chunk: int, lead: int, device: torch.device) -> Tensor:
    """[c, n, s + 2C + n * (j + 1)] bool: what token j of each block sees (context, then its block, itself last)."""
    n_blocks = chunk // config.k
    roots = torch.arange(n_chunks * n_blocks, device=device).view(n_chunks, n_blocks) * config.k - lead
    keys = _key_positions(n_chunks, chunk, config.sink_tokens, device, lead)
    context = _sees(config, keys, roots + j, before=roots)
    own_block = torch.eye(n_blocks, dtype=torch.bool, device=device).repeat(1, j + 1)
    return torch.cat([context, own_block.expand(n_chunks, -1, -1)], dim=2)
