"""The k-step training rollout of SPIRe, over all L / k blocks of a row at once (SPIRe, section 3).

A row of L tokens is cut into blocks of k. Pass j runs token j of every block, teacher forced: its keys are the target's
activations of everything before its block (under sink and window), the memories of the block's earlier tokens, and its
own input. The k passes, over L / k queries each, cost as much arithmetic as one ordinary forward.

Blocks are grouped into chunks at least as long as the window, so that no L x L mask is ever built: the queries of a
chunk see only the sinks, the chunk before, their own chunk, and their own block. Memory is linear in L.

Rows may be packed with documents that do not see each other. A document has positions and sinks of its own, and where
it begins inside a block, a rollout begins with it.

Letters: as in `spire.py`; C tokens per chunk, c chunks per row, n = C / k blocks per chunk, s sinks, W window.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.models.draft_states import RolloutStates
from spectrain.models.spire import SpireConfig, SpireDrafter
from spectrain.target.fingerprint import module_fingerprint
from spectrain.target.llama import KeysValues, grouped


def rollout(
    drafter: SpireDrafter,
    tokens: Tensor,
    captured: Tensor | None,
    block_tokens: int | None = None,
    first_root: int = 0,
    starts: Tensor | None = None,
) -> Tensor:
    """Return the drafter's final hidden state after each token, as decoding computes it from the root of its block.

    Args:
        drafter: the model.
        tokens: [B, L] int64.
        captured: [B, L, C, D] of the target, its `captured_layers`; None if the drafter does not use target
            activations.
        block_tokens: tokens of a block, at most the window; None: the k that it is trained with.
        first_root: root of the first whole block, 0 .. k - 1. Entries before it are rolled out from the first token.
        starts: [B, L] int64, where in the row each token's document begins; None: a row is one document.

    Returns:
        [B, L, D]: entry t predicts token t + 1. Multiply by the unembedding for logits.
    """
    config = drafter.config if block_tokens is None else replace(drafter.config, k=block_tokens)
    assert 0 <= first_root < config.k
    n_rows, n_tokens = tokens.shape
    layout = _Layout.of(config, n_tokens, first_root, torch.zeros_like(tokens[:1]) if starts is None else starts)
    x = drafter.embed(layout.padded(tokens))  # [B, L, D]
    if not config.target_activations:
        return _windowed(drafter, x, layout)[0][:, :n_tokens]
    assert captured.shape[2] == len(config.captured_layers), "rollout needs the target's captured_layers"
    rope = drafter.rope(layout.positions)  # [B or 1, L, D_head]

    past = []  # of each block of the model, [B * c, H_kv, s + 2C, D_head]: context as the target saw it
    for i, block in enumerate(drafter.blocks):
        past.append(layout.around(drafter.run(drafter.of_context, block, layout.padded(captured[:, :, i]), rope), True))

    in_blocks = (layout.n_chunks, layout.chunk // config.k, config.k, -1)
    by_pass = x.view(n_rows, *in_blocks).flatten(0, 1)
    ropes = [part.view(len(part), *in_blocks).expand(n_rows, -1, -1, -1, -1).flatten(0, 1) for part in rope]
    begins = (layout.positions == 0).view(-1, *in_blocks[:-1]).expand(n_rows, -1, -1, -1).flatten(0, 1)[..., None]
    state = None  # final states one token earlier: of roots the target's; of the first token of a document 0
    if config.previous_state:
        state = layout.padded(F.pad(captured[:, :-1, -1], (0, 0, 1, 0))).view_as(by_pass)[:, :, 0]
    hidden, drafted = [], None  # K/V of the memories of the block's earlier tokens
    for j in range(config.k):
        mask = layout.rollout_mask(j).expand(n_rows, -1, -1, -1).flatten(0, 1)[:, None]
        last = j + 1 == config.k
        rope_j = tuple(part[:, :, j].contiguous() for part in ropes)
        previous = None if state is None else state.masked_fill(begins[:, :, j], 0)
        state, owns = drafter.step(drafter.joined(by_pass[:, :, j], previous), rope_j, past, mask, last, drafted)
        hidden.append(state)
        if not last:
            drafted = owns if drafted is None else [KeysValues.cat(both) for both in zip(drafted, owns, strict=True)]
    return torch.stack(hidden, dim=2).reshape(*x.shape)[:, layout.lead : layout.lead + n_tokens]


def root_of_epoch(k: int, seed: int, epoch: int) -> int:
    """Return the `first_root` of a rollout in an epoch of training, 0 .. k - 1.

    Over k epochs each token stands once at every depth of a block. The seed decides the order. The first epoch
    begins at 0.
    """
    order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    return int((order[epoch % k] - order[0]) % k)


def windowed_context(drafter: SpireDrafter, tokens: Tensor) -> list[KeysValues]:
    """Return for each block the K/V [B, H_kv, L, D_head] of tokens [B, n] int64, padded to L, as `_windowed` has them.

    Of a drafter with `target_activations=false`.
    """
    layout = _Layout.of(drafter.config, tokens.shape[1], 0, torch.zeros_like(tokens[:1]))
    return _windowed(drafter, drafter.embed(layout.padded(tokens)), layout)[1]


def _windowed(drafter: SpireDrafter, x: Tensor, layout: _Layout) -> tuple[Tensor, list[KeysValues]]:
    """Run the drafter as an ordinary sparse Transformer over its own activations, given its inputs x [B, L, D].

    Returns the final hidden states [B, L, D], and for each block the K/V of all tokens, [B, H_kv, L, D_head].
    """
    n_rows, n_tokens = x.shape[:2]
    rope, in_chunks = drafter.rope(layout.positions), (layout.n_chunks, layout.chunk, -1)
    ropes = tuple(part.view(len(part), *in_chunks).expand(n_rows, -1, -1, -1).flatten(0, 1) for part in rope)
    mask = grouped(layout.window_mask().expand(n_rows, -1, -1, -1).flatten(0, 1)[:, None], drafter.config.shape)
    every = []
    for block in drafter.blocks:
        every.append(drafter.run(block.keys_values, x, rope))
        past = layout.around(every[-1], own=False)
        x, _ = drafter.run(block, x.reshape(n_rows * layout.n_chunks, layout.chunk, -1), ropes, past, mask)
        x = x.view(n_rows, n_tokens, -1)
    return drafter.norm(x), every


@dataclass(frozen=True)
class _Layout:
    """Where the tokens of padded rows stand, and what each may see. A place in the row counts from its first token."""

    config: SpireConfig
    chunk: int  # C
    lead: int  # entries before the first token
    starts: Tensor  # [B or 1, L] int64, places where documents begin

    @classmethod
    def of(cls, config: SpireConfig, n_tokens: int, first_root: int, starts: Tensor) -> _Layout:
        """Pad rows of n_tokens to whole chunks, and before the first root to a whole block.

        A chunk is the smallest multiple of k that holds the window or the whole row.
        """
        chunk = config.k * max(1, -(-min(config.window_tokens, n_tokens) // config.k))
        lead = -first_root % config.k if config.target_activations else 0
        missing = -(lead + n_tokens) % chunk  # these queries are computed and cut; no real query sees keys there
        return cls(config, chunk, lead, F.pad(starts, (lead, missing)))

    def padded(self, rows: Tensor) -> Tensor:  # [B, n_tokens, ...] -> [B, L, ...]
        after = self.starts.shape[1] - self.lead - rows.shape[1]
        if not self.lead + after:  # padding by nothing would copy them
            return rows
        return F.pad(rows, (0, 0) * (rows.dim() - 2) + (self.lead, after))

    @property
    def n_chunks(self) -> int:
        return self.starts.shape[1] // self.chunk

    @property
    def places(self) -> Tensor:  # [L]
        return torch.arange(self.starts.shape[1], device=self.starts.device) - self.lead

    @property
    def positions(self) -> Tensor:  # [B or 1, L], in the documents
        return self.places - self.starts

    @cached_property
    def near(self) -> Tensor:
        """[c, 2C]: places of the chunk before each chunk, and of the chunk itself; negative before the row."""
        offsets = torch.arange(-self.chunk, self.chunk, device=self.starts.device)
        return self.places[:: self.chunk, None] + offsets

    @cached_property
    def reaching_in(self) -> Tensor:
        """[B or 1, c]: where the document of the first place of `near` begins, perhaps before it."""
        return self.starts[:, self._entries(self.near[:, 0])]

    @cached_property
    def sinks(self) -> Tensor:
        """[B or 1, c, s]: places of the sinks of that document."""
        return self.reaching_in[..., None] + torch.arange(self.config.sink_tokens, device=self.starts.device)

    def _entries(self, places: Tensor) -> Tensor:
        return (places + self.lead).clamp(0, self.starts.shape[1] - 1)

    def around(self, context: KeysValues, own: bool) -> KeysValues:
        """Gather the keys that the queries of each chunk may see: sinks, the chunk before and (`own`) the chunk itself.

        context: [B, H_kv, L, D_head]. Returns [B * c, H_kv, s + C or 2C, D_head].
        """

        def gather(t: Tensor) -> Tensor:
            n_rows, n_heads, _, d_head = t.shape
            chunks = t.view(n_rows, n_heads, self.n_chunks, self.chunk, d_head)
            before = F.pad(chunks[:, :, :-1], (0, 0, 0, 0, 1, 0))
            entries = self._entries(self.sinks).flatten(1)[:, None, :, None]
            sinks = t.gather(2, entries.expand(n_rows, n_heads, -1, d_head)).unflatten(2, self.sinks.shape[1:])
            parts = torch.cat([sinks, before, chunks] if own else [sinks, before], dim=3)
            return parts.transpose(1, 2).flatten(0, 1)

        return KeysValues(gather(context.keys), gather(context.values))

    def rollout_mask(self, j: int) -> Tensor:
        """[B or 1, c, n, s + 2C + n * (j + 1)] bool: what token j of each block sees, itself last."""
        blocks = self.starts.view(len(self.starts), self.n_chunks, -1, self.config.k)
        roots = self.places.view(blocks.shape[1:])[..., 0]  # [c, n]
        context = self._sees(roots + j, blocks[..., j], before=roots)
        itself = torch.eye(roots.shape[1], dtype=torch.bool, device=roots.device)
        earlier = [itself & ((blocks[..., i] == blocks[..., j]) & (roots + i >= 0))[..., None] for i in range(j)]
        others = torch.cat([context, *earlier], dim=3)
        return torch.cat([others, itself & self.config.sees_itself(others)[..., None]], dim=3)

    def window_mask(self) -> Tensor:
        """[B or 1, c, C, s + 2C] bool: what each token of a chunk sees."""
        queries = self.places.view(self.n_chunks, self.chunk)
        return self._sees(queries, self.starts.view(len(self.starts), *queries.shape), before=queries + 1)

    def _sees(self, queries: Tensor, documents: Tensor, before: Tensor) -> Tensor:
        """Return [B or 1, c, n, s + 2C] bool: of its document a query sees the keys in its window, and the sinks.

        A sink is seen among the near keys where it is one of them. queries: [c, n] places; documents: [B or 1, c, n]
        where their documents begin; before: [c, n], only keys at smaller places are seen.
        """
        queries, before, documents = queries[..., None], before[..., None], documents[..., None]
        near = self.near[:, None]  # [c, 1, 2C]
        of_near = self.starts[:, self._entries(near)]
        in_reach = (near > queries - self.config.window_tokens) | (near - of_near < self.config.sink_tokens)
        sees_near = in_reach & (of_near == documents) & (near >= 0) & (near < before)
        sees_sinks = (self.sinks < self.near[:, :1])[:, :, None] & (self.reaching_in[..., None, None] == documents)
        return torch.cat([sees_sinks, sees_near], dim=3)


class SpireStates(RolloutStates):
    """A SPIRe drafter, rolled out from every `block_tokens`-th position: the first token of each block is a root.

    A head is trained on drafts of depth 1 .. block_tokens - 1.
    """

    def fingerprint(self) -> str:
        description = asdict(self.drafter.config)
        # Both are younger than heads that name their drafter so.
        if not description["shape"]["layer_types"]:
            del description["shape"]["layer_types"]
        if description["own_key"]:
            del description["own_key"]
        return module_fingerprint(self.drafter, description)

    def hidden(self, tokens: Tensor, captured: Tensor | None, text: Tensor | None = None) -> Tensor:
        return rollout(self.drafter, tokens, captured, self.block_tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.drafter.logits(hidden)
