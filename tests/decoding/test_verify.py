"""Both rules for chains that were drawn from a q: paths and probabilities worked out by hand.

Trees, greedy decoding and deterministic drafts are in test_random_trees.py, distributions in test_law.py.
"""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from spectrain import kernels
from spectrain.decoding import Sampling, Verified, verify
from spectrain.decoding.sampling import Uniforms, row_generator
from spectrain.target import DraftTree

ALPHA = 1e-4
ANY = Sampling(temperature=1.0)
# The paper's example, in every context the same: two tokens, a and b. Block accepts 11/9 tokens, token-wise 10/9.
COIN_P, COIN_Q = [1 / 3, 2 / 3], [2 / 3, 1 / 3]
A, B = 0, 1


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def operations(request, monkeypatch):
    """Each test runs with the compiled rule, and with torch's, which judges on a GPU."""
    if request.param == "torch":
        monkeypatch.setattr(kernels, "reads", lambda values: False)


def generators(n_rows: int) -> Uniforms:
    return Uniforms([row_generator(0, row) for row in range(n_rows)])


def chains(tokens: list[list[int]], q: list[list[float]], lengths: list[int] | None = None) -> DraftTree:
    """Chains whose column i was drawn from q[i]."""
    columns = [torch.tensor([row] * len(tokens)) for row in q]
    lengths = None if lengths is None else torch.tensor(lengths)
    return DraftTree.chain(torch.zeros(len(tokens), dtype=torch.int64), torch.tensor(tokens), lengths, columns)


def logits_of(p: list[list[float]], n_rows: int) -> torch.Tensor:
    return torch.tensor(p).log().expand(n_rows, -1, -1)


def judged(tokens: list[int], p: list[float], q: list[float], n_rows: int, verification: str = "block") -> Verified:
    """The same chain in n_rows rows, p and q the same in every context."""
    chain = chains([tokens] * n_rows, [q] * len(tokens))
    return verify(chain, logits_of([p] * (len(tokens) + 1), n_rows), ANY, generators(n_rows), verification)


def with_uniforms(monkeypatch, uniforms: list[list[float]]) -> None:
    """The numbers that `verify` is to draw: gamma for the path, then one for the bonus."""
    for read in ("take", "next"):
        monkeypatch.setattr(Uniforms, read, lambda *_: torch.tensor(uniforms))


class TestByHand:
    def test_always_accepted_where_p_exceeds_q_all_along(self):
        # bb: P_1 = P_2 = min(2, 1) = 1, so h_1 = h_2 = 1.
        verified = judged([B, B], COIN_P, COIN_Q, 200)
        assert verified.accepted.tolist() == [2] * 200
        assert verified.path.tolist() == [[0, 1, 2]] * 200
        assert set(verified.bonus.tolist()) == {A, B}  # from p, not from the residual, which is b alone

    def test_never_accepted_where_p_is_zero(self):
        verified = judged([0, 1], [0.0, 0.0, 1.0], [0.5, 0.5, 0.0], 200)
        assert verified.accepted.tolist() == [0] * 200
        assert verified.path.tolist() == [[0, -1, -1]] * 200
        assert verified.bonus.tolist() == [2] * 200

    def test_a_later_token_makes_up_for_an_earlier_one(self):
        # ab: P_1 = 1/2, P_2 = min(1/2 * 2, 1) = 1 = h_2. Token by token a is accepted in half the rows only.
        assert judged([A, B], COIN_P, COIN_Q, 400).accepted.tolist() == [2] * 400
        assert 140 < int((judged([A, B], COIN_P, COIN_Q, 400, "token").accepted == 0).sum()) < 260

    def test_sometimes_accepted_whole_or_not_at_all(self):
        # aa: P_1 = 1/2, S_1 = max(0, 1/2 p - q) = 0, so h_1 = 0; h_2 = P_2 = 1/4. The residual at the root is b.
        verified = judged([A, A], COIN_P, COIN_Q, 4000)
        whole = verified.accepted == 2
        assert set(verified.accepted.tolist()) == {0, 2}
        assert chisquare([int(whole.sum()), int((~whole).sum())], [1000, 3000]).pvalue > ALPHA
        assert set(verified.bonus[~whole].tolist()) == {B}

    def test_thresholds_inside_and_at_the_end_of_a_chain(self, monkeypatch):
        # p = (.5, .3, .2), q = (.7, .1, .2), draft 0 0: P_1 = 5/7, S_1 = 5/7 * .3 - .1 = .8/7, h_1 = .8/2.8 = 2/7;
        # h_2 = P_2 = 25/49. Bonus after x_1: max(0, 5/7 p - q) is token 1 alone; at the root max(0, p - q) is too.
        p, q = [0.5, 0.3, 0.2], [0.7, 0.1, 0.2]
        h_1, h_2 = 2 / 7, 25 / 49
        cases = [
            ([0.99, h_2 - 1e-4], 2),
            ([0.0, h_2 + 1e-4], 1),
            ([h_1 - 1e-4, 0.99], 1),
            ([h_1 + 1e-4, 0.99], 0),
        ]
        with_uniforms(monkeypatch, [[*u, 0.6] for u, _ in cases])
        verified = judged([0, 0], p, q, len(cases))
        assert verified.accepted.tolist() == [accepted for _, accepted in cases]
        assert verified.bonus.tolist() == [1, 1, 1, 1]  # u = 0.6 in the first row: p's second token

    def test_residual_is_scaled_by_what_the_path_lacks(self, monkeypatch):
        # P_1 = 0.3 / 0.5 = 0.6 and then max(0, 0.6 p - q) = (0, .18 - .1, .24 - .2) = 2 : 1 of tokens 1 and 2.
        # Unscaled it would be (0, .2, .2). S_1 = .12, h_1 = .12 / .52; P_2 = 0.6 * .3 / .7 is not reached.
        p = [[0.3, 0.3, 0.4], [0.3, 0.3, 0.4], [1.0, 0.0, 0.0]]
        chain = chains([[0, 0]] * 4, [[0.5, 0.25, 0.25], [0.7, 0.1, 0.2]])
        with_uniforms(monkeypatch, [[0.23, 0.99, u] for u in (0.01, 0.6, 0.7, 0.99)])
        verified = verify(chain, logits_of(p, 4), ANY, generators(4), "block")
        assert verified.accepted.tolist() == [1] * 4
        assert verified.bonus.tolist() == [1, 1, 2, 2]

    def test_ragged_rows_end_at_their_own_length(self, monkeypatch):
        # Draft a: inside a chain h_1 = 0; as the whole chain h_1 = P_1 = 1/2. Without drafts the bonus is p's.
        chain = chains([[A, A], [A, A], [A, A]], [COIN_Q, COIN_Q], lengths=[2, 1, 0])
        with_uniforms(monkeypatch, [[0.4, 0.4, 0.1], [0.4, 0.1, 0.0], [0.1, 0.0, 0.0]])
        verified = verify(chain, logits_of([COIN_P] * 3, 3), ANY, generators(3), "block")
        assert verified.accepted.tolist() == [0, 1, 0]
        assert verified.bonus.tolist() == [B, A, A]


