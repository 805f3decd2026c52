"""An exported lookup method: its options, its datastore, and for which tokenizer.

A folder of kind `lookup` (see `artifacts.py`) holds a `config.json` with what `LookupFacts` says, and where the method
has a datastore `datastore/` with its files and `corpus.jsonl` with its texts.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from spectrain.decoding.errors import UserError
from spectrain.models.artifacts import read_manifest

DATASTORE = "datastore"  # folder of it inside the export
CORPUS = "corpus.jsonl"  # the datastore's documents as text: a JSON string a line, as SGLang's NGRAM reads them
OPTION = "lookup"  # how messages call the folder


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
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(facts), indent=2) + "\n")


def read_lookup_facts(folder: Path) -> LookupFacts:
    """Raises UserError where the folder is no lookup method's export, or is damaged."""
    artifact = read_manifest(folder, OPTION)
    if artifact.kind != "lookup":
        raise UserError(
            f"{OPTION}={folder} is of kind {artifact.kind}, which an engine cannot look up in; give one made by python "
            "-m spectrain.export method=..."
        )
    try:
        return LookupFacts(**json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{OPTION}={folder} is damaged ({type(error).__name__}); export it again") from error


def check_tokenizer(folder: Path, facts: LookupFacts, tokenizer_fingerprint: str, target: str) -> None:
    """Raises UserError where the export holds the tokens of another tokenizer than the target's."""
    if facts.tokenizer_fingerprint != tokenizer_fingerprint:
        raise UserError(
            f"{OPTION}={folder} was exported for the tokenizer {facts.tokenizer_fingerprint}, but {target} has "
            f"{tokenizer_fingerprint}; export one for it with python -m spectrain.export method=... target=..."
        )
