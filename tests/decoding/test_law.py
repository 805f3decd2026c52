"""Sampled text follows the target's own distribution, whatever is drafted.

Plain decoding and drafts that are drawn from a q: the first three tokens against exact enumeration, by chi-square, of
rows with equal prompts and different generators. The same test must fail for verifiers that are wrong in the usual
ways. All other drafts change no token of plain decoding's own sample.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import PreTrainedModel

from spectrain import kernels
from spectrain.decoding import Context, Drafter, Sampling, Verified, generate, loop, verify
from spectrain.decoding.sampling import SharedNoise
from spectrain.drafting.budget import ChainBudget, TreeBudget
from spectrain.drafting.stopping import HeadStop, StopRule
from spectrain.methods.auto import Auto
from spectrain.methods.dflash import DFlash
from spectrain.methods.eagle3 import Eagle3
from spectrain.methods.registry import method_names
from spectrain.methods.speculative import Speculative
from spectrain.methods.spire import Spire
from spectrain.models.head import AcceptanceHead, HeadConfig
from spectrain.models.pruned_init import last_layers, new_drafter
from spectrain.models.spire import SpireConfig
from spectrain.target import TargetModel
from spectrain.target.lean import shape_of
from spectrain.target.weights import on_cpu
from tests.conftest import tiny_model
from tests.decoding.reference import ScriptedDrafter
from tests.methods.every import Artifacts, build, build_auto
from tests.models.tiny_dflash import fitted_dflash
from tests.models.tiny_eagle3 import fitted_eagle3

ALPHA = 1e-4
VOCAB_SIZE = 4
PROMPT = [1, 3, 0, 2]
N_SAMPLES = 2000
PLAIN = Sampling(temperature=1.2, draws="inverse")
WARPED = Sampling(temperature=1.5, top_k=3, top_p=0.95, min_p=0.02, draws="inverse")
SHARED = dataclasses.replace(WARPED, draws="shared")
TINY = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 1, "hidden_size": 16, "initializer_range": 0.15}


@lru_cache
def artifacts() -> Artifacts:
    """A target, drafters that often disagree with it, and a store that knows several ways to go on after the prompt."""
    model = tiny_model("llama", seed=4, **TINY)
    documents = [[3, 0, 2, 1, 1, 0], [0, 2, 1, 3], [0, 2, 3, 3, 2], [2, 0, 0, 1, 2, 3], [1, 2, 2, 0]]
    spire = {"n_layer": 1, "init": "random", "k": 3, "window_tokens": 4}
    folder = Path(tempfile.mkdtemp())
    return Artifacts(folder, model, lambda: tiny_model("llama", seed=9, **TINY), lambda: documents, **spire)


def target() -> TargetModel:
    return artifacts().target


def same_tree_always(context, row) -> list[tuple[int, int]]:
    """0 and 1 under the root, 2 and 0 under the first of them, 1 under that 2: branching, deterministic."""
    return [(0, 0), (1, 0), (2, 1), (0, 1), (1, 3)]


TREES = ("spire_tree", "spire_sssd", "eagle3_tree", "eagle3_sssd", "dflash_tree")
SMALL = {  # options in place of a method's yaml, so that tiny texts meet all of its branches
    "speculative": {"gamma": 3},
    "specdecpp": {"threshold": 0.6, "max_candidates": 3},
    "confidence_stop": {"threshold": 0.5, "max_candidates": 3},
    "entropy_stop": {"threshold": 1.0, "max_candidates": 3},
    "magicdec": {"gamma": 3, "window_tokens": 2},
    "logitspec": {"max_nodes": 9},
    "lookahead": {"window_columns": 3, "ngram_tokens": 3, "max_guesses": 3},
    "spectra_core": {"pool_sequences": 3, "ngram_tokens": 3, "max_guesses": 4},
    "spectra_retrieval": {"max_guesses": 4, "ngram_tokens": 3},
    "spectra": {"pool_sequences": 3, "ngram_tokens": 3, "max_guesses": 6},
    "sssd": {"max_nodes": 9},
    **{name: {"levels": 3, "branches": 2, "max_nodes": 7} for name in TREES},
}


def drafter_of(name: str, **options) -> Drafter:
    return build(name, artifacts(), {**SMALL.get(name, {}), **options})


MORE = {  # drafters that no yaml describes alone
    "spire, pruned": lambda: spire("pruned"),
    "spire, half of the vocabulary": lambda: half_vocabulary(),
    "eagle3, half of the vocabulary": lambda: Eagle3(fitted_eagle3(target(), k=3, draft_vocab=2)),
    "dflash, half of the vocabulary": lambda: DFlash(fitted_dflash(target(), draft_vocab=2)),
    "specdecpp, previous": lambda: drafter_of("specdecpp", judge="previous"),
    "specdecpp on spire": lambda: spire("random", HeadStop(random_head(), 0.6)),
    "specdecpp on spire, one program": lambda: spire("random", HeadStop(random_head(compiles=True), 0.6)),
    "sssd, last logits": lambda: drafter_of("sssd", last_logits=True),
    "logitspec, datastore": lambda: drafter_of("logitspec", datastore="auto"),
    "tree of a vanilla drafter": lambda: drafter_of("spire_tree", tree="vanilla"),
    "tree of a vanilla drafter and sssd": lambda: drafter_of("spire_sssd", tree="vanilla"),
    "tree": lambda: ScriptedDrafter(same_tree_always),
}
DRAFTERS = {**{name: partial(drafter_of, name) for name in method_names()}, **MORE}
ADAPTIVE = ("specdecpp", "specdecpp on spire", "specdecpp on spire, one program", "confidence_stop", "entropy_stop")
# Their drafts are drawn from a q. In VARIED each is made, or ends, in another way.
HALVES = tuple(f"{kind}, half of the vocabulary" for kind in ("spire", "eagle3", "dflash"))
VARIED = ("speculative", "spire", *HALVES, "magicdec", "specdecpp", ADAPTIVE[2])
DRAWING = (*VARIED, *(name for name in ADAPTIVE if name not in VARIED))
ALSO_DRAWING = ("auto", "spire, pruned", "eagle3", "dflash", "specdecpp, previous")


def spire(init: str, stop: StopRule | None = None) -> Spire:
    model = target().model
    config = SpireConfig(shape_of(model), last_layers(model, 1), k=3, window_tokens=4)
    return Spire(new_drafter(target(), config, init), stop=stop)


def half_vocabulary() -> Spire:
    model, kept = target().model, torch.arange(VOCAB_SIZE)[1::2]
    options = {"input": "projected", "unembedding": "target", "draft_vocab": len(kept)}
    config = SpireConfig(shape_of(model), last_layers(model, 1), k=3, window_tokens=4, **options)
    drafter = new_drafter(target(), config, "random", kept)
    for weight in drafter.parameters():
        weight.data.mul_(20)  # it is sure, and often wrong
    return Spire(drafter)


def random_head(compiles: bool = False) -> AcceptanceHead:
    """Stops at the first, second or third token, depending on what was drawn."""
    torch.manual_seed(0)
    head = AcceptanceHead(HeadConfig(TINY["hidden_size"], n_blocks=1)).requires_grad_(False)
    head.output.weight.mul_(10)
    if compiles:
        head.blocks = on_cpu(head.blocks)
        assert HeadStop(head, 0.6).compiles
    return head


@lru_cache
def exact_distribution(model: PreTrainedModel, sampling: Sampling, end: int | None) -> np.ndarray:
    """[V, V, V] probabilities of the first three tokens after PROMPT, from plain forwards of every prefix.

    A text that ends with the token `end` goes on with nothing but it.
    """
    exact = np.ones((VOCAB_SIZE,) * 3)
    for prefix in itertools.chain.from_iterable(itertools.product(range(VOCAB_SIZE), repeat=n) for n in range(3)):
        logits = model(torch.tensor([PROMPT + list(prefix)])).logits[0, -1]
        step = sampling.warp(logits).numpy().astype(np.float64)
        step = np.eye(VOCAB_SIZE)[end] if end in prefix else step
        exact[prefix] *= step.reshape(-1, *[1] * (2 - len(prefix)))
    return exact


def p_value(drafter: Drafter, sampling: Sampling, verification: str = "token", end: int | None = None) -> float:
    """That of the loop's samples; see `p_value_of`."""
    n_new = 5  # longer than what is judged, so that the third token can stand inside a draft
    generations = generate(
        target(),
        drafter,
        [PROMPT] * N_SAMPLES,
        n_new,
        sampling,
        batch_size=200,
        verification=verification,
        stop_token_ids=() if end is None else (end,),
    )
    return p_value_of([one.tokens for one in generations], target().model, sampling, end)


