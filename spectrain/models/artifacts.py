"""Exported drafters, heads and lookup methods: what each folder holds, and which target it belongs to.

Every export holds `spectrain.json` beside its weights or options: what it is, the target and its fingerprint, the
results of training, and the method that decodes with it. So any export can be decoded with, whatever its kind. A kind
of trained export is a module of `spectrain.models`; see kinds.py. docs/export.md lists every file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open

from spectrain.config import conf_dir
from spectrain.errors import NoneFitsError, UserError, shown
from spectrain.models.kinds import about, drafters
from spectrain.stores import locations
from spectrain.stores.files import load_json, read_object, write_json

log = logging.getLogger(__name__)

VERSION = 3
MANIFEST = "spectrain.json"
WEIGHTS = "model.safetensors"
DATASTORE = "datastore"  # its folder inside the export of a lookup method
CORPUS = "corpus.jsonl"  # the datastore's documents as text: one JSON string per line, as SGLang's NGRAM reads them


@dataclass(frozen=True)
class Artifact:
    """The content of `spectrain.json`."""

    kind: str  # see kinds.py
    target: str  # folder or id it was trained for
    target_fingerprint: str  # "" of a lookup method, which fits every target with its tokenizer
    trained: dict  # steps, tokens, final metrics
    tokenizer_fingerprint: str | None = None
    method: str | None = None  # of conf/method/, which decodes with it; None: nothing does
    options: dict = field(default_factory=dict)  # of the method
    folders: dict[str, str] = field(default_factory=dict)  # its options that name a folder in this one, or "."
    version: int = VERSION


def trained_artifact(
    kind: str, target: str, target_fingerprint: str, trained: dict, tokenizer_fingerprint: str | None = None
) -> Artifact:
    """Return what `spectrain.json` says of a trained drafter or head."""
    facts = kind, target, target_fingerprint, trained, tokenizer_fingerprint
    return Artifact(*facts, method=about(kind).method, folders={about(kind).option: "."})


def write_manifest(folder: Path, artifact: Artifact) -> None:
    write_json(folder / MANIFEST, artifact)


def read_manifest(folder: Path, option: str = "drafter") -> Artifact:
    """Read `spectrain.json` from the folder that a user gave by this option. Raise UserError if it is no export.

    The folder of another project has none: of its drafter only the kind is known.
    """
    file = folder / MANIFEST
    if not file.is_file() and (kind := published_kind(folder)) is not None:
        return trained_artifact(kind, "", "", {})
    if not file.is_file():
        what = f"has no {MANIFEST}" if folder.is_dir() else "does not exist"
        raise UserError(f"{option}={folder} {what}; give a folder that spectrain train exported")
    version = read_object(file, dict, "export it again").get("version")
    if version is not None and version != VERSION:
        is_newer = isinstance(version, int) and version > VERSION
        advice = "install the version of spectrain that made it" if is_newer else "export it again"
        raise UserError(f"{folder} has format version {shown(version)}, not {VERSION}; {advice}")
    artifact = read_object(file, Artifact, "export it again")
    try:
        about(artifact.kind)
    except UserError as error:
        raise UserError(f"{folder} cannot be used: {error}") from None
    return artifact


def is_export(folder: str | Path) -> bool:
    """Return whether the folder is one of our exports, or holds a drafter of another project that is read as one."""
    return (Path(folder) / MANIFEST).is_file() or published_kind(Path(folder)) is not None


def published_kind(folder: Path) -> str | None:
    """Return the kind of a drafter that another project has written; None: there is none that a kind recognises."""
    try:
        facts = load_json(folder / "config.json")
    except (OSError, ValueError):
        return None
    if not isinstance(facts, dict):
        return None
    return next((name for name, kind in drafters() if kind.recognises is not None and kind.recognises(facts)), None)


def decoded_by(folder: Path) -> tuple[str, dict]:
    """Return the method that decodes with an exported folder: its name in conf/method/, and its options.

    Raises:
        UserError: there is no such export, it is damaged, or no method decodes with it.
    """
    artifact = read_manifest(folder, "method")
    if artifact.method is None:
        raise UserError(f"{folder} is of kind {artifact.kind}, with which no method decodes; give another folder")
    if not (conf_dir() / "method" / f"{artifact.method}.yaml").is_file():
        method = shown(artifact.method)
        raise UserError(f"{folder} is decoded by the method {method}, which is unknown here; install a newer spectrain")
    inside = {option: str(folder / name) for option, name in artifact.folders.items()}
    return artifact.method, artifact.options | inside


def check_artifact(folder: Path, kind: str, target_fingerprint: str, option: str | None = None) -> None:
    """Raise UserError unless the folder holds a drafter or head of this kind for the target of this fingerprint.

    `option` is the one that it was given by; None: the one that drafts with it.
    """
    option = option or about(kind).option
    given, command = f"{option}={folder}", about(kind).command
    artifact = read_manifest(folder, option)
    if artifact.kind != kind:
        own = about(artifact.kind)
        way = f"method={own.method}, or " if own.method and own.option == option else ""
        raise UserError(f"{given} is {own.a_noun}; give {way}one made by {command}")
    if artifact.target_fingerprint != target_fingerprint:
        raise UserError(
            f"{given} was trained for {artifact.target} ({artifact.target_fingerprint}), not for this target "
            f"({target_fingerprint}); train one for it with {command}"
        )


def check_weights(folder: Path, option: str) -> None:
    """Raise UserError if a drafter's weights are missing or truncated. Only their headers are read."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{option}={folder} has no model.safetensors; export it again")
    for file in files:
        with damage_of(f"{option}={folder}", f"{file.name}: "), safe_open(file, "pt"):
            pass


