"""A datastore: the texts of a corpus as tokens with a suffix array, memory-mapped (format: docs/data.md).

    manifest.json           its origin, and its shards with the sizes and sha256 of their files
    tokens-00000.npy        [n] uint16 or uint32: documents, each closed by the separator (the token vocab_size)
    suffixes-00000.npy      [n] int32: the suffix array
    bounds-00000.npy        [V + 2] int64: where the suffixes of each first token lie
    pairs-00000.npy         [n] uint32 or uint64: second and third token of each suffix, to search without leaps
    offsets-00000.npy       [documents + 1] int64: where each document begins

Opening one maps its files without reading them: resident memory grows with the lookups, and processes share it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from spectrain.errors import UserError
from spectrain.retrieval.suffix_array import (
    MAX_SHARD_TOKENS,
    build_suffix_array,
    first_token_bounds,
    next_pairs,
    token_dtype,
)
from spectrain.stores import locations
from spectrain.stores.files import Count, write_json, write_whole
from spectrain.stores.folder import MANIFEST, FileFacts, StoreKind, sha256
from spectrain.target import TargetModel, tokenizer_fingerprint

VERSION = 1
PARTS = ("tokens", "suffixes", "bounds", "pairs", "offsets")


@dataclass(frozen=True)
class Shard:
    """One part of the text with its index."""

    documents: Count
    tokens: Count  # the separators included
    files: dict[str, FileFacts]


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`."""

    target: str  # folder or id whose tokenizer was used and whose perplexity ranked the documents
    target_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int  # of the target; also the separator's id
    documents: Count
    tokens: Count  # without separators
    shards: list[Shard]
    build: dict = field(default_factory=dict)  # how it was made: config, counts of documents, perplexities
    kind: str = "datastore"
    version: int = VERSION

    @property
    def files(self) -> dict[str, dict]:
        """The files of all shards: name -> {"bytes", "sha256"}."""
        return {name: facts for shard in self.shards for name, facts in shard.files.items()}


DATASTORES = StoreKind("datastore", VERSION, Manifest, option="datastore")


def _file_names(index: int) -> list[str]:
    """The files of a shard, in the order of PARTS."""
    return [f"{part}-{index:05d}.npy" for part in PARTS]


def write_shard(
    folder: Path, index: int, documents: Iterable[np.ndarray], vocab_size: int, lengths: Sequence[int] | None = None
) -> Shard:
    """Write the files of one shard, its documents in the order given. Equal documents give equal bytes.

    Args:
        folder: an existing folder.
        index: number of the shard, from 0.
        documents: token ids of each; at most MAX_SHARD_TOKENS in all, counting one separator per document.
        vocab_size: V.
        lengths: of the documents, where these are read one by one.
    """
    lengths = [len(document) for document in documents] if lengths is None else lengths
    offsets = np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64) + 1)])
    assert offsets[-1] <= MAX_SHARD_TOKENS, offsets[-1]
    tokens = np.full(offsets[-1], vocab_size, dtype=token_dtype(vocab_size))
    for start, document in zip(offsets, documents, strict=False):
        tokens[start : start + len(document)] = document
    suffixes = build_suffix_array(tokens)
    bounds, pairs = first_token_bounds(tokens, vocab_size), next_pairs(tokens, suffixes)
    files = {}
    for name, array in zip(_file_names(index), (tokens, suffixes, bounds, pairs, offsets), strict=True):
        write_whole(folder / name, partial(np.save, arr=array))
        files[name] = {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
    return Shard(len(offsets) - 1, int(offsets[-1]), files)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json`, last of all: a folder without it is no datastore."""
    write_json(folder / MANIFEST, manifest, sort_keys=True)


class Datastore:
    """An open datastore. Its tuples (tokens, suffixes, ..) have one array per shard, as compiled searches take them.

    Args:
        folder: as `data_prep.datastore` wrote it.

    Raises:
        UserError: the folder holds no datastore, or one of its files is missing or damaged.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest = DATASTORES.read_manifest(self.folder)
        DATASTORES.check_sizes(self.folder, self.manifest.files)
        self.vocab_size = self.separator = self.manifest.vocab_size  # this token closes each document
        shards = map(self._open_shard, range(len(self.manifest.shards)))
        self.tokens, self.suffixes, self.bounds, self.pairs, self.offsets = zip(*shards, strict=True)
        self.index = self.tokens, self.suffixes, self.bounds, self.pairs  # as every compiled search takes them

    def _open_shard(self, index: int) -> list[np.ndarray]:
        """Map the arrays of a shard, in the order of PARTS."""
        files = (self.folder / name for name in _file_names(index))
        return [np.load(file, mmap_mode="r").view(np.ndarray) for file in files]  # numba is slow on subclasses

    def check_fits(self, tokenizer_fingerprint: str) -> None:
        """Raise UserError if the store was built with another tokenizer than the target's."""
        DATASTORES.check_tokenizer(self.folder, self.manifest, tokenizer_fingerprint)

    def verify(self) -> None:
        """Read every file whole. Raise UserError if one is not the file that the manifest describes."""
        DATASTORES.check_contents(self.folder, self.manifest.files)

    def documents(self) -> Iterator[np.ndarray]:
        """Yield the token ids of each document, without the separator."""
        for tokens, offsets in zip(self.tokens, self.offsets, strict=True):
            for start, stop in pairwise(offsets):
                yield tokens[start : stop - 1]

    def holds_tokens_from(self, vocab_size: int) -> bool:
        """Return whether a document has a token of at least vocab_size, by the tables of ranges."""
        least = min(vocab_size, self.separator)
        return any(bounds[least] < bounds[self.separator] for bounds in self.bounds)


def open_datastore(folder: str | Path, target: TargetModel | None) -> Datastore:
    """Open the datastore that was built for this target's tokenizer; None: the caller has compared the tokenizers.

    Raises UserError where the folder holds no whole datastore, or one that was built with another tokenizer.
    """
    store = Datastore(folder)
    if target is not None and target.tokenizer is not None:
        store.check_fits(tokenizer_fingerprint(target.tokenizer))
    if target is not None and store.holds_tokens_from(target.vocab_size):
        raise UserError(
            f"datastore={folder} holds tokens above the {target.vocab_size} of {target.model.name_or_path}; build one "
            f"for it with {DATASTORES.built_by} target={target.model.name_or_path}"
        )
    return store


def largest_datastore(root: Path, tokenizer_fingerprint: str, target_fingerprint: str) -> Path:
    """Return the largest datastore for this tokenizer, if possible one that this very target ranked.

    It is one below `root`, or comes with spectrain. Raises UserError if there is none.
    """

    def fits(manifest: Manifest) -> tuple:
        if manifest.tokenizer_fingerprint != tokenizer_fingerprint:
            return ()
        return manifest.target_fingerprint == target_fingerprint, manifest.tokens

    build_one = f"build one with {DATASTORES.built_by} corpus=... target=..., or give datastore=<folder>"
    shipped = locations.shipped_folders(locations.SHIPPED_STORES)
    return DATASTORES.newest(root, fits, f"datastore for this target; {build_one}", shipped)
