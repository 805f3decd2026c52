"""Which tokens a drafter can draft: the most frequent ones of its training text (FR-Spec, EAGLE-3)."""

from __future__ import annotations

import logging

from torch import Tensor

from spectrain.decoding.target import TargetModel
from spectrain.errors import UserError
from spectrain.training.data import Rows

AUTO_SHARE = 0.995  # estimated share of new text that "auto" covers

log = logging.getLogger(__name__)


def drafted_tokens(draft_vocab: int | str | None, rows: Rows, target: TargetModel) -> Tensor | None:
    """The tokens [K] int64 that a drafter can draft: special ones, then the most frequent ones of its training text.

    Args:
        draft_vocab: K, or "auto" for as many as make AUTO_SHARE of new text. None: all tokens, and None is returned.
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
    shares = expected_shares(counts)[order].cumsum(0)
    if draft_vocab == "auto":
        draft_vocab = min(target.vocab_size, 1 + int((shares < AUTO_SHARE).sum()))
    kept = order[:draft_vocab]
    of_text, of_new = float(counts[kept].sum()) / max(1, n_text), float(shares[len(kept) - 1])
    about = f"{100 * of_text:.2f} % of the text, about {100 * of_new:.2f} % of new text like it"
    log.info("draft_vocab: %d of %d tokens, %s", len(kept), target.vocab_size, about)
    return kept


def expected_shares(counts: Tensor) -> Tensor:
    """Estimate the share of each token [V] float64 in new text of the kind that was counted, [V] int64.

    A sample lacks some tokens that new text has, so seen tokens are rarer in new text than in the sample. Each seen
    count is lowered by the discount that Ney, Essen and Kneser (1994) estimate from the numbers of tokens that occur
    once and twice. Unseen tokens share that mass equally.
    """
    once, twice, is_seen = int((counts == 1).sum()), int((counts == 2).sum()), counts > 0
    n_seen, n_unseen = int(is_seen.sum()), int((~is_seen).sum())
    discount = once / max(1, once + 2 * twice) if n_unseen else 0.0
    unseen = discount * n_seen / max(1, n_unseen)
    return (counts.double() - discount).where(is_seen, unseen) / max(1, int(counts.sum()))
