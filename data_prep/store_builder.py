"""The stages of a datastore: read and tokenise, score, choose, write (docs/datastore.md).

Every stage leaves its parts in a work folder beside the store (work_folder.py), each renamed into place when it is
whole: the same command goes on from there after any interruption, and the store comes out byte for byte the same.

    part-*, corpus.json     documents as tokens (token_parts.py)
    score-00000.npy         [documents of the part] float64 perplexities
    store/                  what becomes the datastore
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from pathlib import Path

import numpy as np
from lightning import Fabric

from data_prep.disk_need import check_disk, check_start, store_bytes
from data_prep.perplexity import perplexities
from data_prep.progress import TokenProgress
from data_prep.selection import draw_histogram, quantiles, rounded, select
from data_prep.store_job import Job
from data_prep.token_parts import Counts, read_counts, read_part, write_parts
from spectrain.decoding.errors import UserError
from spectrain.decoding.target import TargetModel
from spectrain.retrieval.datastore import Manifest, Shard, bytes_a_token, write_manifest, write_shard
from spectrain.stores import work_folder
from spectrain.stores.texts import Skipped, corpus_bytes, is_remote

log = logging.getLogger(__name__)

DOCUMENTS, HISTOGRAM = "documents.jsonl", "perplexity.png"


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
    identity = _identity(job)
    work_folder.resume(job.work, identity, fresh)
    counts = read_counts(job.work)
    if counts is None or not is_remote(job.corpus.path):
        n_bytes = corpus_bytes(job.corpus.path)
        check_start(job, n_bytes)
        work_folder.begin(job.work, identity, fresh)
        try:
            counts = _read_parts(job, n_bytes)
        except BaseException:
            if not any(job.work.glob("part-*.npz")):
                work_folder.empty(job.work)  # nothing was begun
            raise
    if not counts.documents:
        work_folder.empty(job.work)
        raise UserError(
            f"no document is left to build from ({counts.read} read, {counts.held_out} held out); use a larger corpus "
            "or a smaller corpus.held_out_share"
        )
    return counts


def _read_parts(job: Job, n_bytes: int | None) -> Counts:
    def before_write(part_bytes: int, n_documents: int, n_tokens: int) -> None:
        check_disk(job.out, part_bytes + store_bytes(job, n_tokens, n_tokens / max(1, n_documents)))

    skipped = Skipped()
    total = n_bytes if job.corpus.max_documents is None else None
    with TokenProgress("tokenise", total) as progress:
        return write_parts(job.work, job.corpus.documents(skipped), job.reading, skipped, progress, before_write)


def _identity(job: Job) -> dict:
    """What parts and scores depend on."""
    return {
        "config": json.loads(json.dumps(work_folder.scored_config(job.config))),
        "target_fingerprint": job.target_fingerprint,
        "tokenizer_fingerprint": job.tokenizer_fingerprint,
    }


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
    """Chooses documents, writes the store in the work folder and renames it to its place."""
    ids, by_part = [], []
    for part in (read_part(job.work, index) for index in range(counts.parts)):
        ids += part.ids
        by_part.append(part.lengths)
    lengths = np.concatenate(by_part)
    scores = _read_scores(job, counts) if job.scores else None
    kept = select(job.selection, ids, lengths, scores)
    check_disk(job.out, int((lengths[kept] + 1).sum()) * bytes_a_token(job.reading.vocab_size))
    store = job.work / work_folder.STORE
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
    work_folder.place(job.work, job.out, job.config)


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
            waiting.append(document.copy())  # a view would hold its whole part in memory
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
