"""A store of acceptance labels: what a drafter drafts beside a target's responses, and how probable it is that the
target accepts it; token ids and floats in a `datasets` folder (docs/acceptance.md).

    store = open_acceptance("checkpoints/acceptance-1f0c93ab")
    store.check_fits(target_fingerprint, drafter_fingerprint, rollout_tokens=None)
    store.rows[0]["response"], store.rows[0]["drafts"][0], store.rows[0]["labels"][0]

At position i of a response X a token Y_i is drawn from q(. | prompt, X_<i); its label is min(1, p(Y_i) / q(Y_i)). A
SPIRe drafter is rolled out in blocks of `rollout_tokens` positions of the text, prompt included; the first of a block
is a root, which is the target's own token and never a draft. Roots have no draft: their q is 0, and so are their draft,
p and label. They are never trained on. Neither is a text's very first token, where the prompt is empty.

The folder is what `Dataset.save_to_disk` writes, with `manifest.json` beside its files.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import datasets
from datasets import Dataset, Features, List, Value

from spectrain.errors import UserError
from spectrain.retrieval.datastore import MANIFEST, sha256

log = logging.getLogger(__name__)

VERSION = 1
KIND = "acceptance"
BUILT_BY = "python -m data_prep.acceptance"
FEATURES = Features(
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
class AcceptanceManifest:
    """What `manifest.json` says."""

    version: int = VERSION
    kind: str = KIND
    target: str  # folder or id
    target_fingerprint: str
    drafter: dict  # kind, path, fingerprint
    rollout_tokens: int | None  # of a SPIRe drafter's blocks; None: an ordinary draft model
    sampling: dict  # by which p and q are warped: temperature, top_k, top_p, min_p
    draws: int  # drafts a position
    responses: str  # name of the store they stand beside
    config: dict  # resolved
    counts: dict  # rows, positions (with a draft), tokens (of prompts and responses), mean_label, below_half
    skipped: list[dict] = field(default_factory=list)  # {"id", "tokens"} of responses longer than a model's context
    files: dict[str, dict] = field(default_factory=dict)  # name -> {"bytes", "sha256"}; `write_acceptance` fills it in


@dataclass(frozen=True)
class AcceptanceStore:
    """An open store. `rows` is memory-mapped, in the order of the responses, with the columns of FEATURES."""

    folder: Path
    manifest: AcceptanceManifest
    rows: Dataset

    def check_fits(self, target_fingerprint: str, drafter_fingerprint: str, rollout_tokens: int | None) -> None:
        """Raises UserError where the labels are of another target, another drafter, or other rollouts of it."""
        manifest, drafter = self.manifest, self.manifest.drafter
        if manifest.target_fingerprint != target_fingerprint:
            raise UserError(
                f"the labels in {self.folder} are of the target {manifest.target} ({manifest.target_fingerprint}), not "
                f"of this one ({target_fingerprint}); give that target, or make others with {BUILT_BY} target=..."
            )
        if drafter["fingerprint"] != drafter_fingerprint:
            raise UserError(
                f"the labels in {self.folder} are of the {drafter['kind']} drafter {drafter['path']} "
                f"({drafter['fingerprint']}), not of this one ({drafter_fingerprint}); give drafter={drafter['path']}, "
                f"or make others with {BUILT_BY} drafter=..."
            )
        if manifest.rollout_tokens != rollout_tokens:
            raise UserError(
                f"the labels in {self.folder} are of rollouts of {manifest.rollout_tokens} tokens, not of "
                f"{rollout_tokens}; give rollout_tokens={manifest.rollout_tokens}, or make others with {BUILT_BY} "
                f"rollout_tokens={rollout_tokens}"
            )


def save_rows(folder: Path, rows: Dataset) -> None:
    """Writes rows so that the folder appears whole or not at all, and replaces none."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with _no_bars():
            rows.save_to_disk(temporary)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_acceptance(folder: Path, rows: Dataset, manifest: AcceptanceManifest) -> None:
    """Writes a store; the manifest comes last.

    Args:
        folder: is made.
        rows: with FEATURES.
        manifest: its `files` are filled in.
    """
    assert rows.features == FEATURES, rows.features
    save_rows(folder, rows)
    files = {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in sorted(folder.iterdir())}
    facts = dataclasses.asdict(dataclasses.replace(manifest, files=files))
    temporary = folder / f".{MANIFEST}.tmp"
    temporary.write_text(json.dumps(facts, indent=2) + "\n")
    temporary.rename(folder / MANIFEST)


@contextmanager
def _no_bars() -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def read_manifest(folder: Path) -> AcceptanceManifest:
    """Raises UserError where the folder is missing, holds no acceptance labels, or is of another version."""
    file = folder / MANIFEST
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder} of acceptance labels; make one with {BUILT_BY}")
    if not file.is_file():
        raise UserError(f"{folder} has no {MANIFEST}; give a folder that {BUILT_BY} wrote")
    try:
        values = json.loads(file.read_text())
        kind, version = values.get("kind"), values.get("version")
        if (kind, version) == (KIND, VERSION):
            return AcceptanceManifest(**values)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{file} cannot be read ({error}); run {BUILT_BY} again") from error
    raise UserError(
        f"{folder} is a store of {kind!r} of format version {version!r}, not of {KIND!r} of version {VERSION}; give a "
        f"folder that {BUILT_BY} wrote"
    )


def open_acceptance(folder: str | Path) -> AcceptanceStore:
    """Opens a store; every file is read and compared with the manifest.

    Raises:
        UserError: there is no store of acceptance labels in the folder, it is of another version, or it is damaged.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    try:
        for name, facts in manifest.files.items():
            file = folder / name
            if not file.is_file():
                raise UserError(f"{folder} lacks {name}; run {BUILT_BY} again")
            if file.stat().st_size != facts["bytes"] or sha256(file) != facts["sha256"]:
                raise UserError(f"{file} is damaged: it is not what the manifest says; run {BUILT_BY} again")
        rows = datasets.load_from_disk(str(folder))
        if not isinstance(rows, Dataset) or rows.features != FEATURES or len(rows) != manifest.counts["rows"]:
            raise UserError(f"{folder} does not hold what its manifest says; run {BUILT_BY} again")
    except UserError:
        raise
    except Exception as error:  # datasets and arrow each raise their own types here
        raise UserError(f"{folder} is damaged ({type(error).__name__}: {error}); run {BUILT_BY} again") from error
    return AcceptanceStore(folder, manifest, rows)


def newest_acceptance(root: Path, target_fingerprint: str, drafter_fingerprint: str) -> Path:
    """The newest store below `root` of this target and drafter.

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
        prints = manifest.target_fingerprint, manifest.drafter.get("fingerprint")
        if prints == (target_fingerprint, drafter_fingerprint):
            fitting.append((file.stat().st_mtime, file.parent))
    if not fitting:
        raise UserError(
            f"{root}/ holds no acceptance labels of this target and drafter; make some with {BUILT_BY} drafter=..."
        )
    return max(fitting)[1]
