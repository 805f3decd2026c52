"""Exported drafters and heads: what each folder holds, and which target it belongs to.

Every export holds `spectrain.json` (kind, version, target and its fingerprint, training results), the tokenizer and a
model card beside `model.safetensors` and `config.json`. A `vanilla` folder is an ordinary Hugging Face model; the
`config.json` of a `spire` folder holds `SpireConfig`, that of a `head` folder `HeadFacts` (head.py), that of a `lookup`
folder `LookupFacts`. docs/export.md lists every file, key and shape.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from spectrain.decoding import TargetModel, fingerprint
from spectrain.decoding.loading import check_finite, check_size
from spectrain.errors import UserError
from spectrain.models.spire import SpireConfig, SpireDrafter
from spectrain.stores import locations
from spectrain.stores.folder import read_json, read_object, write_json
from spectrain.stores.typed import from_json

log = logging.getLogger(__name__)

VERSIONS = (1, 2)  # that are read
SPIRE_VERSION = 2  # of spire folders, which since then name their input; the formats of other kinds are those of 1
MANIFEST = "spectrain.json"
WEIGHTS = "model.safetensors"
DATASTORE = "datastore"  # its folder inside the export of a lookup method
CORPUS = "corpus.jsonl"  # the datastore's documents as text: one JSON string per line, as SGLang's NGRAM reads them


@dataclass(frozen=True)
class Kind:
    """A kind of artifact: its names, and the method that decodes with it."""

    option: str  # by which a user gives a folder of this kind
    noun: str
    made_by: str  # the command that makes one
    method: str | None = None  # in conf/method/; None: the folder names it, or several methods take the artifact


KINDS = {
    "spire": Kind("drafter", "spire drafter", "spectrain.train +exp=spire", "spire"),
    "vanilla": Kind("drafter", "vanilla drafter", "spectrain.train +exp=vanilla", "speculative"),
    "head": Kind("head", "SpecDec++ head", "spectrain.train +exp=specdecpp", "specdecpp"),
    "lookup": Kind("drafter", "lookup method", "spectrain.export method=..."),
    "datastore": Kind("datastore", "datastore", "data_prep.datastore"),
}


@dataclass(frozen=True)
class Artifact:
    """The content of `spectrain.json`."""

    kind: str  # spire | vanilla | head | lookup
    target: str  # folder or id it was trained for
    target_fingerprint: str  # "" of a lookup method, which fits every target with its tokenizer
    trained: dict  # steps, tokens, final metrics
    version: int = 1
    tokenizer_fingerprint: str | None = None  # None in older exports


def write_manifest(folder: Path, artifact: Artifact) -> None:
    write_json(folder / MANIFEST, artifact)


def read_manifest(folder: Path, option: str = "drafter") -> Artifact:
    """Read `spectrain.json` from the folder that a user gave by this option. Raise UserError if it is no export."""
    file = folder / MANIFEST
    if not file.is_file():
        what = f"has no {MANIFEST}" if folder.is_dir() else "does not exist"
        raise UserError(f"{option}={folder} {what}; give a folder that spectrain.train exported")
    with damage_of(str(file)):
        values = read_json(file)
        if values["version"] not in VERSIONS:  # which may have other keys
            known = " or ".join(map(str, VERSIONS))
            raise UserError(f"{folder} has format version {values['version']}, not {known}; export it again")
        return from_json(Artifact, values)


def is_export(folder: str | Path) -> bool:
    """Whether the folder is one of our exports."""
    return (Path(folder) / MANIFEST).is_file()


def decoded_by(folder: Path) -> tuple[str, dict]:
    """The method that decodes with an exported folder: its name in conf/method/, and its options.

    Among these are those that a lookup method was exported with, and the option that names the folder itself.

    Raises:
        UserError: there is no such export, it is damaged, or no method decodes with it.
    """
    kind = read_manifest(folder, "method").kind
    if kind == "lookup":
        facts = read_lookup_facts(folder)
        return facts.method, facts.options | ({"datastore": str(folder / DATASTORE)} if facts.datastore else {})
    if kind not in KINDS or KINDS[kind].method is None:
        known = ", ".join(kind for kind, about in KINDS.items() if about.method or kind == "lookup")
        raise UserError(f"{folder} is of kind {kind}; give one of {known}")
    return KINDS[kind].method, {KINDS[kind].option: str(folder)}


def check_artifact(folder: Path, kind: str, target_fingerprint: str, option: str | None = None) -> None:
    """Raise UserError unless the folder holds a drafter or head of this kind for the target of this fingerprint.

    `option` is the one that it was given by; None: the one that drafts with it.
    """
    option = option or KINDS[kind].option
    given, made_by = f"{option}={folder}", KINDS[kind].made_by
    artifact = read_manifest(folder, option)
    if artifact.kind != kind:
        noun = KINDS[artifact.kind].noun if artifact.kind in KINDS else artifact.kind
        raise UserError(f"{given} is a {noun}; give one made by python -m {made_by}")
    if artifact.target_fingerprint != target_fingerprint:
        raise UserError(
            f"{given} was trained for {artifact.target} ({artifact.target_fingerprint}), not for this target "
            f"({target_fingerprint}); train one for it with python -m {made_by} target=..."
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
    """Turn whatever safetensors, json and torch raise while an export is read into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what} is damaged ({where}{type(error).__name__}); export it again") from error


