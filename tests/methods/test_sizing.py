"""The nodes of a step: chances by hand, the best width against all others, and what is learnt from emitted tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spectrain.decoding import Sampling
from spectrain.decoding.tree import PADDING_PARENT, ROOT_PARENT
from spectrain.kernels.reference import exponentials, mixed
from spectrain.methods import sizing
from spectrain.methods.chances import (
    DEPTHS,
    KIND_TRIALS,
    LIKELIEST,
    NO_KEYS,
    PLAUSIBLE,
    PRIOR_TRIALS,
    Ranking,
    best_width,
    chances,
    cut,
    learn,
)
from spectrain.methods.sizing import FOUND, LEAST_ASKED, SELDOM, WIDTHS, Asking, ChainSizer, Sizer
from spectrain.methods.step_times import DraftSeconds, DraftTimes, Slowness, StepTimes
from spectrain.stores.forward_times import ForwardTimes

NODES = [1, 2, 4, 8, 16, 32, 64]
FREE = ForwardTimes(NODES, [1e-3] * 7)
DEAR = ForwardTimes(NODES, [1e-3 * n for n in NODES])


def draft_of(*nodes: tuple[int, int, int], root: int = 9) -> np.ndarray:
    """[4, N] of nodes (token, parent, kind) behind the root."""
    tokens, parents, kinds = zip(*nodes, strict=True)
    return np.array([[root, *tokens], [ROOT_PARENT, *parents], [0] + [3] * len(nodes), [0, *kinds]])


def new_stats(priors: list[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.zeros((len(priors), DEPTHS + 1)), np.zeros((len(priors), DEPTHS + 1)), np.array(priors)


def chances_of(
    draft: np.ndarray, stats: tuple, own: np.ndarray | None = None, n_probes: int = 0, keys=None
) -> list[float]:
    out = np.empty((1, draft.shape[1]))
    own = np.zeros((1, 2, 2)) if own is None else own
    learnt = *stats, np.full(len(stats[2]), PLAUSIBLE)
    chances(draft[None], np.array([draft.shape[1]]), n_probes, learnt, own, NO_KEYS if keys is None else keys, out)
    return out[0].tolist()


def test_before_anything_is_known_a_path_has_the_product_of_its_kinds_priors():
    draft = draft_of((1, 0, 0), (2, 1, 1), (3, 0, 1), (4, 2, 0))
    assert chances_of(draft, new_stats([0.5, 0.2])) == pytest.approx([1, 0.5, 0.1, 0.2, 0.05])


def test_probes_have_no_chance_and_nothing_is_held_for_certain():
    draft = draft_of((1, 0, 0), (2, 1, 0), (3, 0, 0))
    assert chances_of(draft, new_stats([5.0]), n_probes=2) == [1, 0, 0, LIKELIEST]


def test_known_noise_changes_chances_and_leaves_their_mean():
    draft, stats = draft_of((1, 0, 0), (2, 1, 1)), new_stats([0.7, 0.2])
    keys = mixed(torch.arange(20_000)).view(-1, 2).numpy()
    found = np.array([chances_of(draft, stats, keys=keys[i : i + 1]) for i in range(len(keys))])
    assert found.mean(0) == pytest.approx([1, 0.7, 0.7 * 0.2], abs=0.01)
    late = exponentials(torch.from_numpy(keys), torch.tensor([1, 2])).numpy()
    likely, other = late[:, 0] < np.quantile(late[:, 0], 0.1), late[:, 0] > np.quantile(late[:, 0], 0.9)
    assert found[likely, 1].min() > 0.9 > 0.4 > found[other, 1].max()


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


def test_a_candidate_that_was_not_scored_is_judged_as_well():
    """The bonus tells whether the first candidate behind the last accepted one was right."""
    stats = new_stats([0.5])
    learn(draft_of((1, 0, 0), (2, 1, 0)), 3, 0, np.array([1]), stats, np.zeros((2, 2)))
    assert stats[0][0, :2].tolist() == [1, 0]
    assert stats[1][0, :2].tolist() == [1, 0]


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


def test_the_value_of_candidates_is_that_of_the_tree_that_they_would_make():
    sizer = started(ForwardTimes(NODES, [1e-3 * (1 + 0.02 * n) for n in NODES]))
    gained, value, likely = sizer.value_of(CHAIN[None], np.array([12]))
    sizer.trees(CHAIN[None], np.array([12]))
    assert value == sizer.value > 0
    assert gained == pytest.approx(likely[0, 1 : 1 + sizer._chosen[0] - 1].sum())


def test_a_model_is_asked_where_it_has_added_more_than_its_seconds_are_worth():
    asking, rate = Asking(), 100.0
    sure, unsure = FOUND[-1] + 1, FOUND[0] / 2
    asked = {sure: 0, unsure: 0}
    for _ in range(300):
        for found, added in ((sure, 0.1), (unsure, 0.5)):  # 2 ms are worth 0.2 tokens
            if asking.asks(1, found, rate):
                asking.count(1, added, 2e-3, 1)
                asked[found] += 1
    assert asked[unsure] == 300
    assert 300 // SELDOM <= asked[sure] <= LEAST_ASKED + 300 // SELDOM
    assert not asking.asks(1, sure, rate)
    for _ in range(LEAST_ASKED):
        assert asking.asks(8, sure, rate)  # what so many rows cost is not known
        asking.count(8, 0.1, 2e-3, 1)
    assert asking.asks(8, sure, rate)  # rows share the seconds
    for _ in range(20 * SELDOM):  # the text changes
        if asking.asks(1, sure, rate):
            asking.count(1, 2.0, 2e-3, 1)
    assert asking.asks(1, sure, rate)


def test_seconds_of_drafting_are_those_of_what_was_done_in_each_step():
    """Steps that do not read the model must not be taken for the usual ones, nor the others for disturbed ones."""
    drafting = DraftSeconds()
    for i in range(400):
        drafting.count(1e-4 if i % 4 else 8e-3, int(i % 4 == 0))
    assert drafting.value == pytest.approx(0.75 * 1e-4 + 0.25 * 8e-3, rel=0.1)
    assert drafting.count(1.0, 1) < 0.03  # something else ran


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


@pytest.mark.parametrize("seed", range(60))
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


class Clock:
    """Stands still until a test moves it."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> Clock:
    stands = Clock()
    monkeypatch.setattr(sizing, "time", stands)
    return stands


