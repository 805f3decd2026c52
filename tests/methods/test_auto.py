"""Choosing among methods: what slept drafts as if it had not, text and law stay, and the fastest runs."""

from __future__ import annotations

import time
from math import inf
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from spectrain.decoding import Drafter, DraftTree, Generation, Sampling, Source, generate
from spectrain.decoding.generation import Choices
from spectrain.errors import UserError
from spectrain.methods import auto, draft_chain, registry
from spectrain.methods.auto import PLAIN, Auto
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.registry import build_method, method_config, method_names
from spectrain.stores.forward_times import ForwardTimes
from tests.conftest import random_prompts, tiny_model
from tests.methods.every import Artifacts, build, build_auto

N_NEW = 40
FIXED = {"max_nodes": 9}
CHAINS = {"spire": {"gamma": 3}, "speculative": {"gamma": 3}, "magicdec": {"gamma": 3}}
STOPS = {name: {"max_candidates": 4} for name in ("specdecpp", "confidence_stop", "entropy_stop")}
LOOKUPS = [name for name in method_names() if name not in {**CHAINS, **STOPS, PLAIN: None, "auto": None}]
# Their guesses depend on the probes of steps that they did not run.
PROBING = ("lookahead", "spectra_core", "spectra")
REMEMBER = [name for name in (*LOOKUPS, "spire", "speculative") if name not in PROBING]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> Artifacts:
    model = tiny_model("llama")
    documents = [row * 3 for row in random_prompts([12, 20, 9], seed=3)]
    folder = tmp_path_factory.mktemp("auto")
    return Artifacts(folder, model, lambda: tiny_model("llama", seed=5), lambda: documents, k=3, window_tokens=8)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def fixed(name: str, artifacts: Artifacts) -> Drafter:
    """The method with a number of nodes, which learns nothing: its drafts depend on the text alone."""
    # In 8 bits, the last bits of a state decide now and then how it is rounded, and by that which token is drafted.
    exact = {"draft_dtype": "float32"} if "draft_dtype" in method_config(name) else {}
    drafter = build(name, artifacts, exact | (CHAINS.get(name) or STOPS.get(name) or FIXED))
    if getattr(drafter, "ranking", None) is not None:
        drafter.ranking.end = lambda emitted: None
    return drafter


def prompts() -> list[list[int]]:
    return [row[:7] * 3 + row for row in random_prompts([9, 20, 13], seed=1)]


def choices_of(found: list[Generation]) -> list[Choices]:
    return [one for generation in found for one in generation.choices]


def methods_of(found: list[Generation]) -> set[str]:
    return {one.method for one in choices_of(found)}


