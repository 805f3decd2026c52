"""Searches in damaged datastores, run as plain Python with arrays that refuse places outside of them.

    NUMBA_DISABLE_JIT=1 python -m tests.retrieval.damaged_index <folder>

Each store has a manifest that matches its damaged files, so that neither sizes nor sha256 tell.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numba
import numpy as np

from spectrain.retrieval.datastore import Datastore
from spectrain.retrieval.fusion import RetrievalOptions, Retriever
from spectrain.stores.folder import sha256
from tests.retrieval.reference import make_store

VOCAB_SIZE, CASES = 6, 150
DAMAGED = ("tokens", "suffixes", "pairs")
LOOKUPS = (  # as rest, sssd and spectra_retrieval look up
    RetrievalOptions(2, 16, 10, 500, first_matches=True),
    RetrievalOptions(1, 8, 8, 100, min_matches=50),
    RetrievalOptions(1, 4, 4, 30),
)


class Guarded:
    """An array that is read place by place, each of which must lie inside."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.itemsize, self.n_read = array, array.itemsize, 0

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, place: int):
        assert 0 <= place < len(self.array), f"place {place} of {len(self.array)} is read"
        self.n_read += 1
        return self.array[place]


def damage(folder: Path, names: list[str], rng: np.random.Generator) -> None:
    """Replace some values of these files by any of their type, and the facts in the manifest by the new ones."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in names:
        for shard in manifest["shards"]:
            file = next(folder / known for known in shard["files"] if known.startswith(name))
            array = np.load(file)
            info = np.iinfo(array.dtype)
            wrong = rng.integers(info.min, info.max, len(array), dtype=array.dtype, endpoint=True)
            near = rng.integers(-4, len(array) + 4, len(array)).astype(array.dtype)
            chosen = np.where(rng.random(len(array)) < 0.5, wrong, near)
            np.save(file, np.where(rng.random(len(array)) < rng.choice([0.1, 0.5, 1.0]), chosen, array))
            shard["files"][file.name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def main() -> None:
    assert numba.config.DISABLE_JIT
    folder, rng, n_read = Path(sys.argv[1]), np.random.default_rng(0), 0
    np.seterr(over="ignore")
    for _ in range(CASES):
        documents = [rng.integers(0, VOCAB_SIZE, rng.integers(0, 30)).tolist() for _ in range(6)]
        make_store(folder, documents, VOCAB_SIZE, int(rng.integers(1, 3)))
        damage(folder, list(rng.choice(DAMAGED, rng.integers(1, 4), replace=False)), rng)
        store = Datastore(folder)
        store.index = tuple(tuple(Guarded(array) for array in arrays) for arrays in store.index)
        for options in LOOKUPS:
            retriever = Retriever(store, options)
            for context in ([0], [1, 2], documents[0], rng.integers(0, VOCAB_SIZE + 2, 12).tolist()):
                if context:
                    tokens, _, _ = retriever.draft(context, 20, 6)
                    assert all(0 <= token < VOCAB_SIZE for token in tokens[1:]), tokens
                    store.longest_suffix(context, 1, 8)
        n_read += sum(array.n_read for arrays in store.index for array in arrays)
    print(f"{CASES} stores, {n_read} places read")


if __name__ == "__main__":
    main()
