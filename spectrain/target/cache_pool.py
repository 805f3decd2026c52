"""KV caches that wait for the next generation, whose graphs or programs then stay valid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spectrain.kernels import ROWS, Graphs, padded
from spectrain.target.kv_cache import KVCache
from spectrain.target.lean import LeanEngine
from spectrain.target.modules import TransformersEngine

KEPT_BYTES = 1 << 26  # of a cache on a CPU that waits for the next generation
KEPT_CACHES = 4  # on a GPU, of generations of other numbers of rows, and of drafts
KEPT_PROGRAMS = 64  # that such a cache has; trees and drafts have any of some twenty sizes, prompts eight


@dataclass(eq=False)
class CachePool:
    """The caches of one model, for all who decode with it."""

    engine: LeanEngine | TransformersEngine  # fills them
    graphs: Graphs | None  # that are recorded over them; None: none are
    n_layer: int  # of the model
    kept: list[KVCache] = field(default_factory=list)

    def new(self, max_rows: int, block_tokens: int, n_tokens: int) -> KVCache:
        """Return an empty cache, or one that was given back by `keep`. For errors see `LeanEngine.begin`."""
        weights = self.engine.begin()
        if self.graphs is not None:  # few sizes, so that what was recorded for one serves many generations
            max_rows, quarter = padded(max_rows, ROWS), 1 << max(0, n_tokens.bit_length() - 3)
            n_tokens = -(-n_tokens // quarter) * quarter
        alike = [kept for kept in self.kept if (kept.max_rows, kept.block_tokens) == (max_rows, block_tokens)]
        larger = [kept for kept in self.kept if kept.max_rows > max_rows and kept.block_tokens == block_tokens]
        for kept in [*alike, *larger] if self.graphs is not None else alike:
            fits = not kept.keys or (kept.keys[0].dtype, kept.keys[0].device) == (self.engine.dtype, self.engine.device)
            if fits and kept.capacity >= n_tokens and kept.weights == weights:
                self.kept.remove(kept)
                return kept
        self.drop(None if self.graphs is None else alike)  # a CPU keeps one, a GPU one of each kind
        cache = KVCache(max_rows, block_tokens, n_tokens, 0 if self.graphs is None else self.n_layer)
        cache.weights = weights
        return cache

    def keep(self, cache: KVCache) -> None:
        """Keep the cache of a generation that ended for the next one.

        On a CPU only a small one of a single row. In one of several rows, attention to a shorter row gives weight 0 to
        what stands behind it, which would spread if it were not finite.
        """
        has_programs = cache.programs is not None and cache.max_rows == 1 and cache.bytes <= KEPT_BYTES
        if has_programs:
            cache.programs.forget(self.engine.storage, KEPT_PROGRAMS)
        if self.graphs is not None or has_programs:
            cache.clear()
            self.kept.append(cache)
            self.drop(self.kept[:-KEPT_CACHES])

    def drop(self, caches: Sequence[KVCache] | None = None) -> None:
        """Free caches that were kept, and the graphs that work on them; None: all."""
        caches = self.kept if caches is None else caches
        if caches and self.graphs is not None:
            self.graphs.forget(*(cache.storage for cache in caches))
        self.kept[:] = [kept for kept in self.kept if kept not in caches]
