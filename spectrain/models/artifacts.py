"""Exported drafters and heads: what a folder holds, for which target it was made, and where the newest one lies.

Every export holds `spectrain.json` (kind, version, target and its fingerprint, what training measured), the tokenizer
and a model card beside `model.safetensors` and `config.json`. A `vanilla` folder is an ordinary Hugging Face model; a
`spire` folder holds `SpireConfig` as its `config.json`, a `head` folder `HeadFacts` (head.py), a `lookup` folder
`LookupFacts`. docs/export.md has every file, key and shape.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from spectrain.decoding.errors import UserError
from spectrain.models.spire import LlamaShape, SpireConfig, SpireDrafter
from spectrain.stores.folder import read_json, write_json

log = logging.getLogger(__name__)

VERSION = 1
MANIFEST = "spectrain.json"
DATASTORE = "datastore"  # folder of it inside the export
CORPUS = "corpus.jsonl"  # the datastore's documents as text: a JSON string a line, as SGLang's NGRAM reads them


@dataclass(frozen=True)
class Kind:
    """What the project calls a kind of artifact, and which method decodes with it."""

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
    """What `spectrain.json` says."""

    kind: str  # spire | vanilla | head | lookup
    target: str  # folder or id it was trained for
    target_fingerprint: str  # "" of a lookup method, which fits every target of its tokenizer
    trained: dict  # steps, tokens, final metrics
    version: int = VERSION
    tokenizer_fingerprint: str | None = None  # None: exported before it was kept


def write_manifest(folder: Path, artifact: Artifact) -> None:
    write_json(folder / MANIFEST, dataclasses.asdict(artifact))


def read_manifest(folder: Path, option: str = "drafter") -> Artifact:
    """Raises UserError where the folder is missing, is no export, or is of another version.

    Args:
        folder: what the user gave.
        option: by which option.
    """
    file = folder / MANIFEST
    if not folder.is_dir():
        raise UserError(f"{option}={folder} does not exist; give a folder that spectrain.train exported")
    if not file.is_file():
        raise UserError(f"{option}={folder} has no {MANIFEST}; give a folder that spectrain.train exported")
    try:
        values = read_json(file)
        version = values.get("version")
        artifact = Artifact(**values) if version == VERSION else None  # another version may have other keys
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{file} cannot be read ({error}); export the drafter again") from error
    if artifact is None:
        raise UserError(f"{folder} has format version {version}, not {VERSION}; export it again")
    return artifact


def check_artifact(folder: Path, kind: str, fingerprint: str) -> Artifact:
    """The manifest of a drafter or head that fits.

    Raises:
        UserError: it is of another kind, or was trained for a target of another fingerprint.
    """
    option, made_by = KINDS[kind].option, KINDS[kind].made_by
    artifact = read_manifest(folder, option)
    if artifact.kind != kind:
        noun = KINDS[artifact.kind].noun if artifact.kind in KINDS else artifact.kind
        raise UserError(f"{option}={folder} is a {noun}; give one made by python -m {made_by}")
    if artifact.target_fingerprint != fingerprint:
        raise UserError(
            f"{option}={folder} was trained for {artifact.target} ({artifact.target_fingerprint}), not for this target "
            f"({fingerprint}); train one for it with python -m {made_by} target=..."
        )
    return artifact


def check_weights(folder: Path, option: str) -> None:
    """Raises UserError where a drafter's weights are missing or cut off; reads their headers only."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{option}={folder} has no model.safetensors; export it again")
    for file in files:
        try:
            with safe_open(file, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{option}={folder} is damaged ({file.name}: {type(error).__name__}); export it again"
            ) from error


def newest_artifact(root: Path, kind: str, fingerprint: str) -> Path:
    """The newest drafter of this kind for this target below `root`.

    Raises:
        UserError: there is none.
    """
    fitting = []
    for file in root.glob(f"*/{MANIFEST}"):
        try:
            artifact = read_manifest(file.parent)
        except UserError as error:
            log.warning("passed over: %s", error)
            continue
        if artifact.kind == kind and artifact.target_fingerprint == fingerprint:
            fitting.append(file)
    if not fitting:
        raise UserError(
            f"{root}/ holds no {KINDS[kind].noun} for this target; train one with python -m {KINDS[kind].made_by}, "
            f"or give {KINDS[kind].option}=<folder>"
        )
    return max(fitting, key=lambda file: file.stat().st_mtime).parent


def save_spire(folder: Path, drafter: SpireDrafter) -> None:
    """Writes weights (float32, tied ones once) and config into an existing folder."""
    tied = drafter.config.shape.tie_embeddings
    state = {
        name: t.contiguous() for name, t in drafter.state_dict().items() if not (tied and name == "lm_head.weight")
    }
    save_file(state, folder / "model.safetensors")
    write_json(folder / "config.json", dataclasses.asdict(drafter.config))


def load_spire(folder: Path, fingerprint: str) -> SpireDrafter:
    """Opens a SPIRe drafter for the target of this fingerprint.

    Raises:
        UserError: see `check_artifact`; or a file is missing or corrupt.
    """
    check_artifact(folder, "spire", fingerprint)
    try:
        values = read_json(folder / "config.json")
        shape = LlamaShape(**values.pop("shape"))
        config = SpireConfig(shape=shape, **{**values, "target_layers": tuple(values["target_layers"])})
        drafter = SpireDrafter(config)
        state = load_file(folder / "model.safetensors")
        if shape.tie_embeddings:
            state["lm_head.weight"] = state["embed_tokens.weight"]
        drafter.load_state_dict(state)
    except UserError:
        raise
    except Exception as error:  # safetensors, json and torch each raise their own types here
        raise UserError(f"drafter={folder} is damaged ({type(error).__name__}); export it again") from error
    return drafter


@dataclass(frozen=True)
class LookupFacts:
    """What a lookup method's `config.json` says."""

    method: str  # of conf/method/: pld, anpd, rest, spectra_retrieval, sssd
    options: dict  # of its `build`, but for the datastore
    tokenizer_fingerprint: str
    vocab_size: int
    datastore: bool  # whether it has one
    corpus_tokens: int = 0  # of the datastore's documents
    corpus_same_tokens: float | None = None  # share of sampled documents whose text has the tokens they came from


def save_lookup_facts(folder: Path, facts: LookupFacts) -> None:
    """Writes them into an existing folder."""
    write_json(folder / "config.json", dataclasses.asdict(facts))


def read_lookup_facts(folder: Path) -> LookupFacts:
    """Raises UserError where the folder is no lookup method's export, or is damaged."""
    artifact = read_manifest(folder, "lookup")
    if artifact.kind != "lookup":
        raise UserError(
            f"lookup={folder} is of kind {artifact.kind}, which an engine cannot look up in; give one made by python "
            "-m spectrain.export method=..."
        )
    try:
        return LookupFacts(**read_json(folder / "config.json"))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"lookup={folder} is damaged ({type(error).__name__}); export it again") from error


def check_tokenizer(folder: Path, facts: LookupFacts, tokenizer_fingerprint: str, target: str) -> None:
    """Raises UserError where the export holds the tokens of another tokenizer than the target's."""
    if facts.tokenizer_fingerprint != tokenizer_fingerprint:
        raise UserError(
            f"lookup={folder} was exported for the tokenizer {facts.tokenizer_fingerprint}, but {target} has "
            f"{tokenizer_fingerprint}; export one for it with python -m spectrain.export method=... target=..."
        )
