"""Sampled text has the target's own law: the first three tokens against exact enumeration, by chi-square.

A thousand rows with equal prompts and different generators are decoded as one batch. The same test must fail for
verifiers that are wrong in the usual ways.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from spectrain.decoding import Drafter, Sampling, TargetModel, Verified, generate, loop, verify
from spectrain.methods import anpd, logitspec, pld, rest, spectra, spectra_core, spectra_retrieval, sssd
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.lookahead import Lookahead
from spectrain.methods.magicdec import MagicDec
from spectrain.methods.speculative import Speculative
from spectrain.methods.spire import Spire
from spectrain.methods.stopping import ConfidenceStop, EntropyStop, HeadStop, StopRule
from spectrain.models.acceptance_head import AcceptanceHead, HeadConfig
from spectrain.models.pruned_init import last_layers, new_drafter, shape_of
from spectrain.models.spire import SpireConfig
from tests.conftest import tiny_model
from tests.decoding.reference import ScriptedDrafter
from tests.retrieval.reference import make_store

ALPHA = 1e-4
VOCAB_SIZE = 4
PROMPT = [1, 3, 0, 2]
N_SAMPLES = 4000
SAMPLINGS = {"plain": Sampling(temperature=1.2), "warped": Sampling(temperature=1.5, top_k=3, top_p=0.95, min_p=0.02)}
TINY = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 1, "hidden_size": 16, "initializer_range": 0.15}


@lru_cache
def target() -> TargetModel:
    return TargetModel(tiny_model("llama", seed=4, **TINY))


@lru_cache
def datastore() -> str:
    """A store that knows what follows the prompt, in several ways."""
    folder = Path(tempfile.mkdtemp())
    documents = [[3, 0, 2, 1, 1, 0], [0, 2, 1, 3], [0, 2, 3, 3, 2], [2, 0, 0, 1, 2, 3], [1, 2, 2, 0]]
    make_store(folder, documents, VOCAB_SIZE, n_shards=2)
    return str(folder)


def same_tree_always(context, row) -> list[tuple[int, int]]:
    """0 and 1 under the root, 2 and 0 under the first of them, 1 under that 2: branching, deterministic."""
    return [(0, 0), (1, 0), (2, 1), (0, 1), (1, 3)]


DRAFTERS = {
    "autoregressive": Autoregressive,
    "speculative": lambda: Speculative(TargetModel(tiny_model("llama", seed=9, **TINY)), gamma=3),
    "spire": lambda: spire("random"),
    "spire, pruned": lambda: spire("pruned"),
    "specdecpp": lambda: adaptive(HeadStop(random_head(), 0.6)),
    "specdecpp, previous": lambda: adaptive(HeadStop(random_head(), 0.6, judge="previous")),
    "specdecpp on spire": lambda: spire("random", HeadStop(random_head(), 0.6)),
    "confidence_stop": lambda: adaptive(ConfidenceStop(0.5)),
    "entropy_stop": lambda: adaptive(EntropyStop(1.0)),
    "tree": lambda: ScriptedDrafter(same_tree_always),
    "magicdec": lambda: MagicDec(gamma=3, window_tokens=2),
    "pld": lambda: pld.build(target()),
    "anpd": lambda: anpd.build(target()),
    "logitspec": lambda: logitspec.build(target(), max_nodes=9),
    "lookahead": lambda: Lookahead(window_columns=3, ngram_tokens=3, max_guesses=3),
    "spectra_core": lambda: spectra_core.build(target(), pool_sequences=3, ngram_tokens=3, max_guesses=4),
    "rest": lambda: rest.build(target(), datastore()),
    "spectra_retrieval": lambda: spectra_retrieval.build(target(), datastore(), max_guesses=4, ngram_tokens=3),
    "spectra": lambda: spectra.build(target(), datastore(), pool_sequences=3, ngram_tokens=3, max_guesses=6),
    "sssd": lambda: sssd.build(target(), datastore(), max_nodes=9),
    "sssd_logits": lambda: sssd.build(target(), datastore(), max_nodes=9, last_logits=True),
    "logitspec_datastore": lambda: logitspec.build_with_datastore(target(), datastore(), max_nodes=9),
}
ADAPTIVE = ("specdecpp", "specdecpp on spire", "confidence_stop", "entropy_stop")
DRAWING = ("speculative", "spire", "magicdec", *ADAPTIVE)  # their drafts are drawn from a q


def spire(init: str, stop: StopRule | None = None) -> Spire:
    model = target().model
    config = SpireConfig(shape_of(model), last_layers(model, 1), k=3, window_tokens=4)
    return Spire(new_drafter(model, config, init), stop=stop)


def adaptive(stop: StopRule) -> Speculative:
    return Speculative(TargetModel(tiny_model("llama", seed=9, **TINY)), gamma=3, stop=stop)


def random_head() -> AcceptanceHead:
    """Stops at the first, second or third token, depending on what was drawn."""
    torch.manual_seed(0)
    head = AcceptanceHead(HeadConfig(TINY["hidden_size"], n_blocks=1))
    head.output.weight.data.mul_(10)
    return head


def exact_law(sampling: Sampling) -> np.ndarray:
    """[V, V, V] probabilities of the first three tokens, from plain forwards of every prefix."""
    law = np.ones((VOCAB_SIZE,) * 3)
    for prefix in itertools.chain.from_iterable(itertools.product(range(VOCAB_SIZE), repeat=n) for n in range(3)):
        logits = target().model(torch.tensor([PROMPT + list(prefix)])).logits[0, -1]
        step = sampling.warp(logits).numpy().astype(np.float64)
        law[prefix] *= step.reshape(-1, *[1] * (2 - len(prefix)))
    return law


def p_value(drafter: Drafter, sampling: Sampling, verification: str = "token") -> float:
    """Chi-square of the loop's samples against the exact law; 0 where an impossible text was emitted."""
    n_new = 5  # longer than what is judged, so that the third token can stand inside a draft
    generations = generate(
        target(),
        drafter,
        [PROMPT] * N_SAMPLES,
        n_new,
        sampling,
        batch_size=1000,
        verification=verification,
        stop_token_ids=(),
    )
    counts = np.zeros((VOCAB_SIZE,) * 3)
    for generation in generations:
        counts[tuple(generation.tokens[:3])] += 1
    expected = exact_law(sampling) * N_SAMPLES
    np.testing.assert_allclose(expected.sum(), N_SAMPLES, rtol=1e-6)
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5  # one cell together
    if expected[rare].sum() >= 5:
        return chisquare(
            [*counts[~rare], counts[rare].sum()], [*expected[~rare], expected[rare].sum()], sum_check=False
        ).pvalue
    return chisquare(counts[~rare], expected[~rare] / expected[~rare].sum() * counts[~rare].sum()).pvalue


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("method", DRAFTERS)
def test_first_three_tokens_have_the_law_of_the_target(method, sampling):
    assert p_value(DRAFTERS[method](), sampling) > ALPHA


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("method", DRAWING)
def test_block_verification_has_the_same_law(method, sampling):
    assert p_value(DRAFTERS[method](), sampling, "block") > ALPHA


