"""LogitSpec: trees worked out by hand, the rank rules, ablations and budgets, and that it changes no text."""

import pytest
import torch

from spectrain.decoding import generate
from spectrain.errors import UserError
from spectrain.methods import logitspec
from spectrain.methods.logitspec import LogitSpec
from spectrain.retrieval.candidate_tree import CandidateTree
from spectrain.retrieval.fusion import RetrievalOptions, Retriever
from spectrain.target import DraftTree, Source, TargetModel
from tests.conftest import VOCAB_SIZE, random_prompts, tiny_model
from tests.methods.drafts import leaves, paths, proposed
from tests.retrieval.reference import make_store


def logits_in_order(order: list[int], vocab_size: int) -> torch.Tensor:
    """[1, vocab_size]: these tokens are the likeliest, best first, then the others by id."""
    logits = -1000.0 - torch.arange(vocab_size, dtype=torch.float32)
    logits[order] = torch.arange(len(order), 0, -1, dtype=torch.float32)
    return logits[None]


INPUT, LOGITS = Source.INPUT, Source.LOGITS


def branches(tree: DraftTree) -> list[tuple[list[int], list[Source]]]:
    """The tokens of each leaf from below the root, and their sources."""
    found = paths(tree)
    return [(list(leaf), [found[leaf[: i + 1]] for i in range(len(leaf))]) for leaf in leaves(tree)]


def test_tree_by_hand():
    #       0  1  2  3  4  5  6  7  8
    text = [1, 2, 3, 4, 5, 6, 2, 4, 1]
    # (a) Behind 1: 2 3 4.
    # (b) Without the root 1: 4, behind which 5 6 2 (position 4; the later one, 8, has a single token), then 2, behind
    # which 3 4 5 (the suffix 1 2), of which the tree lacks only the 5; then 7 and 0, which the text does not know.
    drafter = LogitSpec(max_nodes=11, continuation_tokens=3)
    tree = proposed(drafter, [text], last_logits=logits_in_order([4, 1, 2, 7], 12))
    assert tree.tokens.tolist() == [[1, 2, 3, 4, 4, 5, 6, 2, 5, 7, 0]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 0, 4, 5, 6, 3, 0, 0]]
    assert tree.source.tolist() == [[0, INPUT, INPUT, INPUT, LOGITS, INPUT, INPUT, INPUT, INPUT, LOGITS, LOGITS]]
    assert not tree.is_chain


# A text in which each of 100..159 was once followed by three tokens of its own.
FOLLOWED = [token for y in range(60) for token in (100 + y, 200 + y, 300 + y, 400 + y, 500 + y)]
RANKED = list(range(100, 160))
ROOT = 99


def test_branches_keep_4_3_or_1_tokens_by_rank():
    drafter = LogitSpec(max_nodes=200, continuation_tokens=3)
    tree = proposed(drafter, [[*FOLLOWED, ROOT]], last_logits=logits_in_order([*RANKED[:3], ROOT, *RANKED[3:]], 1000))
    expected = []
    for y in range(60):
        rank = y + (y >= 3)  # the root is at rank 3 of the logits and keeps it, as in the reference
        kept = 4 if rank <= 8 else 3 if rank <= 32 else 1
        expected.append(([100 + y, 200 + y, 300 + y, 400 + y][:kept], [LOGITS, INPUT, INPUT, INPUT][:kept]))
    assert branches(tree)[:60] == expected


@pytest.mark.parametrize("max_nodes", [4, 8, "auto"])
def test_both_kinds_are_candidates_however_few_nodes_are_scored(max_nodes):
    text, logits = [ROOT, *range(1, 41), ROOT], logits_in_order([ROOT, *range(60, 98)], 1000)
    drafter = LogitSpec(max_nodes=max_nodes)
    drafter.rank()
    drafter.ranked = logits.topk(drafter.n_ranked).indices.tolist()
    tree = CandidateTree(ROOT, 1 + drafter.ranking.n_candidates, max_depth=50)
    drafter.propose_row(drafter.new_row(text), tree, 0)
    assert tree.sources.count(INPUT) == drafter.ranking.n_candidates // 2
    assert tree.sources.count(LOGITS) >= 3


