"""The first stage of a datastore: a corpus read, tokenised and deduplicated in parts.

A part holds what is left of some consecutive documents of the corpus; each is written under a temporary name and
renamed. A resumed build reads the corpus again, but tokenises only what no part has: a part knows the digest of the
texts it was made from.

    part-00000.npz    tokens [n], lengths [documents], ids and digest as JSON
    corpus.json       written last: the number of parts and what was counted
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from data_prep.progress import TokenProgress
from spectrain.decoding.errors import UserError
from spectrain.retrieval.suffix_array import MAX_SHARD_TOKENS, token_dtype
from spectrain.stores.texts import Document, Skipped, is_held_out

log = logging.getLogger(__name__)

PART_CHARACTERS = 2**21  # a part also ends here, so that one of long documents is not hours of work
READ = "corpus.json"


@dataclass(frozen=True)
class Reading:
    """How a corpus becomes parts."""

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int  # of the target
    held_out_share: float
    part_documents: int


@dataclass
class Counts:
    """What was found while reading."""

    read: int = 0  # documents with text
    not_utf8: int = 0  # files
    not_utf8_files: list[str] = dataclasses.field(default_factory=list)
    empty: int = 0
    held_out: int = 0
    duplicates: int = 0
    parts: int = 0
    documents: int = 0  # left in the parts
    tokens: int = 0


@dataclass(frozen=True)
class Part:
    """Documents as tokens."""

    ids: list[str]
    tokens: np.ndarray  # [n] uint16 or uint32
    lengths: np.ndarray  # [documents] int64

    def documents(self) -> list[np.ndarray]:
        return np.split(self.tokens, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []


def part_file(folder: Path, index: int) -> Path:
    return folder / f"part-{index:05d}.npz"


def read_part(folder: Path, index: int) -> Part:
    """Raises UserError where the file is damaged."""
    part, _ = _read(part_file(folder, index))
    return part


def read_counts(folder: Path) -> Counts | None:
    """What reading counted, or None where it has not come to its end."""
    file = folder / READ
    return Counts(**json.loads(file.read_text())) if file.is_file() else None


def write_parts(
    folder: Path,
    documents: Iterable[Document],
    reading: Reading,
    skipped: Skipped,
    progress: TokenProgress,
    before_write: Callable[[int, int, int], None],
) -> Counts:
    """Reads the corpus to its end; writes the parts that the folder lacks.

    Args:
        folder: of the work.
        documents: the corpus.
        reading: tokenizer and cuts.
        skipped: what the corpus counts while it is read.
        progress: told of every part.
        before_write: called with the bytes of a part, the documents and the tokens so far; raises where the disk is
            too small.

    Raises:
        UserError: the corpus changed since the parts were written, or is empty.
    """
    counts, seen = Counts(), set()
    before = read_counts(folder)
    for batch in _batches(documents, reading.part_documents):
        file, digest = part_file(folder, counts.parts), _digest(batch)
        new = _undecided(batch, reading.held_out_share, seen, counts)
        if file.is_file():
            part, known = _read(file)
            if known != digest:
                raise _changed(folder)
        else:
            part = _tokenised(new, reading)
            before_write(part.tokens.nbytes, counts.documents + len(part.ids), counts.tokens + len(part.tokens))
            _write(file, part, digest)
        counts.parts += 1
        counts.read += len(batch)
        counts.empty += len(new) - len(part.ids)
        counts.documents += len(part.ids)
        counts.tokens += len(part.tokens)
        progress.advance(sum(len(document.text.encode()) for document in batch), len(part.tokens))
    counts.not_utf8, counts.not_utf8_files = len(skipped.not_utf8), skipped.not_utf8
    counts.empty += skipped.empty
    if part_file(folder, counts.parts).is_file() or (before is not None and before != counts):
        raise _changed(folder)
    temporary = folder / f"{READ}.tmp"
    temporary.write_text(json.dumps(dataclasses.asdict(counts)) + "\n")
    temporary.rename(folder / READ)
    return counts


def _changed(folder: Path) -> UserError:
    return UserError(f"the corpus is no longer what this build began with; remove {folder} to begin anew")


def _batches(documents: Iterable[Document], part_documents: int) -> Iterator[list[Document]]:
    batch: list[Document] = []
    n_characters = 0
    for document in documents:
        batch.append(document)
        n_characters += len(document.text)
        if len(batch) == part_documents or n_characters >= PART_CHARACTERS:
            yield batch
            batch, n_characters = [], 0
    if batch:
        yield batch


def _digest(batch: list[Document]) -> str:
    digest = hashlib.sha256()
    for document in batch:
        for text in (document.id, document.text):
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()


def _undecided(batch: list[Document], held_out_share: float, seen: set[bytes], counts: Counts) -> list[Document]:
    """What is neither held out nor known already."""
    new = []
    for document in batch:
        if is_held_out(document.id, held_out_share):
            counts.held_out += 1
            continue
        key = hashlib.sha256(document.text.encode()).digest()[:16]
        if key in seen:
            counts.duplicates += 1
            continue
        seen.add(key)
        new.append(document)
    return new


def _tokenised(documents: list[Document], reading: Reading) -> Part:
    ids, rows = [], []
    texts = [document.text for document in documents]
    encoded = reading.tokenizer(texts, **TOKENS_ONLY)["input_ids"] if texts else []
    dtype = token_dtype(reading.vocab_size)
    for document, row in zip(documents, encoded, strict=True):
        if not row:
            continue  # a tokenizer may normalise a text away
        if len(row) >= MAX_SHARD_TOKENS:
            raise UserError(
                f"{document.id} has {len(row)} tokens, more than the {MAX_SHARD_TOKENS - 1} that one shard holds; "
                "split the document"
            )
        if max(row) >= reading.vocab_size:
            raise UserError(
                f"the tokenizer gives token {max(row)} in {document.id}, but the target knows {reading.vocab_size}; "
                "give a target whose tokenizer is its own"
            )
        ids.append(document.id)
        rows.append(np.array(row, dtype=dtype))
    tokens = np.concatenate(rows) if rows else np.zeros(0, dtype)
    return Part(ids, tokens, np.array([len(row) for row in rows], dtype=np.int64))


TOKENS_ONLY = {
    "add_special_tokens": False,
    "verbose": False,
    "return_attention_mask": False,
    "return_token_type_ids": False,
}


def _write(file: Path, part: Part, digest: str) -> None:
    facts = json.dumps({"ids": part.ids, "digest": digest}).encode()
    temporary = file.with_suffix(".tmp")
    with temporary.open("wb") as out:
        np.savez(out, tokens=part.tokens, lengths=part.lengths, facts=np.frombuffer(facts, dtype=np.uint8))
    temporary.rename(file)


def _read(file: Path) -> tuple[Part, str]:
    try:
        with np.load(file) as arrays:
            facts = json.loads(arrays["facts"].tobytes())
            return Part(facts["ids"], arrays["tokens"], arrays["lengths"]), facts["digest"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{file} is damaged ({type(error).__name__}); remove it and give the command again") from error