def fastest_gamma(folder: Path) -> int | None:
    """Return the draft length that was the fastest after a drafter's training; None: an export that does not say.

    Raises:
        UserError: the export is damaged.
    """
    if not (folder / MANIFEST).is_file():
        return None
    gamma = read_manifest(folder).trained.get("fastest_gamma")
    if gamma is not None and not (type(gamma) is int and gamma >= 1):
        raise UserError(f"drafter={folder} is damaged (fastest_gamma={gamma!r}); export it again")
    return gamma


def trained_acceptance(folder: Path) -> float | None:
    """Return the mean acceptance probability that training measured at T = 1 on held-out rows.

    None where the export does not say. Raises UserError where it is damaged.
    """
    if not (folder / MANIFEST).is_file():
        return None
    metrics = read_manifest(folder).trained.get("metrics") or {}
    alpha = metrics.get("eval/alpha") if isinstance(metrics, dict) else metrics
    if alpha is not None and not (type(alpha) in (int, float) and 0 <= alpha <= 1):
        raise UserError(f"drafter={folder} is damaged (eval/alpha={alpha!r}); export it again")
    return alpha


def newest_artifact(root: Path, kind: str, target_fingerprint: str) -> Path:
    """Return the newest folder of this kind below `root` for this target, else the one that comes with spectrain.

    Raise UserError if there is neither.
    """
    own = [file for file in root.glob(f"*/{MANIFEST}") if file.parent.name not in locations.SHIPPED]
    own = [file.parent for file in sorted(own, key=lambda file: file.stat().st_mtime, reverse=True)]
    for folder in (*own, *locations.shipped_folders(locations.SHIPPED)):
        try:
            artifact = read_manifest(folder)
        except UserError as error:
            log.warning("passed over: %s", error)
            continue
        if (artifact.kind, artifact.target_fingerprint) == (kind, target_fingerprint):
            return folder
    about = KINDS[kind]
    raise UserError(
        f"{root}/ holds no {about.noun} for this target; train one with python -m {about.made_by}, or give "
        f"{about.option}=<folder>"
    )


def save_spire(folder: Path, drafter: SpireDrafter, dtype: torch.dtype = torch.float32) -> None:
    """Write weights (tied ones once) and config into an existing folder. The target's tables are left out."""
    state = drafter.state_dict()
    state = {name: (t.to(dtype) if t.is_floating_point() else t).contiguous() for name, t in state.items()}
    if drafter.config.has_one_table:
        del state["lm_head.weight"]
    save_file(state, folder / WEIGHTS)
    write_json(folder / "config.json", drafter.config)


def load_spire(folder: Path, target: TargetModel, option: str = "drafter") -> SpireDrafter:
    """Open a SPIRe drafter in float32, which shares the target's tables. `option` is the one that it was given by.

    Raises:
        UserError: it does not fit the target, or is damaged.
    """
    given = f"{option}={folder}"
    check_artifact(folder, "spire", fingerprint(target.model, target.tokenizer), option)
    with damage_of(given):
        config = read_object(folder / "config.json", SpireConfig, "export it again")
        check_size(partial(SpireDrafter, config), folder, given)
        drafter = SpireDrafter(config, target)
        state = load_file(folder / WEIGHTS)
        if config.has_one_table:
            state["lm_head.weight"] = state["embed_tokens.weight"]
        drafter.load_state_dict(state)
        if drafter.kept is not None and not 0 <= int(drafter.kept.min()) <= int(drafter.kept.max()) < target.vocab_size:
            raise ValueError("tokens outside of the vocabulary")
    check_finite(drafter, given)
    return drafter


@dataclass(frozen=True)
class LookupFacts:
    """The content of a lookup method's `config.json`."""

    method: str  # of conf/method/: pld, anpd, rest, spectra_retrieval, sssd
    options: dict  # of its `build`, except the datastore
    tokenizer_fingerprint: str
    vocab_size: int
    datastore: bool  # whether it has one
    corpus_tokens: int = 0  # of the datastore's documents
    corpus_same_tokens: float | None = None  # share of sampled documents whose text has the tokens they came from


def read_lookup_facts(folder: Path) -> LookupFacts:
    """Read `config.json` of a lookup method. Raise UserError if the folder holds none, or is damaged."""
    artifact = read_manifest(folder, "lookup")
    if artifact.kind != "lookup":
        how = "python -m spectrain.export method=..."
        raise UserError(f"lookup={folder} is of kind {artifact.kind}, which engines cannot run; give one made by {how}")
    with damage_of(f"lookup={folder}"):
        return read_object(folder / "config.json", LookupFacts, "export it again")


def check_tokenizer(folder: Path, facts: LookupFacts, tokenizer_fingerprint: str, target: str) -> None:
    """Raise UserError if a lookup method was exported for another tokenizer than the target's."""
    if facts.tokenizer_fingerprint != tokenizer_fingerprint:
        raise UserError(
            f"lookup={folder} was exported for the tokenizer {facts.tokenizer_fingerprint}, but {target} has "
            f"{tokenizer_fingerprint}; export one for it with python -m spectrain.export method=... target=..."
        )
