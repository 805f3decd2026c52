"""Select the likeliest continuations from several trees of them as one draft tree (SSSD, Algorithm 1).

The pseudo-probability of a continuation is how often it was seen, divided by how often its prefix was seen. Times a
discount for source, prefix length and depth, it is the node's priority. A queue over the nodes of all trees moves the
likeliest node to the draft tree until that is full. A node's children enter the queue after it, so parents come before
children. Equal priorities are ordered by smaller depth, earlier source, smaller token, and older parent.

`fuse` does this for any sources, `Retriever` for a datastore alone.

Differs from the paper: Algorithm 1 prints the root's own probability for the first level (`node.prob`), by mistake;
here it is the child's at every level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from spectrain.compiled import compiled, inner, n_below
from spectrain.errors import UserError
from spectrain.retrieval.candidate_tree import CandidateTree
from spectrain.retrieval.continuation_tree import CHILD, COUNT, SIBLING, TOKEN, find_child, gather
from spectrain.retrieval.datastore import Datastore
from spectrain.target.tree import ROOT_PARENT, Source

OF_DATASTORE = 0  # origins in the order of ties: the datastore, prefixes 1..P of the input, the logits
DATASTORE, INPUT, LOGITS, ROOT = (int(s) for s in (Source.DATASTORE, Source.INPUT, Source.LOGITS, Source.ROOT))

# Kinds of nodes, for who learns how often each is right: by where a node was found, the share of its prefix's
# continuations that it has, and how often its prefix was seen.
SHARES = np.array([0.05, 0.15, 0.35, 0.6, 0.9])
SEEN = np.array([2, 4, 10])
STORE_PREFIXES = np.array([2, 3, 5, 9])  # tokens of the suffix that was found in the datastore
N_EACH = (len(SHARES) + 1) * (len(SEEN) + 1)
_OF_SHARE = (0.04, 0.10, 0.22, 0.35, 0.5, 0.6)
_OF_SEEN = (0.6, 0.8, 1.0, 1.1)
_EACH = [share * seen for share in _OF_SHARE for seen in _OF_SEEN]
_OF_STORE_PREFIX = (0.6, 0.8, 1.0, 1.15, 1.25)

# Arguments of `fuse` for a source that is left out.
NO_STORE = np.zeros((1, 4), dtype=np.int32)
NO_TEXT = np.zeros((1, 4), dtype=np.int32), np.zeros((0, 2), dtype=np.int32), np.zeros(1, dtype=np.int32)
NO_TOKENS, NO_PROBS = np.zeros(0, dtype=np.int64), np.zeros(0)
LOGITS_PRIORS = [0.3 / (1 + rank) for rank in range(N_EACH)]  # of candidates of the last logits, by rank


def store_priors(factors: np.ndarray | None = None) -> list[float]:
    """Chances of a datastore's nodes, by kind; `factors` [S] are those of `calibrate` for prefixes of 1..S tokens."""
    strengths = list(_OF_STORE_PREFIX)
    if factors is not None:
        groups = np.searchsorted(STORE_PREFIXES, np.arange(1, len(factors) + 1), side="right")
        for group in set(groups.tolist()):
            strengths[group] = float(factors[groups == group].mean())
    return [of * one for of in strengths for one in _EACH]


def input_priors(max_prefix: int, factors: np.ndarray | None = None) -> list[float]:
    """Chances of nodes found in the row's own text by prefixes of 1..max_prefix tokens, by kind; see `store_priors`."""
    strengths = [min(1.3, 0.5 + 0.25 * prefix) for prefix in range(1, max_prefix + 1)]
    return [of * one for of in (strengths if factors is None else factors.tolist()) for one in _EACH]


@inner
def _kind(group, share, seen):
    of_seen = n_below(SEEN, seen + 1)
    return group * N_EACH + n_below(SHARES, share) * (len(SEEN) + 1) + of_seen


@inner
def _push(queue, priority, depth, origin, token, parent, node, kind, scale):
    """Add a node of a source that would hang below `parent` of the draft; `scale`: of its children's counts."""
    if priority > 0:
        ties = np.int64(depth), np.int64(origin), np.int64(token), np.int64(parent)  # smaller ones come first
        heappush(queue, (-priority, *ties, np.int64(node), np.int64(kind), scale))


