"""Which documents a datastore keeps: the ones that the target finds likeliest, or as many by chance.

SPECTRA keeps the documents of lowest perplexity (methods.md, section 7); the same number drawn by a hash of the
documents' ids is its control.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from spectrain.decoding.errors import UserError, check_whole
from spectrain.stores.texts import unit_hash

KEPT, DROPPED = "#0072b2", "#d55e00"
QUANTILES = {"lowest": 0.0, "q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95, "highest": 1.0}
BINS = 60


@dataclass(frozen=True)
class Selection:
    """What is kept; all given limits hold together.

    Raises:
        UserError: a value is out of its range.
    """

    keep: int | float | None = 0.5  # documents: a count, or a share of them below 1
    max_perplexity: float | None = None
    keep_tokens: int | None = None  # most tokens in all
    by_perplexity: bool = True  # False: by a hash of seed and id
    seed: int = 0

    def __post_init__(self):
        keep, limit = self.keep, self.max_perplexity
        if isinstance(keep, float):
            if not 0 < keep <= 1:
                raise UserError(f"keep={keep} must be a share in (0, 1], a whole number of documents, or null for all")
        elif keep is not None:
            check_whole("keep", keep, 1)
        if self.keep_tokens is not None:
            check_whole("keep_tokens", self.keep_tokens, 1)
        if limit is not None:
            if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 1:
                raise UserError(
                    f"max_perplexity={limit} must be a number of at least 1, the lowest perplexity there is"
                )
            if not self.by_perplexity:
                raise UserError(f"max_perplexity={limit} needs perplexity_filter=true; give one or the other")

    @property
    def keeps_all(self) -> bool:
        whole = self.keep is None or (isinstance(self.keep, float) and self.keep == 1.0)
        return whole and self.max_perplexity is None and self.keep_tokens is None

    @property
    def needs_perplexities(self) -> bool:
        return self.by_perplexity and not self.keeps_all


def select(
    selection: Selection, ids: Sequence[str], lengths: np.ndarray, perplexities: np.ndarray | None
) -> np.ndarray:
    """Which documents are kept: the best, ties by their place in the corpus.

    Args:
        selection: limits.
        ids: of all documents.
        lengths: [documents] tokens of each.
        perplexities: [documents], needed where the selection goes by them.

    Returns:
        [documents] bool.

    Raises:
        UserError: nothing would be kept.
    """
    n_documents = len(ids)
    if selection.keeps_all:
        return np.ones(n_documents, dtype=bool)
    if selection.by_perplexity:
        scores = perplexities
    else:
        scores = np.array([unit_hash(f"keep:{selection.seed}:{name}") for name in ids])
    order = np.argsort(scores, kind="stable")
    if isinstance(selection.keep, float):
        order = order[: max(1, round(selection.keep * n_documents))]
    elif selection.keep is not None:
        order = order[: selection.keep]
    if selection.max_perplexity is not None:
        order = order[scores[order] <= selection.max_perplexity]
        if not len(order):
            raise UserError(
                f"max_perplexity={selection.max_perplexity} keeps none of {n_documents} documents, the lowest is "
                f"{scores.min():.4g}; raise it"
            )
    if selection.keep_tokens is not None:
        total = np.cumsum(lengths[order])
        if total[0] > selection.keep_tokens:
            raise UserError(
                f"keep_tokens={selection.keep_tokens} keeps nothing, the first document has {total[0]} tokens; raise it"
            )
        order = order[total <= selection.keep_tokens]
    kept = np.zeros(n_documents, dtype=bool)
    kept[order] = True
    return kept


def rounded(value: float) -> float | None:
    """Six digits of a perplexity; None for infinity, which JSON does not have."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def quantiles(perplexities: np.ndarray) -> dict[str, float | None]:
    """Of some documents; empty where there are none."""
    if not len(perplexities):
        return {}
    # "lower" takes a document's own value: nothing lies between a number and infinity.
    return {name: rounded(np.quantile(perplexities, q, method="lower")) for name, q in QUANTILES.items()}


def draw_histogram(file: Path, perplexities: np.ndarray, kept: np.ndarray, by_perplexity: bool) -> None:
    """Perplexities of kept and dropped documents, logarithmic, with the median and the cut."""
    finite = np.isfinite(perplexities)
    values = perplexities[finite]
    figure = Figure(figsize=(7.5, 4.0), dpi=130, layout="constrained")
    axes = figure.subplots()
    if len(values):
        low, high = np.log10(values.min()), np.log10(values.max())
        pad = max(0.02 * (high - low), 0.01)
        bins = np.logspace(low - pad, high + pad, min(BINS, max(10, 2 * math.isqrt(len(values)))) + 1)
        groups = [values[kept[finite]], values[~kept[finite]]]
        labels = [f"kept ({kept.sum():,})", f"dropped ({(~kept).sum():,})"]
        shown = [i for i in range(2) if len(groups[i])]
        axes.hist(
            [groups[i] for i in shown],
            bins=bins,
            stacked=True,
            color=[(KEPT, DROPPED)[i] for i in shown],
            label=[labels[i] for i in shown],
        )
        median = np.median(values)
        axes.axvline(median, color="black", linestyle="--", linewidth=1.2, label=f"median {median:,.4g}")
        if by_perplexity and not kept.all() and len(groups[0]):
            cut = groups[0].max()
            axes.axvline(cut, color="#555555", linewidth=1.2, label=f"cut {cut:,.4g}")
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,g}")
        if high - low < 1.5:  # within some two decades the powers of ten alone say too little
            axes.xaxis.set_minor_formatter("{x:,.3g}")
            axes.tick_params(axis="x", which="minor", labelsize=7)
        axes.legend(frameon=False)
    axes.set_xlabel("perplexity under the target (logarithmic)")
    axes.set_ylabel("documents")
    axes.spines[["top", "right"]].set_visible(False)
    n_infinite = len(perplexities) - len(values)
    if n_infinite:
        axes.set_title(f"{n_infinite:,} documents of infinite perplexity are not shown", fontsize=9)
    figure.savefig(file, metadata={"Software": None})  # equal input, equal bytes
