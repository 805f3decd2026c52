"""Acceptance computed teacher forced equals what the loop counts: step by step if greedy, on average else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spectrain.decoding import Sampling, TargetModel, generate
from spectrain.measure.baselines import build_baseline
from spectrain.measure.parity import (
    Steps,
    _reached,
    computed,
    counted,
    draft_logits,
    estimate,
    full_steps,
    logits_of,
    positions_apart,
)
from spectrain.methods.speculative import Speculative
from spectrain.methods.spire import Spire
from tests.conftest import noisy_copy, random_prompts, tiny_model
from tests.models.test_spire import make

GREEDY, T1 = Sampling(), Sampling(temperature=1.0)


def write(target, method, contexts, sampling, new_tokens):
    options = {"batch_size": 8, "stop_token_ids": (), "verification": "token"}
    return generate(target, method, contexts, new_tokens, sampling, **options)


def both_sides(target, method, draft, contexts, sampling, new_tokens=20):
    """What is computed at the loop's steps, and what the loop counts."""
    written = write(target, method, contexts, sampling, new_tokens)
    steps = [full_steps(c, one, method.gamma) for c, one in zip(contexts, written, strict=True)]
    _, at_steps = computed(steps, method.gamma, draft, logits_of(target), sampling)
    return at_steps, counted(steps, method.gamma)


def vanilla(gamma: int = 3, scale: float = 0.05):
    target = TargetModel(tiny_model("llama"))
    method = Speculative(TargetModel(noisy_copy(target.model, scale)), gamma)
    return target, method, draft_logits(method, target)


def spire(**options):
    target, drafter = make(n_target_layers=4, k=3, window_tokens=6, **options)
    method = Spire(drafter)
    return target, method, draft_logits(method, target)


@pytest.mark.parametrize(
    "drafter",
    [
        vanilla,
        spire,
        lambda: spire(feedback=False),
        lambda: spire(feedback=False, target_activations=False),
        lambda: spire(input="projected", head="target", previous_state=True),
    ],
    ids=["vanilla", "spire", "no_feedback", "no_target_activations", "previous_state"],
)
def test_greedy_acceptance_is_equal_step_by_step(drafter):
    target, method, draft = drafter()
    ours, loop = both_sides(target, method, draft, random_prompts([9, 21, 14, 33]), GREEDY)
    assert loop[:, 0].min() > 0
    assert loop[:, 1].sum() > 0, "nothing was accepted: the test says nothing"
    assert np.array_equal(ours, loop)


@pytest.mark.parametrize("drafter", [vanilla, spire], ids=["vanilla", "spire"])
@pytest.mark.parametrize("sampling", [T1, Sampling(temperature=0.7, top_k=20)], ids=["T=1", "top_k"])
def test_sampled_acceptance_is_equal_on_average(drafter, sampling):
    target, method, draft = drafter()
    ours, loop = both_sides(target, method, draft, random_prompts([12] * 64), sampling)
    assert positions_apart(ours, loop) == []
    tau = estimate(ours, loop)
    assert tau.low - 0.02 <= 0 <= tau.high + 0.02
    assert tau.high - tau.low < 0.3, "the test could not tell a wrong computation"


def test_another_drafter_s_computation_does_not_pass():
    target, method, _ = vanilla(scale=0.05)
    other = draft_logits(Speculative(TargetModel(noisy_copy(target.model, 0.4)), 3), target)
    ours, loop = both_sides(target, method, other, random_prompts([12] * 64), T1)
    assert estimate(ours, loop).resolved
    assert positions_apart(ours, loop)


def test_assisted_generation_takes_the_loop_s_steps_under_greedy_decoding():
    target, method, _ = vanilla(gamma=3)
    contexts = random_prompts([9, 21, 14])
    written = write(target, method, contexts, GREEDY, 24)
    begun = [[*context, one.tokens[0]] for context, one in zip(contexts, written, strict=True)]
    theirs = build_baseline("hf_assisted", target, speculative=method)(begun, 23, GREEDY, stop_token_ids=())
    for context, own, first, other in zip(contexts, written, begun, theirs, strict=True):
        assert full_steps(context, own, 3) == full_steps(first, other, 3, of_context=True)
        assert own.drafted == other.drafted
        assert own.accepted == other.accepted


def test_steps_cut_short_by_the_end_are_left_out():
    target, method, _ = vanilla(gamma=3)
    (generation,) = write(target, method, random_prompts([9]), GREEDY, 10)
    steps = full_steps([4] * 9, generation, 3)
    assert steps.begins == 9
    assert all(root <= 9 + 10 - 1 - 4 for root in steps.roots)  # room for three drafts and the bonus behind the root
    assert len(steps.roots) < len(generation.accepted)


def test_expected_counts_by_hand():
    """Two tokens, V = 2, one root: p and q are the same at each position."""
    p, q = torch.tensor([0.8, 0.2]).log(), torch.tensor([0.5, 0.5]).log()
    logits = lambda value: lambda tokens, positions: value.expand(*positions.shape, 2)  # noqa: E731
    text = Steps(tokens=[0, 0, 1, 0], begins=1, roots=[1], accepted=[2])
    _, at_steps = computed([text], 2, logits(q), logits(p), T1)
    # sum min(p, q) = 0.5 + 0.2; the first written token is 1: kept with min(1, 0.5 / 0.2) = 1
    np.testing.assert_allclose(at_steps, [[1, 0.7, 0.7]], atol=1e-6)
    other = Steps(tokens=[0, 0, 0, 0], begins=1, roots=[1], accepted=[2])
    _, at_steps = computed([other], 2, logits(q), logits(p), T1)
    # the first written token is 0: kept with 0.5 / 0.8
    np.testing.assert_allclose(at_steps, [[1, 0.7, 0.625 * 0.7]], atol=1e-6)


def test_rates_are_of_the_steps_that_came_so_far():
    counts = np.array([[10.0, 8, 4], [10, 4, 2]])
    assert [estimate(counts, position=i).value for i in (1, 2)] == [12 / 20, 6 / 12]
    assert estimate(counts).value == 1 + 18 / 20
    nothing = np.array([[10.0, 0, 0], [10, 0, 0]])
    assert np.isnan(estimate(nothing, position=2).value)


def test_a_written_token_that_neither_model_gives_weight_ends_the_draft_and_is_no_nan():
    p = q = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]])  # greedy
    assert _reached(p, q, torch.tensor([[0, 1, 0]])).tolist() == [[1, 1, 1, 0]]