@inner
def _push_children(queue, tree, node, depth, origin, parent, scale, discounts, seen, group):
    """Add the children of a source's node, at this depth, with priority count x scale x discount.

    `seen`: continuations of the node; `group`: of kinds.
    """
    if depth < len(discounts):
        child = tree[node, CHILD]
        while child != 0:
            priority = tree[child, COUNT] * scale * discounts[depth]
            kind = _kind(group, tree[child, COUNT] / seen, seen)
            _push(queue, priority, depth, origin, tree[child, TOKEN], parent, child, kind, scale)
            child = tree[child, SIBLING]


@inner
def _into_draft(draft, n_nodes, parent, token, source, kind):
    """Find or add the child of `parent` with this token. Return it and the number of nodes of the draft.

    A shared node keeps its first source and kind.
    """
    for node in range(parent + 1, n_nodes):
        if draft[1, node] == parent and draft[0, node] == token:
            return node, n_nodes
    draft[0, n_nodes] = token
    draft[1, n_nodes] = parent
    draft[2, n_nodes] = source
    draft[3, n_nodes] = kind
    return n_nodes, n_nodes + 1


@inner
def _first_level(store, own, logits):
    """Return a queue with the first level of every source."""
    queue = [(0.0, 0, 0, 0, 0, 0, 0, 0.0)]  # so numba knows the types: priority, ties, node, kind, scale
    queue.clear()
    tree, discounts, longest = store
    seen = tree[0, COUNT]
    if seen > 0:
        group = n_below(STORE_PREFIXES, longest + 1)
        _push_children(queue, tree, 0, 1, OF_DATASTORE, 0, 1.0 / seen, discounts, seen, group)
    tree, places, cursors, by_prefix = own
    for length in range(1, len(cursors)):
        node = cursors[length]
        seen = tree[node, COUNT] - 1  # the end of the text is no occurrence with a continuation
        if seen > 0:
            group = len(STORE_PREFIXES) + length  # the datastore has one more group than there are bounds
            _push_children(queue, tree, node, 1, length, 0, 1.0 / seen, by_prefix[length], seen, group)
    tokens, probs, discounts = logits
    for i in range(len(tokens)):
        node = find_child(tree, places, 0, tokens[i])
        scale = probs[i] / tree[node, COUNT] if node != 0 else 0.0
        kind = (len(STORE_PREFIXES) + len(by_prefix)) * N_EACH + min(i, N_EACH - 1)
        _push(queue, probs[i] * discounts[1], 1, len(by_prefix), tokens[i], 0, node, kind, scale)
    return queue


@compiled
def fuse(store, own, logits, limits, root, draft):
    """Fill a draft tree with the likeliest nodes.

    Args:
        store: (tree [.., 4] int32 from `gather`, discounts [E + 1] float64 by depth for the prefix length that was
            found, entry 0 of which is not read, and this length). A root of count 0 means that nothing was found.
        own: (`nodes` and `places` of a `ContinuationTrie`, its cursors [p + 1] int32 of the last 1..p tokens, discounts
            [P + 1, E + 1] float64 by prefix length and depth).
        logits: (tokens [K] int64: candidates for the next token, their pseudo-probabilities [K] float64, discounts
            [E + 1] float64 by depth). Each continues as it did in the row's own text.
        limits: maximum number of nodes of the draft, root included; of edges from the root; of branches.
        root: the last token.
        draft: [4, >= limits[0]] int64, filled with tokens, parents, sources and kinds.

    Returns:
        The number of nodes of the draft, and its depth.
    """
    max_nodes, max_depth, max_leaves = limits
    draft[0, 0] = root
    draft[1, 0] = ROOT_PARENT
    draft[2, 0] = ROOT
    draft[3, 0] = 0
    n_nodes, n_leaves, deepest = 1, 1, 0
    if max_depth < 1:
        return 1, 0
    queue = _first_level(store, own, logits)
    of_logits = len(own[3])
    has_child = np.zeros(max_nodes, dtype=np.bool_)
    while len(queue) > 0 and n_nodes < max_nodes:
        _, depth, origin, token, parent, below, kind, scale = heappop(queue)
        source = DATASTORE if origin == OF_DATASTORE else INPUT
        if origin == of_logits and depth == 1:
            source = LOGITS
        before = n_nodes
        node, n_nodes = _into_draft(draft, n_nodes, parent, token, source, kind)
        if n_nodes > before:
            if has_child[parent]:
                if n_leaves == max_leaves:
                    n_nodes = before
                    continue
                n_leaves += 1
            has_child[parent] = True
            deepest = max(deepest, depth)
        if depth < max_depth and below != 0:
            tree, discounts, group = own[0], logits[2], kind // N_EACH
            if origin == OF_DATASTORE:
                tree, discounts = store[:2]
            elif origin != of_logits:
                discounts = own[3][origin]
            else:  # as it went on after this token alone
                group = len(STORE_PREFIXES) + 1
            seen = max(tree[below, COUNT], 1)
            _push_children(queue, tree, below, depth + 1, origin, node, scale, discounts, seen, group)
    return n_nodes, deepest


