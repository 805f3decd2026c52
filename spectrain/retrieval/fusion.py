"""One draft tree out of several trees of weighted continuations: the likeliest nodes of all (SSSD, Algorithm 1).

Each source says how likely a continuation is: how often it was seen, divided by how often its prefix was. That
pseudo-probability times a discount for the source, the length of the prefix and the depth is its priority; a queue over
the nodes of all trees gives the likeliest node to the draft tree until it is full. A node's children enter the queue
with it, so parents stand before children.

Differs from the paper: Algorithm 1 prints the root's own probability for the first level (`node.prob`), by mistake;
here it is the child's at every level.

Of equal priorities the one that is less deep comes first, then the earlier source, the smaller token, the older parent.

Letters: P longest prefix of the input, E depth of the discount tables, K candidates of the last logits.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from spectrain.decoding.tree import ROOT_PARENT, Source
from spectrain.retrieval.continuation_tree import CHILD, COUNT, SIBLING, TOKEN, find_child

# Columns of the queue's items. Sources in the order of ties: the datastore, prefixes 1..P of the input, the logits.
KIND, NODE, DEPTH, PARENT, ITEM_TOKEN = range(5)
DATASTORE_KIND = 0
QUEUE_ITEMS = 16384  # children of popped nodes that may wait; later ones are left out

DATASTORE, INPUT, LOGITS, ROOT = (int(s) for s in (Source.DATASTORE, Source.INPUT, Source.LOGITS, Source.ROOT))


class Queue:
    """Scratch of one fusion at a time: as many as run in parallel are needed."""

    def __init__(self, max_items: int = QUEUE_ITEMS):
        self.items = np.zeros((max_items, 5), dtype=np.int32)
        self.numbers = np.zeros((max_items, 2), dtype=np.float64)  # priority; what a child's count is multiplied with
        self.heap = np.zeros(max_items, dtype=np.int32)

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For `fuse`."""
        return self.items, self.numbers, self.heap


@njit(nogil=True, cache=True)
def _before(items, numbers, a, b):
    if numbers[a, 0] != numbers[b, 0]:
        return numbers[a, 0] > numbers[b, 0]
    for column in (DEPTH, KIND, ITEM_TOKEN, PARENT):
        if items[a, column] != items[b, column]:
            return items[a, column] < items[b, column]
    return False


@njit(nogil=True, cache=True)
def _push(queue, n_waiting, n_items, kind, node, depth, parent, token, priority, scale):
    """Returns how many wait and how many items were ever made."""
    items, numbers, heap = queue
    if n_items == len(items) or priority <= 0:
        return n_waiting, n_items
    items[n_items, KIND] = kind
    items[n_items, NODE] = node
    items[n_items, DEPTH] = depth
    items[n_items, PARENT] = parent
    items[n_items, ITEM_TOKEN] = token
    numbers[n_items, 0] = priority
    numbers[n_items, 1] = scale
    place = n_waiting
    while place > 0:
        above = (place - 1) // 2
        if not _before(items, numbers, n_items, heap[above]):
            break
        heap[place] = heap[above]
        place = above
    heap[place] = n_items
    return n_waiting + 1, n_items + 1


@njit(nogil=True, cache=True)
def _pop(queue, n_waiting):
    """The first item. One less waits afterwards."""
    items, numbers, heap = queue
    first, moved = heap[0], heap[n_waiting - 1]
    n_waiting -= 1
    place = 0
    while 2 * place + 1 < n_waiting:
        below = 2 * place + 1
        if below + 1 < n_waiting and _before(items, numbers, heap[below + 1], heap[below]):
            below += 1
        if not _before(items, numbers, heap[below], moved):
            break
        heap[place] = heap[below]
        place = below
    heap[place] = moved
    return first


@njit(nogil=True, cache=True)
def _push_children(queue, n_waiting, n_items, tree, kind, node, depth, parent, scale, discounts):
    """Enters a node's children, `depth` deep; each one's priority is its count x scale x discount."""
    if depth >= len(discounts):
        return n_waiting, n_items
    child = tree[node, CHILD]
    while child != 0:
        n_waiting, n_items = _push(
            queue, n_waiting, n_items, kind, child, depth, parent, tree[child, TOKEN],
            tree[child, COUNT] * scale * discounts[depth], scale,
        )  # fmt: skip
        child = tree[child, SIBLING]
    return n_waiting, n_items


