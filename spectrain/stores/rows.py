"""Stores of rows: responses of a target, and acceptance labels (docs/data.md).

    store = open_responses("checkpoints/responses-1f0c93ab")
    store.check_fits(fingerprint(target.model, target.tokenizer), "pystdlib-8l")
    store.rows[0]["prompt"], store.rows[0]["response"]

    store = open_acceptance("checkpoints/acceptance-1f0c93ab")
    store.rows[0]["response"], store.rows[0]["drafts"][0], store.rows[0]["labels"][0]

A folder is what `Dataset.save_to_disk` writes, with `manifest.json` beside its files.

At position i of a response X a token Y_i is drawn from q(. | prompt, X_<i); its label is min(1, p(Y_i) / q(Y_i)). A
SPIRe drafter is rolled out in blocks of `rollout_tokens` positions of the text, prompt included; the first of a block
is a root, which is the target's own token and never a draft. Roots have no draft: their q is 0, and so are their draft,
p and label. They are never trained on. Neither is a text's very first token, where the prompt is empty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import numpy as np
import pyarrow.compute
from datasets import Dataset, Features, List, Value

from spectrain.errors import UserError
from spectrain.stores.files import Count
from spectrain.stores.folder import FileFacts, M, StoreKind, remove_leftovers, write_folder, write_manifest

RESPONSE_COLUMNS = Features(
    {
        "id": Value("string"),  # of the prompt, unique; see `spectrain.data.texts.turn_id`
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
        "number": Value("int64"),  # of the question in its file; later turns count on behind all first ones
    }
)
LABEL_COLUMNS = Features(
    {
        "id": Value("string"),  # of the prompt, unique
        "prompt": List(Value("int32")),
        "response": List(Value("int32")),  # X
        # [draws][positions of the response]
        "drafts": List(List(Value("int32"))),  # Y
        "p": List(List(Value("float32"))),  # the target's probability of each draft, warped
        "q": List(List(Value("float32"))),  # the drafter's; 0: no draft at this position
        "labels": List(List(Value("float32"))),  # min(1, p / q)
    }
)


@dataclass(frozen=True, kw_only=True)
class ResponseManifest:
    """The content of `manifest.json` of a store of responses."""

    version: int = 1
    kind: str = "responses"
    target: str  # folder or id
    target_fingerprint: str
    tokenizer_fingerprint: str
    sampling: dict[str, float | int]  # how distributions were warped; fields of Sampling
    max_new_tokens: int
    config: dict  # the options by which it was made
    counts: dict[str, Count]  # prompts, responses, failed, unanswered, tokens, retokenized, later_turns
    failed: list[dict[str, str]] = field(default_factory=list)  # {"id", "reason"} of each prompt without a response
    files: dict[str, FileFacts] = field(default_factory=dict)  # by name; writing fills it in


@dataclass(frozen=True, kw_only=True)
class AcceptanceManifest:
    """The content of `manifest.json` of a store of acceptance labels."""

    version: int = 1
    kind: str = "acceptance"
    target: str  # folder or id
    target_fingerprint: str
    drafter: dict[str, str]  # kind, path, fingerprint
    rollout_tokens: int | None  # of a SPIRe drafter's blocks; None: an ordinary draft model
    sampling: dict[str, float | int]  # by which p and q are warped; fields of Sampling
    draws: int  # drafts per position
    mixing_share: float | None = None  # of stores of earlier versions that also hold states, which nothing reads now
    responses: str  # name of the store they stand beside
    config: dict  # the options by which it was made
    counts: dict[str, Count | float | None]  # rows, positions with a draft, tokens, mean_label, below_half
    skipped: list[dict] = field(default_factory=list)  # {"id", "tokens"} of responses longer than a model's context
    files: dict[str, FileFacts] = field(default_factory=dict)  # by name; writing fills it in


RESPONSES = StoreKind("responses", 1, ResponseManifest, option="responses")
ACCEPTANCE = StoreKind("acceptance", 1, AcceptanceManifest, option="data.path")


@dataclass(frozen=True)
class ResponseStore:
    """An open store. `rows` is memory-mapped, in the order of the prompt file, with RESPONSE_COLUMNS."""

    folder: Path
    manifest: ResponseManifest
    rows: Dataset

    def check_fits(self, target_fingerprint: str, name: str) -> None:
        """Raise UserError where another target than `name` wrote these responses."""
        RESPONSES.check_target(self.folder, self.manifest, target_fingerprint, name)


@dataclass(frozen=True)
class AcceptanceStore:
    """An open store. `rows` is memory-mapped, in the order of the responses, with LABEL_COLUMNS."""

    folder: Path
    manifest: AcceptanceManifest
    rows: Dataset

    def check_fits(self, target_fingerprint: str, drafter_fingerprint: str, rollout_tokens: int | None) -> None:
        """Raise UserError where the labels are of another target, another drafter, or other rollouts of it."""
        manifest, drafter = self.manifest, self.manifest.drafter
        ACCEPTANCE.check_target(self.folder, manifest, target_fingerprint, "this one")
        if drafter["fingerprint"] != drafter_fingerprint:
            raise UserError(
                f"the labels in {self.folder} are of the {drafter['kind']} drafter {drafter['path']} "
                f"({drafter['fingerprint']}), not of this one ({drafter_fingerprint}); give drafter={drafter['path']}, "
                f"or make others with {ACCEPTANCE.built_by} drafter=..."
            )
        if manifest.rollout_tokens != rollout_tokens:
            raise UserError(
                f"the labels in {self.folder} are of rollouts of {manifest.rollout_tokens} tokens, not of "
                f"{rollout_tokens}; give rollout_tokens={manifest.rollout_tokens}, or make others with "
                f"{ACCEPTANCE.built_by} rollout_tokens={rollout_tokens}"
            )


def write_responses(folder: str | Path, rows: Iterable[Mapping], manifest: ResponseManifest) -> None:
    """Write a store of rows with RESPONSE_COLUMNS so that it appears whole or not at all; UserError without rows."""
    rows = [{name: row[name] for name in RESPONSE_COLUMNS} for row in rows]
    if not rows:
        raise UserError(f"there is no response to write to {folder}; give prompts that can be answered")
    save_rows(Path(folder), Dataset.from_list(rows, features=RESPONSE_COLUMNS), manifest)


def append_responses(folder: Path, rows: Sequence[Mapping], manifest: ResponseManifest) -> int:
    """Add rows to a store, without those whose ids it has, and return how many it has then.

    Where there is no store, one is made with this manifest. At any time the folder is the whole old store or the whole
    new one; the caller holds its lock.
    """
    added = Dataset.from_list([{name: row[name] for name in RESPONSE_COLUMNS} for row in rows], RESPONSE_COLUMNS)
    remove_leftovers(folder)
    if folder.is_dir() and any(folder.iterdir()):
        store = open_responses(folder)
        store.check_fits(manifest.target_fingerprint, manifest.target)
        known = set(store.rows["id"])
        added = added.select([number for number, name in enumerate(added["id"]) if name not in known])
        manifest, added = store.manifest, datasets.concatenate_datasets([store.rows, added])
    tokens = int(list_lengths(added.data.column("response")).sum())
    counts = manifest.counts | {"prompts": len(added), "responses": len(added), "tokens": tokens}
    save_rows(folder, added, dataclasses.replace(manifest, counts=counts), replace=True)
    return len(added)


def open_responses(folder: str | Path) -> ResponseStore:
    """Open a store of responses, or raise UserError where the folder holds no whole one of this version."""
    return ResponseStore(Path(folder), *open_rows(RESPONSES, Path(folder)))


def open_acceptance(folder: str | Path) -> AcceptanceStore:
    """Open a store of acceptance labels, or raise UserError where the folder holds no whole one of this version."""
    return AcceptanceStore(Path(folder), *open_rows(ACCEPTANCE, Path(folder)))


def list_lengths(column: pyarrow.ChunkedArray) -> np.ndarray:
    """Return the lengths of a column's lists: [rows] int64."""
    return pyarrow.compute.list_value_length(column).to_numpy().astype(np.int64)