def redraws_the_bonus(tree, logits, sampling, generators, verification) -> Verified:
    """Draws the bonus anew from p: not from the residual of a chain, and not the token that left a deterministic tree
    (as REST's reference does)."""
    verified = verify(tree, logits, sampling, generators, verification)
    p_last = sampling.warp(logits[torch.arange(len(verified.last)), verified.last])
    return Verified(verified.path, verified.accepted, torch.multinomial(p_last, 1)[:, 0])


def accepts_too_readily(tree, logits, sampling, generators, verification) -> Verified:
    halved = None if tree.probs is None else tree.probs / 2
    return verify(dataclasses.replace(tree, probs=halved), logits, sampling, generators, verification)


@pytest.mark.parametrize(
    ("method", "biased"),
    [
        ("speculative", redraws_the_bonus),
        ("speculative", accepts_too_readily),
        ("spire", redraws_the_bonus),
        ("specdecpp", redraws_the_bonus),
        ("tree", redraws_the_bonus),
        ("lookahead", redraws_the_bonus),
        ("pld", redraws_the_bonus),
        ("anpd", redraws_the_bonus),
        ("logitspec", redraws_the_bonus),
        ("spectra_core", redraws_the_bonus),
        ("rest", redraws_the_bonus),
        ("spectra_retrieval", redraws_the_bonus),
        ("spectra", redraws_the_bonus),
        ("sssd", redraws_the_bonus),
        ("magicdec", accepts_too_readily),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_biased_verifier_fails_the_same_test(method, biased, monkeypatch):
    monkeypatch.setattr(loop, "verify", biased)
    assert p_value(DRAFTERS[method](), SAMPLINGS["plain"]) < ALPHA


class DropsWhatItDrew(Speculative):
    """Looks at the last token it drew and does not submit one it dislikes."""

    def propose(self, context):
        tree = super().propose(context)
        dropped = (tree.tokens == 0) & (tree.parents == tree.shape[1] - 2)
        return dataclasses.replace(tree, parents=tree.parents.masked_fill(dropped, -2))


def test_dropping_a_token_that_was_drawn_fails_the_same_test():
    """Why a stop rule's verdict on a token comes after the token has joined the chain."""
    draft_model = TargetModel(tiny_model("llama", seed=9, **TINY))
    assert p_value(DropsWhatItDrew(draft_model, gamma=1), SAMPLINGS["plain"]) < ALPHA