@njit(nogil=True, cache=True)
def _into_draft(draft, n_nodes, parent, token, source):
    """The child of `parent` with this token, made where there is none, and the nodes of the draft.

    A shared node keeps the source it was made by.
    """
    for node in range(parent + 1, n_nodes):
        if draft[1, node] == parent and draft[0, node] == token:
            return node, n_nodes
    draft[0, n_nodes] = token
    draft[1, n_nodes] = parent
    draft[2, n_nodes] = source
    return n_nodes, n_nodes + 1


@njit(nogil=True, cache=True)
def _seed(queue, store, own, logits):
    """Enters the first level of every source. Returns how many wait and how many items there are."""
    n_waiting, n_items = 0, 0
    tree, discounts = store
    if tree[0, COUNT] > 0:
        scale = 1.0 / tree[0, COUNT]
        n_waiting, n_items = _push_children(
            queue, n_waiting, n_items, tree, DATASTORE_KIND, 0, 1, 0, scale, discounts
        )  # fmt: skip
    tree, places, cursors, by_prefix = own
    for length in range(1, len(cursors)):
        node = cursors[length]
        seen = tree[node, COUNT] - 1  # the end of the text is no occurrence with a continuation
        if seen > 0:
            n_waiting, n_items = _push_children(
                queue, n_waiting, n_items, tree, length, node, 1, 0, 1.0 / seen, by_prefix[length]
            )
    tokens, probs, discounts = logits
    for i in range(len(tokens)):
        node = find_child(tree, places, 0, tokens[i]) if len(tree) > 0 else 0
        scale = probs[i] / tree[node, COUNT] if node != 0 else 0.0
        priority = probs[i] * discounts[1]
        n_waiting, n_items = _push(
            queue, n_waiting, n_items, len(by_prefix), node, 1, 0, tokens[i], priority, scale
        )  # fmt: skip
    return n_waiting, n_items


@njit(nogil=True, cache=True)
def fuse(queue, store, own, logits, limits, root, draft):
    """Fills a draft tree with the likeliest nodes.

    Args:
        queue: (items, numbers, heap) of a `Queue`.
        store: (tree [.., 4] int32 as `gather` leaves it, discounts [E + 1] float64 by depth for the prefix length that
            was found; entry 0 is not read). A root of count 0 has nothing below.
        own: (`nodes` and `places` of a `ContinuationTrie`, its cursors [p + 1] int32 of the last 1..p tokens, discounts
            [P + 1, E + 1] float64 by prefix length and depth).
        logits: (tokens [K] int64: guesses of the next token, [K] float64: how likely each is, discounts [E + 1] float64
            by depth). Each goes on with what followed it in the row's own text.
        limits: nodes of the draft, root included; edges from the root; branches.
        root: the last token.
        draft: [3, >= limits[0]] int64, filled: tokens, parents, sources.

    Returns:
        Nodes of the draft, and the depth of the deepest.
    """
    max_nodes, max_depth, max_leaves = limits
    draft[0, 0] = root
    draft[1, 0] = ROOT_PARENT
    draft[2, 0] = ROOT
    n_nodes, n_leaves, deepest = 1, 1, 0
    if max_depth < 1:
        return 1, 0
    n_waiting, n_items = _seed(queue, store, own, logits)
    logits_kind = len(own[3])
    items, numbers, _ = queue
    has_child = np.zeros(max_nodes, dtype=np.bool_)
    while n_waiting > 0 and n_nodes < max_nodes:
        item = _pop(queue, n_waiting)
        n_waiting -= 1
        kind, depth, parent = items[item, KIND], items[item, DEPTH], items[item, PARENT]
        source = DATASTORE if kind == DATASTORE_KIND else INPUT
        if kind == logits_kind and depth == 1:
            source = LOGITS
        before = n_nodes
        node, n_nodes = _into_draft(draft, n_nodes, parent, items[item, ITEM_TOKEN], source)
        if n_nodes > before:
            if has_child[parent]:
                if n_leaves == max_leaves:
                    n_nodes = before
                    continue
                n_leaves += 1
            has_child[parent] = True
            deepest = max(deepest, depth)
        if depth < max_depth and items[item, NODE] != 0:
            tree, discounts = own[0], logits[2]
            if kind == DATASTORE_KIND:
                tree, discounts = store
            elif kind != logits_kind:
                discounts = own[3][kind]
            n_waiting, n_items = _push_children(
                queue, n_waiting, n_items, tree, kind, items[item, NODE], depth + 1, node, numbers[item, 1], discounts
            )
    return n_nodes, deepest
