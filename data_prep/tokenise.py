"""A corpus, tokenised and deduplicated in parts: the first stage of a datastore (documents.py).

A part holds what is left of some consecutive documents of the corpus. A resumed build reads the corpus again, but
tokenises only what no part has: a part knows the digest of the texts that it was made from.

    part-00000.npz    tokens [n], lengths [documents], answers [n / 8], and ids, sources and digest as JSON
    corpus.json       written after the last part: the number of parts and what was counted
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from data_prep.pipeline import read_part
from data_prep.progress import token_progress
from spectrain.errors import UserError
from spectrain.retrieval.suffix_array import MAX_SHARD_TOKENS, token_dtype
from spectrain.stores.folder import json_line, parse_json, read_object, write_json
from spectrain.stores.packing import token_documents
from spectrain.stores.texts import Document, Skipped, read_documents
from spectrain.stores.writing import write_whole

PART_CHARACTERS = 2**21  # a part also ends here, so that one of long documents is not hours of work
SAMPLE_DOCUMENTS, SAMPLE_CHARACTERS = 64, 4096  # tokenised to learn how many tokens a byte of text makes
TOKENS_ONLY = dict.fromkeys(("add_special_tokens", "verbose", "return_attention_mask", "return_token_type_ids"), False)


@dataclass
class Counts:
    """What was found while reading."""

    read: int = 0  # documents with text
    not_utf8: int = 0  # files
    not_utf8_files: list[str] = dataclasses.field(default_factory=list)
    empty: int = 0
    without_assistant: int = 0  # conversations
    held_out: int = 0
    duplicates: int = 0
    with_answer: int = 0  # documents in the parts that say which tokens the target or the assistant wrote
    parts: int = 0
    documents: int = 0  # left in the parts
    tokens: int = 0


@dataclass(frozen=True)
class Part:
    """Documents as tokens."""

    ids: list[str]
    sources: list[str]  # of the documents
    digest: str  # of the texts that were read for it
    tokens: np.ndarray  # [n] uint16 or uint32
    lengths: np.ndarray  # [documents] int64
    answers: np.ndarray  # [n] bools as bits: what the target or the assistant wrote

    def documents(self) -> list[np.ndarray]:
        return self._split(self.tokens)

    def counted_answers(self) -> list[np.ndarray]:
        """Return the tokens of each document that its answers have, [n] bool; all of one without an answer."""
        return [answer if answer.any() else np.ones_like(answer) for answer in self._answers()]

    def _answers(self) -> list[np.ndarray]:
        return self._split(np.unpackbits(self.answers, count=len(self.tokens)).astype(bool))

    @property
    def n_answered(self) -> int:
        """Documents with an answer."""
        return sum(bool(answer.any()) for answer in self._answers())

    def _split(self, values: np.ndarray) -> list[np.ndarray]:
        return np.split(values, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []

    @classmethod
    def read(cls, work: Path, index: int) -> Part:
        """Read a part, or raise UserError where its file is damaged."""

        def load(file: Path) -> Part:
            with np.load(file) as arrays:
                read = {name: arrays[name] for name in ("tokens", "lengths", "answers")}
                return cls(**parse_json(arrays["facts"].tobytes()), **read)

        return read_part(part_file(work, index), load)

    def write(self, file: Path) -> None:
        named = json_line({"ids": self.ids, "sources": self.sources, "digest": self.digest})
        arrays = {"tokens": self.tokens, "lengths": self.lengths, "answers": self.answers}
        facts = np.frombuffer(named.encode(), dtype=np.uint8)
        write_whole(file, lambda out: np.savez(out, **arrays, facts=facts))


def part_file(work: Path, index: int) -> Path:
    return work / f"part-{index:05d}.npz"


def read_counts(work: Path) -> Counts | None:
    """Return what reading counted, or None where it has not come to its end."""
    file = work / "corpus.json"
    otherwise = f"remove {work}, and give the command again"
    return read_object(file, Counts, otherwise) if file.is_file() else None


@dataclass(frozen=True)
class Corpus:
    """Where documents come from (see `read_documents`), and how they become parts."""

    path: str | None
    fields: list[str] | None
    split: str
    subset: str | None
    max_documents: int | None
    max_document_bytes: int
    max_files: int
    held_out_share: float
    part_documents: int
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int  # of the target

    def documents(self, skipped: Skipped) -> Iterator[Document]:
        source = self.path, self.fields, self.split, self.subset, skipped, self.max_document_bytes, self.max_files
        return islice(read_documents(*source, tokenizer=self.tokenizer), self.max_documents)

    def estimate(self, n_bytes: int) -> tuple[int, float]:
        """Estimate from the beginning of a corpus of so many bytes its tokens that are not held out.

        Returns:
            These tokens, and the tokens of a document on average.
        """
        sample = list(islice(self.documents(Skipped(quiet=True)), SAMPLE_DOCUMENTS))
        if not sample:
            raise UserError(f"corpus={self.path or 'stdlib'} has no document with text; give another corpus")
        document_bytes = sum(len(document.content()) for document in sample) / len(sample)
        if self.max_documents is not None:
            n_bytes = min(n_bytes, document_bytes * self.max_documents)
        cut = [document.text[:SAMPLE_CHARACTERS] for document in sample]
        n_tokens = sum(map(len, self.tokenizer(cut, **TOKENS_ONLY)["input_ids"]))
        tokens_per_byte = n_tokens / sum(len(text.encode()) for text in cut)
        return int(n_bytes * tokens_per_byte * (1 - self.held_out_share)), document_bytes * tokens_per_byte

    def write_parts(self, work: Path, n_bytes: int | None, before_write: Callable[[Part, Counts], None]) -> Counts:
        """Read the corpus, of n_bytes if known, to its end and write the parts that the work folder lacks.

        `before_write` is called with each part and what was counted before it. UserError is raised where the corpus
        has changed since parts were written.
        """
        counts, skipped, seen = Counts(), Skipped(), set()
        before = read_counts(work)
        changed = UserError(f"the corpus is no longer what this build began with; remove {work} to begin anew")
        with token_progress("tokenise", n_bytes if self.max_documents is None else None) as advance:
            for batch in self._batches(skipped):
                file, digest = part_file(work, counts.parts), _digest(batch)
                new = self._new_documents(batch, seen, counts)
                if file.is_file():
                    part = Part.read(work, counts.parts)
                    if part.digest != digest:
                        raise changed
                else:
                    part = self.tokenised(new, digest)
                    before_write(part, counts)
                    part.write(file)
                counts.parts += 1
                counts.read += len(batch)
                counts.empty += len(new) - len(part.ids)
                counts.documents += len(part.ids)
                counts.tokens += len(part.tokens)
                counts.with_answer += part.n_answered
                advance(sum(len(document.content()) for document in batch), len(part.tokens))
        counts.not_utf8, counts.not_utf8_files = len(skipped.not_utf8), skipped.not_utf8
        counts.empty += skipped.empty
        counts.without_assistant = skipped.without_assistant
        if part_file(work, counts.parts).is_file() or before not in (None, counts):
            raise changed
        write_json(work / "corpus.json", counts)
        return counts

    def _batches(self, skipped: Skipped) -> Iterator[list[Document]]:
        """Yield the documents that are read for each part."""
        batch: list[Document] = []
        n_characters = 0
        for document in self.documents(skipped):
            batch.append(document)
            n_characters += len(document.text) + (0 if document.tokens is None else len(document.tokens))
            if len(batch) == self.part_documents or n_characters >= PART_CHARACTERS:
                yield batch
                batch, n_characters = [], 0
        if batch:
            yield batch

    def _new_documents(self, batch: list[Document], seen: set[bytes], counts: Counts) -> list[Document]:
        """Return what is neither held out nor known already."""
        new = []
        for document in batch:
            key = hashlib.sha256(document.content()).digest()[:16]
            if document.is_held_out(self.held_out_share):
                counts.held_out += 1
            elif key in seen:
                counts.duplicates += 1
            else:
                seen.add(key)
                new.append(document)
        return new

    def tokenised(self, documents: list[Document], digest: str) -> Part:
        """Return a part of these documents, without those that the tokenizer normalises away."""
        found = zip(documents, token_documents(documents, self.tokenizer), strict=True)
        kept = [(document, as_tokens) for document, as_tokens in found if len(as_tokens.tokens)]
        for name, row in ((as_tokens.id, as_tokens.tokens) for _, as_tokens in kept):
            if len(row) >= MAX_SHARD_TOKENS:
                raise UserError(f"{name} has {len(row)} tokens, a shard {MAX_SHARD_TOKENS - 1}; split the document")
            if row.max() >= self.vocab_size:
                raise UserError(
                    f"the tokenizer gives token {row.max()} in {name}, but the target knows {self.vocab_size}; "
                    "give a target whose tokenizer is its own"
                )
        dtype = token_dtype(self.vocab_size)
        masks = [np.zeros(len(d.tokens), bool) if d.is_response is None else d.is_response for _, d in kept]
        return Part(
            ids=[document.id for document, _ in kept],
            sources=[document.source for document, _ in kept],
            digest=digest,
            tokens=np.concatenate([np.zeros(0, dtype), *(d.tokens.astype(dtype) for _, d in kept)]),
            lengths=np.array([len(d.tokens) for _, d in kept], np.int64),
            answers=np.packbits(np.concatenate([np.zeros(0, bool), *masks])),
        )


def _digest(batch: list[Document]) -> str:
    digest = hashlib.sha256()
    for document in batch:
        for encoded in (document.id.encode(), document.source.encode(), document.content()):
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()
