"""Merging, budget and depth of one row's tree; the batch made from them, with and without probes."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from spectrain.decoding import Context, Sampling
from spectrain.drafting.lookup import LookupDrafter
from spectrain.retrieval.candidate_tree import NO_PROBES, CandidateTree, ProbeShape, as_drafts
from spectrain.target import DraftTree, Source

GUESSES = st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=6), st.sampled_from([3, 4, 5])), max_size=12)


def test_equal_prefixes_are_merged_and_keep_the_first_source():
    tree = CandidateTree(9, max_nodes=20, max_depth=9)
    assert tree.add([1, 2, 3], Source.INPUT) == 3
    assert tree.add([1, 2, 4], Source.DATASTORE) == 4
    assert tree.add([1, 2], Source.LOGITS) == 2
    assert tree.add([5], Source.LOGITS) == 5
    assert tree.tokens == [9, 1, 2, 3, 4, 5]
    assert tree.parents == [-1, 0, 1, 2, 2, 0]
    assert tree.sources == [0, 3, 3, 3, 4, 5]
    assert (tree.depth, tree.n_free) == (3, 14)


@given(guesses=GUESSES, max_nodes=st.integers(1, 15), max_depth=st.integers(0, 5))
def test_tree_equals_a_slow_trie(guesses, max_nodes, max_depth):
    tree = CandidateTree(9, max_nodes, max_depth)
    paths: list[tuple[int, ...]] = [()]  # a trie as the list of its paths, in the order they came
    sources = [0]
    for guess, source in guesses:
        tree.add(guess, Source(source))
        for length in range(1, min(len(guess), max_depth) + 1):
            path = tuple(guess[:length])
            if path not in paths and len(paths) < max_nodes:
                paths.append(path)
                sources.append(source)
            elif path not in paths:
                break
    assert tree.tokens == [9, *(path[-1] for path in paths[1:])]
    assert tree.parents == [-1, *(paths.index(path[:-1]) for path in paths[1:])]
    assert tree.sources == sources
    assert tree.depth == max(map(len, paths))
    assert tree.n_free == (max_nodes - len(paths) if max_depth else 0)


def two_rows(shape: ProbeShape = NO_PROBES, probes=((), ())) -> list[CandidateTree]:
    rows = [CandidateTree(root, 20, 9, row, shape) for root, row in zip((8, 9), probes, strict=True)]
    rows[0].add([1, 2], Source.FORWARD)
    rows[0].add([3], Source.BACKWARD)
    rows[1].add([4], Source.INPUT)
    return rows


class Any(LookupDrafter):
    """Makes batches of trees."""

    def new_row(self, tokens):
        raise NotImplementedError

    def propose_row(self, state, tree, row):
        raise NotImplementedError


def draft_tree(rows: list[CandidateTree]) -> DraftTree:
    drafter = Any(max_nodes=20)
    drafter.probe_shape = rows[0].shape
    return drafter.drafted(Context(Sampling()), *as_drafts(rows))


def test_rows_are_padded_to_the_largest():
    batch = draft_tree(two_rows())
    assert batch.tokens.tolist() == [[8, 1, 2, 3], [9, 4, 0, 0]]
    assert batch.parents.tolist() == [[-1, 0, 1, 0], [-1, 0, -2, -2]]
    assert batch.source.tolist() == [[0, 1, 1, 2], [0, 3, 0, 0]]
    assert batch.tokens.dtype == batch.parents.dtype == batch.source.dtype == torch.int64
    assert (batch.probe, batch.is_chain, batch.max_depth) == (None, False, 2)


def test_probes_stand_behind_the_root_and_shift_the_guesses():
    shape = ProbeShape((0, 1, 0))  # two branches: probe 1 - probe 2, and probe 3
    batch = draft_tree(two_rows(shape, [[50, 51, 52], [60, 61, 62]]))
    assert batch.tokens.tolist() == [[8, 50, 51, 52, 1, 2, 3], [9, 60, 61, 62, 4, 0, 0]]
    assert batch.parents.tolist() == [[-1, 0, 1, 0, 0, 4, 0], [-1, 0, 1, 0, 0, -2, -2]]
    assert batch.source.tolist() == [[0, 0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 3, 0, 0]]
    assert batch.probe.tolist() == [[False, True, True, True, False, False, False]] * 2
    assert batch.drafted.tolist() == [[False] * 4 + [True] * 3, [False] * 4 + [True, False, False]]
    assert not batch.is_chain
