"""The documents of a datastore in the work folder of a build (pipeline.py): read, scored, chosen, and written.

    part-*, corpus.json    the documents as tokens (tokenise.py)
    score-00000.npy        [documents of the part] float64 perplexities (select.py)
    store/                 what becomes the datastore (docs/data.md)

Parts and scores do not depend on what is chosen from them, so that another `keep` uses them again.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from data_prep.pipeline import Build, Parts, check_disk, read_part
from data_prep.progress import Advance
from data_prep.select import Scoring, Selection, draw_histogram, perplexities, quantiles, rounded, select
from data_prep.tokenise import Corpus, Counts, Part, read_counts
from spectrain.decoding.target import TargetModel
from spectrain.errors import UserError
from spectrain.retrieval.datastore import Manifest, bytes_a_token, write_manifest, write_shard
from spectrain.retrieval.suffix_array import token_dtype
from spectrain.stores.folder import json_line
from spectrain.stores.texts import corpus_bytes, is_remote
from spectrain.stores.writing import write_whole

log = logging.getLogger(__name__)

DOCUMENTS, HISTOGRAM = "documents.jsonl", "perplexity.png"


@dataclass(frozen=True)
class DocumentParts(Parts):
    """The documents that a datastore is chosen from, in the parts in which they are scored."""

    identity: dict
    corpus: Corpus
    selection: Selection
    scored: bool  # whether perplexities are computed
    score_on: str  # "response": perplexities count what the target or the assistant wrote; "all": every token
    shard_tokens: int  # of a shard of the datastore, at most
    target: TargetModel
    scoring: Scoring
    work: Path  # of the build
    manifest: Callable[..., Manifest]  # makes the manifest of its `documents`, `tokens`, `shards` and `build`

    stage, made_before = "score", "parts are scored"

    @cached_property
    def sizes(self) -> list[int]:
        """Tokens of each part, once all are read; empty where none is scored."""
        return [int(part.lengths.sum()) for part in self._parts()] if self.scored else []

    def _parts(self) -> Iterator[Part]:
        return (Part.read(self.work, index) for index in range(read_counts(self.work).parts))

    def missing(self, build: Build) -> list[int]:
        """Read the corpus, write its parts as far as they are missing, and return those that have no scores.

        A dataset of the hub that was read to its end is not streamed again.
        """
        n_bytes, vocab_size = corpus_bytes(self.corpus.path, self.corpus.max_files), self.corpus.vocab_size
        need_bytes = partial(store_bytes, self.selection, vocab_size, self.shard_tokens)
        if n_bytes is not None:  # else it is not known beforehand, and the disk is checked before every part
            n_tokens, document_tokens = self.corpus.estimate(n_bytes)
            done = sum(file.stat().st_size for file in self.work.glob("part-*.npz"))
            parts = max(0, n_tokens * token_dtype(vocab_size).itemsize - done)
            check_disk(build.out, parts + need_bytes(n_tokens, document_tokens))

        def check_next(part: Part, before: Counts) -> None:
            n_documents, n_tokens = before.documents + len(part.ids), before.tokens + len(part.tokens)
            check_disk(build.out, part.tokens.nbytes + need_bytes(n_tokens, n_tokens / max(1, n_documents)))

        counts = read_counts(self.work)
        if counts is None or not is_remote(self.corpus.path):
            counts = self.corpus.write_parts(self.work, n_bytes, check_next)
        if not counts.documents:
            build.clear()
            raise UserError(
                f"no document is left to build from ({counts.read} read, {counts.held_out} held out); use a larger "
                "corpus or a smaller corpus.held_out_share"
            )
        if self.scored and self.score_on == "response" and not counts.with_answer:
            build.clear()
            raise UserError(
                f"score_on=response needs answers, but none of the {counts.documents} documents is a conversation or a "
                "response; give such a corpus, or score_on=all"
            )
        return [index for index in range(len(self.sizes)) if not score_file(self.work, index).is_file()]

    def make(self, build: Build, parts: Sequence[int], advance: Advance) -> None:
        for index in parts:
            part = Part.read(self.work, index)
            counted = part.counted_answers() if self.score_on == "response" else None
            scores = perplexities(self.target, part.documents(), self.scoring, advance, counted)
            bad = np.flatnonzero(np.isnan(scores))
            if len(bad):
                raise UserError(f"the perplexity of {part.ids[bad[0]]} is no number; give target.dtype=float32")
            if build.writes:
                write_whole(score_file(self.work, index), partial(np.save, arr=scores))

    def write_store(self, build: Build) -> None:
        """Choose documents, write the store and put it in its place."""
        counts, vocab_size, scores = read_counts(self.work), self.corpus.vocab_size, None
        documents = [(part.ids, part.lengths) for part in self._parts()]
        ids, lengths = [name for names, _ in documents for name in names], np.concatenate([n for _, n in documents])
        if self.scored:
            files = [score_file(self.work, index) for index in range(counts.parts)]
            scores = np.concatenate([read_part(file, np.load) for file in files])
        sources = [source for part in self._parts() for source in part.sources]
        kept = select(self.selection, ids, lengths, scores)
        check_disk(build.out, int((lengths[kept] + 1).sum()) * bytes_a_token(vocab_size))
        store, shards = build.new_store(), []
        store.mkdir()
        documents, cuts = self._documents(kept), shard_cuts(lengths[kept], self.shard_tokens)
        for index, shard_lengths in enumerate(np.split(lengths[kept], cuts)):
            of_shard = itertools.islice(documents, len(shard_lengths))
            shards.append(write_shard(store, index, of_shard, vocab_size, shard_lengths))
            log.info("wrote shard %d: %d tokens", index + 1, shards[-1].tokens)
        write_whole(store / DOCUMENTS, lambda out: out.writelines(document_lines(ids, sources, lengths, scores, kept)))
        chosen = {
            "scored": len(ids) if self.scored else 0,
            "kept": int(kept.sum()),
            "dropped": int((~kept).sum()),
            "tokens_kept": int(lengths[kept].sum()),
            "tokens_dropped": int(lengths[~kept].sum()),
        }
        known = dataclasses.asdict(counts)
        read = {name: known[name] for name in known.keys() - {"parts", "documents", "tokens"}}
        facts = {"config": build.config, "counts": read | chosen}
        if scores is not None:
            draw_histogram(store / HISTOGRAM, scores, kept, self.selection.by_perplexity)
            facts["perplexity"] = {"kept": quantiles(scores[kept]), "dropped": quantiles(scores[~kept])}
        write_manifest(
            store, self.manifest(documents=chosen["kept"], tokens=chosen["tokens_kept"], shards=shards, build=facts)
        )
        build.publish()

    def _documents(self, kept: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the kept documents in the corpus's order."""
        return itertools.compress(itertools.chain.from_iterable(part.documents() for part in self._parts()), kept)


