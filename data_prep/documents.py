"""The documents of a datastore in the work folder of a build (pipeline.py): read, scored, chosen, and written.

    part-00000-<digest>.parquet    documents as tokens: what is left of some consecutive ones of the corpus
    corpus.json                    what reading counted; written after the last part
    score-00000.npy                [documents of the part] float64 perplexities (select.py)
    store/                         what becomes the datastore (docs/data.md)

A build that was killed while it read goes through the corpus again, but tokenises only what no part has: the digest is
that of the texts that a part was made from. Parts and scores do not depend on what is chosen from them, so that another
`keep` uses them again.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import parquet

from data_prep.openai_client import CompletionServer
from data_prep.pipeline import Build, Parts
from data_prep.progress import Advance, token_progress
from data_prep.select import Scoring, Selection, median, perplexities, rounded, select
from spectrain.config.commands import Datastore
from spectrain.data.chats import Tally
from spectrain.data.packing import Tokeniser
from spectrain.data.row_cache import forbidden_runs
from spectrain.data.texts import CORPUS_ADVICE, Document, corpus_documents
from spectrain.errors import UserError
from spectrain.retrieval.datastore import Manifest, write_manifest, write_shard
from spectrain.retrieval.suffix_array import MAX_SHARD_TOKENS
from spectrain.stores.files import json_line, read_json, write_json, write_whole
from spectrain.stores.rows import list_lengths
from spectrain.target.target import TargetModel

log = logging.getLogger(__name__)

COUNTS, DOCUMENTS = "corpus.json", "documents.jsonl"
PART_COLUMNS = pyarrow.schema({"id": pyarrow.string(), "tokens": pyarrow.list_(pyarrow.int32())})
PART_CHARACTERS = 2**21  # a part also ends here, so that one of long documents is not hours of work


@dataclass
class Counts:
    """Numbers of what a corpus held and of what was left out."""

    read: int = 0  # documents with text
    said: str = ""  # of what kinds these are, and what was left out (`chats.Tally`)
    empty: int = 0  # documents of which the tokenizer leaves nothing
    held_out: int = 0
    duplicates: int = 0


@dataclass(frozen=True)
class DocumentParts(Parts):
    """The documents that a datastore is chosen from, in the parts in which they are scored."""

    identity: dict
    options: Datastore
    selection: Selection
    target: TargetModel
    scoring: Scoring
    scores: dict[str, float] | None  # perplexities by id, of a file
    server: CompletionServer | None  # scores in the target's place
    work: Path  # of the build
    manifest: Callable[..., Manifest]  # makes the manifest of its `documents`, `tokens`, `shards` and `build`

    stage, made_before = "score", "parts are scored"

    @property
    def scored(self) -> bool:
        """Whether perplexities are computed."""
        return self.selection.needs_perplexities and self.scores is None

    @cached_property
    def sizes(self) -> list[int]:
        """Tokens of each part, once all are read; empty where none is scored."""
        return [int(list_lengths(part["tokens"]).sum()) for part in self._parts()] if self.scored else []

    @cached_property
    def tokeniser(self) -> Tokeniser:
        tokenizer = self.target.tokenizer
        return Tokeniser(tokenizer, self.target.eos_ids, forbidden_runs(self.options.corpus, tokenizer))

    def _parts(self) -> Iterator[pyarrow.Table]:
        return map(parquet.read_table, part_files(self.work))

    def missing(self, build: Build) -> list[int]:
        """Read the corpus, unless that is done, and return the parts that have no scores."""
        file = self.work / COUNTS
        if not file.is_file():
            self.read_corpus()
        if not sum(map(len, self._parts())):
            counts = read_json(file)
            build.clear()
            raise UserError(
                f"no document is left to build from ({counts['read']} read, {counts['held_out']} held out); use a "
                "larger corpus or a smaller corpus.held_out_share"
            )
        return [index for index in range(len(self.sizes)) if not score_file(self.work, index).is_file()]

    def read_corpus(self) -> None:
        """Read the corpus and write the parts that the work folder lacks; UserError where it has changed since."""
        counts, seen, n_parts = Counts(), set(), 0
        tally = Tally(self.options.corpus.name, CORPUS_ADVICE)
        changed = UserError(f"the corpus is no longer what this build began with; remove {self.work} to begin anew")
        with token_progress("tokenise", None) as advance:
            for batch in self._batches(tally):
                file = self.work / f"part-{n_parts:05d}-{digest_of(batch)}.parquet"
                new = self._new_documents(batch, seen, counts)
                if not file.is_file():
                    if any(self.work.glob(f"part-{n_parts:05d}-*")):
                        raise changed
                    write_whole(file, partial(parquet.write_table, self.tokenised(new)))
                part = parquet.read_table(file)
                n_parts += 1
                counts.read += len(batch)
                counts.empty += len(new) - len(part)
                advance(int(list_lengths(part["tokens"]).sum()))
        counts.said = tally.say() if tally.kinds or tally.is_remarkable else ""
        for sentence in ([counts.said] if tally.is_remarkable else []) + self.tokeniser.remarks():
            log.info(sentence)
        if len(part_files(self.work)) > n_parts:
            raise changed
        write_json(self.work / COUNTS, counts)

    def _batches(self, tally: Tally) -> Iterator[list[Document]]:
        """Yield the documents that are read for each part."""
        corpus, batch, n_characters = self.options.corpus, [], 0
        documents = corpus_documents(corpus, tally, self.target.tokenizer)
        for document in itertools.islice(documents, corpus.max_documents):
            batch.append(document)
            n_characters += len(document.text) + (0 if document.tokens is None else len(document.tokens))
            if len(batch) == self.options.part_documents or n_characters >= PART_CHARACTERS:
                yield batch
                batch, n_characters = [], 0
        if batch:
            yield batch

    def _new_documents(self, batch: list[Document], seen: set[bytes], counts: Counts) -> list[Document]:
        """Return what is neither held out nor known already."""
        new = []
        for document in batch:
            key = hashlib.sha256(document.content()).digest()[:16]
            if document.is_held_out(self.options.corpus.held_out_share):
                counts.held_out += 1
            elif key in seen:
                counts.duplicates += 1
            else:
                seen.add(key)
                new.append(document)
        return new

    def tokenised(self, documents: list[Document]) -> pyarrow.Table:
        """Return a part of these documents, without those that the tokenizer normalises away."""
        rows, vocab_size = [], self.target.vocab_size
        for found in self.tokeniser.tokens(documents):
            if not len(found.tokens):
                continue
            if len(found.tokens) >= MAX_SHARD_TOKENS:
                raise UserError(f"{found.id} has more tokens than a shard ({MAX_SHARD_TOKENS}); split the document")
            if found.tokens.max() >= vocab_size:
                raise UserError(
                    f"the tokenizer gives token {found.tokens.max()} in {found.id}, but the target knows "
                    f"{vocab_size}; give a target whose tokenizer is its own"
                )
            rows.append((found.id, found.tokens))
        columns = {name: [row[place] for row in rows] for place, name in enumerate(PART_COLUMNS.names)}
        return pyarrow.table(columns, schema=PART_COLUMNS)

    def make(self, build: Build, parts: Sequence[int], advance: Advance) -> None:
        files = part_files(self.work)
        for index in parts:
            part = parquet.read_table(files[index])
            scores = perplexities(self.target, part["tokens"].to_numpy(), self.scoring, advance, self.server)
            if np.isnan(scores).any():
                name = part["id"][int(np.isnan(scores).argmax())]
                raise UserError(f"the perplexity of {name} is no number; give target.dtype=float32")
            if build.writes:
                write_whole(score_file(self.work, index), partial(np.save, arr=scores))

    def write_store(self, build: Build) -> None:
        """Choose documents, write the store and put it in its place."""
        counts, scores = read_json(self.work / COUNTS), None
        facts = [(part["id"].to_pylist(), list_lengths(part["tokens"])) for part in self._parts()]
        ids, n_tokens = (list(itertools.chain.from_iterable(column)) for column in zip(*facts, strict=True))
        n_tokens = np.array(n_tokens, np.int64)
        if self.scores is not None:
            lacking = [name for name in ids if name not in self.scores]
            if lacking:
                few = f"{len(lacking)} of {len(ids)} documents, {lacking[0]} among them; score all of this corpus"
                raise UserError(f"scores={self.options.scores} lacks {few}")
            scores = np.array([self.scores[name] for name in ids])
        elif self.scored:
            scores = np.concatenate([np.load(score_file(self.work, i)) for i in range(len(facts))])
        kept = select(self.selection, ids, scores)
        store, shards, shard_tokens = build.new_store(), [], self.options.shard_tokens or MAX_SHARD_TOKENS
        store.mkdir()
        texts = itertools.compress(
            itertools.chain.from_iterable(part["tokens"].to_numpy() for part in self._parts()), kept
        )
        cuts = shard_cuts(n_tokens[kept], min(shard_tokens, MAX_SHARD_TOKENS))
        for index, shard_lengths in enumerate(np.split(n_tokens[kept], cuts)):
            of_shard = itertools.islice(texts, len(shard_lengths))
            shards.append(write_shard(store, index, of_shard, self.target.vocab_size, shard_lengths))
            log.info("wrote shard %d: %d tokens", index + 1, shards[-1].tokens)
        rows = [
            {
                "id": ids[i],
                "tokens": int(n_tokens[i]),
                "perplexity": None if scores is None else rounded(scores[i]),
            }
            for i in np.flatnonzero(kept)
        ]
        write_whole(store / DOCUMENTS, "".join(map(json_line, rows)))
        chosen = {
            "scored": 0 if scores is None else len(ids),
            "kept": int(kept.sum()),
            "dropped": int((~kept).sum()),
            "tokens_kept": int(n_tokens[kept].sum()),
            "tokens_dropped": int(n_tokens[~kept].sum()),
        }
        made = {"config": build.config, "counts": counts | chosen}
        if scores is not None:
            made["perplexity"] = {"kept": median(scores[kept]), "dropped": median(scores[~kept])}
        write_manifest(
            store, self.manifest(documents=chosen["kept"], tokens=chosen["tokens_kept"], shards=shards, build=made)
        )
        build.publish()


def part_files(work: Path) -> list[Path]:
    return sorted(work.glob("part-*"))


def score_file(work: Path, index: int) -> Path:
    return work / f"score-{index:05d}.npy"


def digest_of(batch: list[Document]) -> str:
    """Return 16 hex digits over all documents."""
    digest = hashlib.sha256()
    for document in batch:
        for encoded in (document.id.encode(), document.content()):
            digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()[:16]


def shard_cuts(n_tokens: np.ndarray, shard_tokens: int) -> list[int]:
    """Return the numbers of the documents that begin the second shard, the third one, and so on.

    A shard holds as many documents as fit into `shard_tokens` with their separators. A document that is longer than
    that has a shard of its own.
    """
    cuts, filled = [], 0
    for number, length in enumerate(n_tokens):
        if filled and filled + length + 1 > shard_tokens:
            cuts.append(number)
            filled = 0
        filled += length + 1
    return cuts
