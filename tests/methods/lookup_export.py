"""A folder of kind `lookup`, written by hand from docs/export.md."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from spectrain.target import TargetModel, tokenizer_fingerprint
from tests.conftest import random_prompts
from tests.retrieval.reference import make_store

OPTIONS = {
    "pld": {"draft_tokens": 6, "past_end": False},  # drafts end with the text, so they show what was read
    "anpd": {"draft_tokens": 6},
    "rest": {"max_nodes": 33, "max_matches": 50},
    "spectra_retrieval": {"max_guesses": 4, "ngram_tokens": 4, "min_suffix": 1},
    "sssd": {"max_nodes": 24, "min_matches": 2},
}


MANIFEST = {"kind": "lookup", "target": "tiny", "target_fingerprint": "", "trained": {}, "version": 3}


def lookup_facts(
    folder: Path, method: str, options: dict, tokenizer: str = "", vocab_size: int = 61, datastore: bool = False
) -> Path:
    """A new folder with `config.json` and `spectrain.json`."""
    folder.mkdir()
    facts = {"method": method, "options": options, "tokenizer_fingerprint": tokenizer}
    (folder / "config.json").write_text(json.dumps({**facts, "vocab_size": vocab_size, "datastore": datastore}))
    decoded_by = {"method": method, "options": options, "folders": {"datastore": "datastore"} if datastore else {}}
    (folder / "spectrain.json").write_text(json.dumps({**MANIFEST, **decoded_by, "tokenizer_fingerprint": tokenizer}))
    return folder


def export_lookup(folder: Path, target: TargetModel, method: str, documents: list[list[int]] | None = None) -> Path:
    """The method, with a datastore of these documents (None: of random ones) where it takes one."""
    has_store = method not in ("pld", "anpd")
    tokenizer = tokenizer_fingerprint(target.tokenizer)
    lookup_facts(folder, method, OPTIONS[method], tokenizer, target.vocab_size, has_store)
    if has_store:
        documents = documents or random_prompts([30] * 20)
        store = make_store(folder.with_name(f".{folder.name}-store"), documents, target.vocab_size, tokenizer=tokenizer)
        shutil.copytree(store.folder, folder / "datastore")
    return folder
