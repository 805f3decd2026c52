"""Before a generation on a GPU: every step that it may need is recorded, so that no answer waits for it."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Collection

import torch

from spectrain.decoding.context import Context
from spectrain.decoding.drafter import Drafter
from spectrain.decoding.generation import Clock, Ending
from spectrain.decoding.loop import Batch, Row
from spectrain.decoding.sampling import Sampling, row_generator
from spectrain.kernels import ROWS
from spectrain.target.kv_cache import KVCache
from spectrain.target.target import TargetModel
from spectrain.target.tree import DraftTree, Source
from spectrain.terminal import stage

log = logging.getLogger(__name__)

CALLS = 2  # of a step: the first sets libraries up, the second is recorded
PROMPT = 4  # tokens


def rehearse(
    target: TargetModel,
    drafter: Drafter,
    cache: KVCache,
    sampling: Sampling,
    stop_ids: Collection[int],
    verification: str,
) -> None:
    """Record what generations in this cache may need, unless it has been.

    Log how long it took and the memory that it takes.
    """
    known = cache.storage, weakref.ref(drafter), sampling, target.capture_layers
    if known in target.graphs.rehearsed:
        return
    began, before, n_before = time.perf_counter(), _reserved(target.device), target.graphs.n_prepared
    sizes = sorted({min(size, cache.max_rows) for size in (*ROWS, cache.max_rows)})
    room = min(cache.capacity, drafter.method.max_positions - 2 * PROMPT, target.max_positions - 2 * PROMPT)
    with stage("recording steps", len(sizes)) as advance:
        for size in sizes:
            prompt, never = [1 % target.vocab_size] * PROMPT, Ending(frozenset(), frozenset(), (), None)
            with torch.inference_mode():
                drafter.start(target, cache)
            for way in drafter.rehearsals():
                context = Context(sampling, target.device, size, stop_ids)
                rehearsal, clock = _Rehearsal(drafter, way), Clock(target.device)
                batch = Batch(target, rehearsal, cache, context, verification, clock)
                rows = [Row(number, prompt, room, sampling, row_generator(0, number), never) for number in range(size)]
                with torch.inference_mode():
                    lengths = torch.tensor([PROMPT] * size, device=target.device)
                    tokens, read = torch.tensor([prompt] * size).to(target.device), drafter.read_of_prompts(lengths)
                    output = target.prefill(tokens, [PROMPT] * size, cache, range(size), read)
                batch.join(rows, output, 0.0)
                for _ in range(CALLS):
                    batch.step()
                with torch.inference_mode():
                    cache.clear()
                    drafter.start(target, cache)
            advance()
    target.graphs.rehearsed.add(known)
    if target.graphs.n_prepared > n_before:
        log.info(
            "recorded %d steps in %.1f s, %.2f GiB",
            *(target.graphs.n_prepared - n_before, time.perf_counter() - began),
            (_reserved(target.device) - before) / 2**30,
        )


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


class _Rehearsal(Drafter):
    """Proposes in one way, and learns nothing."""

    propose = None  # each object has its own

    def __init__(self, inner: Drafter, way: Callable[[Context], DraftTree]) -> None:
        self.propose, self.prefill, self.observe = way, inner.prefill, inner.observe


def any_tree(context: Context, n_nodes: int) -> DraftTree:
    """Return binary trees of any tokens."""
    if n_nodes == 1:
        return DraftTree.root_only(context.roots)
    places = torch.arange(n_nodes, device=context.device)
    tokens = (context.roots[:, None] + places) % 7
    tokens[:, 0] = context.roots
    parents = (places - 1).div(2, rounding_mode="floor").expand(context.n_rows, -1)  # -1 at the root
    return DraftTree(tokens, parents, torch.full_like(tokens, int(Source.INPUT)), max_depth=n_nodes.bit_length() - 1)
