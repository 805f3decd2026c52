"""Chances of candidates by hand, the best width against all others, and what is learnt from emitted tokens."""

from __future__ import annotations

import numpy as np
import pytest

from spectrain.decoding import Sampling
from spectrain.drafting.budget import TreeBudget
from spectrain.drafting.ranking import (
    DEPTHS,
    KIND_TRIALS,
    LIKELIEST,
    PRIOR_TRIALS,
    Ranking,
    best_width,
    chances,
    cut,
    learn,
)
from spectrain.target.tree import PADDING_PARENT, ROOT_PARENT

WIDTHS = TreeBudget.WIDTHS


def draft_of(*nodes: tuple[int, int, int], root: int = 9) -> np.ndarray:
    """[4, N] of nodes (token, parent, kind) behind the root."""
    tokens, parents, kinds = zip(*nodes, strict=True)
    return np.array([[root, *tokens], [ROOT_PARENT, *parents], [0] + [3] * len(nodes), [0, *kinds]])


def new_stats(priors: list[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.zeros((len(priors), DEPTHS + 1)), np.zeros((len(priors), DEPTHS + 1)), np.array(priors)


def chances_of(draft: np.ndarray, stats: tuple, own: np.ndarray | None = None, n_probes: int = 0) -> list[float]:
    out = np.empty((1, draft.shape[1]))
    own = np.zeros((1, 2, 2)) if own is None else own
    chances(draft[None], np.array([draft.shape[1]]), n_probes, stats, own, out)
    return out[0].tolist()


def test_before_anything_is_known_a_path_has_the_product_of_its_kinds_priors():
    draft = draft_of((1, 0, 0), (2, 1, 1), (3, 0, 1), (4, 2, 0))
    assert chances_of(draft, new_stats([0.5, 0.2])) == pytest.approx([1, 0.5, 0.1, 0.2, 0.05])


def test_probes_have_no_chance_and_nothing_is_held_for_certain():
    draft = draft_of((1, 0, 0), (2, 1, 0), (3, 0, 0))
    assert chances_of(draft, new_stats([5.0]), n_probes=2) == [1, 0, 0, LIKELIEST]


def test_a_ranking_of_fixed_size_keeps_what_was_right_and_not_what_came_first():
    ranking, emitted = Ranking([0.5, 0.5], 3), [[4, 9]]
    ranking.begin_rows(1)
    ranking.join(range(1), Sampling())
    drafts = draft_of((1, 0, 0), (2, 0, 0), (3, 0, 0), (4, 0, 1))[None]
    kept = []
    for _ in range(12):
        kept.append(ranking.trees(drafts, np.array([5]))[0][0, 0].tolist())
        ranking.end(emitted)
    assert kept[0] == [9, 1, 2]
    assert kept[-1] == [9, 1, 4]


def test_what_was_right_is_learnt_by_kind_and_depth():
    stats, own = new_stats([0.5, 0.5]), np.zeros((2, 2))
    draft = draft_of((1, 0, 0), (7, 0, 1), (2, 1, 0), (3, 3, 0))
    for _ in range(100):
        learn(draft, 5, 0, np.array([1, 2, 8]), stats, own)
    hits, trials, _ = stats
    assert hits[0, :4].tolist() == [100, 100, 0, 0]
    assert trials[0, :4].tolist() == [100, 100, 100, 0]
    assert (hits[1, 0], trials[1, 0], hits[0, DEPTHS], trials[0, DEPTHS]) == (0, 100, 200, 300)
    of_kind = (200 + PRIOR_TRIALS * 0.5) / (300 + PRIOR_TRIALS)
    expected = [(h + KIND_TRIALS * of_kind) / (100 + KIND_TRIALS) for h in (100, 100, 0)]
    path = np.cumprod(np.minimum(expected, LIKELIEST))
    found = chances_of(draft, stats)
    assert [found[1], found[3], found[4]] == pytest.approx(path)
    assert found[2] < 0.1


def test_candidates_that_joined_other_trees_are_learnt_under_their_own_kinds_and_once():
    ranking = Ranking([0.5, 0.5, 0.5], 9)
    ranking.begin_rows(1)
    ranking.join(range(1), Sampling())
    ranking.trees(draft_of((1, 0, 2), (2, 0, 0))[None], np.array([3]))
    ranking.learn_also(draft_of((1, 0, 0), (2, 0, 1))[None], np.array([3]), 2)
    ranking.end([[1, 5]])
    hits, trials, _ = ranking.learnt
    assert (hits[:, 0].tolist(), trials[:, 0].tolist()) == ([1, 0, 1], [1, 1, 1])
    assert ranking.own[0, 0].tolist() == [1, LIKELIEST]
    ranking.end([[1, 5]])  # of a step without candidates
    assert ranking.learnt[1][:, 0].tolist() == [1, 1, 1]


def test_a_row_whose_text_repeats_itself_has_better_chances_than_another():
    stats, good, bad = new_stats([0.5]), np.zeros((2, 2)), np.zeros((2, 2))
    draft = draft_of((1, 0, 0))
    for _ in range(20):
        learn(draft, 2, 0, np.array([1]), stats, good)
        learn(draft, 2, 0, np.array([5]), stats, bad)
    alone = chances_of(draft, stats)[1]
    assert chances_of(draft, stats, good[None])[1] > 1.3 * alone
    assert chances_of(draft, stats, bad[None])[1] < 0.7 * alone


def random_drafts(random: np.random.Generator, n_rows: int, n_probes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Drafts, sizes, and chances that no child exceeds its parent's."""
    drafts, likely = np.zeros((n_rows, 4, 14), dtype=np.int64), np.zeros((n_rows, 14))
    sizes = random.integers(1 + n_probes, 15, n_rows)
    for draft, size, one in zip(drafts, sizes, likely, strict=True):
        draft[1, 0], one[0] = ROOT_PARENT, 1.0
        for i in range(1, size):
            draft[0, i], draft[2, i] = random.integers(100), 3
            free = [0, *range(1 + n_probes, i)]
            draft[1, i] = 0 if i <= n_probes else random.choice(free)
            one[i] = 0.0 if i <= n_probes else one[draft[1, i]] * random.choice([0.2, 0.5, 0.9])
    return drafts, sizes, likely


@pytest.mark.parametrize("seed", range(20))
def test_the_width_that_is_worth_most_is_kept_and_no_other_is_worth_more(seed):
    random = np.random.default_rng(seed)
    n_rows, n_probes = int(random.integers(1, 4)), int(random.integers(0, 3))
    drafts, sizes, likely = random_drafts(random, n_rows, n_probes)
    price = np.cumsum(random.choice([0.0, 0.05, 0.3], 15))
    kept = np.empty((n_rows, 3, 14), dtype=np.int64)
    order, first = np.zeros((n_rows, 14), dtype=np.int64), 1 + n_probes
    chosen, gained, value = best_width(sizes, n_probes, likely, price, WIDTHS, order)
    depth, chains = cut(drafts, sizes, n_probes, order, chosen, kept)
    width = first + chosen

    def worth(n: int) -> tuple[float, float]:
        best = [np.sort(one[first:size])[::-1][:n].sum() for one, size in zip(likely, sizes, strict=True)]
        return sum(best), sum(best) - (price[first + n] if n else 0.0)

    widest = int(sizes.max()) - first
    tried = [0, *(n for n in WIDTHS.tolist() if n < widest), *([widest] if widest else [])]
    assert (gained, value) == pytest.approx(worth(chosen))
    assert worth(width - first)[1] == pytest.approx(max(worth(n)[1] for n in tried))
    for row in range(n_rows):
        n = min(width, int(sizes[row]))
        tokens, parents, sources = kept[row, :, :n]
        assert parents[0] == ROOT_PARENT
        assert all(parents[i] < i for i in range(n))
        assert (kept[row, 1, n:width] == PADDING_PARENT).all()
        depths = [0] * n
        for i in range(1, n):
            depths[i] = depths[parents[i]] + 1
        assert max(depths) <= depth
        paths = {tuple(path_of(drafts[row], i)) for i in range(int(sizes[row]))}
        assert all(tuple(path_of(kept[row, :, :n], i)) in paths for i in range(n))
    is_chain = all(kept[row, 1, i] in (i - 1, PADDING_PARENT) for row in range(n_rows) for i in range(width))
    assert chains == (is_chain and not n_probes)


def path_of(draft: np.ndarray, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(int(draft[0, node]))
        node = int(draft[1, node])
    return path