def document_lines(
    ids: Sequence[str],
    sources: Sequence[str],
    lengths: np.ndarray,
    scores: np.ndarray | None,
    kept: np.ndarray,
) -> Iterator[bytes]:
    """Yield the line of each kept document in `documents.jsonl`."""
    for i in np.flatnonzero(kept):
        perplexity = None if scores is None else rounded(scores[i])
        facts = {"id": ids[i], "source": sources[i], "tokens": int(lengths[i]), "perplexity": perplexity}
        yield json_line(facts).encode()


def shard_cuts(lengths: np.ndarray, shard_tokens: int) -> list[int]:
    """Return the numbers of the documents that begin the second shard, the third one, and so on.

    A shard holds as many documents as fit into `shard_tokens` with their separators. A document that is longer than
    that has a shard of its own.
    """
    cuts, n_tokens = [], 0
    for number, length in enumerate(lengths):
        if n_tokens and n_tokens + length + 1 > shard_tokens:
            cuts.append(number)
            n_tokens = 0
        n_tokens += length + 1
    return cuts


def score_file(work: Path, index: int) -> Path:
    return work / f"score-{index:05d}.npy"


def store_bytes(selection: Selection, vocab_size: int, shard_tokens: int, n_tokens: int, document_tokens: float) -> int:
    """Return the size of a store that is chosen from n_tokens, in documents of document_tokens on average."""
    keep = selection.keep
    if isinstance(keep, float):
        kept = n_tokens * keep
    else:
        kept = n_tokens if keep is None else min(n_tokens, keep * document_tokens)
    kept = min(kept, selection.keep_tokens or kept)
    return int(kept * bytes_a_token(vocab_size) + (kept // shard_tokens + 1) * 8 * (vocab_size + 2))