def p_value_of(texts: list[list[int]], model: PreTrainedModel, sampling: Sampling, end: int | None = None) -> float:
    """Chi-square of N_SAMPLES continuations of PROMPT against the exact distribution; 0 where one is impossible."""
    counts = np.zeros((VOCAB_SIZE,) * 3)
    for text in texts:
        counts[tuple((text + 2 * [end])[:3])] += 1
    expected = exact_distribution(model, sampling, end) * N_SAMPLES
    np.testing.assert_allclose(expected.sum(), N_SAMPLES, rtol=1e-6)
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5  # one cell together
    if expected[rare].sum() >= 5:
        return chisquare(
            [*counts[~rare], counts[rare].sum()], [*expected[~rare], expected[rare].sum()], sum_check=False
        ).pvalue
    return chisquare(counts[~rare], expected[~rare] / expected[~rare].sum() * counts[~rare].sum()).pvalue


@pytest.mark.parametrize("method", ["autoregressive", *DRAWING, *ALSO_DRAWING])
def test_first_three_tokens_follow_the_targets_distribution(method):
    assert p_value(DRAFTERS[method](), WARPED) > ALPHA


@pytest.mark.parametrize("method", VARIED)
def test_block_verification_samples_from_the_same_distribution(method):
    assert p_value(DRAFTERS[method](), WARPED, "block") > ALPHA


