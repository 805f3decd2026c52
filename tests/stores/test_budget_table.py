"""Node budgets: the best quotient, interpolation, and losslessness where the budget changes between steps."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import product
from math import log

import pytest

from spectrain.decoding import generate
from spectrain.decoding.errors import UserError
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.logitspec import LogitSpec
from spectrain.methods.lookahead import Lookahead
from spectrain.methods.lookup import StoreDrafter
from spectrain.methods.pld import PromptLookup
from spectrain.methods.spectra_core import CoreOptions, SpectraCore
from spectrain.methods.spectra_retrieval import retrieval_options
from spectrain.methods.sssd import Sssd, SssdOptions
from spectrain.retrieval.fusion import RetrievalOptions, Retriever
from spectrain.stores.budget_table import (
    CONTEXT_BUCKET_TOKENS,
    BudgetTable,
    ForwardCost,
    MethodCurve,
    NodeBudget,
    Roofline,
)
from spectrain.stores.folder import locked
from spectrain.stores.typed import from_json
from tests.conftest import VOCAB_SIZE, random_prompts
from tests.retrieval.reference import make_store

NODES, BATCHES, CONTEXTS = [1, 2, 4, 8, 16, 32], [1, 2, 8], [64, 256]
ROOFLINE = Roofline(1e-3, 4e-3, 1e-4, 2e-7, 1e-8, 0.0)


def cost_of(seconds=ROOFLINE.seconds, roofline: Roofline | None = ROOFLINE) -> ForwardCost:
    grid = [[[float(seconds(n, b, c)) for c in CONTEXTS] for b in BATCHES] for n in NODES]
    return ForwardCost(NODES, BATCHES, CONTEXTS, grid, grid, roofline)


def curve_of(tau=lambda n: 1 + log(n), full=True, least=1, nodes=NODES[1:]) -> MethodCurve:
    widths = [[[n, 1.0]] if full else [[1, 0.9], [n, 0.1]] for n in nodes]
    taus = [tau(n) for n in nodes]
    return MethodCurve(nodes, taus, [2e-4] * len(nodes), [1e-4] * len(nodes), widths, 100, least)


def test_it_takes_the_best_quotient_of_all_candidates():
    budget = NodeBudget(cost=cost_of(), curve=curve_of())
    for b, c in product(BATCHES, CONTEXTS):
        by_hand = {n: (1 + log(n)) / (ROOFLINE.seconds(n, b, c) + 2e-4 + 1e-4 * b) for n in NODES}
        chosen = budget.nodes(b, c)
        (rate,) = [rate for rate in budget.rates(b, c) if rate.nodes == chosen]
        assert rate.tokens_per_s >= b * max(by_hand.values()) - 1e-9
        for rate in budget.rates(b, c):
            if rate.nodes in by_hand:
                assert rate.tokens_per_s == pytest.approx(b * by_hand[rate.nodes])


def test_grid_points_are_exact_and_what_lies_between_is_linear():
    cost = cost_of(lambda n, b, c: n * b * c, roofline=None)
    for n, b, c in product(NODES, BATCHES, CONTEXTS):
        assert cost.at(n, b, c) == n * b * c
    assert cost.at(12, 5, 160) == pytest.approx(12 * 5 * 160)
    assert cost.at(64, 16, 10) == 32 * 8 * 64  # without a fit the borders go on


def test_outside_the_grid_the_fit_says_by_what_it_grows():
    for wanted in ((128, 1, 64), (4, 64, 256), (4, 8, 4096), (128, 64, 4096)):
        assert cost_of().at(*wanted) == pytest.approx(ROOFLINE.seconds(*wanted))
    assert cost_of().at(NODES, 64, 4096) == pytest.approx([ROOFLINE.seconds(n, 64, 4096) for n in NODES])


def test_a_larger_batch_never_gets_more_nodes():
    budget = NodeBudget(cost=cost_of(), curve=curve_of())
    chosen = [budget.nodes(b, 128) for b in range(1, 65)]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] > chosen[-1]


def test_nothing_is_drafted_where_one_node_is_best_unless_the_method_cannot():
    dear = cost_of(lambda n, b, c: n * 1e-2)
    assert NodeBudget(cost=dear, curve=curve_of()).nodes(1, 64) == 1
    assert NodeBudget(cost=dear, curve=curve_of(least=4, nodes=(4, 8, 16))).nodes(1, 64) == 4


def test_a_method_that_seldom_proposes_pays_for_what_it_proposes():
    dear = cost_of(lambda n, b, c: n * 1e-2)
    curve = curve_of(tau=lambda n: 1.5, full=False)
    (two,) = [rate for rate in NodeBudget(cost=dear, curve=curve).rates(1, 64) if rate.nodes == 2]
    assert two.forward_s == pytest.approx(0.9 * 1e-2 + 0.1 * 2e-2)
    (two,) = [rate for rate in NodeBudget(cost=dear, curve=curve).rates(2, 64) if rate.nodes == 2]
    assert two.forward_s == pytest.approx(0.81 * 1e-2 + 0.19 * 2e-2)  # the widest of two trees


def test_shares_of_widths_add_up():
    curve = curve_of(full=False)
    for nodes, b in product((1, 2, 3, 11, 32), (1, 2, 8)):
        widths, shares = curve.widths_at(nodes, b)
        assert sum(shares) == pytest.approx(1)
        assert max(widths) <= nodes


def test_one_answer_a_context_bucket_is_kept():
    budget = NodeBudget(cost=cost_of(), curve=curve_of())
    assert budget.nodes(1, 1) == budget.nodes(1, CONTEXT_BUCKET_TOKENS)
    assert len(budget._known) == 1


def test_a_fixed_budget_is_that_number():
    budget = NodeBudget(fixed=7)
    assert (budget.nodes(1, 10), budget.nodes(64, 5000), budget.largest, budget.candidates) == (7, 7, 7, (7,))


def test_json_gives_back_the_same():
    cost, curve = cost_of(), curve_of(full=False)
    for one in (cost, curve):
        values = json.loads(json.dumps(asdict(one)))
        assert json.loads(json.dumps(asdict(from_json(type(one), values)))) == values


class Restless(NodeBudget):
    """Another budget in every step, by rows and context."""

    def nodes(self, batch_size: int, context_tokens: int = 100) -> int:
        choices = self.candidates
        return choices[(3 * batch_size + context_tokens) % len(choices)]


@pytest.mark.parametrize(
    "make",
    [
        lambda budget, probing, store: LogitSpec(budget),
        lambda budget, probing, store: PromptLookup(max_nodes=budget),
        lambda budget, probing, store: SpectraCore(CoreOptions(ngram_tokens=3), probing),
        lambda budget, probing, store: Lookahead(ngram_tokens=3, max_nodes=probing),
        lambda budget, probing, store: Sssd(store, SssdOptions(last_logits=True), budget),
        lambda budget, probing, store: StoreDrafter(store, RetrievalOptions(1, 8, 5), budget),
        lambda budget, probing, store: StoreDrafter(store, retrieval_options(4), budget, max_guesses=15),
        lambda budget, probing, store: SpectraCore(
            CoreOptions(ngram_tokens=3), probing, Retriever(store, retrieval_options(3))
        ),
    ],
    ids=["logitspec", "pld", "spectra_core", "lookahead", "sssd", "rest", "spectra_retrieval", "spectra"],
)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_text_is_the_targets_own_while_the_budget_changes(llama_target, make, batch_size, tmp_path):
    budget = Restless(cost=cost_of(), curve=curve_of())
    probing = Restless(cost=cost_of(), curve=curve_of(least=8, nodes=(8, 16, 32)))
    prompts = random_prompts([5, 9, 14, 20])
    plain = [g.tokens for g in generate(llama_target, Autoregressive(), prompts, 24)]
    store = make_store(tmp_path, [*plain, *random_prompts([40, 60])], VOCAB_SIZE)
    drafter, seen = make(budget, probing, store), set()
    propose = drafter.propose

    def watched(context):
        tree = propose(context)
        seen.add(tree.shape[1])
        assert tree.shape[1] <= drafter.nodes_of_step(context)
        return tree

    drafter.propose = watched
    for size in (batch_size, 2):  # a second generation, of another size
        found = generate(llama_target, drafter, prompts, 24, batch_size=size)
        assert [g.tokens for g in found] == plain
    assert len(seen) > 1


def test_a_table_that_another_process_is_about_to_write_is_left_alone(tmp_path):
    table = BudgetTable("0" * 16, {"device": "cpu"}, cost_of())
    file = table.save(tmp_path / "checkpoints")
    before = file.read_text()
    with locked(file, is_file=True), pytest.raises(UserError, match="in use by another process; wait for its end"):
        table.save(file.parent)
    assert file.read_text() == before
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    "wrong", [{"facts": 0.5}, {"facts": {"date": []}}, {"machine": "cpu"}, {"machine": {"threads": "2"}}]
)
def test_a_table_with_facts_of_other_types_is_refused(wrong, tmp_path):
    file = BudgetTable("0" * 16, {"device": "cpu", "threads": 2}, cost_of(), facts={"date": "today"}).save(tmp_path)
    assert BudgetTable.load(file).facts == {"date": "today"}
    file.write_text(json.dumps(json.loads(file.read_text()) | wrong))
    with pytest.raises(UserError, match="holds no budget table of schema 1"):
        BudgetTable.load(file)


def test_a_number_without_room_is_refused():
    for wrong in (0, 1, 2.5, "many", None):
        with pytest.raises(UserError, match="max_nodes"):
            PromptLookup(max_nodes=wrong)
