"""What one datastore is built from, and where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from data_prep.perplexity import Scoring
from data_prep.selection import Selection
from data_prep.token_parts import Reading
from spectrain.retrieval.suffix_array import MAX_SHARD_TOKENS
from spectrain.stores.texts import Document, Skipped, read_documents


@dataclass(frozen=True)
class Corpus:
    """Where documents come from; see `read_documents`."""

    path: str | None
    fields: list[str] | None
    split: str
    subset: str | None
    max_documents: int | None

    def documents(self, skipped: Skipped | None = None) -> Iterator[Document]:
        return islice(read_documents(self.path, self.fields, self.split, self.subset, skipped), self.max_documents)


@dataclass(frozen=True)
class Job:
    """One datastore to build."""

    out: Path
    work: Path  # the folder it is built in, beside `out` (work_folder.py)
    config: dict  # resolved; what the store depends on
    target: str  # name
    target_fingerprint: str
    tokenizer_fingerprint: str
    corpus: Corpus
    reading: Reading
    selection: Selection
    scoring: Scoring
    scores: bool  # whether perplexities are computed
    shard_tokens: int = MAX_SHARD_TOKENS
    ranks_share: bool = True  # False: all ranks hold one target together and work on the same part
