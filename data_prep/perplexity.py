"""Perplexity of documents under the target: exp(-mean log p) over their tokens (SPECTRA; methods.md, section 7).

A document longer than the window is read by a sliding one: each token is scored once, and but for the first window
with at least window_tokens - stride_tokens tokens before it. Windows of equal length share a batch; they are padded on
the right, which a causal forward does not see.

Letters: B rows, T tokens of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spectrain.decoding.errors import UserError, check_whole
from spectrain.decoding.target import TargetModel

LOGITS_BYTES = 2**29  # of a batch, as float32, unless a single row has more
MAX_PADDING = 1 / 16  # of a row, in batches that are large enough
BUSY_PART = 8  # a batch of 1 / 8 of the budget is
CHUNK_LOGITS = {"cpu": 2**21, "cuda": 2**27}  # float32 values at once: few enough for caches, enough for all cores


@dataclass(frozen=True)
class Scoring:
    """How documents are read."""

    window_tokens: int
    stride_tokens: int
    batch_tokens: int  # padding included; one row at least
    bos_id: int | None = None  # put in front of each document; without, its first token is not scored

    @classmethod
    def of(
        cls, target: TargetModel, window_tokens: int | None, stride_tokens: int | None, batch_tokens: int
    ) -> Scoring:
        """Options for a target; None takes min(its context, 1024) as the window and half of it as the stride.

        Raises:
            UserError: a value is out of its range.
        """
        window_tokens = min(target.max_positions, 1024) if window_tokens is None else window_tokens
        check_whole("window_tokens", window_tokens, 2)
        if window_tokens > target.max_positions:
            raise UserError(
                f"window_tokens={window_tokens} is longer than the target's context of {target.max_positions}; lower it"
            )
        stride_tokens = window_tokens // 2 if stride_tokens is None else stride_tokens
        check_whole("stride_tokens", stride_tokens, 1)
        if stride_tokens >= window_tokens:
            raise UserError(
                f"stride_tokens={stride_tokens} must be below window_tokens={window_tokens}, or a window's first token "
                "has none before it"
            )
        check_whole("batch_tokens", batch_tokens, 1)
        return cls(window_tokens, stride_tokens, batch_tokens, target.tokenizer.bos_token_id)


@dataclass(frozen=True)
class Window:
    """A piece of a document, as positions of its text (which begins with BOS where there is one)."""

    document: int
    start: int
    stop: int
    scored_from: int  # start < scored_from < stop

    @property
    def row_tokens(self) -> int:
        """What the target reads: the last token is only predicted."""
        return self.stop - self.start - 1


def windows_of(document: int, n_tokens: int, window_tokens: int, stride_tokens: int) -> Iterator[Window]:
    """The windows of a text of n_tokens, BOS included; none where it has no token to score."""
    if n_tokens < 2:
        return
    start, scored_from = 0, 1
    while True:
        stop = min(start + window_tokens, n_tokens)
        yield Window(document, start, stop, scored_from)
        if stop == n_tokens:
            return
        start, scored_from = start + stride_tokens, stop


@torch.inference_mode()
def perplexities(
    target: TargetModel,
    documents: Sequence[np.ndarray],
    scoring: Scoring,
    on_batch: Callable[[int], None] = lambda n_tokens: None,
) -> np.ndarray:
    """Perplexity of each document, infinity where it has no token to score.

    Args:
        target: whose law is asked.
        documents: token ids of each, without BOS.
        scoring: windows and batches.
        on_batch: called after each batch with the tokens that it scored.

    Returns:
        [documents] float64.
    """
    texts = [_with_bos(document, scoring.bos_id) for document in documents]
    windows = [
        window
        for i, text in enumerate(texts)
        for window in windows_of(i, len(text), scoring.window_tokens, scoring.stride_tokens)
    ]
    sums: list[Tensor] = []
    order: list[int] = []
    for batch in length_buckets([w.row_tokens for w in windows], batch_tokens(scoring.batch_tokens, target.vocab_size)):
        rows = [windows[i] for i in batch]
        sums.append(_log_likelihoods(target, texts, rows))
        order += batch
        on_batch(sum(w.stop - w.scored_from for w in rows))
    log_likelihood = np.zeros(len(texts))
    by_window = np.zeros(len(windows))
    if order:
        by_window[order] = torch.cat(sums).cpu().numpy()  # the one wait for the device
    np.add.at(log_likelihood, [w.document for w in windows], by_window)  # in the windows' order, whatever the batches
    scored = np.array([len(document) - (scoring.bos_id is None) for document in documents])
    with np.errstate(over="ignore"):
        mean = np.where(scored > 0, -log_likelihood / np.maximum(scored, 1), np.inf)
        return np.exp(mean)


def _with_bos(document: np.ndarray, bos_id: int | None) -> np.ndarray:
    text = np.asarray(document, dtype=np.int64)
    return text if bos_id is None else np.concatenate([[bos_id], text])


def batch_tokens(wanted: int, vocab_size: int) -> int:
    """Tokens of a batch, bounded by the memory of its logits."""
    return max(1, min(wanted, LOGITS_BYTES // (4 * vocab_size)))


def length_buckets(lengths: Sequence[int], budget_tokens: int) -> Iterator[list[int]]:
    """Indices in batches of at most budget_tokens with padding, longest rows first; a longer row stands alone.

    A batch ends early before a row that would be more than a sixteenth padding, unless the batch is still so small that
    it would not keep the device busy.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        full = max(1, budget_tokens // longest)
        busy = max(1, full // BUSY_PART)
        stop = start + 1
        while stop < min(start + full, len(order)):
            if stop - start >= busy and lengths[order[stop]] < longest * (1 - MAX_PADDING):
                break
            stop += 1
        yield order[start:stop]
        start = stop


def _log_likelihoods(target: TargetModel, texts: Sequence[np.ndarray], rows: Sequence[Window]) -> Tensor:
    """Sum of log p over each row's scored tokens: [B] float64."""
    n_rows, n_tokens = len(rows), max(w.row_tokens for w in rows)
    tokens = np.zeros((n_rows, n_tokens + 1), dtype=np.int64)
    scored = np.zeros((n_rows, n_tokens), dtype=bool)
    for row, window in enumerate(rows):
        tokens[row, : window.stop - window.start] = texts[window.document][window.start : window.stop]
        scored[row, window.scored_from - window.start - 1 : window.row_tokens] = True
    device_tokens = torch.from_numpy(tokens).to(target.device)
    logits = target.forward(device_tokens[:, :-1]).logits
    log_p = token_log_probs(logits, device_tokens[:, 1:])
    return torch.where(torch.from_numpy(scored).to(log_p.device), log_p, 0.0).sum(dim=1, dtype=torch.float64)


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log p of each token, in float32, a chunk of positions at a time.

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
