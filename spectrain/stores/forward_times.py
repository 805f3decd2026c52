"""Seconds of a target's forward by the number of its nodes, timed once for each machine and kept in one JSON file.

    checkpoints/forwards-<fingerprint of the target>-<hash of device, dtype, threads and engine>.json

What a further node costs decides how many of them are worth scoring. The timing takes a few seconds, the first time a
target decodes with so many rows. Seconds of another device, dtype, engine or number of threads have another file.

Letters: n nodes of a row's tree (root, guesses, probes), b rows of the batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spectrain.decoding import DraftTree, KVCache, Source, TargetModel, fingerprint
from spectrain.decoding.memory import is_out_of_memory
from spectrain.errors import UserError
from spectrain.stores.environment import cpu_name
from spectrain.stores.folder import digest, load_json, write_json
from spectrain.stores.locations import CHECKPOINTS
from spectrain.stores.typed import Count, from_json

log = logging.getLogger(__name__)
_of_process: WeakKeyDictionary[PreTrainedModel, dict[tuple, ForwardTimes]] = WeakKeyDictionary()

SCHEMA = 4  # of the file; another one also where kernels have become faster, so that all is timed again
NODES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
DEAR = 5.0  # larger trees than the first that costs so many forwards of one node are not timed
CONTEXT_TOKENS = 160  # committed tokens of the timed forwards
FEWEST_ROUNDS, MOST_ROUNDS = 4, 24
MOST_S = 2.0  # for rounds behind the fewest


@dataclass(frozen=True)
class ForwardTimes:
    """Seconds of forwards of b rows on a quiet machine."""

    nodes: Sequence[Count]  # ascending from 1
    seconds: Sequence[float]

    def __post_init__(self) -> None:
        if not (len(self.nodes) == len(self.seconds) >= 2 and list(self.nodes) == sorted({1, *self.nodes})):
            raise ValueError("nodes must ascend from 1, with as many seconds")
        if not all(0 < one < 1e6 for one in self.seconds):
            raise ValueError("seconds must be above 0")

    def up_to(self, n_nodes: int) -> np.ndarray:
        """Return the seconds of 0..n nodes, [n + 1] float64; beyond the timed ones they go on along the last line."""
        wanted, nodes, seconds = np.arange(n_nodes + 1), np.array(self.nodes), rising(self.seconds)
        slope = (seconds[-1] - seconds[-2]) / (nodes[-1] - nodes[-2])
        return np.interp(wanted, nodes, seconds) + slope * np.maximum(0, wanted - nodes[-1])


@dataclass(frozen=True)
class _File:
    target_fingerprint: str
    machine: Mapping
    rows: dict[str, ForwardTimes] = field(default_factory=dict)  # by b, which JSON wants as text


def forward_times(target: TargetModel, n_rows: int, folder: Path | None = None) -> ForwardTimes:
    """The seconds of b rows on this machine: those of the file in `folder`, else timed now and kept there.

    A file that cannot be read, or written, costs the timing only: it is said in the log.
    """
    key = (*machine_of(target).values(), n_rows)
    known = _of_process.setdefault(target.model, {})
    if key not in known:
        known[key] = _kept_times(target, n_rows, folder or CHECKPOINTS)
    return known[key]


def times_of(target: TargetModel, n_rows: int) -> tuple[ForwardTimes, ForwardTimes, int]:
    """The seconds of one row, and of the next power of two of n rows; and that number."""
    most = 1 << (n_rows - 1).bit_length()
    return forward_times(target, 1), forward_times(target, most), most


def _kept_times(target: TargetModel, n_rows: int, folder: Path) -> ForwardTimes:
    machine = machine_of(target)
    prints = fingerprint(target.model, target.tokenizer)
    file = folder / f"forwards-{prints}-{digest(machine)}.json"
    known: dict[str, ForwardTimes] = {}
    if file.is_file():
        try:
            values = load_json(file)
            if values["kind"] != "forwards":
                raise ValueError(f"kind {values['kind']}")
            if values["schema"] != SCHEMA:
                raise ValueError(f"schema {values['schema']}, of another version of spectrain")
            found = from_json(_File, {key: values[key] for key in ("target_fingerprint", "machine", "rows")})
            if (found.target_fingerprint, dict(found.machine)) != (prints, machine):
                raise ValueError("it is of another target or machine")
            known = dict(found.rows)
        except (ValueError, KeyError, TypeError, AttributeError, UserError) as error:
            log.warning("%s cannot be used (%s); its forwards are timed again", file, error)
    if str(n_rows) not in known:
        known[str(n_rows)] = timed_forwards(target, n_rows)
        kept = {"kind": "forwards", "schema": SCHEMA, "target_fingerprint": prints, "machine": machine}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            rows = {b: {"nodes": list(one.nodes), "seconds": list(one.seconds)} for b, one in known.items()}
            write_json(file, {**kept, "rows": rows})
        except (OSError, UserError) as error:
            log.warning("%s could not be written (%s); forwards are timed again next time", file, error)
    return known[str(n_rows)]


def machine_of(target: TargetModel) -> dict[str, object]:
    """Return what seconds depend on: device, dtype, number of threads, engine."""
    device = target.device
    if device.type == "cuda":
        n_devices = len({p.device for p in target.model.parameters()})
        name, threads = f"{n_devices} x {torch.cuda.get_device_name(device)}", None
    else:
        name, threads = f"{cpu_name()} ({device.type})", torch.get_num_threads()
    dtype = str(target.dtype).removeprefix("torch.")
    graphs = target.graphs is not None
    return {"device": name, "dtype": dtype, "threads": threads, "engine": target.engine, "graphs": graphs}


@torch.inference_mode()
def timed_forwards(target: TargetModel, n_rows: int) -> ForwardTimes:
    """Time forwards of n nodes after a short text; each round visits the sizes in another order."""
    started = time.perf_counter()
    length = max(1, min(CONTEXT_TOKENS, target.max_positions - NODES[-1]))
    generator, order = torch.Generator().manual_seed(0), Random(0)
    cache = target.new_cache(n_rows, 256, length + NODES[-1])
    tokens = torch.randint(target.vocab_size, (n_rows, length), generator=generator).to(target.device)
    target.prefill(tokens, [length] * n_rows, cache, range(n_rows))
    lengths = [max(1, length - row) for row in range(n_rows)]  # unequal, as in a real batch
    trees: dict[int, DraftTree] = {}
    seconds: dict[int, list[float]] = {}
    for n in NODES:  # the first pass warms up, and says which sizes are too dear
        drawn = torch.randint(target.vocab_size, (n_rows, n), generator=generator)
        trees[n], seconds[n] = binary_tree(drawn.to(target.device)), []
        try:
            for _ in range(2):
                elapsed_s = timed(target, trees[n], cache, lengths)
        except (RuntimeError, MemoryError) as error:
            if len(trees) < 3 or not is_out_of_memory(error):
                raise
            del trees[n], seconds[n]  # larger trees are never scored here
            break
        if n == 1:
            plain_s = elapsed_s
        elif elapsed_s > DEAR * plain_s and len(trees) > 2:
            break
    first = time.perf_counter()
    for i in range(MOST_ROUNDS):
        if i >= FEWEST_ROUNDS and time.perf_counter() - first > MOST_S:
            break
        for n in order.sample(list(trees), len(trees)):
            timed(target, trees[n], cache, lengths)  # a tree of another size left other data in the caches
            seconds[n].append(timed(target, trees[n], cache, lengths))
    target.keep_cache(cache)
    took_s = time.perf_counter() - started
    log.info("timed forwards of 1..%d nodes for %d rows in %.1f s", max(trees), n_rows, took_s)
    # Other work only ever adds to a time, so the lower quartile says more than the median.
    return ForwardTimes(list(trees), [float(np.quantile(seconds[n], 0.25)) for n in trees])


def rising(values: Sequence[float]) -> np.ndarray:
    """Return the nearest values that never fall: neighbours that do are replaced by their mean."""
    blocks: list[tuple[float, int]] = []  # mean and length
    for value in values:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (mean, n), (before, m) = blocks.pop(), blocks.pop()
            blocks.append(((mean * n + before * m) / (n + m), n + m))
    return np.concatenate([np.full(n, mean) for mean, n in blocks])


def timed(target: TargetModel, tree: DraftTree, cache: KVCache, lengths: list[int]) -> float:
    """Time one forward. Nothing is committed, so the cache may be set to any length again."""
    cache.lengths = list(lengths)
    wait = torch.cuda.synchronize if target.device.type == "cuda" else lambda device: None
    wait(target.device)
    start = time.perf_counter()
    target.score(tree, cache)
    wait(target.device)
    return time.perf_counter() - start


def binary_tree(tokens: Tensor) -> DraftTree:
    """Make a binary tree per row of tokens [b, n]: not a chain, which would take a faster mask."""
    n_rows, n_nodes = tokens.shape
    if n_nodes == 1:
        return DraftTree.root_only(tokens[:, 0])
    parents = (torch.arange(n_nodes, device=tokens.device) - 1).div(2, rounding_mode="floor")  # -1 at the root
    source = torch.full_like(tokens, int(Source.INPUT))
    tree = DraftTree(tokens, parents.expand(n_rows, -1), source, max_depth=n_nodes.bit_length() - 1)
    _ = tree.depth, tree.ancestors  # made on first use, and part of drafting
    return tree