def step(sizer: Sizer, clock: Clock, emitted: list[int]) -> int:
    """A step on `CHAIN` that takes the seconds expected of it. Returns the nodes that were scored."""
    sizer.begin()
    width = sizer.trees(CHAIN[None], np.array([12]))[0].shape[2]
    clock.now += float(sizer.times.seconds(1)[width])
    sizer.end([emitted])
    return width


def started(times: ForwardTimes, n_rows: int = 1, priors: list[float] | None = None) -> Sizer:
    sizer = Sizer(priors or [0.5], 64)
    sizer.start(times, times, n_rows)
    sizer.join(range(n_rows), Sampling())
    sizer.begin()
    return sizer


CHAIN = draft_of(*((token, token - 1, 0) for token in range(1, 12)))


def test_where_nodes_cost_nothing_all_are_scored_and_where_they_are_dear_none():
    sizes = np.array([12])
    free, dear = started(FREE), started(DEAR)
    free.times.drafting[:] = 0.5  # a step with a draft is no slower
    assert free.trees(CHAIN[None], sizes)[0].shape == (1, 3, 12)
    kept, depth, chains = dear.trees(CHAIN[None], sizes)
    assert (kept.shape, depth, chains) == ((1, 3, 1), 0, True)


def test_more_nodes_are_scored_once_they_have_been_right(clock):
    sizer = started(ForwardTimes(NODES, [1e-3 * (1 + 0.1 * n) for n in NODES]))
    widths = [step(sizer, clock, [*range(1, 12)]) for _ in range(30)]
    assert widths[0] <= 4 < widths[-1]
    widths += [step(sizer, clock, [50]) for _ in range(60)]
    assert widths[-1] <= 2


def test_another_sampling_forgets_what_was_learnt_and_the_same_does_not():
    sizer = started(FREE)
    sizer.trees(CHAIN[None], np.array([12]))
    sizer.end([[1, 2]])
    sizer.join(range(1), Sampling())
    assert sizer.learnt[1].any()
    sizer.join(range(1), Sampling(temperature=0.8))
    assert not sizer.learnt[1].any()


def test_what_a_row_has_learnt_moves_with_it():
    sizer = started(FREE, n_rows=3)
    sizer.own[:] = np.arange(12).reshape(3, 2, 2)
    sizer.free(0, 2)
    assert sizer.own[:2].tolist() == np.arange(12).reshape(3, 2, 2)[[2, 1]].tolist()
    sizer.join(range(2, 3), Sampling())
    assert not sizer.own[2].any()
    assert sizer.own[0].any()


def test_a_chain_is_as_long_as_its_tokens_are_accepted(clock):
    times = ForwardTimes(NODES, [1e-3 * (1 + 0.05 * n) for n in NODES])
    lengths = {}
    for accepted in (0, 1, 8):
        sizer = ChainSizer(8)
        sizer.start(times, times, 1)
        sizer.join(Sampling())
        for _ in range(50):
            n = sizer.begin(1)
            clock.now += 1e-4 * n
            sizer.drafted(n)
            clock.now += 1e-3 * (1.6 + 0.05 * n)
            sizer.end([[7] * (1 + min(accepted, n))])
        lengths[accepted] = n
    assert lengths[0] == 1
    assert lengths[0] <= lengths[1] <= 3 < lengths[8]


def test_a_chain_begins_as_long_as_training_says_and_learns_all_the_same():
    times = ForwardTimes(NODES, [1e-3 * (1 + 0.1 * n) for n in NODES])
    firsts, lasts = [], []
    for acceptance in (0.2, None, 0.9):
        sizer = ChainSizer(8, acceptance)
        sizer.start(times, times, 1)
        sizer.join(Sampling())
        firsts.append(sizer.begin(1))
        sizer.hits[:], sizer.trials[:] = 30, 100
        lasts.append(sizer.begin(1))
    assert firsts[0] < firsts[1] < firsts[2]
    assert max(lasts) <= 2 < firsts[1]


