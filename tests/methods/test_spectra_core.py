"""SPECTRA's core: dictionaries and pool worked out by hand, the choice of new tokens, the target's own text."""

import random

import pytest

from spectrain.errors import UserError
from spectrain.methods.spectra_core import CoreOptions, CoreRow, NgramStorage, SpectraCore, build
from spectrain.retrieval.candidate_tree import CandidateTree
from spectrain.target import Source
from tests.methods.drafts import leaves
from tests.methods.test_lookahead import Walk


def listed(storage: NgramStorage) -> dict[int, list[tuple[int, ...]]]:
    return {key: list(sequences) for key, sequences in storage.forward.items()}


def core(max_nodes: int | None = None, pool_from_output: bool = False, **options) -> SpectraCore:
    return build(max_nodes, pool_from_output=pool_from_output, **options)


def test_each_candidate_is_a_branch_of_probes_under_the_root(llama_target):
    drafter = core(pool_sequences=2, ngram_tokens=4)
    # Nodes by place: 1 2 | 3 4 | 5 6, the odd ones candidate 0.
    assert drafter.probe_shape.parents == (0, 0, 1, 2, 3, 4)
    walk = Walk(drafter, llama_target, [[7]], [9])
    drafter.rows[0].candidates = [10, 20, 11, 21, 12, 22]
    tree = walk.step([{}], [[5]])
    assert tree.tokens[0].tolist() == [9, 10, 20, 11, 21, 12, 22]
    assert tree.probe[0].tolist() == [False] + [True] * 6


def test_pool_shifts_left_and_its_sub_sequences_enter_both_dictionaries(llama_target):
    drafter = core(pool_sequences=2, ngram_tokens=4, threshold=0)
    walk = Walk(drafter, llama_target, [[7]], [9])
    state = drafter.rows[0]
    state.candidates = [10, 20, 11, 21, 12, 22]  # (10, 11, 12) and (20, 21, 22)
    # Predicted behind the last token of each branch, nodes 5 and 6.
    walk.step([{0: (1,), 1: (2,), 3: (3,), 4: (4,), 5: (13,), 6: (23,)}], [[7, 8]])
    assert state.candidates == [11, 21, 12, 22, 13, 23]
    assert listed(state.ngrams) == {
        10: [(11, 12, 13)], 11: [(12, 13)], 12: [(13,)],
        20: [(21, 22, 23)], 21: [(22, 23)], 22: [(23,)],
    }  # fmt: skip
    assert state.ngrams.backward == {
        (10,): 11, (10, 11): 12, (10, 11, 12): 13,
        (20,): 21, (20, 21): 22, (20, 21, 22): 23,
    }  # fmt: skip
    assert list(state.tail) == [7, 9, 7, 8]

    walk.step([{5: (14,), 6: (24,)}], [[6]])
    forward = listed(state.ngrams)
    assert forward[11] == [(12, 13, 14)]  # grown from (12, 13)
    assert forward[13] == [(14,)]
    assert state.ngrams.backward[11, 12, 13] == 14


def test_lists_keep_the_latest_and_no_duplicates(llama_target):
    drafter = core(ngram_tokens=2, pool_sequences=1, max_guesses=3, threshold=0, backward=False)
    walk = Walk(drafter, llama_target, [[7]], [9])
    state = drafter.rows[0]
    for token in (1, 2, 1, 3):
        state.candidates = [30]
        walk.step([{1: (token,)}], [[30]])
    assert listed(state.ngrams) == {30: [(1,), (3,)]}  # G - 1 = 2; 1 was refreshed, so 2 fell out
    assert leaves(walk.step([{}], [[5]])) == [(3,), (1,)]


def test_backward_guess_follows_the_longest_known_suffix():
    storage = NgramStorage(max_key_tokens=3, max_forward=14, sub_ngrams=True)
    storage.backward = {(3,): 40, (2, 3): 41, (1, 2, 3): 42, (9, 1, 2, 3): 43}
    assert storage.backward_guess([1, 2, 3]) == [42]  # a key of 4 tokens is none; nothing follows 42
    assert storage.backward_guess([5, 2, 3]) == [41]
    assert storage.backward_guess([5, 5, 3]) == [40]
    assert storage.backward_guess([3, 5, 5]) == []
    assert storage.backward_guess([3]) == [40]  # a text of one token
    storage.backward |= {(1, 2, 3, 42): 60, (2, 3, 42): 50, (42,): 51, (50,): 52, (52,): 53, (53,): 54}
    # By (2, 3, 42) rather than (42,) or four tokens, then by single tokens; N = 4 tokens and no more.
    assert storage.backward_guess([1, 2, 3]) == [42, 50, 52, 53]


