"""A store of features: what training reads of a frozen target per token, in safetensors shards (docs/data.md).

    store = open_features("checkpoints/activations-1f0c93ab")
    store.check_fits(fingerprint(target.model, target.tokenizer), "pystdlib-8l", (6, 7), target.vocab_size)
    row = store.read(0)
    row.tokens, row.captured, row.final_hidden

Shards are memory-mapped, and a row is read by itself. Rows lie one after another, in the order of the source; shards
cut between rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from spectrain.errors import UserError
from spectrain.stores.files import Count, write_whole
from spectrain.stores.folder import FileFacts, StoreKind

DTYPES = ("bfloat16", "int8")
OPEN_SHARDS = 256  # mapped at once: a process may hold only so many maps
INT8_MAX = 127


@dataclass(frozen=True, kw_only=True)
class FeatureManifest:
    """The content of `manifest.json`."""

    version: int = 1
    kind: str = "activations"
    target: str  # folder or id
    target_fingerprint: str
    tokenizer_fingerprint: str
    layers: list[int]  # blocks of the target whose inputs are stored, in order
    hidden_size: int  # D
    dtype: str  # of the features: bfloat16 | int8, with a scale for each token and layer
    precision: str  # that the forward ran in, in Lightning's words
    row_tokens: int  # of the longest row at most
    source: dict[str, str]  # "kind": corpus | responses, and which
    config: dict  # the options by which it was made
    counts: dict[str, Count]  # rows, held_out, tokens; of responses also cut and skipped
    shard_rows: list[int]  # rows of each shard
    files: dict[str, FileFacts] = field(default_factory=dict)


ACTIVATIONS = StoreKind("activations", 1, FeatureManifest, option="data.path")


@dataclass(frozen=True)
class Shard:
    """Rows with their features, as a shard holds them. Scales are those of an int8 store, else None."""

    tokens: Tensor  # [n] int32
    offsets: Tensor  # [rows + 1] int64: a row's tokens are offsets[r] .. offsets[r + 1]
    held_out: Tensor  # [rows] bool
    prompt_tokens: Tensor  # [rows] int32; 0 where the source is raw text
    captured: Tensor  # [n, C, D] bfloat16 or int8, inputs of the blocks `layers`
    final_hidden: Tensor  # [n, D] likewise, what the unembedding takes
    captured_scale: Tensor | None = None  # [n, C] float32
    hidden_scale: Tensor | None = None  # [n] float32
    is_response: Tensor | None = None  # [n] bool, where packed rows hold responses; None: see prompt_tokens
    starts: Tensor | None = None  # [n] int32, where in its row each token's document begins; None: rows are documents


@dataclass(frozen=True)
class FeatureRow:
    """A row as training reads it."""

    tokens: Tensor  # [L] int32
    captured: Tensor | None  # [L, C, D] bfloat16 of the layers that were asked for; None: of none
    final_hidden: Tensor  # [L, D] bfloat16
    is_response: Tensor | None  # [L] bool; None: the row is no answer to anything
    starts: Tensor | None  # [L] int64; None: the row is one document


def shard_name(index: int) -> str:
    return f"shard-{index:05d}.safetensors"


def token_bytes(dtype: str, n_layers: int, hidden_size: int) -> int:
    """Return the bytes that a token takes on disk; rows add a few bytes each."""
    vectors = n_layers + 1
    return 4 + vectors * (2 * hidden_size if dtype == "bfloat16" else hidden_size + 4)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 vectors with a scale each, x [..., D] being about q * scale: q [..., D] int8, scale [...] float32."""
    x = x.float()
    scale = x.abs().amax(dim=-1) / INT8_MAX
    q = (x / scale.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).round().clamp(-INT8_MAX, INT8_MAX)
    return q.to(torch.int8), scale


def dequantise(q: Tensor, scale: Tensor) -> Tensor:
    """Return [..., D] bfloat16 of q [..., D] int8 and scale [...] float32."""
    return (q * scale[..., None]).to(torch.bfloat16)


def write_shard(file: Path, shard: Shard) -> None:
    """Write a shard whole."""
    tensors = {name: values for name, values in vars(shard).items() if values is not None}
    write_whole(file, lambda out: save_file(tensors, out.name))


