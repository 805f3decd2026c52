"""Hidden states of a target, captured shard by shard in the work folder of a build (pipeline.py).

    store/shard-00000.safetensors    whole rows, shard_tokens tokens at most (unless one row has more)

Rows are cut into shards by index and batches form inside a shard, so neither the number of ranks nor an interruption
changes a byte. Threads write shards while the next one is computed.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from data_prep.pipeline import Build, Parts, check_disk
from data_prep.progress import Advance
from spectrain.decoding import fingerprint, tokenizer_fingerprint
from spectrain.decoding.masks import length_buckets
from spectrain.decoding.memory import is_out_of_memory
from spectrain.decoding.target import Features, TargetModel
from spectrain.errors import UserError
from spectrain.stores.features import FeatureManifest, Shard, quantise, shard_name, token_bytes, write_shard
from spectrain.stores.folder import write_manifest
from spectrain.stores.packing import Packed
from spectrain.stores.rows import ResponseStore
from spectrain.stores.texts import is_held_out
from spectrain.training.data import padded

log = logging.getLogger(__name__)

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}  # by Lightning's names of precision
PENDING_SHARDS = 2  # waiting to be written, in memory beside the one that is computed
SCALES = {"captured": "captured_scale", "final_hidden": "hidden_scale"}  # of int8 features


@dataclass(frozen=True)
class TokenRows:
    """What is read, one row after another."""

    tokens: np.ndarray  # [n] int32
    offsets: np.ndarray  # [rows + 1] int64
    held_out: np.ndarray  # [rows] bool
    prompt_tokens: np.ndarray  # [rows] int32; 0 where the source is raw text
    cut: int = 0  # responses whose end is left out
    skipped: int = 0  # responses that have no token within the limit
    is_response: np.ndarray | None = None  # [n] bool, of packed rows with responses
    starts: np.ndarray | None = None  # [n] int32, of packed rows whose documents do not see each other

    def __len__(self) -> int:
        return len(self.held_out)

    @classmethod
    def of_texts(cls, texts: Sequence[tuple[np.ndarray, int, bool]], cut: int = 0, skipped: int = 0) -> TokenRows:
        """Of each text its tokens [L] int32, how many of them are the prompt, and whether it is held out."""
        tokens, prompts, held_out = zip(*texts, strict=True)
        offsets = np.concatenate([[0], np.cumsum([len(text) for text in tokens])]).astype(np.int64)
        return cls(np.concatenate(tokens), offsets, np.array(held_out), np.array(prompts, np.int32), cut, skipped)

    @classmethod
    def of_packed(cls, packed: Packed) -> TokenRows:
        """All rows of a corpus, training rows first, as training numbers them."""
        sides = packed.train, packed.held_out
        n_rows, row_tokens = sum(map(len, sides)), packed.train.tokens.shape[1]

        def joined(name: str) -> np.ndarray | None:
            found = [getattr(side, name) for side in sides]
            if all(one is None for one in found):
                return None
            # Where one side alone holds responses, all tokens of the other are learned.
            return np.concatenate(
                [
                    (torch.ones_like(side.tokens, dtype=torch.bool) if one is None else one).numpy().ravel()
                    for side, one in zip(sides, found, strict=True)
                ]
            )

        return cls(
            joined("tokens"),
            np.arange(n_rows + 1, dtype=np.int64) * row_tokens,
            np.arange(n_rows) >= len(packed.train),
            np.zeros(n_rows, np.int32),
            is_response=joined("is_response"),
            starts=joined("starts"),
        )

    def digest(self) -> str:
        """Return 8 hex digits over all tokens and how they are cut and split."""
        digest = hashlib.sha256()
        for values in (self.tokens, self.offsets, self.held_out, self.prompt_tokens, self.is_response, self.starts):
            if values is not None:
                digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()[:8]


def rows_of_responses(stores: Sequence[ResponseStore], row_tokens: int, held_out_share: float) -> TokenRows:
    """Return one row per response, with its prompt before it, cut to `row_tokens`; UserError where a side is empty."""
    texts, cut = [], 0
    rows = [store.rows.with_format("numpy", columns=["id", "prompt", "response"]) for store in stores]
    for row in itertools.chain.from_iterable(rows):
        text, n_prompt = np.concatenate([row["prompt"], row["response"]]).astype(np.int32), len(row["prompt"])
        if min(len(text), row_tokens) > n_prompt:
            cut += len(text) > row_tokens
            texts.append((text[:row_tokens], n_prompt, is_held_out(str(row["id"]), held_out_share)))
    n_held_out = sum(held_out for _, _, held_out in texts)
    if not 0 < n_held_out < len(texts):
        folders = ":".join(str(store.folder) for store in stores)
        raise UserError(
            f"responses={folders} gives {len(texts) - n_held_out} training rows and {n_held_out} held-out rows "
            f"within row_tokens={row_tokens}; give more responses, or change row_tokens or held_out_share"
        )
    return TokenRows.of_texts(texts, cut, skipped=sum(map(len, rows)) - len(texts))


@dataclass(frozen=True)
class ShardParts(Parts):
    """Rows of tokens, in the shards in which their features are captured."""

    rows: TokenRows
    target: TargetModel  # with `capture_layers`
    precision: str  # of the forward, one of AUTOCAST
    dtype: str  # of the store: bfloat16 | int8
    batch_tokens: int  # of a forward, padding included; one row at least
    shard_tokens: int
    facts: dict  # of the manifest: target, config, source

    stage, made_before = "capture", "shards are captured"

    @cached_property
    def bounds(self) -> np.ndarray:
        return shard_bounds(self.rows.offsets, self.shard_tokens)

    @cached_property
    def sizes(self) -> np.ndarray:
        return np.diff(self.rows.offsets[self.bounds])

    @cached_property
    def manifest(self) -> FeatureManifest:
        rows, target = self.rows, self.target
        counts = {"rows": len(rows), "held_out": int(rows.held_out.sum()), "tokens": len(rows.tokens)}
        return FeatureManifest(
            **self.facts,
            target_fingerprint=fingerprint(target.model, target.tokenizer),
            tokenizer_fingerprint=tokenizer_fingerprint(target.tokenizer),
            layers=list(target.capture_layers),
            hidden_size=target.unembedding.shape[-1],
            dtype=self.dtype,
            precision=self.precision,
            row_tokens=int(np.diff(rows.offsets).max()),
            counts=counts | {"cut": rows.cut, "skipped": rows.skipped},
            shard_rows=np.diff(self.bounds).tolist(),
        )

    @property
    def identity(self) -> dict:
        prints = {"target_fingerprint": self.manifest.target_fingerprint, "set_of_rows": self.rows.digest()}
        return {"config": self.manifest.config} | prints

    def missing(self, build: Build) -> list[int]:
        manifest = self.manifest
        if self.rows.cut or self.rows.skipped:
            log.warning(
                "of the responses %d are cut to %d tokens and %d skipped, whose prompts leave no room for a response",
                *(self.rows.cut, manifest.row_tokens, self.rows.skipped),
            )
        indices = range(len(self.sizes))
        todo = [index for index in indices if not (build.store / shard_name(index)).is_file()]
        token = token_bytes(manifest.dtype, len(manifest.layers), manifest.hidden_size)
        less = "lower corpus.max_documents" if manifest.dtype == "int8" else "give dtype=int8"
        check_disk(build.out, int(self.sizes[todo].sum()) * token, less)
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
    def capture(self, index: int, advance: Advance = lambda n_tokens: None) -> Shard:
        """Return the features of one shard's rows, on the CPU; `advance` is called after each forward."""
        span, target = slice(*self.bounds[index : index + 2]), self.target
        first, stop = self.rows.offsets[self.bounds[index : index + 2]]
        offsets = self.rows.offsets[span.start : span.stop + 1] - first
        tokens, is_response, starts = (
            None if values is None else torch.from_numpy(values[first:stop])
            for values in (self.rows.tokens.astype(np.int32, copy=False), self.rows.is_response, self.rows.starts)
        )
        buffers = _ShardBuffers(target, len(tokens), self.dtype == "int8")
        lengths = np.diff(offsets)
        for batch in length_buckets(lengths.tolist(), self.batch_tokens):
            places = [slice(int(offsets[i]), int(offsets[i + 1])) for i in batch]
            n_rows, longest = len(batch), int(lengths[batch].max())
            inputs = (
                None if values is None else padded([values[place] for place in places], torch.int64).to(target.device)
                for values in (tokens, starts)
            )
            try:
                with autocast(target.device, self.precision):
                    features = target.features(*inputs)
                buffers.put(features, places)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise UserError(
                    f"a batch of {n_rows} rows of {longest} tokens is too large for the memory of {target.device}; "
                    f"lower batch_tokens={self.batch_tokens}, or row_tokens where a batch is one row"
                ) from error
            advance(int(lengths[batch].sum()))
        if not buffers.are_finite():
            raise UserError("a feature of the target is no number; give target.dtype=float32 or precision=32-true")
        return Shard(
            tokens,
            torch.from_numpy(offsets.astype(np.int64)),
            torch.from_numpy(self.rows.held_out[span].astype(bool)),
            torch.from_numpy(self.rows.prompt_tokens[span].astype(np.int32)),
            is_response=is_response,
            starts=starts,
            **buffers.kept,
        )

    def write_store(self, build: Build) -> None:
        """Put the store, whose shards stand where they were written, in its place."""
        write_manifest(build.store, self.manifest)
        build.publish()