def newest_responses(root: Path, target_fingerprint: str) -> Path:
    """Return the newest store below `root` that this target wrote, or raise UserError."""
    otherwise = f"responses of this target; run {RESPONSES.built_by} target=..., or give responses=<folder>"
    return RESPONSES.newest(root, lambda one: one.target_fingerprint == target_fingerprint, otherwise)


def newest_acceptance(root: Path, target_fingerprint: str, drafter_fingerprint: str) -> Path:
    """Return the newest store below `root` of this target and drafter, or raise UserError."""
    prints = target_fingerprint, drafter_fingerprint
    otherwise = f"acceptance labels of this target and drafter; make some with {ACCEPTANCE.built_by} drafter=..."
    return ACCEPTANCE.newest(
        root, lambda one: (one.target_fingerprint, one.drafter.get("fingerprint")) == prints, otherwise
    )


def save_rows(folder: Path, rows: Dataset, manifest: object | None = None, replace: bool = False) -> None:
    """Write rows, and a manifest if it is a whole store, so that the folder appears whole or not at all."""

    def write(temporary: Path) -> None:
        datasets.disable_progress_bars()
        rows.save_to_disk(temporary)
        datasets.enable_progress_bars()
        if manifest is not None:
            write_manifest(temporary, manifest)

    write_folder(folder, write, replace)


def open_rows(kind: StoreKind[M], folder: Path) -> tuple[M, Dataset]:
    """Return the manifest and the memory-mapped rows of a store, every file read and compared with the manifest."""
    manifest = kind.read_manifest(folder)
    kind.check_sizes(folder, manifest.files)
    kind.check_contents(folder, manifest.files)
    return manifest, datasets.load_from_disk(str(folder))