@pytest.mark.parametrize("method", VARIED)
def test_samples_follow_the_distribution_where_drafts_stop_at_an_end_of_text(method):
    assert p_value(DRAFTERS[method](), WARPED, end=0) > ALPHA


@pytest.mark.parametrize("method", ["speculative", "spire, pruned"])
def test_a_draft_that_leaves_out_the_token_that_ends_it_is_noticed(method, monkeypatch):
    until_end = Context.until_end

    def before_end(context, tokens):
        kept = until_end(context, tokens)
        return kept if kept is None else kept - (tokens == 0).any(1).long()

    monkeypatch.setattr(Context, "until_end", before_end)
    assert p_value(DRAFTERS[method](), WARPED, end=0) < ALPHA


def test_draws_with_shared_noise_follow_the_distribution():
    assert p_value(DRAFTERS["autoregressive"](), SHARED) > ALPHA


@pytest.mark.parametrize("method", [name for name in DRAFTERS if name not in (*DRAWING, *ALSO_DRAWING)])
def test_drafts_that_are_not_drawn_change_no_token_of_a_sample(method):
    assert sampled(DRAFTERS[method](), WARPED, 5) == plain_sample(WARPED)


@pytest.mark.parametrize("method", DRAFTERS)
def test_with_shared_noise_no_draft_changes_a_token_of_a_sample(method):
    assert sampled(DRAFTERS[method](), SHARED, 5) == plain_sample(SHARED)


@lru_cache
def plain_sample(sampling: Sampling) -> list[list[int]]:
    return sampled(DRAFTERS["autoregressive"](), sampling, 1)


def sampled(drafter: Drafter, sampling: Sampling, batch_size: int) -> list[list[int]]:
    prompts = [PROMPT[: 1 + i % 4] for i in range(64)]  # rows end at different steps
    found = generate(target(), drafter, prompts, 9, sampling, batch_size=batch_size, stop_token_ids=(1,))
    return [one.tokens for one in found]


def test_noise_that_returns_at_the_next_place_fails_the_same_test(monkeypatch):
    monkeypatch.setattr(SharedNoise, "follow", lambda noise, lengths: None)
    assert p_value(DRAFTERS["autoregressive"](), SHARED) < ALPHA