def shard_bounds(offsets: np.ndarray, shard_tokens: int) -> np.ndarray:
    """Return the rows at which shards begin, and the number of rows: [shards + 1]."""
    bounds, n_rows = [0], len(offsets) - 1
    while bounds[-1] < n_rows:
        fitting = int(np.searchsorted(offsets, offsets[bounds[-1]] + shard_tokens, side="right")) - 1
        bounds.append(max(fitting, bounds[-1] + 1))  # a row longer than a shard stands alone
    return np.array(bounds)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context in which Lightning's Trainer runs a step in this precision."""
    dtype = AUTOCAST.get(precision)
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


class _ShardBuffers:
    """Tensors of a shard on the CPU, filled batch by batch; from a GPU while the next batch is computed."""

    def __init__(self, target: TargetModel, n_tokens: int, int8: bool) -> None:
        self._stream = torch.cuda.Stream(target.device) if target.device.type == "cuda" else None
        self._int8, self._sums = int8, []
        shapes = {"captured": (n_tokens, len(target.capture_layers)), "final_hidden": (n_tokens,)}
        width, dtype = target.unembedding.shape[-1], torch.int8 if int8 else torch.bfloat16
        empty = partial(torch.empty, pin_memory=self._stream is not None)
        self.kept = {name: empty(*shape, width, dtype=dtype) for name, shape in shapes.items()}
        if int8:
            self.kept |= {SCALES[name]: empty(shape) for name, shape in shapes.items()}

    def put(self, features: Features, places: Sequence[slice]) -> None:
        """Keep a batch: its rows go to these places of the shard."""
        device = features.captured.device
        found: dict[str, Tensor] = {}
        for name in SCALES:
            values = getattr(features, name).to(device)
            self._sums.append(values.sum(dtype=torch.float32))
            if self._int8:
                found[name], found[SCALES[name]] = quantise(values)
            else:
                found[name] = values.to(torch.bfloat16)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))
            for values in found.values():
                values.record_stream(self._stream)  # its memory is not used again before it is copied
        with torch.cuda.stream(self._stream):  # None: as if it was not there
            for name, values in found.items():
                for row, place in enumerate(places):
                    self.kept[name][place].copy_(values[row, : place.stop - place.start], non_blocking=True)

    def are_finite(self) -> bool:
        """Return whether all were numbers, once they are copied."""
        if self._stream is not None:
            self._stream.synchronize()
        return bool(torch.stack(self._sums).isfinite().all())
