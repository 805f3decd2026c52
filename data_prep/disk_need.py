"""How much disk a build takes, so that too small a disk is said before the work and not after it."""

from __future__ import annotations

import shutil
from itertools import islice
from pathlib import Path

from data_prep.store_job import Job
from data_prep.token_parts import TOKENS_ONLY
from spectrain.decoding.errors import UserError
from spectrain.retrieval.datastore import bytes_a_token
from spectrain.retrieval.suffix_array import token_dtype
from spectrain.stores.texts import Skipped

SAMPLE_DOCUMENTS, SAMPLE_CHARACTERS = 64, 4096  # tokenised to learn how many tokens a byte of text makes
MARGIN = 1.1  # of the disk need


def check_start(job: Job, n_bytes: int | None) -> None:
    """Raises UserError where the corpus has no document, or the disk has no room for what it becomes.

    Args:
        job: what is to be built.
        n_bytes: of the corpus; None: not known beforehand, and the disk is checked before every part instead.
    """
    if n_bytes is None:
        return
    sample = [document.text for document in islice(job.corpus.documents(Skipped(quiet=True)), SAMPLE_DOCUMENTS)]
    if not sample:
        raise UserError(f"corpus={job.corpus.path or 'stdlib'} has no document with text; give another corpus")
    document_bytes = sum(len(text.encode()) for text in sample) / len(sample)
    if job.corpus.max_documents is not None:
        n_bytes = min(n_bytes, document_bytes * job.corpus.max_documents)
    cut = [text[:SAMPLE_CHARACTERS] for text in sample]
    encoded = job.reading.tokenizer(cut, **TOKENS_ONLY)["input_ids"]
    tokens_a_byte = sum(map(len, encoded)) / sum(len(text.encode()) for text in cut)
    n_tokens = int(n_bytes * tokens_a_byte * (1 - job.reading.held_out_share))
    done = sum(file.stat().st_size for file in job.work.glob("part-*.npz"))
    parts = max(0, n_tokens * token_dtype(job.reading.vocab_size).itemsize - done)
    check_disk(job.out, parts + store_bytes(job, n_tokens, document_bytes * tokens_a_byte))


def check_disk(out: Path, need_bytes: int, less: str = "lower keep or keep_tokens") -> None:
    """Raises UserError where the disk of `out` has no room for so many more bytes; `less` says how to need fewer."""
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < need_bytes * MARGIN:
        raise UserError(
            f"{folder} has {readable(free)} free, but this build needs about {readable(need_bytes * MARGIN)}; free "
            f"some, {less}, or give out=<folder on another disk>"
        )


def store_bytes(job: Job, n_tokens: int, document_tokens: float) -> int:
    """Of a store that is chosen from so many tokens, in documents of so many tokens each on average."""
    keep, vocab_size = job.selection.keep, job.reading.vocab_size
    if isinstance(keep, float):
        kept = n_tokens * keep
    else:
        kept = n_tokens if keep is None else min(n_tokens, keep * document_tokens)
    kept = min(kept, job.selection.keep_tokens or kept)
    shards = kept // job.shard_tokens + 1
    return int(kept * bytes_a_token(vocab_size) + shards * 8 * (vocab_size + 2))


def readable(n_bytes: float) -> str:
    """12.3 MB"""
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.1f} {unit}" if unit != "B" else f"{n_bytes:.0f} B"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"
