"""How many tokens a step drafts: against exhaustive search, under scripted acceptance and tables read from a file."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import numpy as np
import pytest

from spectrain.decoding import Drafter, Sampling, generate
from spectrain.drafting import step_costs
from spectrain.drafting.budget import ChainBudget, TreeBudget
from spectrain.drafting.step_costs import Table, curve, doubt
from spectrain.errors import UserError
from spectrain.methods.auto import Auto
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.registry import method_names
from spectrain.stores.environment import OtherWork
from spectrain.target import TargetModel
from tests.conftest import random_prompts, table_of, tiny_model
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
    drafted(drafter, artifacts.target)
    found = drafted(drafter, artifacts.target)
    steps = {one.method for row in found for one in row.choices if one.why == "fastest"}
    assert steps == {"autoregressive"}
    assert sum(sum(one.drafted) for one in found) <= 0.1 * sum(one.target_forwards for one in found)
    assert "nothing was drafted" in drafter.why_plain or "hardly anything was drafted" in drafter.why_plain


@pytest.mark.parametrize("name", ["spire", "speculative", "magicdec"])
def test_where_nodes_are_free_chains_are_as_long_as_they_may_be(name, artifacts, tmp_path, monkeypatch):
    use("free", tmp_path, monkeypatch)
    drafter = build_auto(name, artifacts)
    most = drafter.arms[0].drafter.gamma
    (row,) = generate(artifacts.target, drafter, prompts()[:1], 60, stop_token_ids=())
    free = [n for n in row.drafted[:-most] if n]
    assert set(free) == {most}
    assert len(free) > 0.5 * row.target_forwards
    assert drafter.why_plain is None


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


@pytest.mark.parametrize("name", DRAFTING)
def test_with_shared_noise_batch_and_table_leave_the_sample_as_it_is(name, artifacts, tmp_path, monkeypatch):
    sampling = Sampling(temperature=1.0, draws="shared")
    plain = [one.tokens for one in drafted(Autoregressive(), artifacts.target, 1, sampling)]
    for kind, batch_size in (("free", 1), ("cpu", 8), ("gpu", 8)):
        use(kind, tmp_path, monkeypatch)
        found = drafted(build_auto(name, artifacts), artifacts.target, batch_size, sampling)
        assert [one.tokens for one in found] == plain, kind


def test_seconds_never_fall_and_go_on_beyond_what_was_timed():
    assert curve({1: 1.0, 2: 3.0, 4: 2.0, 8: 4.0}, 10) == pytest.approx([1, 1, 2, 2, 2, 2.5, 3, 3.5, 4, 4.5, 5])
    assert curve({0: 1.0, 1: 2.0, 2: 4.0, 3: 3.9}, 5) == pytest.approx([1, 2, 3.9, 3.9, 4.85, 5.8])
    assert curve({0: 1.0}, 2) == pytest.approx([1, 1, 1])


QUIET = {1: [1.0, 1.01], 2: [1.1, 1.1], 8: [1.8, 1.9]}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({2: [1.1, 1.6]}, "took 1.1 s and 1.6 s"),
        ({2: [2.6, 2.6], 8: [2.7, 2.7]}, "more than 2 times"),
        ({2: [2.2, 2.2]}, "longer than a larger one"),
        ({1: [3.0, 3.0]}, "longer than a larger one"),
    ],
)
def test_seconds_that_the_shape_does_not_allow_are_noticed(changes, says):
    found = doubt(QUIET | changes)
    assert found is None if says is None else says in found


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """The table of a process of its own, whose steps take made-up seconds; some of the first are disturbed."""
    monkeypatch.delenv(step_costs.FILE)
    monkeypatch.setattr(step_costs, "CHECKPOINTS", tmp_path)
    runs = []

    def run(target, sampling, n_rows, paced, n_rounds):
        runs.append(n_rows)
        for size, taken in paced.taken.items():
            taken += [1 + 0.1 * size + (1.0 if disturbed(len(runs), size) else 0.0)] * n_rounds

    def open_table(target: TargetModel, is_disturbed=lambda run, size: False) -> Table:
        nonlocal disturbed
        disturbed = is_disturbed
        runs.clear()
        step_costs._of_process.clear()
        return Table.of(target)

    disturbed = None
    monkeypatch.setattr(step_costs, "_run", run)
    monkeypatch.setattr(OtherWork, "share", lambda others: 0.0)
    open_table.runs = runs
    return open_table


def test_a_table_is_timed_once_and_read_by_the_next_process(timed, llama_target):
    costs = timed(llama_target).costs(llama_target, Sampling(), 3, Autoregressive())
    assert costs.forward_s(1)[1] == pytest.approx(1.1)
    assert set(timed.runs) == {1, 4}
    again = timed(llama_target).costs(llama_target, Sampling(), 3, Autoregressive())
    assert again.forward_s(3) == pytest.approx(costs.forward_s(3))
    assert not timed.runs


def test_steps_that_a_full_batch_takes_long_for_are_not_timed_but_extrapolated(timed, llama_target):
    drafter = Autoregressive()
    drafter.timed_reads, drafter.timed_as = (0, 1, 2, 3, 4, 6, 8), "draft"
    table = timed(llama_target)
    costs = table.costs(llama_target, Sampling(), 16, drafter)
    sizes = {key: [*one] for key, one in table.seconds.items()}
    assert sizes["draft, greedy, rows 1"] == [0, 1, 2, 3, 4, 6, 8]
    assert sizes["draft, greedy, rows 16"] == [0, 1, 2, 3]
    assert sizes["forward of trees, greedy, rows 16"] == [1, 2, 3, 4]
    assert costs.draft_s(16)[8] == pytest.approx(1.8)


def test_a_disturbed_table_is_timed_again_until_its_seconds_agree(timed, llama_target, caplog):
    table = timed(llama_target, lambda run, size: run < 4 and size == 3)
    assert table.costs(llama_target, Sampling(), 1, Autoregressive()).forward_s(1)[3] == pytest.approx(1.3)
    assert len(timed.runs) > 2
    assert "disturbed" not in caplog.text


def test_a_table_that_stays_spoiled_serves_this_process_and_is_not_kept(timed, llama_target, caplog):
    table = timed(llama_target, lambda run, size: size == 3)
    table.costs(llama_target, Sampling(), 1, Autoregressive())
    n_runs = len(timed.runs)
    assert n_runs > 3
    assert "look disturbed (size 3 took longer than a larger one)" in caplog.text
    table.costs(llama_target, Sampling(), 1, Autoregressive())
    assert len(timed.runs) == n_runs
    timed(llama_target).costs(llama_target, Sampling(), 1, Autoregressive())
    assert timed.runs


def test_a_table_that_was_timed_beside_other_work_is_not_kept(timed, llama_target, caplog, monkeypatch):
    monkeypatch.setattr(OtherWork, "share", lambda others: 0.34)
    timed(llama_target).costs(llama_target, Sampling(), 1, Autoregressive())
    assert "look disturbed (other processes took 34% of the cores); they are timed again next time" in caplog.text
    timed(llama_target).costs(llama_target, Sampling(), 1, Autoregressive())
    assert timed.runs


@pytest.mark.parametrize("text", ["", "{}", '{"kind": "seconds", "schema": 0, "seconds": {}}'])
def test_an_unreadable_file_is_timed_again_and_said_in_the_log(timed, llama_target, text, tmp_path, caplog):
    timed(llama_target).costs(llama_target, Sampling(), 1, Autoregressive())
    (file,) = tmp_path.glob("seconds-*.json")
    file.write_text(text)
    timed(llama_target).costs(llama_target, Sampling(), 1, Autoregressive())
    assert timed.runs
    assert "cannot be used" in caplog.text
    assert json.loads(file.read_text())["seconds"]


def test_a_file_that_the_user_names_and_cannot_be_read_is_refused(tmp_path, monkeypatch, llama_target):
    monkeypatch.setenv(step_costs.FILE, str(tmp_path / "none.json"))
    with pytest.raises(UserError, match="is no table of seconds"):
        Table.of(llama_target)


@pytest.mark.parametrize("name", ["pld", "spire", "spire_sssd", "specdecpp"])
def test_real_steps_of_every_size_are_timed_before_the_generation(name, artifacts, monkeypatch, tmp_path, caplog):
    monkeypatch.delenv(step_costs.FILE)
    monkeypatch.setattr(step_costs, "CHECKPOINTS", tmp_path)
    monkeypatch.setattr(step_costs, "MOST_S", 0.0)
    monkeypatch.setattr(step_costs, "DEAR", float("inf"))  # a busy machine makes any size dear
    step_costs._of_process.clear()
    drafter = build_auto(name, artifacts)
    assert isinstance(drafter, Auto)
    with caplog.at_level(logging.INFO):
        found = drafted(drafter, artifacts.target, 2)
    assert caplog.text.count("timed forward") == 2
    plain = drafted(Autoregressive(), artifacts.target, 2)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    again = drafted(build_auto(name, artifacts), artifacts.target, 2)  # which knows the seconds
    assert [one.drafted for one in found] == [one.drafted for one in again]  # nothing is learnt from timed drafts
    known = Table.of(artifacts.target).seconds
    assert all(one.keys() >= {1, 2, 3, 8} for key, one in known.items() if key.startswith("forward"))
    reads = [set(one) for key, one in known.items() if not key.startswith("forward")]
    assert len(reads) == 2
    assert all(len(one) == 1 if name == "pld" else len(one) > 2 for one in reads)