@contextmanager
def damage_of(what: str, where: str = "") -> Iterator[None]:
    """Turn whatever safetensors and torch raise while weights are read into a UserError."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{what} is damaged ({where}{type(error).__name__}); export it again") from error


def fastest_gamma(folder: Path) -> int | None:
    """Return the draft length that was the fastest after a drafter's training; None where the folder does not say."""
    return read_manifest(folder).trained.get("fastest_gamma") if is_export(folder) else None


def trained_acceptance(folder: Path) -> float | None:
    """Return the mean acceptance probability at T = 1 on held-out rows; None where the folder does not say."""
    metrics = read_manifest(folder).trained.get("metrics") if is_export(folder) else None
    return (metrics or {}).get("eval/alpha")


def export_folders(root: Path) -> list[Path]:
    """Return the exports below `root`, the newest first, then those that come with spectrain."""
    own = [file for file in root.glob(f"*/{MANIFEST}") if file.parent.name not in locations.SHIPPED]
    own = [file.parent for file in sorted(own, key=lambda file: file.stat().st_mtime, reverse=True)]
    return [*own, *locations.shipped_folders(locations.SHIPPED)]


def default_artifact(root: Path, kind: str, target_fingerprint: str) -> Path:
    """Return the folder of this kind that methods take for this target where the user gives none.

    Of those below `root` and those that come with spectrain it is the one with the highest acceptance length that its
    training measured; where none was measured, the newest. Raise UserError if there is none.
    """
    fitting: dict[Path, float | None] = {}
    for folder in export_folders(root):
        try:
            artifact = read_manifest(folder)
        except UserError as error:
            log.warning("passed over: %s", error)
            continue
        if (artifact.kind, artifact.target_fingerprint) == (kind, target_fingerprint):
            fitting[folder] = measured_tau(artifact)
    if not fitting:
        one = about(kind)
        raise NoneFitsError(
            f"{root}/ holds no {one.noun} for this target; train one with {one.command}, or give {one.option}=<folder>"
        )
    measured = {folder: tau for folder, tau in fitting.items() if tau is not None}
    best = max(measured, key=measured.get) if measured else next(iter(fitting))
    if len(fitting) > 1:
        why = f"the highest measured tau, {measured[best]:.2f}" if measured else "the newest; no tau was measured"
        log.info("%s of %d that fit: %s (%s)", about(kind).noun, len(fitting), best, why)
    return best


def measured_tau(artifact: Artifact) -> float | None:
    """Return the mean acceptance length that training measured on held-out rows; None where it measured none."""
    taus = artifact.trained.get("tau") or {}
    values = [one["value"] for one in (taus.get(artifact.kind) or taus.get(artifact.method) or {}).values()]
    return sum(values) / len(values) if values else None


@dataclass(frozen=True)
class LookupFacts:
    """The content of a lookup method's `config.json`."""

    method: str  # of conf/method/: pld, anpd, rest, spectra_retrieval, sssd
    options: dict  # of its `build`, except the datastore
    tokenizer_fingerprint: str
    vocab_size: int
    datastore: bool  # whether it has one


def read_lookup_facts(folder: Path) -> LookupFacts:
    """Read `config.json` of a lookup method. Raise UserError if the folder holds none, or is damaged."""
    artifact = read_manifest(folder, "lookup")
    if artifact.kind != "lookup":
        how = "spectrain export method=..."
        raise UserError(f"lookup={folder} is of kind {artifact.kind}, which engines cannot run; give one made by {how}")
    return read_object(folder / "config.json", LookupFacts, "export it again")


def check_tokenizer(folder: Path, facts: LookupFacts, tokenizer_fingerprint: str, target: str) -> None:
    """Raise UserError if a lookup method was exported for another tokenizer than the target's."""
    if facts.tokenizer_fingerprint != tokenizer_fingerprint:
        raise UserError(
            f"lookup={folder} was exported for the tokenizer {facts.tokenizer_fingerprint}, but {target} has "
            f"{tokenizer_fingerprint}; export one for it with spectrain export method=... target=..."
        )