class FeatureStore:
    """An open store; what is asked for is read through the shards' maps, never a whole shard.

    Attributes:
        folder, manifest: which store.
        lengths: [rows] int64, tokens of each row.
        held_out: [rows] bool, rows that no training may see.
        prompt_tokens: [rows] int32, of the responses' prompts; 0 where the source is a corpus.
    """

    def __init__(self, folder: Path, manifest: FeatureManifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._shard = lru_cache(OPEN_SHARDS)(lambda index: safe_open(folder / shard_name(index), "pt"))
        self._first = np.concatenate([[0], np.cumsum(manifest.shard_rows)])  # of each shard, its first row's number
        tables = [self._read_table(index) for index in range(len(manifest.shard_rows))]
        self._offsets = [offsets for offsets, *_ in tables]  # of each shard
        self.lengths = np.concatenate([np.diff(offsets) for offsets in self._offsets])
        self.held_out, self.prompt_tokens = (np.concatenate(column) for column in list(zip(*tables, strict=True))[1:])
        if len(self.lengths) != manifest.counts.get("rows"):
            raise ACTIVATIONS.damaged(f"data.path={folder}", "it does not hold the rows that its manifest says")

    def __len__(self) -> int:
        return len(self.lengths)

    def _read_table(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the offsets of a shard's rows, which are held out, and the tokens of their prompts."""
        names = "offsets", "held_out", "prompt_tokens"
        try:
            with safe_open(self.folder / shard_name(index), "pt") as shard:
                return tuple(shard.get_tensor(name).numpy().copy() for name in names)
        except Exception as error:  # safetensors, torch and the system each raise their own types here
            raise ACTIVATIONS.damaged(self.folder / shard_name(index), type(error).__name__) from error

    def _place(self, row: int, n_tokens: int | None = None) -> tuple[safe_open, slice]:
        """Return the shard of a row, and where its first `n_tokens` tokens stand there (None: all)."""
        index = int(np.searchsorted(self._first, row, side="right")) - 1
        start, stop = map(int, self._offsets[index][row - self._first[index] :][:2])
        return self._shard(index), slice(start, stop if n_tokens is None else min(stop, start + n_tokens))

    def tokens(self, row: int) -> Tensor:
        """Return the tokens of a row: [L] int32."""
        shard, place = self._place(row)
        return shard.get_slice("tokens")[place]

    def is_response(self, row: int, n_tokens: int | None = None) -> Tensor | None:
        """Return which of the first `n_tokens` tokens of a row are of a response: [L] bool; None: it is no answer."""
        shard, place = self._place(row, n_tokens)
        if "is_response" in shard.keys():  # noqa: SIM118  safetensors' handle is no mapping
            return shard.get_slice("is_response")[place]
        n_prompt = int(self.prompt_tokens[row])
        return torch.arange(place.stop - place.start) >= n_prompt if n_prompt else None

    def read(self, row: int, n_tokens: int | None = None, layers: Sequence[int] | None = None) -> FeatureRow:
        """Read a row with its features: memory-mapped where the store is bfloat16 and all layers are read.

        Args:
            row: its number in the store.
            n_tokens: at most so many of its first tokens; None: all.
            layers: blocks of the target; None: all that are stored.
        """
        shard, place = self._place(row, n_tokens)

        def vectors(name: str, scale: str, kept: list[int] | None = None) -> Tensor:
            values = shard.get_slice(name)[place]
            scales = shard.get_slice(scale)[place] if values.dtype == torch.int8 else None
            if kept is not None:
                values, scales = values[:, kept], None if scales is None else scales[:, kept]
            return values if scales is None else dequantise(values, scales)

        stored = self.manifest.layers
        kept = None if layers is None or list(layers) == stored else [stored.index(layer) for layer in layers]
        captured = None if kept == [] else vectors("captured", "captured_scale", kept)
        starts = shard.get_slice("starts")[place].long() if "starts" in shard.keys() else None  # noqa: SIM118
        final_hidden = vectors("final_hidden", "hidden_scale")
        return FeatureRow(
            shard.get_slice("tokens")[place], captured, final_hidden, self.is_response(row, n_tokens), starts
        )

    def check_fits(self, target_fingerprint: str, name: str, layers: Sequence[int], vocab_size: int) -> None:
        """Raise UserError where the features are of another target than `name`, or lack inputs of these blocks.

        UserError is also raised where a token lies outside the target's vocabulary.
        """
        ACTIVATIONS.check_target(self.folder, self.manifest, target_fingerprint, name)
        if not set(layers) <= set(self.manifest.layers):
            raise UserError(
                f"the activations in {self.folder} are of the target's blocks {self.manifest.layers}, but the drafter "
                f"reads {list(layers)}; capture them with {ACTIVATIONS.built_by} layers={_compact(layers)}"
            )
        for index in range(len(self.manifest.shard_rows)):
            tokens = self._shard(index).get_tensor("tokens")
            if len(tokens):
                ACTIVATIONS.check_ids(self.folder, int(tokens.min()), int(tokens.max()), vocab_size)


def _compact(layers: Sequence[int]) -> str:
    """As a shell takes it without quotes."""
    return f"[{','.join(map(str, layers))}]"


def open_features(folder: str | Path, verify: bool = True, rank: int = 0, world_size: int = 1) -> FeatureStore:
    """Open a store, or raise UserError where it is none or damaged. The sizes of its shards are always checked.

    Args:
        folder: as the user gave it.
        verify: reads shards and compares their sha256: this rank's share of them.
        rank: of this process among those that open the store at once.
        world_size: how many they are.
    """
    folder = Path(folder)
    manifest = ACTIVATIONS.read_manifest(folder)
    ACTIVATIONS.check_sizes(folder, manifest.files)
    if verify:
        share = sorted(manifest.files)[rank::world_size]
        ACTIVATIONS.check_contents(folder, {name: manifest.files[name] for name in share})
    return FeatureStore(folder, manifest)


def newest_features(root: Path, target_fingerprint: str, layers: Sequence[int]) -> Path:
    """Return the newest store below `root` of this target with these layers, or raise UserError."""
    otherwise = (
        f"activations of this target's blocks {list(layers)}; capture them with {ACTIVATIONS.built_by} "
        f"target=... layers={_compact(layers)}, or give data.path=<folder>"
    )

    def fits(one: FeatureManifest) -> bool:
        return one.target_fingerprint == target_fingerprint and set(layers) <= set(one.layers)

    return ACTIVATIONS.newest(root, fits, otherwise)
