"""Which documents a datastore keeps: those of lowest perplexity (SPECTRA), or a random choice.

The perplexity of a document under the target is exp(-mean log p) over its tokens. The target computes it, or a server
of the target does, or it stands in a file. A document longer than the window is read by a sliding one: each token is
scored once, and except in the first window with at least window_tokens - stride_tokens tokens before it. Windows of
about equal length share a batch; they are padded on the right, which a causal forward does not see.
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
    server: CompletionServer | None = None,
) -> np.ndarray:
    """Compute the perplexity of each document, which is token ids without BOS: [documents] float64.

    It is infinite where there is no token to score. A `server` scores in the target's place. `advance` is called after
    each batch with the tokens that it scored.
    """
    bos = np.array([] if scoring.bos_id is None else [scoring.bos_id], dtype=np.int64)
    texts = [np.concatenate([bos, document]) for document in documents]
    size = scoring.window_tokens, scoring.stride_tokens
    windows = [window for i, text in enumerate(texts) for window in windows_of(i, len(text), *size)]
    by_window = np.zeros(len(windows))
    if server is not None:

        def keep(i: int, log_p: np.ndarray) -> None:
            _, start, stop, scored_from = windows[i]
            by_window[i] = log_p[scored_from - start - 1 :].sum()
            advance(stop - scored_from)

        server.score((texts[w.document][w.start : w.stop].tolist() for w in windows), keep)
    else:
        sums: list[Tensor] = []
        order: list[int] = []
        batch_tokens = max(1, min(scoring.batch_tokens, LOGITS_BYTES // (4 * target.vocab_size)))
        for batch in length_buckets([w.stop - w.start - 1 for w in windows], batch_tokens):
            rows = [windows[i] for i in batch]
            sums.append(_log_likelihoods(target, texts, rows))
            order += batch
            advance(sum(w.stop - w.scored_from for w in rows))
        if order:
            by_window[order] = torch.cat(sums).cpu().numpy()  # the one wait for the device
    log_likelihood = np.zeros(len(texts))
    np.add.at(log_likelihood, [w.document for w in windows], by_window)  # in the windows' order, whatever the batches
    scored = np.array([len(text) - 1 for text in texts])
    with np.errstate(over="ignore"):
        mean = np.where(scored > 0, -log_likelihood / np.maximum(scored, 1), np.inf)
        return np.exp(mean)


def _log_likelihoods(target: TargetModel, texts: Sequence[np.ndarray], rows: Sequence[Window]) -> Tensor:
    """Sum log p over the tokens that each row scores: [B] float64."""
    n_rows, n_tokens = len(rows), max(w.stop - w.start for w in rows) - 1
    tokens = np.zeros((n_rows, n_tokens + 1), dtype=np.int64)
    scored = np.zeros((n_rows, n_tokens), dtype=bool)
    for row, window in enumerate(rows):
        tokens[row, : window.stop - window.start] = texts[window.document][window.start : window.stop]
        scored[row, window.scored_from - window.start - 1 : window.stop - window.start - 1] = True
    device_tokens = torch.from_numpy(tokens).to(target.device)
    logits = target.forward(device_tokens[:, :-1]).logits
    log_p = token_log_probs(logits, device_tokens[:, 1:])
    return torch.where(torch.from_numpy(scored).to(log_p.device), log_p, 0.0).sum(dim=1, dtype=torch.float64)


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Compute log p [B, T] float32 of tokens [B, T] int64 by logits [B, T, V], a chunk of positions at a time."""
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
    """The documents that are kept."""

    keep: int | float | None = 0.5  # documents: a count, or a share of them below 1; None: all
    by_perplexity: bool = True  # False: by a hash of seed and id
    seed: int = 0

    @property
    def keeps_all(self) -> bool:
        return self.keep is None or (isinstance(self.keep, float) and self.keep == 1.0)

    @property
    def needs_perplexities(self) -> bool:
        return not self.keeps_all and self.by_perplexity


def select(selection: Selection, ids: Sequence[str], perplexities: np.ndarray | None = None) -> np.ndarray:
    """Choose the best documents; of equal ones, the earlier in the corpus. Return which are kept, [documents] bool.

    `perplexities` [documents] are needed where the selection goes by them.
    """
    if selection.keeps_all:
        return np.ones(len(ids), dtype=bool)
    if not selection.by_perplexity:
        perplexities = np.array([unit_hash(f"keep:{selection.seed}:{name}") for name in ids])
    n_kept = selection.keep if type(selection.keep) is int else max(1, round(selection.keep * len(ids)))
    kept = np.zeros(len(ids), dtype=bool)
    kept[np.argsort(perplexities, kind="stable")[:n_kept]] = True
    return kept


def rounded(value: float) -> float | None:
    """Round a perplexity to six digits; None for infinity, which JSON does not have."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def median(perplexities: np.ndarray) -> dict[str, float | None]:
    """Return the median of some documents; none where there is no document."""
    # "lower" takes a document's own value: nothing lies between a number and infinity.
    return {"median": rounded(np.quantile(perplexities, 0.5, method="lower"))} if len(perplexities) else {}