def test_ablations():
    text, logits = [ROOT, *FOLLOWED, ROOT], logits_in_order([ROOT, *RANKED[1:]], 1000)
    tree = proposed(LogitSpec(last_logits=False), [text], last_logits=logits)
    assert branches(tree) == [(FOLLOWED[:20], [INPUT] * 20)]
    assert tree.is_chain
    tree = proposed(LogitSpec(retrieval=False), [text], last_logits=logits)
    assert branches(tree)[:59] == [([y], [LOGITS]) for y in RANKED[1:]]
    assert tree.shape == (1, 64)


def test_the_logits_are_those_the_root_was_drawn_from(llama_target):
    """The first guesses of each step are the ranks of the plain model's logits at the token before the root."""

    class Watched(LogitSpec):
        checked = 0

        def propose(self, context):
            tree = super().propose(context)
            for row in range(context.n_rows):
                if context.room[row] > 1:
                    text = context.tokens[row, : context.n_tokens[row]].tolist()
                    ranked = llama_target.model(torch.tensor([text[:-1]])).logits[0, -1].argsort(descending=True)
                    assert ranked[0] == text[-1]  # greedy: the root is the first rank
                    assert tree.tokens[row, 1:6].tolist() == ranked[1:6].tolist()
                    self.checked += 1
            return tree

    drafter = Watched(retrieval=False, max_nodes=VOCAB_SIZE)
    generate(llama_target, drafter, random_prompts([5, 17, 1]), 15, batch_size=2, stop_token_ids=())
    assert drafter.checked > 10


def test_options_that_leave_nothing_to_propose_are_refused():
    with pytest.raises(UserError, match="leave nothing to propose"):
        LogitSpec(last_logits=False, retrieval=False)
    with pytest.raises(UserError, match="leave nothing to propose"):
        LogitSpec(last_logits=False, input_tokens=0)


def test_a_datastore_says_what_follows_where_the_text_does_not_know(tmp_path):
    store = make_store(tmp_path, [[7, 8, 9, 10], [5, 6, 20]], 40)
    method = LogitSpec(max_nodes=40, continuation_tokens=4)
    method.retriever = Retriever(store, RetrievalOptions(2, 8, 4))
    known = method.new_row([1, 7, 8, 30, 31, 7, 8])  # the text itself knows what follows (7, 8)
    assert method.continuation(known, 4, ask_store=True)[:2] == ([30, 31, 7, 8], Source.INPUT)
    unknown = method.new_row([8, 33, 1, 7, 8])  # it knows what followed 8 alone; the store what followed (7, 8)
    assert method.continuation(unknown, 4, ask_store=True)[:2] == ([9, 10], Source.DATASTORE)
    assert method.continuation(unknown, 4)[:2] == ([33, 1, 7, 8], Source.INPUT)
    branch = method.new_row([1, 2, 5])
    assert method.continuation(branch, 4, (6,), ask_store=True)[:2] == ([20], Source.DATASTORE)
    nowhere = method.new_row([1, 2, 1])
    assert method.continuation(nowhere, 4, ask_store=True)[:2] == ([2, 1], Source.INPUT)


def test_only_so_many_ranks_ask_the_store(tmp_path):
    make_store(tmp_path, [[5, 6, 20], [5, 7, 21]], 61)
    target = TargetModel(tiny_model("llama"))
    method = logitspec.build(target, str(tmp_path), datastore_ranks=1, max_nodes=20)
    method.ranked = [[6, 7]]
    tree = CandidateTree(5, 20, 50)
    method.propose_row(method.new_row([1, 5]), tree, 0)
    assert 20 in tree.tokens
    assert 21 not in tree.tokens