def test_an_unseen_token_is_the_most_probable_that_is_no_key(llama_target):
    for threshold, expected in ((1.0, 32), (0.0, 30)):
        drafter = core(ngram_tokens=3, pool_sequences=1, threshold=threshold)
        walk = Walk(drafter, llama_target, [[7], [7]], [9, 9])
        for state in drafter.rows:
            state.candidates = [30, 31]
        walk.step([{}, {}], [[5], [5]])  # 30 and 31 become keys
        for state in drafter.rows:
            state.candidates = [50, 51]
        drafter.rows[1].candidates = [30, 31]
        walk.step([{2: (30, 31, 32)}, {2: (50, 51, 52)}], [[5], [5]])
        assert drafter.rows[0].candidates == [51, expected]
        # The keys of row 0 are not row 1's, and what becomes a key in a step counts from the next.
        assert drafter.rows[1].candidates == [31, 50]


def test_keys_move_with_their_row(llama_target):
    drafter = core(ngram_tokens=2, pool_sequences=1, threshold=1)
    walk = Walk(drafter, llama_target, [[7], [7], [7]], [9, 9, 9])
    for row, token in enumerate((20, 21, 22)):
        drafter.rows[row].candidates = [token]
    for _ in range(2):  # a key of the first step is seen in the second
        walk.step([{}] * 3, [[5]] * 3)
    drafter.free(0)
    for row, token in enumerate((22, 21)):
        assert [key for key in (20, 21, 22) if drafter.is_key[row, key]] == [token]
    drafter.new_row([7, 8])
    assert not drafter.is_key[2].any()


def test_guesses_of_both_dictionaries_the_backward_one_last():
    row = CoreRow([1, 2, 3], CoreOptions(ngram_tokens=4), n_candidates=1)
    row.ngrams.forward = {3: {(10, 11): None, (20, 21, 22): None}}
    row.ngrams.backward = {(2, 3): 10, (3, 10): 12}
    for options, guesses, sources in (
        ({}, [(20, 21, 22), (10, 11), (10, 12)], [1, 1, 1, 1, 1, 2]),  # 10 is shared and keeps its first source
        ({"forward": False}, [(10, 12)], [2, 2]),
        ({"backward": False}, [(20, 21, 22), (10, 11)], [1, 1, 1, 1, 1]),
    ):
        row.options = CoreOptions(ngram_tokens=4, **options)
        tree = CandidateTree(3, 50, 50)
        n_guesses = row.add_guesses(tree)
        assert n_guesses == len(guesses)
        assert tree.sources[1:] == sources
        for guess in guesses:
            assert spelled(tree, guess)


def test_without_replaced_prefixes_guesses_are_those_of_algorithm_1_as_printed():
    N, W, G, rng = 4, 3, 5, random.Random(0)
    row = CoreRow([1, 2, 3], CoreOptions(N, W, G, replace_prefixes=False, pool_from_output=False), n_candidates=W)
    c, x, s_fwd, s_bwd, n_cut = [row.candidates[i::W] for i in range(W)], [1, 2, 3], {}, {}, 0
    for _ in range(60):
        guesses, u = list(s_fwd.get(x[-1], [])), []
        for _ in range(N):  # lines 9 to 14
            known = [s_bwd[key] for k in range(N - 1, 0, -1) if (key := tuple([*x, *u][-k:])) in s_bwd]
            u += known[:1]
            if not known:
                break
        guesses = [guess for guess in [*guesses, tuple(u)] if guess][:G]  # lines 15 to 17
        n_cut += bool(u) and tuple(u) not in guesses
        tree = CandidateTree(x[-1], 200, 50)
        assert row.add_guesses(tree) == len(guesses)
        wanted = CandidateTree(x[-1], 200, 50)
        for guess in guesses:
            wanted.add(guess, Source.FORWARD)
        assert (tree.tokens, tree.parents) == (wanted.tokens, wanted.parents)
        new = rng.choices(range(9), k=W)
        for i in range(W):  # lines 35 to 43
            c[i] = [*c[i], new[i]]
            for j in range(N - 1):
                s_fwd.setdefault(c[i][j], []).append(tuple(c[i][j + 1 :]))
                s_bwd[tuple(c[i][: j + 1])] = c[i][j + 1]
            c[i] = c[i][1:]
        row.predicted(new)
        x += [rng.randrange(9)]
        row.extend(x[-1:])
    assert n_cut > 5


