"""A folder of kind `lookup`, written by hand from docs/export.md."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from spectrain.decoding import TargetModel, tokenizer_fingerprint
from tests.conftest import random_prompts
from tests.retrieval.reference import make_store

OPTIONS = {
    "pld": {"draft_tokens": 6},
    "anpd": {"draft_tokens": 6},
    "rest": {"max_nodes": 33, "max_matches": 50},
    "spectra_retrieval": {"max_guesses": 4, "ngram_tokens": 4, "min_suffix": 1},
    "sssd": {"max_nodes": 24, "min_matches": 2},
}


def export_lookup(folder: Path, target: TargetModel, method: str, documents: list[list[int]] | None = None) -> Path:
    """The method, with a datastore of these documents (None: of random ones) where it takes one."""
    folder.mkdir()
    has_store = method not in ("pld", "anpd")
    tokenizer = tokenizer_fingerprint(target.tokenizer)
    if has_store:
        documents = documents or random_prompts([30] * 20)
        store = make_store(folder.with_name(f".{folder.name}-store"), documents, target.vocab_size, tokenizer=tokenizer)
        shutil.copytree(store.folder, folder / "datastore")
    facts = {"method": method, "options": OPTIONS[method], "tokenizer_fingerprint": tokenizer}
    (folder / "config.json").write_text(json.dumps({**facts, "vocab_size": target.vocab_size, "datastore": has_store}))
    manifest = {"kind": "lookup", "target": "tiny", "target_fingerprint": "", "trained": {}, "version": 1}
    (folder / "spectrain.json").write_text(json.dumps({**manifest, "tokenizer_fingerprint": tokenizer}))
    return folder
