"""Hidden states of a target, captured shard by shard in the work folder of a build (pipeline.py).

    store/shard-00000.safetensors    whole rows, shard_tokens tokens at most, but one row at least

Rows are cut into shards by index and batches form inside a shard, so neither the number of ranks nor an interruption
changes a byte. Threads write shards while the next one is computed.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import torch
from rich.filesize import decimal
from torch import Tensor

from data_prep.pipeline import Build, Parts, check_disk
from data_prep.progress import Advance
from spectrain.data.packing import Packed, PackedRows
from spectrain.errors import UserError
from spectrain.stores.features import FeatureManifest, quantise, shard_name, token_bytes, write_shard
from spectrain.stores.files import free_bytes
from spectrain.stores.folder import write_manifest
from spectrain.target import fingerprint, tokenizer_fingerprint
from spectrain.target.device import is_out_of_memory
from spectrain.target.target import TargetModel

log = logging.getLogger(__name__)

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}  # by Lightning's names of precision
MUCH_BYTES, MUCH_OF_DISK = 100 * 10**9, 0.1  # of a store: bytes, and share of what the disk has free
PENDING_SHARDS = 2  # waiting to be written, in memory beside the one that is computed


@dataclass(frozen=True)
class ShardParts(Parts):
    """Rows of tokens, in the shards in which their features are captured."""

    packed: Packed
    target: TargetModel  # with `capture_layers`
    precision: str  # of the forward, one of AUTOCAST
    dtype: str  # of the store: bfloat16 | int8
    batch_tokens: int  # of a forward; one row at least
    shard_tokens: int
    facts: dict  # of the manifest: target, config, corpus

    stage, made_before = "capture", "shards are captured"

    @cached_property
    def rows(self) -> PackedRows:
        return self.packed.all_rows()

    @cached_property
    def shards(self) -> list[slice]:
        """The rows of each shard."""
        n_rows, size = len(self.rows), max(1, self.shard_tokens // self.rows.tokens.shape[1])
        return [slice(start, min(start + size, n_rows)) for start in range(0, n_rows, size)]

    @cached_property
    def sizes(self) -> list[int]:
        return [(one.stop - one.start) * self.rows.tokens.shape[1] for one in self.shards]

    @cached_property
    def manifest(self) -> FeatureManifest:
        target, (n_rows, row_tokens) = self.target, self.rows.tokens.shape
        return FeatureManifest(
            **self.facts,
            target_fingerprint=fingerprint(target.model, target.tokenizer),
            tokenizer_fingerprint=tokenizer_fingerprint(target.tokenizer),
            layers=list(target.capture_layers),
            hidden_size=target.unembedding.shape[-1],
            dtype=self.dtype,
            precision=self.precision,
            row_tokens=row_tokens,
            counts={"rows": n_rows, "held_out": len(self.packed.held_out), "tokens": n_rows * row_tokens},
            shard_rows=self.shards[0].stop,
        )

    @property
    def identity(self) -> dict:
        digest = hashlib.sha256(str(len(self.packed.train)).encode())
        for values in filter(lambda values: values is not None, vars(self.rows).values()):
            digest.update(values.numpy().data)
        prints = {"target_fingerprint": self.manifest.target_fingerprint, "set_of_rows": digest.hexdigest()[:8]}
        return {"config": self.manifest.config} | prints

    def missing(self, build: Build) -> list[int]:
        manifest = self.manifest
        indices = range(len(self.sizes))
        todo = [index for index in indices if not (build.store / shard_name(index)).is_file()]
        token = token_bytes(manifest.dtype, len(manifest.layers), manifest.hidden_size)
        less = "lower corpus.max_documents" if manifest.dtype == "int8" else "give dtype=int8"
        need_bytes = sum(self.sizes[index] for index in todo) * token
        log.info("the store will take %s", decimal(need_bytes))
        if need_bytes > min(MUCH_BYTES, MUCH_OF_DISK * free_bytes(build.out)):
            log.warning(
                "that is much; data=online computes what it holds while training, and data=served asks a server"
            )
        check_disk(build.out, need_bytes, less)
        # What a kill left of shards that were being written has a hidden name, ours or safetensors' own.
        for file in build.store.glob(".*"):
            file.unlink()
        return todo

    def make(self, build: Build, parts: Sequence[int], advance: Advance) -> None:
        """Capture these shards; each is written while the next ones are computed.

        After an error too, this waits for what is still to be written, so a shard is whole or not there.
        """
        build.store.mkdir(exist_ok=True)
        pending: deque[Future] = deque()
        with ThreadPoolExecutor(PENDING_SHARDS) as pool:
            for index in parts:
                shard = self.capture(index, advance)
                if build.writes:
                    if len(pending) == PENDING_SHARDS:
                        pending.popleft().result()
                    pending.append(pool.submit(write_shard, build.store / shard_name(index), shard))
            for one in pending:
                one.result()

    @torch.inference_mode()
    def capture(self, index: int, advance: Advance = lambda n_tokens: None) -> dict[str, Tensor]:
        """Return the tensors of a shard, on the CPU; `advance` is called after each forward."""
        rows, target = self.rows[self.shards[index]], self.target
        n_rows, row_tokens = rows.tokens.shape
        size, sums = max(1, self.batch_tokens // row_tokens), []
        kept = {name: values for name, values in vars(rows).items() if values is not None}
        for start in range(0, n_rows, size):
            batch = slice(start, min(start + size, n_rows))
            tokens = rows.tokens[batch].long().to(target.device)
            starts = None if rows.starts is None else rows.starts[batch].long().to(target.device)
            try:
                with autocast(target.device, self.precision):
                    features = target.features(tokens, starts)
                found = features.captured, features.final_hidden.to(features.captured.device)
                sums += [values.sum(dtype=torch.float32) for values in found]
                for name, values in self.stored(*found).items():
                    if name not in kept:  # pinned, so that a GPU goes on while it copies
                        pinned, shape = values.device.type == "cuda", (n_rows, *values.shape[1:])
                        kept[name] = torch.empty(shape, dtype=values.dtype, pin_memory=pinned)
                    kept[name][batch].copy_(values, non_blocking=True)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise UserError(
                    f"a batch of {batch.stop - start} rows of {row_tokens} tokens is too large for the memory of "
                    f"{target.device}; lower batch_tokens={self.batch_tokens}, or row_tokens where a batch is one row"
                ) from error
            advance((batch.stop - start) * row_tokens)
        if not torch.stack(sums).isfinite().all():  # which also waits for the copies
            raise UserError("a feature of the target is no number; give target.dtype=float32 or precision=32-true")
        return kept

    def stored(self, captured: Tensor, final_hidden: Tensor) -> dict[str, Tensor]:
        """Return features [B, L, C, D] and [B, L, D] as the store keeps them, by their names there."""
        if self.dtype == "bfloat16":
            return {"captured": captured.bfloat16(), "final_hidden": final_hidden.bfloat16()}
        (captured, captured_scale), (final_hidden, hidden_scale) = quantise(captured), quantise(final_hidden)
        scales = {"captured_scale": captured_scale, "hidden_scale": hidden_scale}
        return {"captured": captured, "final_hidden": final_hidden} | scales

    def write_store(self, build: Build) -> None:
        """Put the store, whose shards stand where they were written, in its place."""
        write_manifest(build.store, self.manifest)
        build.publish()


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context in which Lightning's Trainer runs a step in this precision."""
    dtype = AUTOCAST.get(precision)
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)
