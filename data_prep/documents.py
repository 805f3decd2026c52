"""The documents of a datastore in the work folder of a build (pipeline.py): read, scored, chosen, and written.

    part-*, corpus.json    the documents as tokens (tokenise.py)
    score-00000.npy        [documents of the part] float64 perplexities (select.py)
    store/                 what becomes the datastore (docs/data.md)

Parts and scores do not depend on what is chosen from them, so that another `keep` uses them again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from lightning import Fabric

from data_prep.pipeline import Build, check_disk
from data_prep.progress import Advance
from data_prep.select import Scoring, Selection, draw_histogram, perplexities, quantiles, rounded, select
from data_prep.tokenise import Corpus, Counts, Part, read_part
from spectrain.decoding.errors import UserError
from spectrain.decoding.target import TargetModel
from spectrain.retrieval.datastore import Manifest, bytes_a_token, write_manifest, write_shard
from spectrain.retrieval.suffix_array import token_dtype
from spectrain.stores.texts import corpus_bytes, is_remote

log = logging.getLogger(__name__)

DOCUMENTS, HISTOGRAM = "documents.jsonl", "perplexity.png"


@dataclass(frozen=True)
class DocumentParts:
    """The documents that a datastore is chosen from."""

    build: Build
    corpus: Corpus
    selection: Selection
    scored: bool  # whether perplexities are computed
    shard_tokens: int

    def read(self, identity: dict) -> Counts:
        """Begin or resume the build, and write the parts that are missing. Rank zero alone calls it.

        A dataset of the hub that was read to its end is not streamed again.

        Raises:
            UserError: the corpus is empty, has changed, or is malformed; the work folder belongs to another build; or
                the disk is too small.
        """
        work, n_bytes = self.build.work, corpus_bytes(self.corpus.path)

        def begin() -> Counts | None:
            if n_bytes is not None:  # else it is not known beforehand, and the disk is checked before every part
                n_tokens, document_tokens = self.corpus.estimate(n_bytes)
                done = sum(file.stat().st_size for file in work.glob("part-*.npz"))
                parts = max(0, n_tokens * token_dtype(self.corpus.vocab_size).itemsize - done)
                check_disk(self.build.out, parts + self.store_bytes(n_tokens, document_tokens))
            return self.corpus.read_counts(work)

        counts = self.build.start(identity, begin)
        if counts is None or not is_remote(self.corpus.path):
            with self.build.cleared_if_nothing_begun():
                counts = self.corpus.write_parts(work, n_bytes, self._check_disk)
        if not counts.documents:
            self.build.clear()
            raise UserError(
                f"no document is left to build from ({counts.read} read, {counts.held_out} held out); use a larger "
                "corpus or a smaller corpus.held_out_share"
            )
        return counts

    def _check_disk(self, part: Part, before: Counts) -> None:
        n_documents, n_tokens = before.documents + len(part.ids), before.tokens + len(part.tokens)
        store_bytes = self.store_bytes(n_tokens, n_tokens / max(1, n_documents))
        check_disk(self.build.out, part.tokens.nbytes + store_bytes)

    def store_bytes(self, n_tokens: int, document_tokens: float) -> int:
        """Of a store that is chosen from so many tokens, in documents of so many tokens each on average."""
        keep, vocab_size = self.selection.keep, self.corpus.vocab_size
        if isinstance(keep, float):
            kept = n_tokens * keep
        else:
            kept = n_tokens if keep is None else min(n_tokens, keep * document_tokens)
        kept = min(kept, self.selection.keep_tokens or kept)
        return int(kept * bytes_a_token(vocab_size) + (kept // self.shard_tokens + 1) * 8 * (vocab_size + 2))

    def score_file(self, index: int) -> Path:
        return self.build.work / f"score-{index:05d}.npy"

    def score(self, fabric: Fabric, n_parts: int, target: TargetModel, scoring: Scoring) -> None:
        """Compute the perplexities of the parts that have none yet. All ranks call it together.

        Raises:
            UserError: a perplexity is no number.
        """
        todo = fabric.broadcast([index for index in range(n_parts) if not self.score_file(index).is_file()])
        if len(todo) < n_parts:
            log.info("%d of %d parts are scored already", n_parts - len(todo), n_parts)
        sizes = {index: int(read_part(self.build.work, index).lengths.sum()) for index in todo}

        def work(parts: Sequence[int], advance: Advance) -> None:
            for part, file in ((read_part(self.build.work, index), self.score_file(index)) for index in parts):
                scores = perplexities(target, part.documents(), scoring, advance)
                bad = np.flatnonzero(np.isnan(scores))
                if len(bad):
                    raise UserError(
                        f"the target's perplexity of {part.ids[bad[0]]} is no number; give target.dtype=float32"
                    )
                if self.build.writes(fabric):
                    temporary = file.with_suffix(".tmp")
                    with temporary.open("wb") as out:
                        np.save(out, scores)
                    temporary.rename(file)

        self.build.work_through(fabric, "score", todo, sizes, work)

    def write_store(self, counts: Counts, manifest: Callable[..., Manifest]) -> None:
        """Choose documents, write the store and put it in its place. Rank zero alone calls it.

        Args:
            counts: what reading counted.
            manifest: makes the manifest of its documents, tokens, shards and `build`.

        Raises:
            UserError: nothing would be kept, a part or a score is damaged, or the disk is too small.
        """
        ids, by_part = [], []
        for part in map(partial(read_part, self.build.work), range(counts.parts)):
            ids += part.ids
            by_part.append(part.lengths)
        lengths, vocab_size = np.concatenate(by_part), self.corpus.vocab_size
        scores = self._scores(counts.parts) if self.scored else None
        kept = select(self.selection, ids, lengths, scores)
        check_disk(self.build.out, int((lengths[kept] + 1).sum()) * bytes_a_token(vocab_size))
        store, shards = self.build.new_store(), []
        store.mkdir()
        for index, documents in enumerate(self._shards(counts.parts, kept)):
            shards.append(write_shard(store, index, documents, vocab_size))
            log.info("wrote shard %d: %d tokens", index + 1, shards[-1].tokens)
        with (store / DOCUMENTS).open("w", encoding="utf-8") as rows:
            for i in np.flatnonzero(kept):
                perplexity = None if scores is None else rounded(scores[i])
                rows.write(json.dumps({"id": ids[i], "tokens": int(lengths[i]), "perplexity": perplexity}) + "\n")
        chosen = {
            "scored": len(ids) if self.scored else 0,
            "kept": int(kept.sum()),
            "dropped": int((~kept).sum()),
            "tokens_kept": int(lengths[kept].sum()),
            "tokens_dropped": int(lengths[~kept].sum()),
        }
        known = dataclasses.asdict(counts)
        read = {name: known[name] for name in known.keys() - {"parts", "documents", "tokens"}}
        facts = {"config": self.build.config, "counts": read | chosen}
        if scores is not None:
            draw_histogram(store / HISTOGRAM, scores, kept, self.selection.by_perplexity)
            facts["perplexity"] = {"kept": quantiles(scores[kept]), "dropped": quantiles(scores[~kept])}
        write_manifest(
            store, manifest(documents=chosen["kept"], tokens=chosen["tokens_kept"], shards=shards, build=facts)
        )
        self.build.publish()

    def _scores(self, n_parts: int) -> np.ndarray:
        """[documents] float64."""
        scores = []
        for file in map(self.score_file, range(n_parts)):
            try:
                scores.append(np.load(file))
            except (OSError, ValueError, EOFError) as error:
                raise UserError(
                    f"{file} is damaged ({type(error).__name__}); remove it and give the command again"
                ) from error
        return np.concatenate(scores)

    def _shards(self, n_parts: int, kept: np.ndarray) -> Iterator[list[np.ndarray]]:
        """The kept documents in the corpus's order, as many to a shard as fit; a longer one has a shard of its own."""
        shard, n_tokens, is_kept = [], 0, iter(kept)
        for index in range(n_parts):
            for document in read_part(self.build.work, index).documents():
                if not next(is_kept):
                    continue
                if shard and n_tokens + len(document) + 1 > self.shard_tokens:
                    yield shard
                    shard, n_tokens = [], 0
                shard.append(document.copy())  # a view would hold its whole part in memory
                n_tokens += len(document) + 1
        if shard:
            yield shard
