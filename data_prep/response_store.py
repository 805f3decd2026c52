"""A store of responses: what a target answered to prompts, as token ids, in a `datasets` folder (docs/responses.md).

    store = open_responses("checkpoints/responses-1f0c93ab")
    store.check_fits(fingerprint(target.model, target.tokenizer), "pystdlib-8l")
    store.rows[0]["prompt"], store.rows[0]["response"]

The folder is what `Dataset.save_to_disk` writes, with `manifest.json` beside its files.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import numpy as np
from datasets import Dataset, Features, List, Value

from spectrain.errors import UserError
from spectrain.retrieval.datastore import MANIFEST, sha256

log = logging.getLogger(__name__)

VERSION = 1
KIND = "responses"
BUILT_BY = "python -m data_prep.responses"
FEATURES = Features(
    {
        "id": Value("string"),  # of the prompt, unique
        "category": Value("string"),
        "prompt": List(Value("int32")),  # token ids as the target read them, chat template applied
        "response": List(Value("int32")),  # token ids; ends with the EOS where one was drawn
        "finish_reason": Value("string"),  # eos | stop | length
        "sampling": {
            "temperature": Value("float32"),
            "top_k": Value("int32"),
            "top_p": Value("float32"),
            "min_p": Value("float32"),
        },
        "seed": Value("int64"),  # (seed, number) seeds the row's generator
        "number": Value("int64"),  # of the prompt in its file
    }
)


@dataclass(frozen=True, kw_only=True)
class ResponseManifest:
    """What `manifest.json` says."""

    version: int = VERSION
    kind: str = KIND
    target: str  # folder or id
    target_fingerprint: str
    tokenizer_fingerprint: str
    sampling: dict  # temperature, top_k, top_p, min_p
    max_new_tokens: int
    config: dict  # resolved
    counts: dict  # prompts, responses, failed, tokens (of the responses)
    failed: list[dict] = field(default_factory=list)  # {"id", "reason"} of each prompt that has no response
    files: dict[str, dict] = field(default_factory=dict)  # name -> {"bytes", "sha256"}; `write_responses` fills it in


@dataclass(frozen=True)
class ResponseStore:
    """An open store. `rows` is memory-mapped, in the order of the prompt file, with the columns of FEATURES."""

    folder: Path
    manifest: ResponseManifest
    rows: Dataset

    def check_fits(self, target_fingerprint: str, name: str) -> None:
        """Raises UserError where another target than `name` wrote these responses."""
        if self.manifest.target_fingerprint != target_fingerprint:
            raise UserError(
                f"responses={self.folder} were written by {self.manifest.target} "
                f"({self.manifest.target_fingerprint}), not by {name} ({target_fingerprint}); let it answer with "
                f"{BUILT_BY} target={name}"
            )


def write_responses(folder: str | Path, rows: Iterable[Mapping], manifest: ResponseManifest) -> None:
    """Writes a store so that it appears whole or not at all.

    Args:
        folder: is made.
        rows: mappings with the keys of FEATURES; token ids as lists or int32 arrays.
        manifest: its `files` are filled in.

    Raises:
        UserError: `folder` exists, or there are no rows.
    """
    folder = Path(folder)
    if folder.exists():
        raise UserError(f"out={folder} exists already; give another out or remove it")
    columns: dict[str, list] = {name: [] for name in FEATURES}
    for row in rows:
        for name, column in columns.items():
            value = row[name]
            column.append(np.asarray(value, dtype=np.int32) if name in ("prompt", "response") else value)
    if not columns["id"]:
        raise UserError(f"there is no response to write to {folder}; give prompts that can be answered")
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with _no_bars():
            Dataset.from_dict(columns, features=FEATURES).save_to_disk(temporary)
        files = {
            file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in sorted(temporary.iterdir())
        }
        facts = dataclasses.asdict(dataclasses.replace(manifest, files=files))
        (temporary / MANIFEST).write_text(json.dumps(facts, indent=2) + "\n")
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _no_bars() -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def read_manifest(folder: Path) -> ResponseManifest:
    """Raises UserError where the folder is missing, holds no responses, or is of another version."""
    file = folder / MANIFEST
    if not folder.is_dir():
        raise UserError(f"responses={folder} does not exist; let the target write some with {BUILT_BY}")
    if not file.is_file():
        raise UserError(f"responses={folder} has no {MANIFEST}; give a folder that {BUILT_BY} wrote")
    try:
        values = json.loads(file.read_text())
        kind, version = values.get("kind"), values.get("version")
        if (kind, version) == (KIND, VERSION):
            return ResponseManifest(**values)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{file} cannot be read ({error}); run {BUILT_BY} again") from error
    raise UserError(
        f"responses={folder} is a store of {kind!r} of format version {version!r}, not of {KIND!r} of version "
        f"{VERSION}; give a folder that {BUILT_BY} wrote"
    )


def open_responses(folder: str | Path) -> ResponseStore:
    """Opens a store; every file is read and compared with the manifest.

    Raises:
        UserError: there is no store of responses in the folder, it is of another version, or it is damaged.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    try:
        for name, facts in manifest.files.items():
            file = folder / name
            if not file.is_file():
                raise UserError(f"responses={folder} lacks {name}; run {BUILT_BY} again")
            if file.stat().st_size != facts["bytes"] or sha256(file) != facts["sha256"]:
                raise UserError(f"{file} is damaged: it is not what the manifest says; run {BUILT_BY} again")
        rows = datasets.load_from_disk(str(folder))
        if not isinstance(rows, Dataset) or rows.features != FEATURES or len(rows) != manifest.counts["responses"]:
            raise UserError(f"responses={folder} does not hold what its manifest says; run {BUILT_BY} again")
    except UserError:
        raise
    except Exception as error:  # datasets and arrow each raise their own types here
        raise UserError(
            f"responses={folder} is damaged ({type(error).__name__}: {error}); run {BUILT_BY} again"
        ) from error
    return ResponseStore(folder, manifest, rows)


def newest_responses(root: Path, target_fingerprint: str) -> Path:
    """The newest store below `root` that this target wrote.

    Raises:
        UserError: there is none.
    """
    fitting = []
    for file in root.glob(f"[!.]*/{MANIFEST}"):
        try:
            if json.loads(file.read_text()).get("kind") != KIND:
                continue  # another command's store
            manifest = read_manifest(file.parent)
        except (UserError, ValueError, AttributeError) as error:
            log.warning("passed over: %s: %s", file.parent, error)
            continue
        if manifest.target_fingerprint == target_fingerprint:
            fitting.append((file.stat().st_mtime, file.parent))
    if not fitting:
        raise UserError(
            f"{root}/ holds no responses of this target; run {BUILT_BY} target=..., or give responses=<folder>"
        )
    return max(fitting)[1]
