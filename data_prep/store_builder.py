"""The stages of a datastore: read and tokenise, score, choose, write (docs/datastore.md).

Every stage leaves its parts in a work folder beside the store, `.<name>.partial`, each renamed into place when it is
whole: the same command goes on from there after any interruption, and the store comes out byte for byte the same. The
store itself appears by one rename, after which the work folder goes.

    work.json           the config, target and tokenizer that the build began with
    part-*, corpus.json     documents as tokens (token_parts.py)
    score-00000.npy     [documents of the part] float64 perplexities
    store/              what becomes the datastore
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from lightning import Fabric

from data_prep.corpus import Document, Skipped, corpus_bytes, is_remote, read_documents
from data_prep.perplexity import Scoring, perplexities
from data_prep.progress import TokenProgress
from data_prep.selection import Selection, draw_histogram, quantiles, rounded, select
from data_prep.token_parts import TOKENS_ONLY, Counts, Reading, read_counts, read_part, write_parts
from spectrain.decoding.target import TargetModel
from spectrain.errors import UserError
from spectrain.retrieval.datastore import MANIFEST, Manifest, Shard, bytes_a_token, write_manifest, write_shard
from spectrain.retrieval.suffix_array import MAX_SHARD_TOKENS, token_dtype

log = logging.getLogger(__name__)

DOCUMENTS, HISTOGRAM = "documents.jsonl", "perplexity.png"
SAMPLE_DOCUMENTS, SAMPLE_CHARACTERS = 64, 4096  # tokenised to learn how many tokens a byte of text makes
MARGIN = 1.1  # of the disk need


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

    @property
    def work(self) -> Path:
        return self.out.with_name(f".{self.out.name}.partial")


def build(job: Job, target: TargetModel, fabric: Fabric, fresh: bool = False) -> Path:
    """Builds the datastore, or goes on with it; returns its folder. All ranks call it together.

    Raises:
        UserError: the corpus is empty, has changed, or is malformed; the work folder belongs to another build; nothing
            would be kept; or the disk is too small.
    """
    if fabric.is_global_zero:
        counts = read_corpus(job, fresh)
    fabric.barrier()
    if job.scores:
        score(job, target, fabric)
        fabric.barrier()
    if fabric.is_global_zero:
        write(job, counts)
    fabric.barrier()
    return job.out


def read_corpus(job: Job, fresh: bool) -> Counts:
    """The first stage. A hub dataset that was read to its end is not streamed again."""
    if fresh and job.work.exists():
        shutil.rmtree(job.work)
    _check_same_build(job)
    counts = read_counts(job.work)
    if counts is None or not is_remote(job.corpus.path):
        n_bytes = corpus_bytes(job.corpus.path)
        check_start(job, n_bytes)
        _begin(job)

        def before_write(part_bytes: int, n_tokens: int) -> None:
            check_disk(job, part_bytes + _store_bytes(job, n_tokens))

        skipped = Skipped()
        total = n_bytes if job.corpus.max_documents is None else None
        with TokenProgress("tokenise", total) as progress:
            documents = job.corpus.documents(skipped)
            counts = write_parts(job.work, documents, job.reading, skipped, progress, before_write)
    if not counts.documents:
        shutil.rmtree(job.work)
        raise UserError(
            f"no document is left to build from ({counts.read} read, {counts.held_out} held out); use a larger corpus "
            "or a smaller corpus.held_out_share"
        )
    return counts


def _check_same_build(job: Job) -> None:
    file = job.work / "work.json"
    if not file.is_file():
        return
    known = json.loads(file.read_text())
    for name, value in _identity(job).items():
        if known.get(name) != value:
            what = f"another {name.replace('_', ' ')}"
            if name == "config":
                before = known.get("config", {})
                differing = sorted(key for key in before.keys() | value.keys() if before.get(key) != value.get(key))
                what = f"another config (differs in {', '.join(differing)})"
            raise UserError(f"{job.work} holds a build with {what}; remove it, give another out, or fresh=true")


def _identity(job: Job) -> dict:
    return {
        "config": json.loads(json.dumps(job.config)),
        "target_fingerprint": job.target_fingerprint,
        "tokenizer_fingerprint": job.tokenizer_fingerprint,
    }


def _begin(job: Job) -> None:
    job.work.mkdir(parents=True, exist_ok=True)
    temporary = job.work / "work.tmp"
    temporary.write_text(json.dumps(_identity(job), indent=2) + "\n")
    temporary.rename(job.work / "work.json")


def check_start(job: Job, n_bytes: int | None) -> None:
    """Raises UserError where the corpus has no document, or the disk has no room for what it becomes."""
    if n_bytes is None:
        return  # not known beforehand: checked before every part
    first = islice(job.corpus.documents(Skipped(quiet=True)), SAMPLE_DOCUMENTS)
    sample = [document.text[:SAMPLE_CHARACTERS] for document in first]
    if not sample:
        raise UserError(f"corpus={job.corpus.path or 'stdlib'} has no document with text; give another corpus")
    if job.corpus.max_documents is not None:
        return  # nor is this
    encoded = job.reading.tokenizer(sample, **TOKENS_ONLY)["input_ids"]
    tokens_a_byte = sum(map(len, encoded)) / sum(len(text.encode("utf-8", "surrogatepass")) for text in sample)
    n_tokens = int(n_bytes * tokens_a_byte * (1 - job.reading.held_out_share))
    done = sum(file.stat().st_size for file in job.work.glob("part-*.npz"))
    check_disk(job, max(0, n_tokens * _token_bytes(job) - done) + _store_bytes(job, n_tokens))


def check_disk(job: Job, need_bytes: int) -> None:
    """Raises UserError where the disk of `out` has no room for so many more bytes."""
    folder = next(parent for parent in job.out.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < need_bytes * MARGIN:
        raise UserError(
            f"{folder} has {readable(free)} free, but this build needs about {readable(need_bytes * MARGIN)}; free "
            "some, lower keep or keep_tokens, or give out=<folder on another disk>"
        )


def _token_bytes(job: Job) -> int:
    return token_dtype(job.reading.vocab_size).itemsize


def _store_bytes(job: Job, n_tokens: int) -> int:
    """Of a store that is chosen from so many tokens."""
    selection = job.selection
    kept = n_tokens * selection.keep if isinstance(selection.keep, float) else n_tokens
    kept = min(kept, selection.keep_tokens or kept)
    shards = kept // job.shard_tokens + 1
    return int(kept * bytes_a_token(job.reading.vocab_size) + shards * 8 * (job.reading.vocab_size + 2))


def readable(n_bytes: float) -> str:
    """12.3 MB"""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.1f} {unit}" if unit != "B" else f"{n_bytes:.0f} B"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"


def score(job: Job, target: TargetModel, fabric: Fabric) -> None:
    """Perplexities of the parts that have none yet; ranks take turns at them."""
    n_parts = read_counts(job.work).parts
    todo = fabric.broadcast([i for i in range(n_parts) if not _score_file(job, i).is_file()])
    mine = todo[fabric.global_rank :: fabric.world_size] if job.ranks_share else todo
    if len(todo) < n_parts and fabric.is_global_zero:
        log.info("%d of %d parts are scored already", n_parts - len(todo), n_parts)
    total = sum(int(read_part(job.work, i).lengths.sum()) for i in mine) if fabric.is_global_zero else None
    with TokenProgress("score", total, shown=fabric.is_global_zero) as progress:
        for index in mine:
            part = read_part(job.work, index)
            scores = perplexities(target, part.documents(), job.scoring, lambda n: progress.advance(n, n))
            bad = np.flatnonzero(np.isnan(scores))
            if len(bad):
                raise UserError(
                    f"the target's perplexity of {part.ids[bad[0]]} is no number; give target.dtype=float32"
                )
            if job.ranks_share or fabric.is_global_zero:
                temporary = _score_file(job, index).with_suffix(".tmp")
                with temporary.open("wb") as file:
                    np.save(file, scores)
                temporary.rename(_score_file(job, index))


def _score_file(job: Job, index: int) -> Path:
    return job.work / f"score-{index:05d}.npy"


def _read_scores(job: Job, counts: Counts) -> np.ndarray:
    """[documents] float64."""
    scores = []
    for index in range(counts.parts):
        file = _score_file(job, index)
        try:
            scores.append(np.load(file))
        except (OSError, ValueError, EOFError) as error:
            raise UserError(
                f"{file} is damaged ({type(error).__name__}); remove it and give the command again"
            ) from error
    return np.concatenate(scores)


def write(job: Job, counts: Counts) -> None:
    """Chooses documents, writes the store beside its place and renames it there."""
    ids, by_part = [], []
    for part in (read_part(job.work, index) for index in range(counts.parts)):
        ids += part.ids
        by_part.append(part.lengths)
    lengths = np.concatenate(by_part)
    scores = _read_scores(job, counts) if job.scores else None
    kept = select(job.selection, ids, lengths, scores)
    check_disk(job, int((lengths[kept] + 1).sum()) * bytes_a_token(job.reading.vocab_size))
    store = job.work / "store"
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir()
    shards = _write_shards(job, counts, kept, store)
    with (store / DOCUMENTS).open("w", encoding="utf-8") as rows:
        for i in np.flatnonzero(kept):
            perplexity = None if scores is None else rounded(scores[i])
            row = {"id": ids[i], "tokens": int(lengths[i]), "perplexity": perplexity}
            rows.write(json.dumps(row) + "\n")
    if scores is not None:
        draw_histogram(store / HISTOGRAM, scores, kept, job.selection.by_perplexity)
    facts = {"config": job.config, "counts": _final_counts(counts, lengths, kept, scores)}
    if scores is not None:
        facts["perplexity"] = {"kept": quantiles(scores[kept]), "dropped": quantiles(scores[~kept])}
    manifest = Manifest(
        target=job.target,
        target_fingerprint=job.target_fingerprint,
        tokenizer_fingerprint=job.tokenizer_fingerprint,
        vocab_size=job.reading.vocab_size,
        documents=int(kept.sum()),
        tokens=int(lengths[kept].sum()),
        shards=shards,
        build=facts,
    )
    write_manifest(store, manifest)
    if job.out.exists():
        shutil.rmtree(job.out)
    store.rename(job.out)
    shutil.rmtree(job.work)


def _write_shards(job: Job, counts: Counts, kept: np.ndarray, store: Path) -> list[Shard]:
    """The kept documents in the corpus's order, so many to a shard as fit; a longer one has a shard of its own."""
    shards: list[Shard] = []
    waiting: list[np.ndarray] = []
    n_waiting = first = 0

    def flush() -> None:
        if waiting:
            shards.append(write_shard(store, len(shards), waiting, job.reading.vocab_size))
            log.info("wrote shard %d: %d tokens", len(shards), shards[-1].tokens)
            waiting.clear()

    for index in range(counts.parts):
        documents = read_part(job.work, index).documents()
        for document, keep in zip(documents, kept[first : first + len(documents)], strict=True):
            if not keep:
                continue
            if n_waiting + len(document) + 1 > job.shard_tokens:
                flush()
                n_waiting = 0
            waiting.append(document)
            n_waiting += len(document) + 1
        first += len(documents)
    flush()
    return shards


def _final_counts(counts: Counts, lengths: np.ndarray, kept: np.ndarray, scores: np.ndarray | None) -> dict:
    known = dataclasses.asdict(counts)
    for name in ("parts", "documents", "tokens"):
        known.pop(name)
    return known | {
        "scored": 0 if scores is None else len(scores),
        "kept": int(kept.sum()),
        "dropped": int((~kept).sum()),
        "tokens_kept": int(lengths[kept].sum()),
        "tokens_dropped": int(lengths[~kept].sum()),
    }


def is_finished(out: Path) -> bool:
    """Whether a datastore stands there; the manifest is written last."""
    return (out / MANIFEST).is_file()
