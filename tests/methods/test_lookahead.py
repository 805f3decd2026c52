"""Lookahead: window and pool worked out by hand, the shape of the probes, and text that is the target's own."""

import pytest
import torch

from spectrain.decoding import Context, Sampling, Verified, generate
from spectrain.drafting.lookup import LookupDrafter
from spectrain.methods.lookahead import Lookahead, LookaheadRow
from spectrain.target import KVCache, Source, TargetOutput
from tests.conftest import VOCAB_SIZE, random_prompts
from tests.decoding.reference import follow, greedy_by_full_forwards
from tests.methods.drafts import leaves


class Walk:
    """Steps of a drafter without a target: a test says what is likely at each node, and what is accepted."""

    def __init__(self, drafter: LookupDrafter, target, prompts: list[list[int]], roots: list[int], room: int = 50):
        self.drafter = drafter
        self.context = Context(Sampling(), "cpu", len(prompts))
        self.context.append(prompts, [room] * len(prompts), [torch.Generator() for _ in prompts])
        logits = torch.zeros(len(prompts), 1, VOCAB_SIZE)
        self.context.root(range(len(prompts)), torch.tensor(roots), logits[:, 0])
        drafter.start(target, KVCache(len(prompts)))
        drafter.prefill(self.context, TargetOutput(logits, None, None), range(len(prompts)))

    def step(self, likely: list[dict[int, tuple[int, ...]]], emitted: list[list[int]]):
        """`likely[row][node]`: tokens, the most probable first. `emitted[row]`: accepted tokens and bonus."""
        tree = self.drafter.propose(self.context)
        logits = torch.zeros(*tree.shape, VOCAB_SIZE)
        for row, nodes in enumerate(likely):
            for node, tokens in nodes.items():
                for rank, token in enumerate(tokens):
                    logits[row, node, token] = 9 - rank
        accepted = torch.tensor([len(tokens) - 1 for tokens in emitted])
        verified = Verified(None, accepted, torch.tensor([tokens[-1] for tokens in emitted]))
        output = TargetOutput(logits, None, None)
        follow(self.drafter, self.context, tree, output, verified, logits[:, 0], emitted)
        return tree


def test_probes_hang_under_the_level_below_and_level_0_is_a_chain(llama_target):
    drafter = Lookahead(window_columns=3, ngram_tokens=4, max_guesses=2)
    # Nodes by level: 0 1 2 | 3 4 5 | 6 7 8, node 0 being the root.
    assert drafter.probe_shape.parents == (0, 1, 0, 1, 2, 3, 4, 5)
    tree = Walk(drafter, llama_target, [[7]], [9]).step([{}], [[5]])
    assert tree.probe[0].tolist() == [False] + [True] * 8
    assert tree.depth[0].tolist() == [0, 1, 2, 1, 2, 3, 2, 3, 4]  # level + column


def test_levels_move_up_and_ngrams_enter_the_pool(llama_target):
    drafter = Lookahead(window_columns=2, ngram_tokens=4, max_guesses=3)
    walk = Walk(drafter, llama_target, [[7]], [10])
    drafter.rows[0].window = [10, 11, 20, 21, 30, 31]  # levels (10, 11), (20, 21), (30, 31)
    # New tokens come from the last level, nodes 4 and 5, alone.
    walk.step([{0: (1,), 1: (2,), 2: (3,), 3: (4,), 4: (40,), 5: (41,)}], [[12]])
    state = drafter.rows[0]
    assert state.window == [12, 21, 30, 31, 40, 41]  # (0, 0) is the new root instead of 20
    assert {key: list(ngrams) for key, ngrams in state.pool.items()} == {10: [(20, 30, 40)], 11: [(21, 31, 41)]}

    walk.step([{4: (50,), 5: (51,)}], [[11]])
    assert state.window == [11, 31, 40, 41, 50, 51]
    assert list(state.pool[12]) == [(30, 40, 50)]
    assert list(state.pool[21]) == [(31, 41, 51)]
    tree = walk.step([{}], [[1]])
    assert leaves(tree) == [(21, 31, 41)]
    assert tree.source[0][tree.drafted[0]].tolist() == [Source.FORWARD] * 3


def test_accepted_tokens_move_the_columns(llama_target):
    drafter = Lookahead(window_columns=3, ngram_tokens=3)
    walk = Walk(drafter, llama_target, [[7]], [10])
    drafter.rows[0].text = [7]
    drafter.rows[0].window = [10, 11, 12, 20, 21, 22]
    walk.step([{3: (30,), 4: (31,), 5: (32,)}], [[7, 7]])  # one accepted, one bonus
    # Levels up: (20, 21, 22), (30, 31, 32); left by one: (21, 22, ?), (31, 32, ?). The text is all sevens.
    assert drafter.rows[0].window == [7, 22, 7, 31, 32, 7]


def test_pool_keeps_the_latest_ngrams_of_a_token_and_refreshes_one_seen_again(llama_target):
    drafter = Lookahead(
        window_columns=1, ngram_tokens=2, max_guesses=2, pool_from_output=False
    )  # the window is the root alone: pairs
    walk = Walk(drafter, llama_target, [[7]], [10])
    for token in (1, 2, 1, 3):
        walk.step([{0: (token,)}], [[10]])
    assert list(drafter.rows[0].pool[10]) == [(1,), (3,)]  # 1 was refreshed, so 2 fell out
    assert drafter.rows[0].guesses() == [(3,), (1,)]
    assert leaves(walk.step([{0: (4,)}], [[11]])) == [(3,), (1,)]


@pytest.mark.parametrize("max_nodes", [6, 7, 14, 61, 119, 120, 129])
def test_max_nodes_counts_root_probes_and_guesses(llama_target, max_nodes):
    drafter = Lookahead(max_nodes=max_nodes)
    if max_nodes < 120:
        assert drafter.probe_shape.n_probes <= max_nodes // 2
    assert drafter.n_columns == min(15, (max_nodes // 2 + 1) // 4)
    walk = Walk(drafter, llama_target, [[7]], [10])
    drafter.rows[0].pool[10] = {(i, i, i, i): None for i in range(20, 35)}
    n_nodes = walk.step([{}], [[9]]).shape[1]
    assert n_nodes == min(max_nodes, 1 + drafter.probe_shape.n_probes + 60)


def test_a_probe_that_is_right_is_not_accepted(llama_target):
    prompt = random_prompts([9])[0]
    text = greedy_by_full_forwards(llama_target.model, prompt, 12)

    class Knowing(Lookahead):
        """Its level 0 is the target's own continuation."""

        def propose(self, context):
            done = context.n_tokens[0] - len(prompt)
            columns = text[done : done + self.n_columns - 1]
            self.rows[0].window[1 : 1 + len(columns)] = columns
            self.rows[0].pool.clear()
            return super().propose(context)

    generation = generate(llama_target, Knowing(), [prompt], 12, stop_token_ids=())[0]
    assert generation.tokens == text
    assert generation.accepted == [0] * 11


def test_what_was_written_enters_the_pool_too():
    row = LookaheadRow([1, 2, 3], n_columns=2, levels=2, max_guesses=4, pool_from_output=True)
    row.extend([4])
    row.extend([5, 6])
    assert {first: list(others) for first, others in row.pool.items()} == {2: [(3, 4)], 3: [(4, 5)], 4: [(5, 6)]}
    papers = LookaheadRow([1, 2, 3], n_columns=2, levels=2, max_guesses=4)
    papers.extend([4])
    assert papers.pool == {}
