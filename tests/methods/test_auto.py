"""Choosing among methods: what slept drafts as if it had not, text and law stay, and the fastest runs."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from spectrain.decoding import Drafter, Generation, Sampling, generate
from spectrain.decoding.generation import Choice
from spectrain.errors import UserError
from spectrain.methods import auto, options, registry
from spectrain.methods.auto import PLAIN, Auto
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.registry import build_method, method_config, method_names
from spectrain.target import DraftTree
from tests.conftest import random_prompts, tiny_model
from tests.methods.every import Artifacts, build, build_auto

N_NEW = 40
FIXED = {"max_nodes": 9}
CHAINS = {name: {"gamma": 3} for name in ("spire", "eagle3", "dflash", "speculative", "magicdec")}
STOPS = {name: {"max_candidates": 4} for name in ("specdecpp", "confidence_stop", "entropy_stop")}
LOOKUPS = [name for name in method_names() if name not in {**CHAINS, **STOPS, PLAIN: None, "auto": None}]
# Their guesses depend on the probes of steps that they did not run.
PROBING = ("lookahead", "spectra_core", "spectra")
REMEMBER = [name for name in (*LOOKUPS, "spire", "eagle3", "dflash", "speculative") if name not in PROBING]


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
        drafter.ranking.end = lambda emitted, reads=0: None
    return drafter


def prompts() -> list[list[int]]:
    return [row[:7] * 3 + row for row in random_prompts([9, 20, 13], seed=1)]


def choices_of(found: list[Generation]) -> list[Choice]:
    return [one for generation in found for one in generation.choices]


def methods_of(found: list[Generation]) -> set[str]:
    return {one.method for one in choices_of(found)}


class Shuffled(Auto):
    """Every block runs a method by lot, whatever is fast."""

    def __init__(self, methods, seed: int = 0, lengths: tuple[int, ...] = (1, 2, 5)):
        super().__init__(methods)
        self.random, self.lengths = Random(seed), lengths

    def _choose(self, context) -> None:
        for arm in self.arms:  # none is tried because it is its turn
            arm.n_steps, arm.next_trial = auto.FIRST_STEPS, self.n_steps + 1
        lots = {arm: self.random.random() + 1 for arm in self.arms}
        for arm in self.arms:
            arm.speed = lambda n_rows, lot=lots[arm], arm=arm: lot if arm.name != PLAIN or lot < 1.5 else 2.0
        super()._choose(context)
        self._left = self.random.choice(self.lengths)


@pytest.mark.parametrize(("name", "batch_size"), [*((name, 3) for name in REMEMBER), ("spire", 1), ("speculative", 1)])
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

    class OneByOne(Auto):
        def _choose(self, context):
            self.arms[0].speed = lambda n_rows: 2.0
            super()._choose(context)
            self._left = 1000

        def propose(self, context):
            super().propose(context)
            return DraftTree.root_only(context.roots)

    generate(target, OneByOne({name: watched(always, drafts)}), prompts(), N_NEW, batch_size=batch_size)
    for seed in range(4):
        slept: dict = {}
        drafter = Beside({name: watched(fixed(name, artifacts), slept)}, seed)
        generate(target, drafter, prompts(), N_NEW, batch_size=batch_size)
        assert 10 < len(slept) < len(drafts)
        for text, tree in slept.items():
            assert tree == drafts[text], (seed, len(text))
            seen += len(tree[0]) > 1
    assert seen


@pytest.mark.parametrize("name", method_names())
def test_text_is_the_targets_own_while_methods_take_turns_by_lot(artifacts, name):
    if name in (PLAIN, "auto"):
        pytest.skip("it is always an arm, or has arms")
    target = artifacts.target
    plain = [one.tokens for one in generate(target, Autoregressive(), prompts(), N_NEW)]
    drafter = Shuffled({name: fixed(name, artifacts)})
    for _ in range(2):
        found = generate(target, drafter, prompts(), N_NEW, batch_size=2)
        assert [one.tokens for one in found] == plain
    assert methods_of(found) == {name, PLAIN}


@pytest.mark.parametrize("reads_all", [False, True])
def test_two_drafters_that_read_states_keep_those_of_each_row_s_own_prompt(artifacts, reads_all):
    """Rows of unequal length, longer than the window; what stands behind the shorter one is no text."""
    target, texts = artifacts.target, random_prompts([60, 25], seed=4)

    def drafted(*names: str) -> list:
        methods = {name: fixed(name, artifacts) for name in names}
        if reads_all and "spire_tree" in methods:
            methods["spire_tree"].read_of_prompts = lambda lengths: None
        drafter = Auto(methods)
        for i, arm in enumerate(drafter.arms):
            arm.n_steps, arm.next_trial = auto.FIRST_STEPS, auto.RESTING
            arm.speed = lambda n_rows, first=i == 0: 2.0 if first else 1.0
        found = generate(target, drafter, texts, 12, batch_size=2)
        assert methods_of(found) == {"spire"}
        read = drafter.read_of_prompts(torch.tensor([60, 25]))
        assert (read is None) == (reads_all and len(names) > 1)  # what any of them reads is kept, and no more
        return [(one.tokens, one.accepted) for one in found]

    assert drafted("spire", "spire_tree") == drafted("spire")


def test_what_several_methods_read_of_prompts_is_read_once_and_in_order():
    def reading(*positions: list[int]) -> Drafter:
        method = Oracle([], right=True).describe(capture_layers=(0,))
        method.read_of_prompts = lambda lengths: torch.tensor(positions)
        return method

    chosen = Auto({"window": reading([0, -1, 7, 8], [0, -1, -1, 3]), "whole": reading([5, 6, 7, 8], [2, 3, -1, -1])})
    found = chosen.read_of_prompts(torch.tensor([9, 4]))
    assert found.tolist() == [[0, 5, 6, 7, 8], [0, 2, 3, -1, -1]]


@pytest.mark.parametrize(("right", "share"), [(True, 0.6), (False, 0.2)])
def test_a_method_runs_where_it_is_fast_and_hardly_where_it_is_not(artifacts, right, share):
    target, asked = artifacts.target, prompts() * 3
    plain = generate(target, Autoregressive(), asked, 60, stop_token_ids=())
    chosen = Auto({"oracle": Oracle([p + one.tokens for p, one in zip(asked, plain, strict=True)], right)})
    found = generate(target, chosen, asked, 60, stop_token_ids=())
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    drafted = chosen.arms[0].n_steps / chosen.n_steps
    assert drafted > share if right else drafted < share
    assert (auto.why_plain(chosen) is None) == right


class Oracle(Drafter):
    """Drafts the text that is known to follow, or rubbish."""

    def __init__(self, texts: list[list[int]], right: bool):
        self.texts, self.right = texts, right

    def propose(self, context):
        (known,) = context.tail(10**6)
        follows = next(text[len(known) : len(known) + 4] for text in self.texts if text[: len(known)] == known)
        tokens = [token if self.right else (token + 1) % 50 for token in follows][: max(0, context.room[0] - 1)]
        if not tokens:
            return DraftTree.root_only(context.roots)
        return DraftTree.chain(context.roots, torch.tensor([tokens]))


def test_trials_of_a_slower_method_become_ever_more_seldom_and_a_new_text_makes_them_sooner(artifacts):
    target, asked = artifacts.target, prompts()[:1]
    plain = generate(target, Autoregressive(), asked, 180, stop_token_ids=())
    chosen = Auto({"oracle": Oracle([asked[0] + plain[0].tokens], False)})
    generate(target, chosen, asked, 180, stop_token_ids=())
    arm = chosen.arms[0]
    waits = []
    for failures in range(4):
        arm.failures = failures
        waits.append(chosen._wait(arm, 1.0, 1))
    assert waits == sorted(set(waits))
    arm.next_trial = chosen.n_steps + waits[-1]
    chosen.prepare(target, Sampling(), 1)
    assert arm.next_trial == chosen.n_steps + waits[0]


def test_a_method_whose_next_trial_is_far_away_reads_no_states_until_then(artifacts):
    target = artifacts.target
    drafter = Auto({"spire": fixed("spire", artifacts)})
    arm = drafter.arms[0]
    assert drafter.prepare(target, Sampling(), 1).capture_layers == arm.drafter.method.capture_layers
    arm.n_steps, arm.next_trial = auto.FIRST_STEPS, 10**6
    arm.speed = lambda n_rows: 0.1
    arm.cost = lambda n_rows: 9.0
    assert drafter.prepare(target, Sampling(), 1).capture_layers == ()
    plain = [one.tokens for one in generate(target, Autoregressive(), prompts(), N_NEW)]
    assert [one.tokens for one in generate(target, drafter, prompts(), N_NEW)] == plain
    drafter.n_steps = arm.next_trial - 1
    assert drafter.prepare(target, Sampling(), 1).capture_layers == arm.drafter.method.capture_layers


def test_every_method_with_max_nodes_auto_decodes_beside_plain_decoding(artifacts):
    target = artifacts.target
    plain = [one.tokens for one in generate(target, Autoregressive(), prompts(), N_NEW)]
    for name in method_names():
        drafter = build_auto(name, artifacts)
        assert isinstance(drafter, Auto) == (name != PLAIN), name
        found = generate(target, drafter, prompts(), N_NEW, batch_size=2)
        assert [one.tokens for one in found] == plain, name


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
    monkeypatch.setattr(registry, "candidates", lambda: {"pld": (), "speculative": ()})
    monkeypatch.setattr(options, "find_artifact", lambda kind, target: folder)
    config = OmegaConf.merge(method_config("auto"), {"methods": None})
    assert "speculative" in [arm.name for arm in build_method(config, short.target, {"vanilla": folder}).arms]
    assert [arm.name for arm in build_method(config, short.target, {}).arms] == ["pld", PLAIN]


def test_auto_leaves_out_what_another_choice_finds_as_well(artifacts, monkeypatch):
    at_hand: dict[str, str] = {}

    def find(kind, target):
        if kind not in at_hand:
            raise UserError(f"no {kind}")
        return at_hand[kind]

    monkeypatch.setattr(options, "find_artifact", find)

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
    assert [*by_name] == ["spire_sssd", "spire", "speculative", "pld", PLAIN]
    generate(artifacts.target, found, prompts(), 8, batch_size=2)
    assert by_name["spire"].drafter is by_name["spire_sssd"].model.drafter


def test_a_drafters_tree_takes_the_datastore_at_hand(artifacts, monkeypatch, tmp_path):
    """Without one it is the prompt and the text alone, and a folder that was given goes before it."""
    monkeypatch.chdir(tmp_path)
    spire, store = artifacts.get("spire"), artifacts.get("datastore")
    config = method_config("spire_sssd")
    found = build_method(config, artifacts.target, {"spire": spire})
    assert found.arms[0].drafter.method.store is None
    monkeypatch.setattr(options, "find_artifact", lambda kind, target: {"datastore": store}[kind])
    found = build_method(config, artifacts.target, {"spire": spire})
    assert found.arms[0].drafter.method.store.folder == Path(store)
    alone = OmegaConf.merge(config, {"datastore": None})
    assert build_method(alone, artifacts.target, {"spire": spire}).arms[0].drafter.method.store is None
    with pytest.raises(UserError, match="nowhere"):
        build_method(config, artifacts.target, {"spire": spire, "datastore": str(tmp_path / "nowhere")})


def test_a_full_batch_that_lacks_a_row_is_no_other_batch():
    drafter, tried = Auto({}), []
    drafter._rows_before, drafter._retry = 16, tried.append
    for n_rows in (15, 16, 9, 16, 8, 5, 7, 2, 1):
        drafter._choose(SimpleNamespace(n_rows=n_rows))
    assert tried == [8, 2, 1]
