"""A store of features: what training reads of a frozen target per token, in safetensors shards (docs/data.md).

    store = open_features("checkpoints/activations-1f0c93ab")
    store.check_fits(fingerprint(target.model, target.tokenizer), "pystdlib-8l", (6, 7))
    row = store.read(0)
    row.tokens, row.captured, row.final_hidden

Rows have equal length and lie in the order in which training numbers them, held-out rows last. Shards are
memory-mapped, and a row is read by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

VERSION = 2
OPEN_SHARDS = 256  # mapped at once: a process may hold only so many maps
INT8_MAX = 127


@dataclass(frozen=True, kw_only=True)
class FeatureManifest:
    """The content of `manifest.json`."""

    version: int = VERSION
    kind: str = "activations"
    target: str  # folder or id
    target_fingerprint: str
    tokenizer_fingerprint: str
    layers: list[int]  # blocks of the target whose inputs are stored, in order
    hidden_size: int  # D
    dtype: str  # of the features: bfloat16 | int8, with a scale for each token and layer
    precision: str  # that the forward ran in, in Lightning's words
    row_tokens: int  # L, of each row
    corpus: str
    config: dict  # the options by which it was made
    counts: dict[str, Count]  # rows, held_out, tokens
    shard_rows: int  # rows of each shard but the last
    files: dict[str, FileFacts] = field(default_factory=dict)


ACTIVATIONS = StoreKind("activations", VERSION, FeatureManifest, option="data.path")


@dataclass(frozen=True)
class FeatureRow:
    """A row as training reads it."""

    tokens: Tensor  # [L] int32
    captured: Tensor | None  # [L, C, D] bfloat16 of the layers that were asked for; None: of none
    final_hidden: Tensor  # [L, D] bfloat16
    is_response: Tensor | None  # [L] bool; None: the corpus is no answer to anything
    starts: Tensor | None  # [L] int64, where the document of each token begins; None: not known


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


def write_shard(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors of a shard, each [rows, L, ...] (docs/data.md)."""
    write_whole(file, lambda out: save_file(tensors, out.name))


class FeatureStore:
    """An open store; what is asked for is read through the shards' maps, never a whole shard.

    `row_tokens` is L, of each row; `held_out` [rows] bool are the rows that no training may see.
    """

    def __init__(self, folder: Path, manifest: FeatureManifest) -> None:
        self.folder, self.manifest, self.row_tokens = folder, manifest, manifest.row_tokens
        self._shard = lru_cache(OPEN_SHARDS)(lambda index: safe_open(folder / shard_name(index), "pt"))
        n_rows = manifest.counts["rows"]
        self.held_out = np.arange(n_rows) >= n_rows - manifest.counts["held_out"]

    def __len__(self) -> int:
        return self.manifest.counts["rows"]

    def _vectors(self, name: str, row: int, n_tokens: int | None = None) -> Tensor | None:
        """Return a tensor of a row, of its first `n_tokens` tokens (None: of all); None where the store has none."""
        index, place = divmod(row, self.manifest.shard_rows)
        shard = self._shard(index)
        return shard.get_slice(name)[place, :n_tokens] if name in shard.keys() else None  # noqa: SIM118

    def tokens(self, row: int) -> Tensor:
        """Return the tokens of a row: [L] int32."""
        return self._vectors("tokens", row)

    def is_response(self, row: int, n_tokens: int | None = None) -> Tensor | None:
        """Return which of the first `n_tokens` tokens of a row are of a response: [L] bool; None: it is no answer."""
        return self._vectors("is_response", row, n_tokens)

    def read(self, row: int, n_tokens: int | None = None, layers: Sequence[int] | None = None) -> FeatureRow:
        """Read a row with its features: memory-mapped where the store is bfloat16 and all layers are read.

        `n_tokens`: at most so many of its first tokens; `layers`: of these blocks of the target. None: all of them.
        """
        stored, captured = self.manifest.layers, None
        if layers is None or len(layers):
            captured = self._vectors("captured", row, n_tokens)
            scale = self._vectors("captured_scale", row, n_tokens)
            if layers is not None and list(layers) != stored:
                kept = [stored.index(layer) for layer in layers]
                captured, scale = captured[:, kept], None if scale is None else scale[:, kept]
            captured = captured if scale is None else dequantise(captured, scale)
        hidden, scale = (self._vectors(name, row, n_tokens) for name in ("final_hidden", "hidden_scale"))
        starts = self._vectors("starts", row, n_tokens)
        return FeatureRow(
            self._vectors("tokens", row, n_tokens),
            captured,
            hidden if scale is None else dequantise(hidden, scale),
            self.is_response(row, n_tokens),
            None if starts is None else starts.long(),
        )

    def check_fits(self, target_fingerprint: str, name: str, layers: Sequence[int]) -> None:
        """Raise UserError where the features are of another target than `name`, or lack inputs of these blocks."""
        ACTIVATIONS.check_target(self.folder, self.manifest, target_fingerprint, name)
        if not set(layers) <= set(self.manifest.layers):
            raise UserError(
                f"the activations in {self.folder} are of the target's blocks {self.manifest.layers}, but the drafter "
                f"reads {list(layers)}; capture them with {ACTIVATIONS.built_by} layers={_compact(layers)}"
            )


def _compact(layers: Sequence[int]) -> str:
    """As a shell takes it without quotes."""
    return f"[{','.join(map(str, layers))}]"


def open_features(folder: str | Path, verify: bool = True) -> FeatureStore:
    """Open a store, or raise UserError where it is none or damaged.

    The sizes of its shards are always checked; `verify` reads them, and compares their sha256.
    """
    folder = Path(folder)
    manifest = ACTIVATIONS.read_manifest(folder)
    ACTIVATIONS.check_sizes(folder, manifest.files)
    if verify:
        ACTIVATIONS.check_contents(folder, manifest.files)
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
