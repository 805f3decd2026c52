"""Stores of rows: what `Dataset.save_to_disk` writes, with a `manifest.json` beside its files (`store_folder.py`)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
from datasets import Dataset, Features

from spectrain.decoding.errors import UserError
from spectrain.stores.folder import M, StoreKind, write_manifest


def save_rows(folder: Path, rows: Dataset, manifest: object | None = None) -> None:
    """Writes rows so that the folder appears whole or not at all, and replaces none.

    Args:
        folder: is made.
        rows: what it holds.
        manifest: a dataclass, whose `files` are filled in; None: a part of a store, which has none.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with _no_bars():
            rows.save_to_disk(temporary)
        if manifest is not None:
            write_manifest(temporary, manifest)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def open_rows(kind: StoreKind[M], folder: Path, features: Features, counted: str) -> tuple[M, Dataset]:
    """Opens a store; every file is read and compared with the manifest.

    Args:
        kind: of the store.
        folder: what the user gave.
        features: columns and their types.
        counted: entry of the manifest's `counts` that says how many rows there are.

    Returns:
        The manifest, and the rows, memory-mapped.

    Raises:
        UserError: there is no store of this kind and version in the folder, or it is damaged.
    """
    manifest = kind.read_manifest(folder)
    try:
        kind.check_files(folder, manifest.files)
        rows = datasets.load_from_disk(str(folder))
        if not isinstance(rows, Dataset) or rows.features != features or len(rows) != manifest.counts[counted]:
            raise UserError(
                f"{kind.option}={folder} does not hold what its manifest says; run {kind.built_by} again with "
                "fresh=true"
            )
    except UserError:
        raise
    except Exception as error:  # datasets and arrow each raise their own types here
        raise UserError(
            f"{kind.option}={folder} is damaged ({type(error).__name__}: {error}); run {kind.built_by} again with "
            "fresh=true"
        ) from error
    return manifest, rows


@contextmanager
def _no_bars() -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
