"""What a method asks of a datastore: the likeliest continuations of a context, as a small tree or a chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spectrain.decoding.errors import UserError, check_whole
from spectrain.retrieval.continuation_tree import COUNT, gather
from spectrain.retrieval.datastore import Datastore
from spectrain.retrieval.fusion import Queue, fuse

# What `fuse` is given for a source that there is not.
NO_TOKENS, NO_PROBS = np.zeros(0, dtype=np.int64), np.zeros(0)
NO_TEXT = np.zeros((0, 4), dtype=np.int32), np.zeros((0, 2), dtype=np.int32), np.zeros(1, dtype=np.int32)


@dataclass(frozen=True)
class RetrievalOptions:
    """What is looked up, and how much of what is found is read.

    Raises:
        UserError: an option is out of range.
    """

    min_suffix: int  # tokens of the shortest suffix of the context that is looked for
    max_suffix: int  # and of the longest
    branch_tokens: int  # longest continuation
    max_matches: int = 100  # continuations read
    min_matches: int = 1  # fewer matches than this, and shorter suffixes are looked for, too
    first_matches: bool = False  # True: the first ones of the sorted range, as REST; False: at regular intervals of it

    def __post_init__(self) -> None:
        for name in ("min_suffix", "max_suffix", "branch_tokens", "max_matches", "min_matches"):
            check_whole(name, getattr(self, name), 1)
        if self.max_suffix < self.min_suffix:
            raise UserError(
                f"max_suffix={self.max_suffix} must be at least min_suffix={self.min_suffix}; raise max_suffix"
            )


class Retriever:
    """Looks contexts up in a store. One is used by one thread at a time: it owns the memory it works in.

    Args:
        store: an open datastore.
        options: see there.
    """

    def __init__(self, store: Datastore, options: RetrievalOptions):
        self.store, self.options = store, options
        self.tree = np.zeros((1 + options.max_matches * options.branch_tokens, 4), dtype=np.int32)
        self._lengths = options.min_suffix, options.max_suffix
        self._matches = options.max_matches, options.min_matches, options.first_matches
        self._ranges = np.zeros((len(store.tokens), 2), dtype=np.int64)
        self._queue = Queue(len(self.tree))
        self._even = np.ones(options.branch_tokens + 1)
        self._no_others = (*NO_TEXT, self._even[None]), (NO_TOKENS, NO_PROBS, self._even)

    def gather(self, context: np.ndarray, branch_tokens: int | None = None) -> int:
        """Leaves what follows the context's suffixes in `tree`.

        Args:
            context: [n] int64, its last token the last one known.
            branch_tokens: longest continuation; None: that of the options.

        Returns:
            Length of the longest suffix found; 0, and a root of count 0, where none was.
        """
        branch_tokens = branch_tokens or self.options.branch_tokens
        return int(
            gather(self.store.index, context, self._lengths, self._matches, branch_tokens, self.tree, self._ranges)
        )

    def draft(
        self, context: Sequence[int], max_nodes: int, max_depth: int, max_leaves: int | None = None
    ) -> tuple[list[int], list[int]]:
        """The continuations seen most often.

        Args:
            context: tokens; only the last ones are read.
            max_nodes: of the tree, its root (the context's last token) included.
            max_depth: tokens of the longest continuation.
            max_leaves: branches; None: no limit.

        Returns:
            Tokens and parents of the nodes, the root first, parents before children.
        """
        tail = np.asarray(context[-self.options.max_suffix :], dtype=np.int64)
        self.gather(tail, min(max_depth, self.options.branch_tokens) or 1)
        if self.tree[0, COUNT] == 0:
            return [int(tail[-1])], [-1]
        draft = np.empty((3, max_nodes), dtype=np.int64)
        limits = max_nodes, max_depth, max_leaves or max_nodes
        n_nodes, _ = fuse(self._queue.arrays, (self.tree, self._even), *self._no_others, limits, tail[-1], draft)
        return draft[0, :n_nodes].tolist(), draft[1, :n_nodes].tolist()

    def chain(self, context: Sequence[int], limit: int) -> list[int]:
        """The continuation seen most often, up to `limit` tokens; [] where no suffix is known."""
        return self.draft(context, limit + 1, limit, max_leaves=1)[0][1:]