@dataclass(frozen=True)
class RetrievalOptions:
    """Options of a lookup in a datastore. UserError where max_suffix is below min_suffix."""

    min_suffix: int  # tokens of the shortest suffix of the context that is looked up
    max_suffix: int  # tokens of the longest
    branch_tokens: int  # tokens of the longest continuation
    max_matches: int = 100  # continuations that are read
    min_matches: int = 1  # with fewer matches than this, shorter suffixes are looked up, too
    first_matches: bool = False  # True: read the first of each shard, as REST; False: at regular intervals of all

    def __post_init__(self) -> None:
        if self.max_suffix < self.min_suffix:
            raise UserError(
                f"max_suffix={self.max_suffix} must be at least min_suffix={self.min_suffix}; raise max_suffix"
            )


class Retriever:
    """Looks up contexts in a datastore. It owns its scratch memory, so each thread needs one."""

    def __init__(self, store: Datastore, options: RetrievalOptions):
        self.store, self.options = store, options
        self.tree = np.zeros((1 + options.max_matches * options.branch_tokens, 4), dtype=np.int32)
        self._lengths = options.min_suffix, options.max_suffix
        self._matches = options.max_matches, options.min_matches, options.first_matches
        self._ranges = np.zeros((len(store.tokens), 2), dtype=np.int64)
        self._even = np.ones(options.branch_tokens + 1)

    def gather(self, context: np.ndarray, branch_tokens: int | None = None) -> int:
        """Write the continuations of the context's suffixes to `tree`.

        Args:
            context: [n] int64.
            branch_tokens: tokens of the longest continuation; None: as in the options.

        Returns:
            The length of the longest suffix found; 0, with a root of count 0, for none.
        """
        branch = branch_tokens or self.options.branch_tokens
        return int(gather(self.store.index, context, self._lengths, self._matches, branch, self.tree, self._ranges))

    def draft(
        self, context: Sequence[int], max_nodes: int, max_depth: int, max_leaves: int | None = None
    ) -> tuple[list[int], list[int], list[int]]:
        """Return the continuations that were seen most often, as a tree.

        Args:
            context: tokens; only the last ones are read.
            max_nodes: of the tree, including its root, the context's last token.
            max_depth: tokens of the longest continuation.
            max_leaves: branches; None: no limit.

        Returns:
            Tokens, parents and kinds of the nodes, root first, parents before children.
        """
        tail = np.asarray(context[-self.options.max_suffix :], dtype=np.int64)
        longest = self.gather(tail, min(max_depth, self.options.branch_tokens) or 1)
        if self.tree[0, COUNT] == 0:
            return [int(tail[-1])], [ROOT_PARENT], [0]
        draft = np.empty((4, max_nodes), dtype=np.int64)
        even = self._even
        others = (*NO_TEXT, even[None]), (NO_TOKENS, NO_PROBS, even)
        limits = max_nodes, max_depth, max_leaves or max_nodes
        n_nodes, _ = fuse((self.tree, even, longest), *others, limits, tail[-1], draft)
        tokens, parents, _, kinds = draft[:, :n_nodes].tolist()
        return tokens, parents, kinds

    def add_to(
        self, tree: CandidateTree, context: Sequence[int], max_leaves: int | None = None, first_kind: int = 0
    ) -> None:
        """Add what `draft` finds to a tree that may hold other guesses, with kinds from `first_kind` on.

        It adds up to max_leaves branches (None: no limit).
        """
        if tree.n_free and max_leaves != 0:
            found = self.draft(context, tree.max_nodes - tree.shape.n_probes, tree.max_depth, max_leaves)
            tree.add_tree(*found, Source.DATASTORE, first_kind)

    def chain(self, context: Sequence[int], limit: int) -> list[int]:
        """Return the continuation that was seen most often, up to `limit` tokens; [] if no suffix is known."""
        return self.draft(context, limit + 1, limit, max_leaves=1)[0][1:]