def spelled(tree: CandidateTree, guess) -> bool:
    node = 0
    for token in guess:
        children = [i for i in range(len(tree.tokens)) if tree.parents[i] == node and tree.tokens[i] == token]
        if not children:
            return False
        assert len(children) == 1
        node = children[0]
    return True


@pytest.mark.parametrize("seed", range(10))
def test_backward_guess_is_never_cut_by_the_budget(seed):
    rng = random.Random(seed)
    row = CoreRow([1, 2, 3], CoreOptions(), n_candidates=1)
    for _ in range(14):
        row.ngrams.enter((3, *rng.choices(range(4, 7), k=4)))
    backward = rng.choices(range(4, 7), k=5)
    text = [3]
    row.ngrams.backward.clear()
    for token in backward:
        row.ngrams.backward[tuple([1, 2, *text][-4:])] = token
        text.append(token)
    row.tail = [1, 2, 3]
    for max_depth in (50, 3):
        unlimited = CandidateTree(3, 1000, max_depth)
        row.add_guesses(unlimited)
        for max_nodes in range(1, len(unlimited.tokens) + 3):
            tree = CandidateTree(3, max_nodes, max_depth)
            row.add_guesses(tree)
            assert spelled(tree, backward[: min(max_nodes - 1, max_depth)])
            assert len(tree.tokens) == min(max_nodes, len(unlimited.tokens))  # nothing is left free


def test_pool_from_prompt_enters_the_prompts_ngrams():
    options = CoreOptions(ngram_tokens=3, pool_from_prompt=True)
    row = CoreRow([1, 2, 3, 4, 99], options, n_candidates=1)  # 99 is the root
    assert listed(row.ngrams) == {1: [(2, 3)], 2: [(3, 4)], 3: [(4,)]}
    assert row.ngrams.backward == {(1,): 2, (1, 2): 3, (2,): 3, (2, 3): 4}
    assert CoreRow([1, 99], options, n_candidates=1).ngrams.forward == {}
    assert CoreRow([1, 2, 99], options, n_candidates=1).ngrams.backward == {(1,): 2}
    assert CoreRow([1, 2, 3, 4, 99], CoreOptions(ngram_tokens=3), n_candidates=1).ngrams.forward == {}


@pytest.mark.parametrize("max_nodes", [8, 9, 16, 61, 121, 122, 131])
def test_max_nodes_counts_root_probes_and_guesses(llama_target, max_nodes):
    drafter = core(max_nodes)
    assert drafter.n_columns == min(15, max_nodes // 8)
    assert drafter.probe_shape.n_probes == 4 * drafter.n_columns
    walk = Walk(drafter, llama_target, [[7]], [3])
    drafter.rows[0].ngrams.forward = {3: {(i, i, i, i): None for i in range(20, 34)}}
    drafter.rows[0].ngrams.backward = {(3,): 40, (40,): 41, (41,): 42, (42,): 43, (43,): 44, (44,): 45}
    n_nodes = walk.step([{}], [[5]]).shape[1]
    assert n_nodes == min(max_nodes, 1 + drafter.probe_shape.n_probes + 61)


def test_options_that_leave_no_room_or_nothing_to_guess_from_are_refused():
    with pytest.raises(UserError, match="max_nodes=7 must be at least 8 with ngram_tokens=5; raise max_nodes"):
        core(7)
    with pytest.raises(UserError, match="nothing to guess from"):
        core(forward=False, backward=False)
    for n in range(2, 9):  # what the sentence names as the least is enough
        core(max(n + 1, 2 * (n - 1)), ngram_tokens=n)


def test_what_was_written_enters_the_dictionaries_too():
    options = CoreOptions(ngram_tokens=3)
    row = CoreRow([1, 2, 3], options, n_candidates=1)
    row.extend([4, 5])
    assert listed(row.ngrams) == {2: [(3, 4)], 3: [(4, 5)], 4: [(5,)]}
    assert row.ngrams.backward == {(2,): 3, (2, 3): 4, (3,): 4, (3, 4): 5}
    papers = CoreRow([1, 2, 3], CoreOptions(ngram_tokens=3, pool_from_output=False), n_candidates=1)
    papers.extend([4, 5])
    assert (papers.ngrams.forward, papers.ngrams.backward) == ({}, {})
