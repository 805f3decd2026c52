"""How many tokens a step drafts: against exhaustive search, under scripted acceptance and tables read from a file."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from spectrain.decoding import Drafter, Sampling, generate
from spectrain.drafting import step_costs
from spectrain.drafting.budget import ChainBudget, TreeBudget
from spectrain.drafting.step_costs import Table, curve, draft_curve, forward_curve
from spectrain.errors import UserError
from spectrain.methods.auto import why_plain
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.registry import method_names
from spectrain.target import TargetModel
from tests.conftest import in_turn, random_prompts, table_of, tiny_model
from tests.drafting.test_ranking import draft_of
from tests.methods.every import Artifacts, build_auto

TABLES = {
    "free": ({1: 1.0, 64: 1.0}, {0: 0.0}),
    "dear": ({1: 1.0, 2: 40.0, 64: 2000.0}, {0: 0.5, 1: 50.0, 10: 500.0}),
    "cpu": ({1: 1.0, 2: 1.3, 8: 2.2, 64: 14.0}, {0: 0.03, 1: 0.3, 8: 1.5}),
    "gpu": ({1: 1.0, 16: 1.05, 64: 1.2}, {0: 0.02, 1: 0.12, 8: 0.6}),
}


@pytest.fixture(params=list(TABLES))
def table(request, tmp_path, monkeypatch) -> Table:
    return use(request.param, tmp_path, monkeypatch)


def use(name: str, folder: Path, monkeypatch) -> Table:
    file = table_of(folder, *TABLES[name])
    monkeypatch.setenv(step_costs.FILE, str(file))
    return Table.read(file, is_given=True)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> Artifacts:
    documents = [row * 3 for row in random_prompts([12, 20, 9], seed=3)]
    spire = {"k": 3, "window_tokens": 8}
    folder = tmp_path_factory.mktemp("budget")
    return Artifacts(folder, tiny_model("llama"), lambda: tiny_model("llama", seed=5), lambda: documents, **spire)


def prompts() -> list[list[int]]:
    return [row[:7] * 3 + row for row in random_prompts([9, 20, 13], seed=1)]


def costs_of(table: Table, target: TargetModel, n_rows: int) -> step_costs.Costs:
    return table.costs(target, Sampling(), n_rows, Autoregressive())


@pytest.mark.parametrize("chances", [(0.9, 0.9, 0.9, 0.9, 0.9), (0.9, 0.2, 0.9, 0.9, 0.9), (0.1, 0.1, 0.1, 0.1, 0.1)])
@pytest.mark.parametrize("n_rows", [1, 4])
def test_a_chain_has_the_length_that_an_exhaustive_search_finds(table, llama_target, chances, n_rows):
    """Row b accepts by its own chance: that of the script to the power of b + 1, as if its temperature were higher."""
    random, chain = np.random.default_rng(0), ChainBudget(5)
    chain.costs = costs_of(table, llama_target, n_rows)
    chain.begin_rows(n_rows)
    chain.join(range(n_rows), Sampling())
    hits, trials, own = np.zeros(5), np.zeros(5), np.zeros((n_rows, 2))
    for step in range(60):
        by_place, before = [], (0.6, 8)
        for place in range(5):
            before = (hits[place] + before[1] * before[0]) / (trials[place] + before[1]), 8
            by_place.append(before[0])
        ratio = (own[:, 0] + 6) / (own[:, 1] + 6)
        rates = []
        for length in range(6):
            tokens = sum(
                1 + sum(np.prod([min(r * chance, 0.98) for chance in by_place[: i + 1]]) for i in range(length))
                for r in ratio
            )
            rates.append(tokens / (chain.costs.step_s(n_rows, 1 + length, length)))
        chosen = chain.choose(n_rows)
        assert rates[chosen] == pytest.approx(max(rates)), step
        drafted = 5 if step % 2 else chosen
        emitted = []
        for row in range(n_rows):
            accepted = 0
            while accepted < drafted and random.random() < chances[accepted] ** (row + 1):
                accepted += 1
            tried = min(accepted + 1, drafted)
            hits[:accepted] += 1
            trials[:tried] += 1
            own[row] += accepted, sum(by_place[:tried])
            own[row] *= 0.5 if own[row, 1] > 24 else 1.0
            emitted.append([0] * (accepted + 1))
        chain.learn(emitted, drafted)


@pytest.mark.parametrize("n_rows", [1, 3])
def test_a_tree_has_the_width_that_an_exhaustive_search_finds(table, llama_target, n_rows):
    """Candidates of three kinds are right by a script; one row has better luck than the others."""
    random, tree = np.random.default_rng(1), TreeBudget([0.5, 0.5, 0.5], 64)
    tree.costs = costs_of(table, llama_target, n_rows)
    tree.begin_rows(n_rows)
    tree.join(range(n_rows), Sampling())
    draft = draft_of((1, 0, 0), (2, 0, 1), (3, 1, 0), (4, 3, 2), (5, 1, 2), (6, 4, 0), (7, 2, 1))
    drafts, sizes = np.array([draft] * n_rows), np.full(n_rows, draft.shape[1])
    gained_tokens, spent = n_rows, float(tree.costs.step_s(n_rows, 1, 0))
    for step in range(60):
        likely = np.sort(tree.likely(drafts, sizes)[:, 1:])[:, ::-1]
        seconds = tree.costs.forward_s(n_rows)
        rate = max(n_rows / seconds[1], gained_tokens / spent if step else 0.0)
        assert tree.rate(n_rows) == pytest.approx(rate)
        values = {n: likely[:, :n].sum() - rate * (seconds[1 + n] - seconds[1]) for n in range(8)}
        width = tree.trees(drafts, sizes)[0].shape[2] - 1
        assert values[width] == pytest.approx(max(values.values())), step
        emitted = [[*[1, 3, 4, 6][: random.integers(0, 5)], 9] if random.random() < 0.8 else [2, 9] for _ in drafts]
        emitted[0] = [1, 3, 4, 9]
        tree.end(emitted)
        decay = 1 - 1 / tree.RATE_STEPS
        tokens, step_s = sum(map(len, emitted)), tree.costs.step_s(n_rows, 1 + width, 0)
        gained_tokens, spent = (decay * gained_tokens + tokens, decay * spent + step_s) if step else (tokens, step_s)


DRAFTING = [name for name in method_names() if name != "autoregressive"]


def drafted(drafter: Drafter, target: TargetModel, batch_size: int = 1, sampling: Sampling | None = None):
    return generate(target, drafter, prompts(), 40, sampling, batch_size=batch_size)


@pytest.mark.parametrize("name", DRAFTING)
def test_where_drafts_never_pay_every_method_decodes_plainly_and_says_so(name, artifacts, tmp_path, monkeypatch):
    use("dear", tmp_path, monkeypatch)
    drafter = build_auto(name, artifacts)
    for _ in range(4 if name == "auto" else 1):  # which tries each of its methods
        drafted(drafter, artifacts.target)
    found = drafted(drafter, artifacts.target)
    steps = {one.method for row in found for one in row.choices if one.why == "fastest"}
    assert steps == {"autoregressive"}
    assert sum(sum(one.drafted) for one in found) <= 0.1 * sum(one.target_forwards for one in found)
    assert any(why in why_plain(drafter) for why in ("nothing was drafted", "hardly anything was drafted"))


@pytest.mark.parametrize("name", ["spire", "speculative", "magicdec"])
def test_where_nodes_are_free_chains_are_as_long_as_they_may_be(name, artifacts, tmp_path, monkeypatch):
    use("free", tmp_path, monkeypatch)
    drafter = build_auto(name, artifacts)
    most = drafter.arms[0].drafter.gamma
    (row,) = generate(artifacts.target, drafter, prompts()[:1], 60, stop_token_ids=())
    free = [n for n in row.drafted[:-most] if n]
    assert set(free) == {most}
    assert len(free) > 0.5 * row.target_forwards
    assert why_plain(drafter) is None


@pytest.mark.parametrize("name", ["pld", "sssd", "logitspec", "spire_sssd"])
def test_where_nodes_are_free_all_candidates_are_scored(name, artifacts, tmp_path, monkeypatch):
    use("free", tmp_path, monkeypatch)
    drafter = build_auto(name, artifacts)
    ranking = drafter.arms[0].drafter.ranking
    kept, trees = [], ranking.trees

    def noted(drafts, sizes, n_probes=0):
        found = trees(drafts, sizes, n_probes)
        kept.append((found[0].shape[2] - 1, int(sizes.max()) - 1))
        return found

    ranking.trees = noted
    drafted(drafter, artifacts.target)
    assert kept
    assert all(width == min(n, 63) for width, n in kept)


@pytest.mark.parametrize("name", DRAFTING)
def test_the_same_seed_gives_the_same_text_and_drafts_whatever_the_clock_says(name, artifacts, tmp_path, monkeypatch):
    use("cpu", tmp_path, monkeypatch)
    sampling = Sampling(temperature=0.8)

    def decoded() -> list:
        return [
            (one.tokens, one.drafted) for one in drafted(build_auto(name, artifacts), artifacts.target, 2, sampling)
        ]

    before, lots = decoded(), np.random.default_rng(5)
    monkeypatch.setattr(time, "perf_counter", lambda: float(lots.uniform(-1e6, 1e6)))
    assert decoded() == before


@pytest.mark.parametrize(("name", "kind"), in_turn(DRAFTING, ["free", "cpu", "gpu"]))
def test_with_shared_noise_batch_and_table_leave_the_sample_as_it_is(name, kind, artifacts, tmp_path, monkeypatch):
    sampling = Sampling(temperature=1.0, draws="shared")
    plain = [one.tokens for one in drafted(Autoregressive(), artifacts.target, 1, sampling)]
    use(kind, tmp_path, monkeypatch)
    found = drafted(build_auto(name, artifacts), artifacts.target, 1 if kind == "free" else 8, sampling)
    assert [one.tokens for one in found] == plain


def test_seconds_never_fall_and_go_on_beyond_what_was_timed():
    assert curve({1: 1.0, 2: 3.0, 4: 2.0, 8: 4.0}, 10) == pytest.approx([1, 1, 2, 2, 2, 2.5, 3, 3.5, 4, 4.5, 5])
    assert curve({0: 1.0, 1: 2.0, 2: 4.0, 3: 3.9}, 5) == pytest.approx([1, 2, 3.9, 3.9, 4.85, 5.8])
    assert curve({0: 1.0}, 2) == pytest.approx([1, 1, 1])


def test_forwards_have_the_known_shape_scaled_by_what_near_sizes_took():
    shape = forward_curve({}, 1)
    assert [shape[n] for n in (1, 8, 48, 96)] == pytest.approx([1.0, 1.3, 6.3, 12.6])
    assert forward_curve({}, 8)[1] == shape[8]  # all rows together have as many nodes
    assert forward_curve({(1, 1): (0.02, 20)}, 1) == pytest.approx(0.02 * shape)
    found = forward_curve({(1, 1): (0.02, 20), (1, 32): (0.04, 20)}, 1)
    assert (found[1], found[32], found[64]) == pytest.approx((0.02, 0.04, 0.04 * 6.3 / 4.4 * 64 / 48), rel=0.01)
    assert (np.diff(found) >= 0).all()
    assert (forward_curve({}, 1, is_flat=True)[1:49] == 1).all()
    seldom = forward_curve({(1, 4): (0.023, 20), (1, 8): (0.1, 1)}, 1)  # one slow step beside twenty others
    assert seldom[8] < 0.05


def test_a_size_that_other_work_made_slow_is_bounded_by_a_larger_one():
    quiet = {(1, 1): (0.016, 8), (1, 6): (0.018, 8), (1, 8): (0.019, 8)}
    spoiled = quiet | {(1, 2): (0.031, 8), (1, 3): (0.057, 8), (1, 5): (0.032, 8)}
    assert forward_curve(spoiled, 1)[1:9] == pytest.approx(forward_curve(quiet, 1)[1:9], rel=0.1)
    assert forward_curve(spoiled, 1)[5] <= 0.019


def test_drafts_are_shares_of_a_plain_step_until_one_was_run():
    guessed = draft_curve({}, 1, 2.0)
    assert (guessed[0], guessed[1], guessed[5]) == pytest.approx((0.04, 0.24, 1.04))
    found = draft_curve({(1, 0): (0.1, 5), (1, 4): (1.3, 5), (8, 4): (9.0, 5)}, 2, 2.0)  # of one row, which is nearer
    assert (found[0], found[2], found[8]) == pytest.approx((0.1, 0.7, 2.5))
    found = draft_curve({(1, 1): (0.1, 20), (1, 3): (9.0, 20)}, 1, 2.0)  # one that was slow once
    assert found[3] == pytest.approx(0.6)
    found = draft_curve({(4, 2): (0.4, 20), (3, 2): (9.0, 1)}, 3, 2.0)  # a single step, and many of another row
    assert found[2] == pytest.approx(0.4)


@pytest.fixture
def learnt(monkeypatch, tmp_path):
    """The table of a process of its own, which learns."""
    monkeypatch.delenv(step_costs.FILE)
    monkeypatch.setattr(step_costs, "CHECKPOINTS", tmp_path)

    def open_table(target: TargetModel) -> Table:
        step_costs._of_process.clear()
        return Table.of(target)

    return open_table


def test_an_estimate_follows_faster_steps_at_once_and_slower_ones_late(learnt, llama_target):
    table, seconds = learnt(llama_target), []
    for step_s in [*[0.06] * 40, *[0.02] * 10, *[0.06] * 3]:  # a busy minute, a quiet one, and a few slow steps
        table.learn("forward of trees, greedy", 1, 1, step_s)
        seconds.append(table.known.get("forward of trees, greedy", {(1, 1): (9.0, 0)})[1, 1][0])
    assert seconds[0] == 9.0  # the first step of a size, which compiles, is left out
    table.learn("forward of trees, greedy", 1, 1, 30.0)  # the process was stopped
    assert table.known["forward of trees, greedy"][1, 1][0] < 1.05 * seconds[-1]
    assert seconds[39] == pytest.approx(0.06)
    assert seconds[49] < 1.1 * 0.02
    assert seconds[-1] < 1.25 * 0.02


def test_a_trial_doubts_a_table_that_a_busy_minute_has_spoiled(learnt, llama_target):
    """Once chains of one token are known to be fast, longer ones are tried, too, whose forwards nothing else mends."""
    table, budget = learnt(llama_target), ChainBudget(8, acceptance=0.4)
    budget.begin_rows(1)
    known_s = [0.01, 0.016, *[0.03] * 7]
    table.known["forward of chains, greedy"] = {(1, 1 + i): (seconds, 20.0) for i, seconds in enumerate(known_s)}
    table.known["drafter, greedy"] = {(1, n): (0.0005 * n, 20.0) for n in range(9)}
    budget.costs = step_costs.LearntCosts(table, "forward of chains, greedy", "drafter, greedy", 1, False, True)
    assert budget.choose(1) == 0
    budget.must_draft = True
    assert budget.choose(1) >= 2


def test_what_was_learnt_is_kept_and_read_by_the_next_process(learnt, llama_target, tmp_path, caplog):
    table, drafter = learnt(llama_target), Autoregressive()
    costs = table.costs(llama_target, Sampling(), 3, drafter)
    table.keep()
    assert not [*tmp_path.glob("*.json")]  # nothing was learnt
    for n_rows, nodes, seconds in 2 * (
        (1, 1, 0.02),
        (1, 8, 0.03),
        (4, 1, 0.05),
    ):  # the first step of a size is left out
        table.learn(table.keys_of(drafter, Sampling())[0], n_rows, nodes, seconds)
    table.keep()
    assert costs.forward_s(1)[1] == 1.0  # it was computed a moment ago
    again = learnt(llama_target).costs(llama_target, Sampling(), 3, drafter)
    assert (again.forward_s(1)[1], again.forward_s(1)[8]) == pytest.approx((0.02, 0.03), rel=0.03)
    (file,) = tmp_path.glob("seconds-*.json")
    for text in ("", "{}", '{"kind": "seconds", "schema": 0, "seconds": {}}'):
        file.write_text(text)
        assert learnt(llama_target).known == {}
    assert "cannot be used" in caplog.text


@pytest.mark.parametrize(
    ("sampling", "follows"),
    [(Sampling(), True), (Sampling(0.8, draws="shared"), True), (Sampling(0.8, draws="inverse"), False)],
)
def test_costs_follow_the_table_only_where_no_text_depends_on_them(learnt, llama_target, sampling, follows):
    table, drafter = learnt(llama_target), Autoregressive()
    costs = table.costs(llama_target, sampling, 1, drafter)
    for _ in range(step_costs.REFRESH + 1):
        table.learn(table.keys_of(drafter, sampling)[0], 1, 1, 0.25)
    assert costs.forward_s(1)[1] == (0.25 if follows else 1.0)


def test_a_file_that_the_user_names_and_cannot_be_read_is_refused(tmp_path, monkeypatch, llama_target):
    monkeypatch.setenv(step_costs.FILE, str(tmp_path / "none.json"))
    with pytest.raises(UserError, match="is no table of seconds"):
        Table.of(llama_target)


@pytest.mark.parametrize("name", ["pld", "spire", "spire_sssd", "specdecpp"])
def test_steps_of_an_answer_are_learnt_from_and_the_text_is_the_same(name, artifacts, learnt):
    table = learnt(artifacts.target)
    drafter = build_auto(name, artifacts)
    found = drafted(drafter, artifacts.target, 2)
    assert [one.tokens for one in found] == [one.tokens for one in drafted(Autoregressive(), artifacts.target, 2)]
    forwards = {size for key, known in table.known.items() if key.startswith("forward") for size in known}
    assert {(1, 1), (2, 1)} & forwards  # drafts for a model of this size cost more than they gain
    drafts = [known for key, known in table.known.items() if not key.startswith("forward")]
    assert len(drafts) == 1
    assert all(0 < seconds < 60 for known in table.known.values() for seconds, _ in known.values())
