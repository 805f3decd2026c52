"""A datastore: texts of a corpus as tokens with a suffix array, memory-mapped (docs/data.md has the format).

    manifest.json           what it was made of and for, shards with their files' sizes and sha256
    tokens-00000.npy        [n] uint16 or uint32: documents, each closed by the separator (the token vocab_size)
    suffixes-00000.npy      [n] int32: the suffix array
    bounds-00000.npy        [V + 2] int64: where the suffixes of each first token lie
    pairs-00000.npy         [n] uint32 or uint64: second and third token of each suffix, to search without leaps
    offsets-00000.npy       [documents + 1] int64: where each document begins

Opening one maps its files and reads none of them: resident memory grows with what is looked up, and processes share it.

Letters: V vocabulary, n tokens of a shard.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from spectrain.decoding import TargetModel, tokenizer_fingerprint
from spectrain.decoding.errors import UserError
from spectrain.retrieval.suffix_array import (
    MAX_SHARD_TOKENS,
    build_suffix_array,
    first_token_bounds,
    longest_suffix,
    next_pairs,
    token_dtype,
)
from spectrain.stores.folder import MANIFEST, kind_of, read_json, sha256, write_json

log = logging.getLogger(__name__)

VERSION = 1
PARTS = ("tokens", "suffixes", "bounds", "pairs", "offsets")
BUILT_BY = "python -m data_prep.datastore"


@dataclass(frozen=True)
class Shard:
    """One piece of the text and its index."""

    documents: int
    tokens: int  # the separators included
    files: dict[str, dict]  # name -> {"bytes", "sha256"}


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says."""

    target: str  # folder or id whose tokenizer was used and whose perplexity ranked the documents
    target_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int  # of the target; also the separator's id
    documents: int
    tokens: int  # without separators
    shards: list[Shard]
    build: dict = field(default_factory=dict)  # resolved config, counts, perplexities
    kind: str = "datastore"
    version: int = VERSION


