"""The draft tree: what every method proposes and the target scores in one forward.

A tree is parent pointers. Depth and ancestors follow from them by vector operations; a chain, the shape that every
model-based drafter proposes, knows them beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT_PARENT = -1
PADDING_PARENT = -2


class Source(IntEnum):
    """Where a token came from. ROOT marks what the target itself drew: the first token and every bonus."""

    ROOT = 0
    FORWARD = 1
    BACKWARD = 2
    INPUT = 3
    DATASTORE = 4
    LOGITS = 5
    DRAFT = 6


@dataclass(frozen=True)
class DraftTree:
    """B trees, ragged by padding. Node 0 of a row is its root; parents stand before their children."""

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64: index of the parent, -1 at the root, -2 at padding
    source: Tensor  # [B, N] int64, values of Source
    probs: Tensor | None = None  # [B, N, V] float32: probs[:, i] is the q that node i was drawn from; None: one-hot
    probe: Tensor | None = None  # [B, N] bool: scored, never accepted; None: no probes
    is_chain: bool = False  # every node's parent is the node before it, padding only at the end
    max_depth: int | None = None  # no node is deeper; None: not known. Saves rounds of pointer doubling
    n_silent: int = 0  # nodes 1..n_silent are probes whose logits nobody reads

    @classmethod
    def root_only(cls, roots: Tensor) -> DraftTree:
        """Trees without a draft: the target decodes one token. roots: [B] int64."""
        tokens = roots[:, None]
        return cls(tokens, torch.full_like(tokens, ROOT_PARENT), torch.zeros_like(tokens), is_chain=True)

    @classmethod
    def chain(
        cls,
        roots: Tensor,
        tokens: Tensor,
        lengths: Tensor | None = None,
        probs: Sequence[Tensor] | Tensor | None = None,
        source: Source = Source.DRAFT,
    ) -> DraftTree:
        """A chain under each root.

        Args:
            roots: [B] int64.
            tokens: [B, gamma] int64; what stands after a row's length is ignored.
            lengths: [B] int64 drafted tokens of each row; None: all gamma.
            probs: gamma tensors [B, V] float32, the q that each column was drawn from, or all of them behind the root's
                entry, [B, N, V]; None: deterministic.
            source: of the drafted tokens.
        """
        parents, sources = _chains(*tokens.shape, int(source), tokens.device)
        if lengths is not None:
            parents = parents.masked_fill(parents >= lengths[:, None], PADDING_PARENT)
        if not isinstance(probs, Tensor):
            probs = torch.stack([probs[0], *probs], dim=1) if probs else None  # the root's entry is never read
        return cls(torch.cat([roots[:, None], tokens], dim=1), parents, sources, probs=probs, is_chain=True)

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(B, N)"""
        return self.tokens.shape[0], self.tokens.shape[1]

    @property
    def deepest(self) -> int:
        """No node is deeper, as far as is known without looking."""
        return self.shape[1] - 1 if self.max_depth is None else min(self.max_depth, self.shape[1] - 1)

    @property
    def by_place(self) -> bool:
        """Whether nodes are chained by their places, as draft models have them.

        Lookups find chains and trees in turns. These say how deep they are, and graphs take both alike.
        """
        return self.is_chain and self.max_depth is None

    def padded(self, n_nodes: int) -> DraftTree:
        """Return the same trees with padding up to n nodes. Their greatest depth is rounded up, too, to 2^i - 1."""
        missing = n_nodes - self.shape[1]
        if missing <= 0:
            return self
        tokens, source = (F.pad(values, (0, missing)) for values in (self.tokens, self.source))
        parents = F.pad(self.parents, (0, missing), value=PADDING_PARENT)
        probs = None if self.probs is None else F.pad(self.probs, (0, 0, 0, missing))
        probe = None if self.probe is None else F.pad(self.probe, (0, missing))
        depth = None if self.by_place else (1 << self.deepest.bit_length()) - 1
        return DraftTree(tokens, parents, source, probs, probe, self.is_chain, depth, self.n_silent)

    @cached_property
    def drafted(self) -> Tensor:
        """[B, N] bool: neither root, padding nor probe."""
        drafted = self.parents >= 0
        return drafted if self.probe is None else drafted & ~self.probe

    @cached_property
    def depth(self) -> Tensor:
        """[B, N] int64: edges to the root, 0 at padding. A node's position id is its root's plus its depth."""
        if self.is_chain:
            return (self.parents + 1).clamp_min(0)
        return self.ancestors.sum(-1) - 1

    @cached_property
    def ancestors(self) -> Tensor:
        """[B, N, N] bool: [b, i, j] says that node j lies on the path from the root to node i, i itself included.

        Padding sees only itself in a general tree, and what stands before it in a chain; nobody sees padding.
        """
        n_rows, n_nodes = self.shape
        if self.is_chain:
            causal = torch.ones(n_nodes, n_nodes, dtype=torch.bool, device=self.tokens.device).tril()
            return causal.expand(n_rows, -1, -1)
        # Pointer doubling: after t rounds a node knows its 2^t nearest ancestors, and `jump` is the next one beyond.
        nodes = torch.arange(n_nodes, device=self.tokens.device)
        jump = torch.where(self.parents >= 0, self.parents, nodes)
        ancestors = torch.eye(n_nodes, dtype=torch.bool, device=self.tokens.device).expand(n_rows, -1, -1)
        for _ in range(self.deepest.bit_length()):
            ancestors = ancestors | ancestors.gather(1, jump[:, :, None].expand(-1, -1, n_nodes))
            jump = jump.gather(1, jump)
        return ancestors

    def path_to(self, node: Tensor) -> Tensor:
        """The nodes from the root to `node` [B], in order. Returns [B, N] int64, padded with -1."""
        n_rows, n_nodes = self.shape
        nodes = torch.arange(n_nodes, device=self.tokens.device).expand(n_rows, -1)
        if self.is_chain:
            return nodes.masked_fill(nodes > node[:, None], -1)
        on_path = self.ancestors.gather(1, node[:, None, None].expand(-1, 1, n_nodes))[:, 0]
        place = torch.where(on_path, self.depth, n_nodes)  # nodes off the path are written to a column that is cut off
        path = torch.full((n_rows, n_nodes + 1), -1, dtype=torch.int64, device=self.tokens.device)
        return path.scatter_(1, place, nodes)[:, :-1]


@lru_cache(maxsize=64)
def _chains(n_rows: int, gamma: int, source: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return parents and sources [B, gamma + 1] of full chains; nobody writes to them."""
    with torch.inference_mode(False):
        parents = torch.arange(-1, gamma, device=device).expand(n_rows, -1)
        sources = torch.full((n_rows, gamma + 1), source, device=device)
        sources[:, 0] = Source.ROOT
    return parents, sources
