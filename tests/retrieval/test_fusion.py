"""The fused tree equals a slow version of SSSD's Algorithm 1, over sources made by brute force."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain.retrieval.continuation_tree import ContinuationTrie
from spectrain.retrieval.fusion import (
    LOGITS_PRIORS,
    N_EACH,
    NO_PROBS,
    NO_TOKENS,
    SEEN,
    STORE_PREFIXES,
    RetrievalOptions,
    Retriever,
    fuse,
    input_priors,
    store_priors,
)
from spectrain.target.tree import Source
from tests.retrieval.reference import continuations, fused, index_in_memory, longest, prefix_counts, text_counts
from tests.retrieval.test_suffix_array import DOCUMENTS, TOKEN, VOCAB_SIZE

P, S, E = 3, 4, 4  # longest prefix of the input and of the store, longest branch
NAMES = {int(s): s.name.lower() for s in Source}


def discounts(draw_from: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Multiples of 1/8, so that products are exact and ties happen."""
    return draw_from.integers(0, 9, size=shape) / 8


def kernel(store, trie: ContinuationTrie, input_discounts, logits, limits, root):
    draft = np.zeros((4, limits[0]), dtype=np.int64)
    own = (*trie.arrays, input_discounts)
    n_nodes, depth = fuse(store, own, logits, limits, root, draft)
    found = [(int(t), int(p), NAMES[int(s)]) for t, p, s, _ in draft[:, :n_nodes].T]
    depths = [0]
    for _, parent, _ in found[1:]:
        depths.append(depths[parent] + 1)
    assert depth == max(depths)
    return found


@settings(max_examples=250, deadline=None)
@given(
    documents=DOCUMENTS,
    text=st.lists(TOKEN, min_size=1, max_size=25),
    limits=st.tuples(st.integers(1, 24), st.integers(0, 5), st.integers(1, 9)),
    candidates=st.lists(TOKEN, max_size=3, unique=True),
    seed=st.integers(0, 2**32 - 1),
)
def test_fused_tree_equals_the_slow_algorithm(documents, text, limits, candidates, seed):
    random = np.random.default_rng(seed)
    store_table, input_table, logit_table = (discounts(random, shape) for shape in ((E + 1,), (P + 1, E + 1), (E + 1,)))
    probs = discounts(random, (len(candidates),))
    store = index_in_memory(documents, VOCAB_SIZE)
    retriever = Retriever(store, RetrievalOptions(1, S, E, max_matches=1000))
    suffix = retriever.gather(np.array(text))
    trie = ContinuationTrie(text, P, E)
    guesses = np.array(candidates, dtype=np.int64)
    logits = guesses, probs, logit_table
    found = kernel((retriever.tree, store_table, suffix), trie, input_table, logits, limits, text[-1])

    length, total = longest(documents, text, 1, S)
    counts = prefix_counts(continuations(documents, text[len(text) - length :], E)) if length else {}
    sources = [{"name": "datastore", "probs": {p: c * (1 / total) * store_table[len(p)] for p, c in counts.items()}}]
    for prefix in range(1, min(P, len(text)) + 1):
        total, counts = text_counts(text, prefix, E)
        probabilities = {p: c * (1 / total) * input_table[prefix, len(p)] for p, c in counts.items()}
        sources.append({"name": "input", "probs": probabilities})
    logits = {}
    for token, prob in zip(candidates, probs, strict=True):
        logits[token,] = prob * logit_table[1]
        below = prefix_counts([tuple(text[i + 1 : i + E]) for i, t in enumerate(text) if t == token])
        scale = prob / max(1, text.count(token))
        logits |= {(token, *p): c * scale * logit_table[1 + len(p)] for p, c in below.items()}
    sources.append({"name": ["logits", *["input"] * E], "probs": logits})
    assert found == fused(sources, text[-1], *limits)


def test_the_first_level_takes_the_childs_probability_not_the_roots():
    # 0 is followed by 1 twice and by 2 once: with the root's probability of 1 for both, 1 and 2 would tie.
    store = index_in_memory([[0, 2], [0, 1], [0, 1]], VOCAB_SIZE)
    retriever = Retriever(store, RetrievalOptions(1, 1, 2))
    assert retriever.draft([0], 2, 2)[:2] == ([0, 1], [-1, 0])
    retriever.gather(np.array([0]))
    even = np.ones(E + 1)
    # An input source that believes 3 at 0.5 stands between the store's 2/3 and 1/3.
    trie = ContinuationTrie([0, 3, 0, 2, 0], 1, E)
    table = np.array([even, even])
    found = kernel((retriever.tree, even, 1), trie, table, (NO_TOKENS, NO_PROBS, even), (4, 1, 9), 0)
    assert [token for token, _, _ in found] == [0, 1, 2, 3]
    assert [source for _, _, source in found] == ["root", "datastore", "input", "input"]


def test_a_leaf_limit_keeps_chains_going():
    store = index_in_memory([[0, 1, 2, 3], [0, 2, 3, 1], [0, 1, 3]], VOCAB_SIZE)
    retriever = Retriever(store, RetrievalOptions(1, 1, 3))
    assert retriever.chain([0], 3) == [1, 2, 3]
    tokens, parents, _ = retriever.draft([0], 9, 3, max_leaves=2)
    assert len(tokens) - len(set(parents) - {-1}) == 2  # leaves
    assert len(set(parents) - {-1}) + 2 == len(tokens)


def test_kinds_tell_apart_source_prefix_share_and_how_often_it_was_seen():
    """Of the store: 3 of 4 and 1 of 4 continuations of 0 1, which is two tokens long; then all of 3, and of 1."""
    store = index_in_memory([[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 3, 3]], VOCAB_SIZE)
    retriever = Retriever(store, RetrievalOptions(1, 4, 2))
    tokens, parents, kinds = retriever.draft([0, 1], 9, 2)
    assert (tokens, parents) == ([1, 2, 3, 3, 3], [-1, 0, 1, 0, 3])

    def kind(group: int, share: int, seen: int) -> int:
        return group * N_EACH + share * (len(SEEN) + 1) + seen

    # Shares of 0.75, 1 and 0.25 are 4, 5 and 2; 4 and 3 continuations are 2 and 1; a suffix of two tokens is 1.
    assert kinds == [0, kind(1, 4, 2), kind(1, 5, 1), kind(1, 2, 2), kind(1, 5, 0)]
    draft = np.zeros((4, 9), dtype=np.int64)
    trie, even = ContinuationTrie([1, 2, 3, 1, 2], P, E), np.ones(E + 1)
    own = (*trie.arrays, np.ones((P + 1, E + 1)))
    nothing = np.zeros((1, 4), dtype=np.int32), even, 0
    logits = np.array([3, 0]), np.array([0.01, 0.005]), even
    n_nodes, _ = fuse(nothing, own, logits, (9, 1, 9), 2, draft)
    first = len(STORE_PREFIXES)
    assert draft[0, 1:n_nodes].tolist() == [3, 0]
    assert draft[3, 1:n_nodes].tolist() == [kind(first + 1, 5, 0), (first + P + 1) * N_EACH + 1]
    assert len(store_priors()) == (first + 1) * N_EACH
    assert len(input_priors(P)) == P * N_EACH
    assert len(LOGITS_PRIORS) == N_EACH