def write_shard(folder: Path, index: int, documents: Sequence[np.ndarray], vocab_size: int) -> Shard:
    """Writes one shard's files: its documents in the order given. Equal documents give equal bytes.

    Args:
        folder: exists.
        index: of the shard, from 0 on.
        documents: token ids of each, in all at most MAX_SHARD_TOKENS with a separator each.
        vocab_size: V.
    """
    lengths = np.array([len(document) + 1 for document in documents], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    assert offsets[-1] <= MAX_SHARD_TOKENS, offsets[-1]
    tokens = np.full(offsets[-1], vocab_size, dtype=token_dtype(vocab_size))
    for start, document in zip(offsets, documents, strict=False):
        tokens[start : start + len(document)] = document
    suffixes = build_suffix_array(tokens)
    arrays = {
        "tokens": tokens,
        "suffixes": suffixes,
        "bounds": first_token_bounds(tokens, vocab_size),
        "pairs": next_pairs(tokens, suffixes),
        "offsets": offsets,
    }
    files = {}
    for part, name in zip(PARTS, _file_names(index), strict=True):
        temporary = folder / f"{name}.tmp"
        with temporary.open("wb") as file:
            np.save(file, arrays[part])
        temporary.rename(folder / name)
        files[name] = {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
    return Shard(len(documents), int(offsets[-1]), files)


def bytes_a_token(vocab_size: int) -> int:
    """Bytes of a token on disk: itself, its place in the suffix array, the two behind it."""
    width = token_dtype(vocab_size).itemsize
    return width + 4 + 2 * width


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Written last: a folder without it is no datastore."""
    write_json(folder / MANIFEST, manifest, sort_keys=True)


def read_manifest(folder: Path) -> Manifest:
    """Raises UserError where the folder is missing, is no datastore, or is of another version."""
    file = folder / MANIFEST
    if not folder.is_dir():
        raise UserError(f"datastore={folder} does not exist; build one with {BUILT_BY}")
    if not file.is_file():
        raise UserError(f"datastore={folder} has no {MANIFEST}; give a folder that {BUILT_BY} wrote")
    try:
        values = read_json(file)
        kind, version = values.get("kind"), values.get("version")
        shards = [Shard(**shard) for shard in values.pop("shards")]
        complete = bool(shards) and all(
            set(shard.files) == set(_file_names(i)) for i, shard in enumerate(shards)
        )  # fmt: skip
        if (kind, version) == ("datastore", VERSION) and complete:
            return Manifest(shards=shards, **values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{file} cannot be read ({error}); build the datastore again with {BUILT_BY}") from error
    if (kind, version) == ("datastore", VERSION):
        raise UserError(f"{file} does not name all files of a datastore; build it again with {BUILT_BY}")
    raise UserError(
        f"datastore={folder} is a {kind} of format version {version}, not a datastore of version {VERSION}; build it "
        f"again with {BUILT_BY}"
    )


def _file_names(index: int) -> list[str]:
    """Of a shard's parts, in the order of PARTS."""
    return [f"{part}-{index:05d}.npy" for part in PARTS]


class Datastore:
    """An open store. The tuples have an array a shard; compiled searches take them as they are.

    Args:
        folder: what `data_prep.datastore` wrote.

    Raises:
        UserError: the folder holds no datastore, or a file of it is missing or truncated.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self._check_sizes()
        shards = [self._open_shard(i, shard) for i, shard in enumerate(self.manifest.shards)]
        self.tokens: tuple[np.ndarray, ...]
        self.suffixes: tuple[np.ndarray, ...]
        self.bounds: tuple[np.ndarray, ...]
        self.pairs: tuple[np.ndarray, ...]
        self.offsets: tuple[np.ndarray, ...]
        self.tokens, self.suffixes, self.bounds, self.pairs, self.offsets = zip(*shards, strict=True)

    @property
    def index(self) -> tuple[tuple[np.ndarray, ...], ...]:
        """Tokens, suffixes, bounds and pairs: what every compiled search takes."""
        return self.tokens, self.suffixes, self.bounds, self.pairs

    @property
    def vocab_size(self) -> int:
        return self.manifest.vocab_size

    @property
    def separator(self) -> int:
        """The token that closes each document."""
        return self.manifest.vocab_size

    def _files(self) -> Iterator[tuple[Path, dict]]:
        for shard in self.manifest.shards:
            for name, facts in shard.files.items():
                yield self.folder / name, facts

    def _check_sizes(self) -> None:
        for file, facts in self._files():
            if not file.is_file():
                raise UserError(f"datastore={self.folder} lacks {file.name}; build it again with {BUILT_BY}")
            size = file.stat().st_size
            if size != facts["bytes"]:
                raise UserError(
                    f"{file} has {size} bytes, but the manifest says {facts['bytes']}: it is truncated or another "
                    f"store's; build the datastore again with {BUILT_BY}"
                )

    def _open_shard(self, index: int, shard: Shard) -> list[np.ndarray]:
        """Its arrays in the order of PARTS.

        Compiled searches do not check bounds. Types, shapes and the table of ranges are checked here; places in the
        suffix array and tokens are checked when they are read.
        """
        V, n = self.vocab_size, shard.tokens
        tokens = token_dtype(V)
        pairs = np.dtype(f"u{2 * tokens.itemsize}")
        expected = [(tokens, n), (np.int32, n), (np.int64, V + 2), (pairs, n), (np.int64, shard.documents + 1)]
        arrays = []
        for name, (dtype, length) in zip(_file_names(index), expected, strict=True):
            file = self.folder / name
            try:
                mapped = np.load(file, mmap_mode="r")
                ends_with_file = mapped.offset + mapped.nbytes == shard.files[name]["bytes"]
                array = mapped.view(np.ndarray)  # numba is slow to recognise subclasses
            except Exception as error:  # a damaged header is parsed as Python, and fails in as many ways
                raise UserError(f"{file} is damaged ({error}); build the datastore again with {BUILT_BY}") from error
            # Its content says where to read, so this small one is read whole.
            damaged = name.startswith("bounds") and sha256(file) != shard.files[name]["sha256"]
            if damaged or not ends_with_file or array.dtype != dtype or array.shape != (length,):
                raise UserError(
                    f"{file} is damaged: it does not hold what the manifest says; build the datastore again with "
                    f"{BUILT_BY}"
                )
            arrays.append(array)
        return arrays

    def check_fits(self, tokenizer_fingerprint: str, target: str) -> None:
        """Raises UserError where the store holds the tokens of another tokenizer than the target's."""
        if self.manifest.tokenizer_fingerprint != tokenizer_fingerprint:
            raise UserError(
                f"datastore={self.folder} was built with the tokenizer of {self.manifest.target} "
                f"({self.manifest.tokenizer_fingerprint}), not of {target} ({tokenizer_fingerprint}); build one for it "
                f"with {BUILT_BY} target={target}"
            )

    def verify(self) -> None:
        """Reads every file whole. Raises UserError where one's sha256 is not the manifest's."""
        for file, facts in self._files():
            if sha256(file) != facts["sha256"]:
                raise UserError(
                    f"{file} is damaged: its sha256 differs from the manifest's; build the datastore again with "
                    f"{BUILT_BY}"
                )

    def documents(self) -> Iterator[np.ndarray]:
        """Token ids of each document, without the separator."""
        for tokens, offsets in zip(self.tokens, self.offsets, strict=True):
            for start, stop in pairwise(offsets):
                yield tokens[start : stop - 1]

    def longest_suffix(self, context: Sequence[int], min_length: int, max_length: int) -> tuple[int, np.ndarray]:
        """The longest suffix of the context that the store holds.

        Returns:
            Its length, 0 where none of min_length..max_length tokens is known, and where it stands: [n_shards, 2] int64
            ranges of the shards' suffix arrays.
        """
        ranges = np.zeros((len(self.tokens), 2), dtype=np.int64)
        context = np.asarray(context, dtype=np.int64)
        length, _ = longest_suffix(self.index, context, min_length, max_length, ranges)
        return int(length), ranges if length else np.zeros_like(ranges)


def open_datastore(folder: str | Path, target: TargetModel | None) -> Datastore:
    """A store whose tokens are this target's; None: whoever calls has compared the tokenizers.

    Raises:
        UserError: there is none in the folder, it is damaged, or it was built with another tokenizer.
    """
    store = Datastore(folder)
    if target is not None and target.tokenizer is not None:
        store.check_fits(tokenizer_fingerprint(target.tokenizer), target.model.name_or_path)
    return store


def newest_datastore(root: Path, tokenizer_fingerprint: str, target_fingerprint: str) -> Path:
    """The newest store below `root` for this tokenizer; of those that this very target ranked, where there are any.

    Raises:
        UserError: there is none.
    """
    fitting = []
    for file in root.glob(f"*/{MANIFEST}"):
        if kind_of(file) not in ("datastore", None):
            continue  # another command's store
        try:
            manifest = read_manifest(file.parent)
        except UserError as error:
            log.warning("passed over: %s", error)
            continue
        if manifest.tokenizer_fingerprint == tokenizer_fingerprint:
            fitting.append((manifest.target_fingerprint == target_fingerprint, file.stat().st_mtime, file.parent))
    if not fitting:
        raise UserError(
            f"{root}/ holds no datastore for this target; build one with {BUILT_BY} corpus=... target=..., or give "
            "datastore=<folder>"
        )
    return max(fitting)[2]