class Spending(Auto):
    """Methods may lose any time against plain decoding."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.allowance.count = lambda gained, spent: None


class Shuffled(Spending):
    """Every block runs an arm by lot, whatever is fast."""

    def __init__(self, methods, seed: int = 0, lengths: tuple[int, ...] = (1, 2, 5)):
        super().__init__(methods)
        self.random, self.lengths = Random(seed), lengths

    def _choose(self, context) -> None:
        self.times.slowness.is_known = True
        for arm in self.arms:  # no arm is tried because it is its turn
            arm.next_trial = self.n_steps + 1
        super()._choose(context)
        self._left = self.random.choice(self.lengths)

    def _speed(self, arm, n_rows) -> float:
        return self.random.random()


@pytest.mark.parametrize("name", REMEMBER)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_method_that_slept_drafts_what_it_drafts_where_it_never_slept(artifacts, name, batch_size, one_thread):
    """Both see the same text. Steps of the one that never sleeps are compared wherever the other one drafts.

    A draft model reads what it has slept through at once, which several threads add up in another order.
    """
    target, drafts, seen = artifacts.target, {}, 0
    always = fixed(name, artifacts)

    def watched(drafter: Drafter, found: dict) -> Drafter:
        propose = drafter.propose

        def noted(context):
            texts = [tuple(context.tokens[row, :n].tolist()) for row, n in enumerate(context.n_tokens)]
            tree = propose(context)
            for row, text in enumerate(texts):
                found[text] = [one[row][tree.parents[row] > -2].tolist() for one in (tree.tokens, tree.parents)]
            return tree

        drafter.propose = noted
        return drafter

    class Beside(Shuffled):
        """Whoever runs, one token is emitted per step, so that both see every text."""

        def propose(self, context):
            super().propose(context)
            return DraftTree.root_only(context.roots)

    class OneByOne(Spending):
        def _choose(self, context):
            self.arms[-1].next_trial = 10**9  # plain decoding never runs
            self.times.slowness.is_known = True
            super()._choose(context)
            self._left = 1000

        def _speed(self, arm, n_rows):
            return float(arm.drafter is not None)

        def propose(self, context):
            super().propose(context)
            return DraftTree.root_only(context.roots)

    generate(target, OneByOne({name: watched(always, drafts)}), prompts(), N_NEW, batch_size=batch_size)
    for seed in range(8):
        slept: dict = {}
        drafter = Beside({name: watched(fixed(name, artifacts), slept)}, seed)
        generate(target, drafter, prompts(), N_NEW, batch_size=batch_size)
        assert 10 < len(slept) < len(drafts)
        for text, tree in slept.items():
            assert tree == drafts[text], (seed, len(text))
            seen += len(tree[0]) > 1
    assert seen


@pytest.mark.parametrize("name", method_names())
@pytest.mark.parametrize("batch_size", [1, 2])
def test_text_is_the_targets_own_while_methods_take_turns_by_lot(artifacts, name, batch_size):
    if name in (PLAIN, "auto"):
        pytest.skip("it is always an arm, or has arms")
    target = artifacts.target
    plain = [one.tokens for one in generate(target, Autoregressive(), prompts(), N_NEW)]
    drafter = Shuffled({name: fixed(name, artifacts)})
    for _ in range(2):
        found = generate(target, drafter, prompts(), N_NEW, batch_size=batch_size)
        assert [one.tokens for one in found] == plain
    assert methods_of(found) == {name, PLAIN}


@pytest.mark.parametrize("batch_size", [1, 3])
def test_many_methods_share_a_generation(artifacts, batch_size):
    target = artifacts.target
    names = ["pld", "spire", "logitspec", "speculative", "sssd", "lookahead"]
    plain = [one.tokens for one in generate(target, Autoregressive(), prompts(), N_NEW)]
    drafter = Shuffled({name: fixed(name, artifacts) for name in names})
    found = generate(target, drafter, prompts(), N_NEW, batch_size=batch_size)
    assert [one.tokens for one in found] == plain
    assert len(methods_of(found)) > 4


@pytest.mark.parametrize("reads_all", [False, True])
def test_two_drafters_that_read_states_keep_those_of_each_row_s_own_prompt(artifacts, reads_all):
    """Rows of unequal length, longer than the window; what stands behind the shorter one is no text."""
    target, texts = artifacts.target, random_prompts([60, 25], seed=4)

    class First(Spending):
        def _speed(self, arm, n_rows):
            return float(arm is self.arms[0])

    def drafted(*names: str) -> list:
        methods = {name: fixed(name, artifacts) for name in names}
        if reads_all and "spire_tree" in methods:
            methods["spire_tree"].read_of_prompts = lambda lengths: None
        drafter = First(methods)
        drafter.times.slowness.is_known = True
        for arm in drafter.arms[1:]:
            arm.next_trial = auto.RESTING
        found = generate(target, drafter, texts, 12, batch_size=2)
        assert methods_of(found) == {"spire"}
        read = drafter.read_of_prompts(torch.tensor([60, 25]))
        assert (read is None) == (reads_all and len(names) > 1)  # what any of them reads is kept, and no more
        return [(one.tokens, one.accepted) for one in found]

    assert drafted("spire", "spire_tree") == drafted("spire")


def test_lookups_sample_what_plain_decoding_samples_while_they_take_turns(artifacts):
    target, sampling = artifacts.target, Sampling(temperature=1.3)
    plain = [one.tokens for one in generate(target, Autoregressive(), prompts(), N_NEW, sampling, seed=3)]
    drafter = Shuffled({name: fixed(name, artifacts) for name in ("pld", "logitspec", "sssd")})
    assert [one.tokens for one in generate(target, drafter, prompts(), N_NEW, sampling, seed=3)] == plain


class Oracle(Drafter):
    """Drafts the text that is known to follow, or rubbish, and takes its time."""

    sizer = None

    def __init__(self, texts: list[list[int]], right: bool, seconds: float):
        self.texts, self.right, self.seconds = texts, right, seconds
        self.n_steps = 0

    def propose(self, context):
        self.n_steps += 1
        time.sleep(self.seconds)
        (known,) = context.tail(10**6)
        follows = next(text[len(known) : len(known) + 4] for text in self.texts if text[: len(known)] == known)
        tokens = [token if self.right else (token + 1) % 50 for token in follows][: max(0, context.room[0] - 1)]
        if not tokens:
            return DraftTree.root_only(context.roots)
        return DraftTree.chain(context.roots, torch.tensor([tokens]), source=Source.INPUT)


def slow_down(target, monkeypatch) -> None:
    """Let a forward be what a step costs."""
    score = target.score

    def slow(*arguments):
        time.sleep(0.003)
        return score(*arguments)

    monkeypatch.setattr(target, "score", slow)


@pytest.mark.parametrize(("right", "seconds"), [(True, 0.0), (False, 0.01), (True, 0.05)])
def test_a_method_runs_where_it_is_fast_and_hardly_where_it_is_not(artifacts, monkeypatch, right, seconds):
    monkeypatch.setattr(auto, "times_of", lambda target, n: (auto_times(), auto_times(), 1))
    target, asked = artifacts.target, prompts() * 3
    plain = generate(target, Autoregressive(), asked, 60, stop_token_ids=())
    slow_down(target, monkeypatch)
    texts = [prompt + one.tokens for prompt, one in zip(asked, plain, strict=True)]
    drafter = Oracle(texts, right, seconds)
    chosen = Auto({"oracle": drafter})
    found = generate(target, chosen, asked, 60, stop_token_ids=())
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    steps = sum(one.target_forwards for one in found)
    share = drafter.n_steps / steps
    assert share > 0.6 if (right and not seconds) else share < 0.2


@pytest.mark.parametrize("speeds", [(1.2, 1.5), (1.5, 1.2), (1.3, 0.7)])
def test_methods_that_beat_plain_decoding_take_turns_and_then_the_faster_one_runs(artifacts, speeds):
    target, names = artifacts.target, ("pld", "logitspec")

    class Known(Spending):
        def _speed(self, arm, n_rows):
            return dict(zip(names, speeds, strict=True)).get(arm.name, 1.0) if arm.n_steps or not arm.drafter else inf

    drafter = Known({name: fixed(name, artifacts) for name in names})
    drafter.times.slowness.is_known = True
    found = generate(target, drafter, prompts() * 3, N_NEW)
    steps = {arm.name: arm.n_steps for arm in drafter.arms}
    best = max(names, key=lambda name: speeds[names.index(name)])
    other = next(name for name in names if name != best)
    assert steps[best] > 2 * auto.SETTLED_STEPS
    assert steps[other] >= auto.SETTLED_STEPS if min(speeds) > 1 else steps[other] < auto.SETTLED_STEPS
    first = [one.method for one in choices_of(found) if one.method != PLAIN][:4]
    assert len(set(first)) == 2
    assert all(sum(one.steps for one in row.choices) == row.target_forwards for row in found)
    last = [one for one in choices_of(found) if one.why != "trial"][-1]
    assert (last.method, last.why, last.speed) == (best, "fastest", max(speeds))
    assert {one.why for one in found[0].choices} >= {"first"}
    few, many = (drafter._hoped(drafter.arms[0], 1.2, n_rows) for n_rows in (8, 1))
    assert 1.2 < few < many
    assert drafter._hoped(drafter.arms[0], 0.9, 1) == 0.9


def test_trying_a_slower_arm_may_cost_a_share_of_what_the_best_one_gains(artifacts, monkeypatch):
    drafter = Auto({"pld": fixed("pld", artifacts)})
    monkeypatch.setattr(drafter, "_cost", lambda arm, n_rows: 1.0)
    (arm, _), cost = drafter.arms, auto.TRIAL_STEPS * (0.1 + auto.SWITCHING)
    one_row = SimpleNamespace(n_rows=1)
    shares = [cost / drafter._steps_between(arm, 0.9 * best, best, one_row) for best in (0.9, 1.0, 1.1, 3.0)]
    assert shares == pytest.approx([0.005, 0.005, 0.015, auto.MOST_TRIAL_SHARE], rel=0.05)


def test_what_a_trial_takes_beside_its_steps_is_measured_and_delays_the_next_one(artifacts):
    """Its drafter catches up for thirty plain steps."""
    target, name = artifacts.target, "pld"

    class Slow(Spending):
        def _speed(self, arm, n_rows):
            return 1.0 if arm.drafter is None else 0.9

        def _cost(self, arm, n_rows):
            return 1.0

        def _catch_up(self, arm, context):
            super()._catch_up(arm, context)
            if arm.drafter is not None:
                time.sleep(30 * self.plain_s[0] * self.times.slowness.value)

    drafter = Slow({name: fixed(name, artifacts)})
    generate(target, drafter, prompts() * 2, N_NEW)
    arm, one_row = drafter.arms[0], SimpleNamespace(n_rows=1)
    assert 27 < arm.extra.value < 90
    waited = drafter._steps_between(arm, 0.9, 1.0, one_row)
    assert waited * auto.TRIAL_SHARE == pytest.approx(arm.extra.value, rel=0.2)


def test_an_allowance_bounds_what_any_row_of_steps_loses():
    """Drafts gain or lose by lot; nothing runs but plain decoding while there is to wait."""
    random, allowance, total = Random(0), auto.Allowance(), [0.0]
    for gain in (0.5, -0.5, 2.0, -1.0):  # on average, for a long while
        for _ in range(2000):
            waits = allowance.steps_to_wait
            gained = 1.0 if waits else 1 + gain + random.uniform(-0.5, 0.5)
            allowance.count(gained, 1.0)
            total.append(total[-1] + gained - 1)
            assert not waits or allowance.steps_to_wait == waits - 1
    for first in range(0, len(total), 25):
        for end in range(first + 25, len(total), 25):
            lost = total[first] - total[end]
            assert lost <= auto.MOST_ALLOWED + auto.ALLOWED_SHARE * (end - first) + 1.5
    assert total[2000] > 900
    allowance.count(0.0, 1e6)  # one disturbed step
    assert allowance.steps_to_wait == auto.MOST_DEBT / auto.ALLOWED_SHARE
    allowance.count(0.0, auto.SLEEP_SHARE)
    allowance.count(1.0, 1.0)
    assert allowance.steps_to_wait < auto.MOST_DEBT / auto.ALLOWED_SHARE  # it grows beside sleepers
    assert total[4000] < total[2000] - 50  # what it may lose is spent


def test_a_method_that_seems_fast_but_loses_is_stopped(artifacts, monkeypatch):
    """Its drafts are wrong and take three plain steps; the estimate, which says otherwise, never learns."""
    monkeypatch.setattr(auto, "times_of", lambda target, n: (auto_times(), auto_times(), 1))
    target, asked = artifacts.target, prompts() * 6
    plain = generate(target, Autoregressive(), asked, 60, stop_token_ids=())
    slow_down(target, monkeypatch)

    class Misled(Auto):
        def _speed(self, arm, n_rows):
            return 1.0 if arm.drafter is None else 2.0 if arm.n_steps else inf

    texts = [prompt + one.tokens for prompt, one in zip(asked, plain, strict=True)]
    drafter = Oracle(texts, False, 0.009)
    chosen = Misled({"oracle": drafter})
    found = generate(target, chosen, asked, 60, stop_token_ids=())
    steps = sum(one.target_forwards for one in found)
    lost = 3 * drafter.n_steps
    allowed = auto.FIRST_ALLOWED + auto.ALLOWED_SHARE * (steps + lost)
    assert allowed / 3 < lost < 2 * allowed + 3 * auto.BLOCK_STEPS
    assert "loss" in {one.why for one in choices_of(found)}


def test_a_method_whose_next_trial_is_far_away_reads_no_states_until_then(artifacts):
    target = artifacts.target
    plain = [one.tokens for one in generate(target, Autoregressive(), prompts(), N_NEW)]
    drafter = Spending({name: fixed(name, artifacts) for name in ("spire", "pld")})
    spire, layers = drafter.arms[0], drafter.capture_layers
    assert layers
    for far, expected in ((auto.RESTING, layers), (auto.RESTING + 1, ()), (1, layers)):
        spire.next_trial = drafter.n_steps - drafter._left + far
        assert drafter.capture_layers == expected
        assert [one.tokens for one in generate(target, drafter, prompts(), N_NEW, batch_size=2)] == plain
        assert (spire in drafter.choices) == bool(expected)
    spire.next_trial, drafter.leader = drafter.n_steps + auto.MOST_BETWEEN, spire
    assert drafter.capture_layers == layers  # the fastest one does not rest
    drafter.leader = drafter.plain
    assert drafter.capture_layers == ()
    for expected in ((), layers):  # with another number of rows it may be faster, so it takes part again
        generate(target, drafter, prompts()[:1], 4)
        assert drafter.capture_layers == layers
        assert (spire in drafter.choices) == bool(expected)
    drafter.leader = spire
    for left, expected in ((0.1, layers), (-0.1, ())):  # after a loss, all rest
        drafter.allowance.left = left
        assert drafter.capture_layers == expected


@pytest.mark.parametrize(("dear", "tried"), [(1.4, True), (2.5, False)])
def test_a_chain_that_cannot_pay_is_not_tried_at_once(artifacts, monkeypatch, dear, tried):
    """A first token is accepted with 0.6 at most, so a second node must not cost 1.6 steps."""
    forward = ForwardTimes([1, 2, 64], [1.0, dear, 64 * dear])
    for module in (auto, draft_chain):
        monkeypatch.setattr(module, "times_of", lambda target, n: (forward, forward, 1))
    drafter = build_auto("speculative", artifacts)
    drafter.times.slowness.is_known = True
    found = generate(artifacts.target, drafter, prompts(), 20, stop_token_ids=())
    assert ("speculative" in methods_of(found)) == tried
    assert drafter.arms[0].next_trial > 0


def auto_times():
    return ForwardTimes([1, 2, 4, 64], [3e-3, 3e-3, 3e-3, 3e-3])


def test_every_method_with_max_nodes_auto_decodes_beside_plain_decoding(artifacts):
    target = artifacts.target
    plain = [one.tokens for one in generate(target, Autoregressive(), prompts(), N_NEW)]
    for name in method_names():
        drafter = build_auto(name, artifacts)
        assert isinstance(drafter, Auto) == (name != PLAIN), name
        found = generate(target, drafter, prompts(), N_NEW, batch_size=2)
        assert [one.tokens for one in found] == plain, name


def test_auto_chooses_among_what_can_be_built(artifacts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no checkpoints/ lie
    config, target = method_config("auto"), artifacts.target
    nothing = build_method(config, target)
    assert [arm.name for arm in nothing.arms] == ["pld", "logitspec", PLAIN]
    store = {"datastore": artifacts.get("datastore"), "spire": artifacts.get("spire")}
    with_store = build_method(config, target, store)
    assert [arm.name for arm in with_store.arms] == ["spire_sssd", "spire", "pld", PLAIN]
    assert with_store.artifacts == store
    plain = [one.tokens for one in generate(target, Autoregressive(), prompts(), N_NEW)]
    for drafter in (nothing, with_store):
        found = generate(target, drafter, prompts(), N_NEW, batch_size=2)
        assert [one.tokens for one in found] == plain
        assert all(sum(one.steps for one in row.choices) == row.target_forwards for row in found)


def test_auto_without_anything_to_choose_from_still_decodes(artifacts):
    target = artifacts.target
    plain = [one.tokens for one in generate(target, Autoregressive(), prompts(), N_NEW)]
    config = OmegaConf.merge(method_config("auto"), {"methods": [PLAIN]})
    drafter = build_method(config, target)
    found = generate(target, drafter, prompts(), N_NEW)
    assert [one.tokens for one in found] == plain
    assert methods_of(found) == {PLAIN}


@pytest.mark.parametrize(
    ("methods", "says"),
    [(["plt"], "plt is unknown; choose among"), ("auto", "auto is unknown"), (["sssd"], "holds no datastore")],
)
def test_auto_refuses_what_it_cannot_build(artifacts, tmp_path, monkeypatch, methods, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=says):
        build_method(OmegaConf.merge(method_config("auto"), {"methods": methods}), artifacts.target)


def test_a_given_length_is_kept(artifacts):
    for name, option in (("pld", {"max_nodes": 5}), ("spire", {"gamma": 2}), ("magicdec", {"max_nodes": 4})):
        assert not isinstance(build_auto(name, artifacts, option), Auto)


def test_a_draft_model_of_a_shorter_context_is_no_choice_unless_it_was_given(artifacts, monkeypatch, tmp_path):
    short = Artifacts(tmp_path, artifacts.target, lambda: tiny_model("llama", max_position_embeddings=32), lambda: [])
    folder = short.get("vanilla")
    monkeypatch.setattr(registry, "METHODS", {"pld": auto.Covers(), "speculative": auto.Covers()})
    monkeypatch.setattr(registry, "find_artifact", lambda kind, target: folder)
    config = OmegaConf.merge(method_config("auto"), {"methods": None})
    assert "speculative" in [arm.name for arm in build_method(config, short.target, {"vanilla": folder}).arms]
    assert [arm.name for arm in build_method(config, short.target, {}).arms] == ["pld", PLAIN]


def test_auto_leaves_out_what_another_choice_finds_as_well(artifacts, monkeypatch):
    at_hand: dict[str, str] = {}

    def find(kind, target):
        if kind not in at_hand:
            raise UserError(f"no {kind}")
        return at_hand[kind]

    monkeypatch.setattr(registry, "find_artifact", find)

    def choices() -> list[str]:
        return [arm.name for arm in build_method(method_config("auto"), artifacts.target).arms]

    assert choices() == ["pld", "logitspec", PLAIN]
    at_hand["datastore"] = artifacts.get("datastore")
    assert choices() == ["sssd", "pld", PLAIN]
    at_hand["spire"] = artifacts.get("spire")
    assert choices() == ["spire_sssd", "spire", "pld", PLAIN]
    del at_hand["datastore"]
    assert choices() == ["spire_sssd", "spire", "pld", PLAIN]
    at_hand["vanilla"] = artifacts.get("vanilla")
    found = build_method(method_config("auto"), artifacts.target)
    by_name = {arm.name: arm.drafter for arm in found.arms}
    assert [*by_name] == ["spire_sssd", "speculative_sssd", "spire", "speculative", "pld", PLAIN]
    assert by_name["speculative"].draft_model is by_name["speculative_sssd"].model.draft_model  # loaded once
    generate(artifacts.target, found, prompts(), 8, batch_size=2)
    assert by_name["spire"].drafter is by_name["spire_sssd"].model.drafter


def test_methods_that_another_one_covers_do_not_run(artifacts, monkeypatch):
    """A lookup beside a tree that has it, where a step is long."""
    target, at_hand = artifacts.target, {"spire": artifacts.get("spire")}
    seconds = [1.0]

    def times(target, n_rows):
        forward = ForwardTimes([1, 64], 2 * seconds)
        return forward, forward, n_rows

    monkeypatch.setattr(auto, "times_of", times)

    def choices(config) -> set[str]:
        drafter = build_method(config, target, at_hand)
        monkeypatch.setattr(drafter, "_speed", lambda arm, n: 1.0 if arm.drafter is None else float("inf"))
        generate(target, drafter, prompts(), 2 * N_NEW, batch_size=2)
        ran = {arm.name for arm in drafter.arms if arm.n_steps}
        found = {arm.name for arm in drafter.choices}
        assert ran <= found
        return found - {PLAIN}

    everything = method_config("auto")
    assert choices(everything) == {"spire_sssd", "spire"}
    named = OmegaConf.merge(everything, {"methods": ["pld", "spire", "spire_sssd"]})
    assert choices(named) == {"pld", "spire", "spire_sssd"}
    seconds[0] = auto.LONG_STEP_S / 2
    assert choices(everything) == {"spire_sssd", "spire", "pld"}


def test_a_drafters_tree_takes_the_datastore_at_hand(artifacts, monkeypatch, tmp_path):
    """Without one it is the prompt and the text alone, and a folder that was given goes before it."""
    monkeypatch.chdir(tmp_path)
    spire, store = artifacts.get("spire"), artifacts.get("datastore")
    config = method_config("spire_sssd")
    found = build_method(config, artifacts.target, {"spire": spire})
    assert found.arms[0].drafter.store is None
    monkeypatch.setattr(registry, "find_artifact", lambda kind, target: {"datastore": store}[kind])
    found = build_method(config, artifacts.target, {"spire": spire})
    assert found.arms[0].drafter.store.folder == Path(store)
    alone = OmegaConf.merge(config, {"datastore": None})
    assert build_method(alone, artifacts.target, {"spire": spire}).arms[0].drafter.store is None
    with pytest.raises(UserError, match="nowhere"):
        build_method(config, artifacts.target, {"spire": spire, "datastore": str(tmp_path / "nowhere")})
