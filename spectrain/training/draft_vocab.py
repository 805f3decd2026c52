"""Which tokens a drafter can draft: the most frequent ones of its training text (FR-Spec, EAGLE-3)."""

from __future__ import annotations

import logging

from torch import Tensor

from spectrain.decoding.errors import UserError
from spectrain.decoding.target import TargetModel
from spectrain.training.data import Rows

AUTO_SHARE = 0.995  # of a text's tokens that "auto" keeps

log = logging.getLogger(__name__)


def drafted_tokens(draft_vocab: int | str | None, rows: Rows, target: TargetModel) -> Tensor | None:
    """The tokens that a drafter can draft, [K] int64 ascending: those that are the most frequent in its training text.

    Args:
        draft_vocab: K, or "auto" for as many as make AUTO_SHARE of the text. None: all tokens, and None is returned.
        rows: for training. Where responses are marked, these count alone.
        target: whose special tokens are always kept.
    """
    if draft_vocab is None:
        return None
    if draft_vocab != "auto" and draft_vocab > target.vocab_size:
        raise UserError(f"draft_vocab={draft_vocab} is more than the target's {target.vocab_size} tokens; lower it")
    counts = rows.token_counts(target.vocab_size)
    n_text, special = int(counts.sum()), set(target.eos_ids)
    if target.tokenizer is not None:
        special |= {*target.tokenizer.all_special_ids, *target.tokenizer.get_added_vocab().values()}
    weights = counts.clone()
    weights[[token for token in special if token < target.vocab_size]] = n_text + 1
    order = weights.argsort(descending=True, stable=True)
    if draft_vocab == "auto":
        shares = counts[order].cumsum(0) / max(1, n_text)
        draft_vocab = min(target.vocab_size, 1 + int((shares < AUTO_SHARE).sum()))
    kept = order[:draft_vocab].sort().values
    share = float(counts[kept].sum()) / max(1, n_text)
    log.info("draft_vocab: %d of %d tokens, %.2f %% of the text", len(kept), target.vocab_size, 100 * share)
    return kept
