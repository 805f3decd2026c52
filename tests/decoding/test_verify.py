"""Scripted logits and paths worked out by hand: always, never and sometimes accepted."""

import pytest
import torch
from scipy.stats import chisquare

from spectrain.decoding import DraftTree, Sampling, verify
from spectrain.decoding.sampling import Uniforms, row_generator
from tests.decoding.reference import tree_of

VOCAB_SIZE = 8
ANY = Sampling(temperature=1.0)


def says(*rows: list[int]) -> torch.Tensor:
    """Logits [B, N, V] of a target that is sure of one next token at each node."""
    return 1000.0 * torch.nn.functional.one_hot(torch.tensor(rows), VOCAB_SIZE).float()


def generators(n_rows: int) -> Uniforms:
    return Uniforms([row_generator(0, row) for row in range(n_rows)])


# Greedily, or sampled from a target that is sure: the same path.
@pytest.mark.parametrize("sampling", [Sampling(), ANY], ids=["greedy", "sampled"])
class TestScriptedTarget:
    def test_always_accepted(self, sampling):
        chain = DraftTree.chain(torch.tensor([1]), torch.tensor([[2, 3, 4]]))
        verified = verify(chain, says([2, 3, 4, 5]), sampling, generators(1))
        assert verified.path.tolist() == [[0, 1, 2, 3]]
        assert (verified.accepted.tolist(), verified.bonus.tolist()) == ([3], [5])

    def test_never_accepted(self, sampling):
        chain = DraftTree.chain(torch.tensor([1]), torch.tensor([[2, 3, 4]]))
        verified = verify(chain, says([6, 3, 4, 5]), sampling, generators(1))
        assert verified.path.tolist() == [[0, -1, -1, -1]]
        assert (verified.accepted.tolist(), verified.bonus.tolist()) == ([0], [6])

    def test_sometimes_accepted_row_by_row(self, sampling):
        chain = DraftTree.chain(
            torch.tensor([1, 1, 1]), torch.tensor([[2, 3, 4], [2, 3, 4], [2, 0, 0]]), torch.tensor([3, 3, 1])
        )
        # Row 1 disagrees after the second token, but agrees again later: too late. Row 2 has one draft, and padding
        # whose id the target happens to predict.
        verified = verify(chain, says([2, 3, 4, 5], [2, 7, 4, 5], [2, 0, 0, 5]), sampling, generators(3))
        assert verified.path.tolist() == [[0, 1, 2, 3], [0, 1, -1, -1], [0, 1, -1, -1]]
        assert verified.accepted.tolist() == [3, 1, 1]
        assert verified.bonus.tolist() == [5, 7, 0]

    def test_branch_is_followed(self, sampling):
        #   0:1 - 1:2 - 3:4
        #      \- 2:3 - 4:4 - 5:6
        tree = tree_of([[1, 2, 3, 4, 4, 6]], [[-1, 0, 0, 1, 2, 4]])
        verified = verify(tree, says([3, 0, 4, 0, 6, 7]), sampling, generators(1))
        assert verified.path.tolist() == [[0, 2, 4, 5, -1, -1]]
        assert (verified.accepted.tolist(), verified.bonus.tolist()) == ([3], [7])

    def test_a_matching_node_under_a_rejected_parent_is_not_accepted(self, sampling):
        tree = tree_of([[1, 2, 3, 4, 4, 6]], [[-1, 0, 0, 1, 2, 4]])
        verified = verify(tree, says([5, 4, 4, 0, 6, 7]), sampling, generators(1))
        assert verified.path.tolist() == [[0, -1, -1, -1, -1, -1]]
        assert verified.bonus.tolist() == [5]

    def test_probe_is_never_accepted(self, sampling):
        tree = tree_of([[1, 2, 3]], [[-1, 0, 0]], probe=[[False, True, False]])
        verified = verify(tree, says([2, 4, 4]), sampling, generators(1))
        assert (verified.accepted.tolist(), verified.bonus.tolist()) == ([0], [2])

    def test_equal_siblings_lose_nothing(self, sampling):
        # Two children spell 2; only the second goes on to 3.
        tree = tree_of([[1, 2, 2, 3]], [[-1, 0, 0, 2]])
        verified = verify(tree, says([2, 3, 3, 5]), sampling, generators(1))
        assert verified.path.tolist() == [[0, 2, 3, -1]]
        assert verified.bonus.tolist() == [5]


def drafted(tokens: list[list[int]], q: list[list[float]], lengths=None) -> DraftTree:
    """Chains whose column i was drawn from q[i] (over 3 tokens)."""
    columns = [torch.tensor([row] * len(tokens)) for row in q]
    lengths = None if lengths is None else torch.tensor(lengths)
    return DraftTree.chain(torch.zeros(len(tokens), dtype=torch.int64), torch.tensor(tokens), lengths, columns)


def logits_of(p: list[list[float]], n_rows: int = 1) -> torch.Tensor:
    return torch.tensor(p).log().expand(n_rows, -1, -1)


def test_rejects_everything_when_p_is_zero():
    chain = drafted([[0, 1]], [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    verified = verify(chain, logits_of([[0.0, 0.0, 1.0]] * 3), ANY, generators(1))
    assert (verified.accepted.tolist(), verified.bonus.tolist()) == ([0], [2])


def test_rejection_draws_from_the_residual_only():
    # max(0, p - q) = (0, 0, 0.4): after a rejection of token 0 the bonus is 2, never 1, though p(1) > 0.
    chain = drafted([[0]] * 400, [[0.6, 0.3, 0.1]])
    verified = verify(chain, logits_of([[0.2, 0.3, 0.5]] * 2, 400), ANY, generators(400))
    rejected = verified.accepted == 0
    assert 200 < int(rejected.sum()) < 330  # 1 - 0.2 / 0.6 of 400 is 267
    assert set(verified.bonus[rejected].tolist()) == {2}


def test_a_row_without_drafts_draws_from_p_not_from_the_residual():
    chain = drafted([[0]] * 600, [[0.9, 0.1, 0.0]], lengths=[0] * 600)
    p = [0.5, 0.25, 0.25]
    verified = verify(chain, logits_of([p] * 2, 600), ANY, generators(600))
    counts = torch.bincount(verified.bonus, minlength=3).numpy()
    assert chisquare(counts, [600 * x for x in p]).pvalue > 1e-4


def test_warping_is_applied_before_the_ratio():
    # top_k=1 makes p one-hot at 2, so a draft of 0 must be rejected however likely it was before warping.
    chain = drafted([[0]], [[1.0, 0.0, 0.0]])
    verified = verify(chain, logits_of([[0.45, 0.05, 0.5]] * 2), Sampling(temperature=1.0, top_k=1), generators(1))
    assert (verified.accepted.tolist(), verified.bonus.tolist()) == ([0], [2])