def test_noise_that_is_not_exponential_fails_the_same_test(monkeypatch):
    monkeypatch.setattr(kernels, "reads", lambda values: False)
    assert p_value(DRAFTERS["spire_tree"](), SHARED) > ALPHA
    true = kernels.reference.exponentials
    monkeypatch.setattr(kernels.reference, "exponentials", lambda keys, tokens: 1 - (-true(keys, tokens)).exp())
    assert p_value(DRAFTERS["spire_tree"](), SHARED) < ALPHA


def redraws_the_bonus(tree, logits, sampling, uniforms, verification, *_) -> Verified:
    """Draws the bonus anew from p: not from the residual of a chain, and not the token that left a deterministic tree
    (as REST's reference does)."""
    verified = verify(tree, logits, sampling, uniforms, verification)
    p_last = sampling.warp(logits[torch.arange(len(verified.last)), verified.last])
    return Verified(verified.path, verified.accepted, torch.multinomial(p_last, 1)[:, 0])


def accepts_too_readily(tree, logits, sampling, uniforms, verification, *_) -> Verified:
    halved = None if tree.probs is None else tree.probs / 2
    return verify(dataclasses.replace(tree, probs=halved), logits, sampling, uniforms, verification)


@pytest.mark.parametrize(
    ("method", "biased"),
    [
        ("speculative", redraws_the_bonus),
        ("speculative", accepts_too_readily),
        ("specdecpp", redraws_the_bonus),  # chains of different lengths
        ("tree", redraws_the_bonus),
        ("magicdec", accepts_too_readily),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_biased_verifier_fails_the_same_test(method, biased, monkeypatch):
    monkeypatch.setattr(loop, "verify", biased)
    assert p_value(DRAFTERS[method](), PLAIN) < ALPHA


@pytest.fixture
def budgets_by_lot(monkeypatch) -> Callable[[str], Drafter]:
    """A method as users get it, whose trees have any number of nodes in each step, and which sleeps in some."""
    lots = Random(0)

    def choices(budget, n_rows, n_probes, n_nodes):
        return np.array([lots.choice([0, 1, 2, 5])]), np.zeros(n_nodes + 1)

    def choose(auto, context):
        before, auto.active = auto.active, lots.choice(auto.arms)
        auto._left = lots.choice([1, 2])
        if auto.active is not before:
            before.known = list(context.n_tokens)
            auto._catch_up(auto.active, context)

    monkeypatch.setattr(TreeBudget, "choices", choices)
    monkeypatch.setattr(ChainBudget, "choose", lambda budget, n_rows: lots.choice([0, 1, 2, 3]))
    monkeypatch.setattr(Auto, "_choose", choose)
    auto = {"max_nodes": "auto"}
    return lambda name: build_auto(name, artifacts(), SMALL.get(name, {}) | auto | FREE.get(name, {}))


FREE = {"speculative": {"gamma": None}}  # lengths of chains


@pytest.mark.parametrize("method", ["pld", "sssd", "lookahead", "spire_tree", "spire_sssd"])
def test_budgets_that_change_within_a_batch_change_no_token(method, budgets_by_lot):
    assert sampled(budgets_by_lot(method), WARPED, 5) == plain_sample(WARPED)


def test_lengths_of_chains_that_change_leave_the_distribution(budgets_by_lot):
    assert p_value(budgets_by_lot("speculative"), WARPED) > ALPHA


class DropsWhatItDrew(Speculative):
    """Looks at the last token it drew and does not submit one it dislikes."""

    def propose(self, context):
        tree = super().propose(context)
        dropped = (tree.tokens == 0) & (tree.parents == tree.shape[1] - 2)
        return dataclasses.replace(tree, parents=tree.parents.masked_fill(dropped, -2))


def test_dropping_a_token_that_was_drawn_fails_the_same_test():
    """Why a stop rule's verdict on a token comes after the token has joined the chain."""
    draft_model = TargetModel(tiny_model("llama", seed=9, **TINY))
    assert p_value(DropsWhatItDrew(draft_model, gamma=1), PLAIN) < ALPHA