class TestRounding:
    def test_tiny_products_recover(self):
        # P falls to 1e-60, below float32's least number, and rises to 1 again: all four are accepted, always.
        low, high = [1e-30, 1.0], [1.0, 1e-30]
        chain = chains([[0, 0, 0, 0]] * 50, [high, high, low, low])
        verified = verify(chain, logits_of([low, low, high, high, high], 50), ANY, generators(50), "block")
        assert verified.accepted.tolist() == [4] * 50

    def test_a_token_of_tiny_q_is_judged_by_the_ratio(self):
        for p_0, least, most in ((0.5, 400, 400), (1e-36, 140, 260), (0.0, 0, 0)):  # ratios: huge, 1/2, 0
            chain = chains([[0]] * 400, [[2e-36, 1.0]])
            logits = logits_of([[p_0, 1 - p_0]] * 2, 400)
            assert least <= int(verify(chain, logits, ANY, generators(400), "block").accepted.sum()) <= most

    def test_zero_over_zero_is_not_accepted(self):
        chain = chains([[0, 0]] * 50, [[0.0, 1.0]] * 2)
        verified = verify(chain, logits_of([[0.0, 1.0]] * 3, 50), ANY, generators(50), "block")
        assert verified.accepted.tolist() == [0] * 50
        assert verified.bonus.tolist() == [1] * 50

    def test_no_residual_falls_back_to_p(self):
        chain = chains([[0]] * 200, [[1.0, 0.5, 0.5]])  # q above p everywhere
        verified = verify(chain, logits_of([[0.0, 0.5, 0.5]] * 2, 200), ANY, generators(200), "block")
        assert verified.accepted.tolist() == [0] * 200
        assert set(verified.bonus.tolist()) == {1, 2}


N_SAMPLES = 20_000


def test_accepts_strictly_more_in_the_paper_s_example():
    drafts = torch.multinomial(torch.tensor(COIN_Q).expand(N_SAMPLES, 2), 2, replacement=True)
    chain = chains(drafts.tolist(), [COIN_Q] * 2)
    arguments = chain, logits_of([COIN_P] * 3, N_SAMPLES), ANY
    for verification, expected in (("token", 10 / 9), ("block", 11 / 9)):
        accepted = verify(*arguments, generators(N_SAMPLES), verification).accepted.double()
        assert abs(float(accepted.mean()) - expected) < 4 * float(accepted.std()) / N_SAMPLES**0.5


def test_rejection_draws_from_the_residual_only():
    # max(0, p - q) = (0, 0, 0.4): after a rejection of token 0 the bonus is 2, never 1, though p(1) > 0.
    chain = chains([[0]] * 400, [[0.6, 0.3, 0.1]])
    verified = verify(chain, logits_of([[0.2, 0.3, 0.5]] * 2, 400), ANY, generators(400))
    rejected = verified.accepted == 0
    assert 200 < int(rejected.sum()) < 330  # 1 - 0.2 / 0.6 of 400 is 267
    assert set(verified.bonus[rejected].tolist()) == {2}


def test_a_row_without_drafts_draws_from_p_not_from_the_residual():
    chain = chains([[0]] * 600, [[0.9, 0.1, 0.0]], lengths=[0] * 600)
    p = [0.5, 0.25, 0.25]
    verified = verify(chain, logits_of([p] * 2, 600), ANY, generators(600))
    counts = torch.bincount(verified.bonus, minlength=3).numpy()
    assert chisquare(counts, [600 * x for x in p]).pvalue > ALPHA


def test_warping_is_applied_before_the_ratio():
    # top_k=1 makes p one-hot at 2, so a draft of 0 must be rejected however likely it was before warping.
    chain = chains([[0]], [[1.0, 0.0, 0.0]])
    verified = verify(chain, logits_of([[0.45, 0.05, 0.5]] * 2, 1), Sampling(temperature=1.0, top_k=1), generators(1))
    assert (verified.accepted.tolist(), verified.bonus.tolist()) == ([0], [2])