@pytest.mark.parametrize("forward_s", [0.5e-3, 20e-3])
def test_what_a_step_takes_beside_its_forward_is_no_share_of_it(forward_s):
    """Before any step was timed: a large target's step must not seem dear only because it drafts."""
    seconds = started(ForwardTimes(NODES, [forward_s] * 7)).times.seconds(1)
    assert seconds[2] - seconds[1] == pytest.approx(1e-4)
    assert seconds[1] == pytest.approx(forward_s + 1.5e-4)


def test_a_few_unlucky_steps_do_not_outweigh_what_was_expected():
    times = started(FREE).times
    for i in range(200):
        times.count(1, 3, 1, (0.0, float(times.seconds(1)[3])), (1.0, 2.0))  # 2 tokens were expected, 1 was gained
        if i == 4:
            early = times.speed(1)
    seconds = times.step_s(1)
    assert early * seconds > 1.85
    assert times.speed(1) * seconds == pytest.approx(1.5, abs=0.01)  # half of the weight each, after many steps


def test_drafting_takes_a_first_token_and_more():
    times = DraftTimes()
    for _ in range(40):
        for n in (1, 4, 2):
            times.count(n, 0.2 + 0.1 * n)
    times.count(3, 100.0)  # something else ran
    for n in (1, 2, 3, 8):
        assert times.seconds(n) == pytest.approx(0.2 + 0.1 * n, rel=0.2)
    one = DraftTimes()
    for _ in range(200):
        one.count(3, 0.4)
    assert one.seconds(3) == pytest.approx(0.4, rel=0.05)
    assert one.seconds(1) == pytest.approx(0.2, rel=0.15)  # the first costs as much as each


def test_a_machine_that_is_slow_for_a_while_does_not_make_a_draft_dear():
    """Steps with and without a draft, in turns, while everything takes three times as long."""
    sizer = started(FREE)
    times = sizer.times
    before = times.seconds(1)[[1, 3]]
    for i in range(400):
        slow = 3.0 if i > 100 else 1.0
        for width in (1, 3):
            times.count(1, width, 1, (0.0, slow * before[int(width > 1)]), (1.0, 1.0))
    assert times.slowness.value == pytest.approx(3.0, rel=0.1)
    np.testing.assert_allclose(times.seconds(1)[[1, 3]], before, rtol=0.15)


def test_chains_of_no_tokens_say_nothing_about_what_others_cost(clock):
    sizer = ChainSizer(4)
    sizer.start(FREE, FREE, 1)
    for i in range(60):
        n_tokens = sizer.begin(1)
        n_tokens = n_tokens if i % 3 else 0
        clock.now += 1e-3 * n_tokens
        sizer.drafted(n_tokens)
        clock.now += float(sizer.times.seconds(1)[1 + n_tokens])
        sizer.end([[1]])
    means = sizer.times.draft_s[0].means
    assert means[0].value < 1e-4
    assert all(mean.value == pytest.approx(1e-3 * n, rel=0.1) for n, mean in means.items() if mean.n_steps)


def test_a_single_disturbed_step_hardly_counts():
    slowness = Slowness()
    slowness.count(1.0, 4)
    slowness.count(1000.0, 1.0)
    assert slowness.value < 1.5


def test_a_method_seems_slower_with_more_rows_where_their_second_nodes_are_dearer():
    """One row has two nodes for 1.1 times the price of one, eight rows for twice the price."""
    times = StepTimes(4)
    times.start(ForwardTimes([1, 2, 4], [1.0, 1.1, 1.3]), ForwardTimes([1, 2, 4], [2.0, 4.0, 8.0]), 8)
    for _ in range(40):
        times.count(1, 2, 1, (0.0, 1.1), (1.5, 1.5))
    over_plain = [times.speed(n_rows) * times.seconds(n_rows)[1] / n_rows for n_rows in (1, 8)]
    assert over_plain == pytest.approx([1.5 / 1.1, 1.5 / 2], rel=0.01)


def test_rows_that_nothing_was_drafted_with_start_from_the_same_ratio_as_their_neighbours():
    """Steps of two rows take twice what was guessed, so those of three may, too."""
    times = StepTimes(4)
    times.start(ForwardTimes([1, 2, 4], [1.0, 1.1, 1.3]), ForwardTimes([1, 2, 4], [2.0, 4.0, 8.0]), 3)
    guessed, before = times.seconds(2)[2], [times.seconds(n_rows)[4] for n_rows in (2, 3)]
    for _ in range(100):
        times.count(2, 2, 1, (0.0, 2 * guessed), (2, 2))
    learnt = [times.seconds(n_rows)[4] for n_rows in (2, 3)]
    assert learnt[0] > 1.2 * before[0]
    assert learnt[1] / before[1] == pytest.approx(learnt[0] / before[0])
    assert times.seconds(3)[1] == pytest.approx(2.0, rel=0.01)
