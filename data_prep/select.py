"""Which documents a datastore keeps: those of lowest perplexity (SPECTRA), or a random choice.

The perplexity of a document under the target is exp(-mean log p) over its tokens, or over those of its answers. The
target computes it, or a server of the target does, or it stands in a file. A document longer than the window is read by
a sliding one: each token is scored once, and except in the first window with at least window_tokens - stride_tokens
tokens before it. Windows of about equal length share a batch; they are padded on the right, which a causal forward does
not see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow
import torch
from pyarrow import json, parquet
from torch import Tensor

from data_prep.openai_client import CompletionServer
from data_prep.progress import Advance
from spectrain.data.texts import unit_hash
from spectrain.errors import UserError
from spectrain.target.loading import first_line
from spectrain.target.masks import length_buckets
from spectrain.target.target import TargetModel

ROUNDING = 1e-6  # below the least perplexity or nll
LOGITS_BYTES = 2**29  # of a batch, as float32, unless a single row has more
CHUNK_LOGITS = {"cpu": 2**21, "cuda": 2**27}  # float32 values at once: few enough for caches, enough for all cores
QUANTILES = {"lowest": 0.0, "q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95, "highest": 1.0}


@dataclass(frozen=True)
class Scoring:
    """How documents are read."""

    window_tokens: int
    stride_tokens: int
    batch_tokens: int  # padding included; one row at least
    bos_id: int | None = None  # put in front of each document; without it, its first token is not scored

    @classmethod
    def of(
        cls, target: TargetModel, window_tokens: int | None, stride_tokens: int | None, batch_tokens: int
    ) -> Scoring:
        """Check options for a target; None takes min(its context, 1024) as the window and half of it as the stride."""
        window_tokens = min(target.max_positions, 1024) if window_tokens is None else window_tokens
        if window_tokens > target.max_positions:
            raise UserError(
                f"window_tokens={window_tokens} is above the target's {target.max_positions} tokens; lower it"
            )
        stride_tokens = window_tokens // 2 if stride_tokens is None else stride_tokens
        if stride_tokens >= window_tokens:
            raise UserError(f"stride_tokens={stride_tokens} must be below window_tokens={window_tokens}")
        return cls(window_tokens, stride_tokens, batch_tokens, target.tokenizer.bos_token_id)


class Window(NamedTuple):
    """A piece of a document, as positions of its text (which begins with BOS where there is one)."""

    document: int
    start: int
    stop: int  # start < scored_from < stop; the last token is only predicted
    scored_from: int


def windows_of(document: int, n_tokens: int, window_tokens: int, stride_tokens: int) -> Iterator[Window]:
    """Yield the windows of a text of n_tokens, BOS included; none where it has no token to score."""
    start, scored_from = 0, 1
    while scored_from < n_tokens:
        stop = min(start + window_tokens, n_tokens)
        yield Window(document, start, stop, scored_from)
        start, scored_from = start + stride_tokens, stop


@torch.inference_mode()
def perplexities(
    target: TargetModel,
    documents: Sequence[np.ndarray],
    scoring: Scoring,
    advance: Advance = lambda n_tokens: None,
    counted: Sequence[np.ndarray] | None = None,
    server: CompletionServer | None = None,
) -> np.ndarray:
    """Compute the perplexity of each document (token ids without BOS), infinity where it has no token to score.

    Args:
        target: scores the documents.
        documents: [n] token ids of each.
        scoring: how they are read.
        advance: called after each batch with the tokens that it scored.
        counted: [n] bool of each document, the tokens whose mean is taken; None: all.
        server: scores the windows in the target's place.

    Returns:
        [documents] float64.
    """
    bos = np.array([] if scoring.bos_id is None else [scoring.bos_id], dtype=np.int64)
    texts = [np.concatenate([bos, document]) for document in documents]
    if counted is None:
        counts = [np.ones(len(text), dtype=bool) for text in texts]
    else:
        counts = [np.concatenate([np.zeros(len(bos), dtype=bool), tokens]) for tokens in counted]
    size = scoring.window_tokens, scoring.stride_tokens
    windows = [window for i, text in enumerate(texts) for window in windows_of(i, len(text), *size)]
    by_window = np.zeros(len(windows))
    if server is not None:

        def keep(i: int, log_p: np.ndarray) -> None:
            document, start, stop, scored_from = windows[i]
            by_window[i] = log_p[scored_from - start - 1 :][counts[document][scored_from:stop]].sum()
            advance(stop - scored_from)

        server.score((texts[w.document][w.start : w.stop].tolist() for w in windows), keep)
    else:
        sums: list[Tensor] = []
        order: list[int] = []
        budget_tokens = batch_tokens(scoring.batch_tokens, target.vocab_size)
        for batch in length_buckets([w.stop - w.start - 1 for w in windows], budget_tokens):
            rows = [windows[i] for i in batch]
            sums.append(_log_likelihoods(target, texts, counts, rows))
            order += batch
            advance(sum(w.stop - w.scored_from for w in rows))
        if order:
            by_window[order] = torch.cat(sums).cpu().numpy()  # the one wait for the device
    log_likelihood = np.zeros(len(texts))
    np.add.at(log_likelihood, [w.document for w in windows], by_window)  # in the windows' order, whatever the batches
    scored = np.array([int(tokens[1:].sum()) for tokens in counts])
    with np.errstate(over="ignore"):
        mean = np.where(scored > 0, -log_likelihood / np.maximum(scored, 1), np.inf)
        return np.exp(mean)


def batch_tokens(wanted: int, vocab_size: int) -> int:
    """Return the tokens of a batch, bounded by the memory of its logits."""
    return max(1, min(wanted, LOGITS_BYTES // (4 * vocab_size)))


def _log_likelihoods(
    target: TargetModel, texts: Sequence[np.ndarray], counts: Sequence[np.ndarray], rows: Sequence[Window]
) -> Tensor:
    """Sum log p over the tokens that each row scores and that count: [B] float64."""
    n_rows, n_tokens = len(rows), max(w.stop - w.start for w in rows) - 1
    tokens = np.zeros((n_rows, n_tokens + 1), dtype=np.int64)
    scored = np.zeros((n_rows, n_tokens), dtype=bool)
    for row, window in enumerate(rows):
        tokens[row, : window.stop - window.start] = texts[window.document][window.start : window.stop]
        own = counts[window.document][window.scored_from : window.stop]
        scored[row, window.scored_from - window.start - 1 : window.stop - window.start - 1] = own
    device_tokens = torch.from_numpy(tokens).to(target.device)
    logits = target.forward(device_tokens[:, :-1]).logits
    log_p = token_log_probs(logits, device_tokens[:, 1:])
    return torch.where(torch.from_numpy(scored).to(log_p.device), log_p, 0.0).sum(dim=1, dtype=torch.float64)


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Compute log p of each token, in float32, a chunk of positions at a time.

    Args:
        logits: [B, T, V] in the model's dtype.
        tokens: [B, T] int64.

    Returns:
        [B, T] float32.
    """
    flat, wanted = logits.flatten(0, 1), tokens.flatten()[:, None].to(logits.device)
    chunk = max(1, CHUNK_LOGITS.get(logits.device.type, 2**24) // flat.shape[1])
    log_p = torch.empty(len(flat), dtype=torch.float32, device=logits.device)
    for start in range(0, len(flat), chunk):
        piece = flat[start : start + chunk].float()
        chosen = piece.gather(1, wanted[start : start + chunk])[:, 0]
        log_p[start : start + chunk] = chosen - piece.logsumexp(dim=1)
    return log_p.view(tokens.shape)


def read_scores(file: str) -> dict[str, float]:
    """Read perplexities by id, from `perplexity` or `nll`, the mean -log p; null: infinity, as in documents.jsonl."""
    form = "give a .jsonl or .parquet file of id and perplexity, or nll"
    try:
        table = (parquet.read_table if Path(file).suffix == ".parquet" else json.read_json)(file)
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"scores={file} cannot be read ({first_line(error)}); {form}") from error
    found = set(table.column_names)
    if "id" not in found or not found & {"perplexity", "nll"}:
        raise UserError(f"scores={file} has the columns {', '.join(table.column_names)}; {form}")
    column, least = ("perplexity", 1) if "perplexity" in found else ("nll", 0)
    scores = {}
    for name, value in zip(table["id"].to_pylist(), table[column].to_pylist(), strict=True):
        value = math.inf if value is None else value
        if type(value) not in (int, float) or not value >= least - ROUNDING:
            raise UserError(f"scores={file} has {column}={value} for {name}; give a number of {least} or more")
        if str(name) in scores:
            raise UserError(f"scores={file} has two rows for {name}; give one for each document")
        scores[str(name)] = value if least else math.exp(value) if value < 700 else math.inf
    return scores


