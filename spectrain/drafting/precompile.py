"""Compile what is called between steps. `compiled.begin` runs this in another process at the very first start."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from spectrain.drafting.model_candidates import next_read
from spectrain.drafting.ranking import Ranking
from spectrain.kernels import top_tokens
from spectrain.retrieval.continuation_tree import ContinuationTrie
from spectrain.retrieval.fusion import RetrievalOptions, Retriever
from spectrain.retrieval.suffix_array import build_suffix_array, first_token_bounds, next_pairs, token_dtype

V = 3  # of a small vocabulary, whose tokens have two bytes


def lookups() -> None:
    """Look something up in a datastore of one shard, and in a text."""
    tokens = np.array([1, 2, 1, 2, V], dtype=token_dtype(V))
    suffixes = build_suffix_array(tokens)
    index = tokens, suffixes, first_token_bounds(tokens, V), next_pairs(tokens, suffixes)
    for array in index:
        array.setflags(write=False)  # as those of mapped files
    store = SimpleNamespace(tokens=(tokens,), index=tuple((array,) for array in index))
    Retriever(store, RetrievalOptions(min_suffix=1, max_suffix=8, branch_tokens=4)).draft([1, 2], 8, 4)
    ContinuationTrie([1, 2], 4, 4)


def trees() -> None:
    """Choose among the candidates of a tree, as a lookup or a draft model gives them."""
    drafts, sizes, ranking = np.zeros((1, 4, 2), dtype=np.int64), np.array([2]), Ranking([0.4], most_nodes=2)
    ranking.begin_rows(1)
    ranking.trees(drafts, sizes)
    ranking.end([[0, 0]])
    likely, none = ranking.likely(drafts, sizes), np.zeros(0, dtype=np.int64)
    next_read(likely, likely[:, 2:], drafts, (1, 2), none, 1, np.empty((1, 1), dtype=np.int64))
    top_tokens(torch.zeros(1, 1, V), torch.ones(1), 1)


if __name__ == "__main__":
    lookups()
    trees()
