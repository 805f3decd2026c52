"""A store of responses: what a target answered to prompts, as token ids, in a `datasets` folder (docs/data.md).

    store = open_responses("checkpoints/responses-1f0c93ab")
    store.check_fits(fingerprint(target.model, target.tokenizer), "pystdlib-8l")
    store.rows[0]["prompt"], store.rows[0]["response"]

The folder is what `Dataset.save_to_disk` writes, with `manifest.json` beside its files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from datasets import Dataset, Features, List, Value

from spectrain.decoding.errors import UserError
from spectrain.stores.folder import StoreKind
from spectrain.stores.rows import open_rows, save_rows

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


RESPONSES = StoreKind(KIND, VERSION, ResponseManifest, option="responses", built_by=BUILT_BY)


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
    save_rows(folder, Dataset.from_dict(columns, features=FEATURES), manifest)


def open_responses(folder: str | Path) -> ResponseStore:
    """Opens a store; every file is read and compared with the manifest.

    Raises:
        UserError: there is no store of responses in the folder, it is of another version, or it is damaged.
    """
    folder = Path(folder)
    return ResponseStore(folder, *open_rows(RESPONSES, folder, FEATURES, "responses"))


def newest_responses(root: Path, target_fingerprint: str) -> Path:
    """The newest store below `root` that this target wrote.

    Raises:
        UserError: there is none.
    """
    found = RESPONSES.newest(root, lambda manifest: manifest.target_fingerprint == target_fingerprint)
    if found is None:
        raise UserError(
            f"{root}/ holds no responses of this target; run {BUILT_BY} target=..., or give responses=<folder>"
        )
    return found