@dataclass(frozen=True)
class Selection:
    """The documents that are kept; all given limits hold together."""

    keep: int | float | None = 0.5  # documents: a count, or a share of them below 1
    max_perplexity: float | None = None
    keep_tokens: int | None = None  # most tokens in all
    by_perplexity: bool = True  # False: by a hash of seed and id
    seed: int = 0

    def __post_init__(self):
        if self.max_perplexity is not None and not self.by_perplexity:
            raise UserError(f"max_perplexity={self.max_perplexity} needs perplexity_filter=true; remove one")

    @property
    def keeps_all(self) -> bool:
        keeps_every_document = self.keep is None or (isinstance(self.keep, float) and self.keep == 1.0)
        return keeps_every_document and self.max_perplexity is None and self.keep_tokens is None

    @property
    def needs_perplexities(self) -> bool:
        return not self.keeps_all and self.by_perplexity


def select(
    selection: Selection, ids: Sequence[str], lengths: np.ndarray, perplexities: np.ndarray | None = None
) -> np.ndarray:
    """Choose the best documents; of equal ones, the earlier in the corpus.

    Args:
        selection: what is kept.
        ids: of the documents.
        lengths: [documents] in tokens.
        perplexities: [documents], needed where the selection goes by them.

    Returns:
        [documents] bool: which are kept.

    Raises:
        UserError: nothing would be kept.
    """
    if selection.keeps_all:
        return np.ones(len(ids), dtype=bool)
    scores = perplexities
    if not selection.by_perplexity:
        scores = np.array([unit_hash(f"keep:{selection.seed}:{name}") for name in ids])
    best = np.argsort(scores, kind="stable")
    if isinstance(selection.keep, float):
        best = best[: max(1, round(selection.keep * len(best)))]
    elif selection.keep is not None:
        best = best[: selection.keep]
    if selection.max_perplexity is not None:
        if perplexities.min() > selection.max_perplexity:
            raise UserError(
                f"max_perplexity={selection.max_perplexity} keeps no document, the lowest has "
                f"{perplexities.min():.4g}; raise it"
            )
        best = best[perplexities[best] <= selection.max_perplexity]
    if selection.keep_tokens is not None:
        best = best[np.cumsum(lengths[best]) <= selection.keep_tokens]
    if not len(best):
        raise UserError(f"keep_tokens={selection.keep_tokens} keeps nothing, the first document is longer; raise it")
    kept = np.zeros(len(ids), dtype=bool)
    kept[best] = True
    return kept


def rounded(value: float) -> float | None:
    """Round a perplexity to six digits; None for infinity, which JSON does not have."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def quantiles(perplexities: np.ndarray) -> dict[str, float | None]:
    """Return quantiles of some documents; none where there is no document."""
    if not len(perplexities):
        return {}
    # "lower" takes a document's own value: nothing lies between a number and infinity.
    values = np.quantile(perplexities, list(QUANTILES.values()), method="lower")
    return dict(zip(QUANTILES, map(rounded, values), strict=True))
