"""A drafter decodes as it was trained: acceptance computed from rollouts is what the decoding loop counts.

After the root of a step the loop's text is drawn from p, whatever the drafter does. So with x_i its tokens,

    P(first j accepted) = E_p[ prod_{i < j} min(1, q_i(x_i) / p_i(x_i)) * sum_v min(p_j(v), q_j(v)) ]

since the loop keeps x_i with that probability. Under greedy decoding every factor is 0 or 1, and both sides agree step
by step. Steps near the end of a text, which draft fewer than gamma tokens, are left out.

Letters: T texts, S steps of a text, k = gamma, L tokens of a text, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from spectrain.decoding import Drafter, Sampling, generate
from spectrain.measure.statistics import of_sums
from spectrain.methods.eagle3 import Eagle3
from spectrain.methods.speculative import Speculative
from spectrain.methods.spire import Spire
from spectrain.models.eagle3 import unrolled
from spectrain.models.rollout import rollout
from spectrain.target import TargetModel
from tests.conftest import in_turn, noisy_copy, random_prompts, tiny_model
from tests.models.test_spire import make
from tests.models.tiny_eagle3 import fitted_eagle3

GREEDY, T1 = Sampling(), Sampling(temperature=1.0)
NEW_TOKENS = 20
Logits = Callable[[Tensor, Tensor], Tensor]  # (tokens [L], positions [S, k]) -> logits [S, k, V]


def logits_of(model: TargetModel) -> Logits:
    return lambda tokens, positions: model.forward(tokens[None]).logits[0][positions]


def spire_logits(method: Spire, target: TargetModel) -> Logits:
    """The logits of the training rollout, run once for each place of a root modulo k."""
    drafter = method.for_target(target)
    reading = target.with_capture(drafter.config.captured_layers)

    def logits(tokens: Tensor, positions: Tensor) -> Tensor:
        captured = reading.features(tokens[None]).captured
        first_roots = (positions[:, 0] % method.gamma).tolist()
        states = {
            root: rollout(drafter, tokens[None], captured, block_tokens=method.gamma, first_root=root)[0]
            for root in set(first_roots)
        }
        return drafter.logits(
            torch.stack([states[root][row] for root, row in zip(first_roots, positions, strict=True)])
        )

    return logits


def eagle3_logits(method: Eagle3, target: TargetModel) -> Logits:
    """The logits of the training unroll, whose drafts begin at every token."""
    drafter = method.for_target(target)
    reading = target.with_capture(drafter.config.captured_layers)

    def logits(tokens: Tensor, positions: Tensor) -> Tensor:
        steps = unrolled(drafter, tokens[None], reading.features(tokens[None]).captured, method.gamma)
        drafts = torch.stack([step[0] for step in steps], dim=1)[positions[:, 0]]
        return drafter.spread(drafts @ drafter.unembedding.T)

    return logits


def vanilla(scale: float = 0.05) -> tuple[TargetModel, Drafter, Logits]:
    target = TargetModel(tiny_model("llama"))
    method = Speculative(TargetModel(noisy_copy(target.model, scale)), 3)
    return target, method, logits_of(method.draft_model)


def spire(**options) -> tuple[TargetModel, Drafter, Logits]:
    target, drafter = make(n_target_layers=4, k=3, window_tokens=6, **options)
    method = Spire(drafter)
    return target, method, spire_logits(method, target)


@torch.no_grad()
def eagle3() -> tuple[TargetModel, Drafter, Logits]:
    target = TargetModel(tiny_model("llama"))
    method = Eagle3(fitted_eagle3(target, k=3))
    return target, method, eagle3_logits(method, target)


@torch.inference_mode()
def both_sides(
    target: TargetModel, method: Drafter, draft: Logits, prompts: list[list[int]], sampling: Sampling
) -> tuple[np.ndarray, np.ndarray]:
    """Steps of each text whose first 0, 1, .. k tokens were accepted, [T, k + 1]: as expected, and as counted."""
    k, options = method.gamma, {"batch_size": 8, "stop_token_ids": (), "verification": "token"}
    expected, counted = [], []
    for prompt, text in zip(prompts, generate(target, method, prompts, NEW_TOKENS, sampling, **options), strict=True):
        roots = len(prompt) + np.concatenate([[0], np.cumsum(np.add(text.accepted, 1))[:-1]])
        full = np.array(text.drafted) == k
        positions = torch.from_numpy(roots[full])[:, None] + torch.arange(k)  # [S, k]
        tokens = torch.tensor([*prompt, *text.tokens])
        p, q = (sampling.warp(one(tokens, positions)) for one in (logits_of(target), draft))
        expected.append(reached(p, q, tokens[positions + 1]).sum(0))
        counted.append([(np.array(text.accepted)[full] >= j).sum() for j in range(k + 1)])
    return np.array(expected), np.array(counted, dtype=np.float64)


def reached(p: Tensor, q: Tensor, written: Tensor) -> np.ndarray:
    """Probability that the first 0, 1, .. k draft tokens are accepted, [S, k + 1], where `written` [S, k] follows."""
    overlap = torch.minimum(p, q).sum(-1).double()
    p_written, q_written = (values.gather(-1, written[..., None])[..., 0].double() for values in (p, q))
    kept = torch.where(q_written > 0, q_written / p_written, 0.0).clamp_max(1)
    before = pad(kept.cumprod(1)[:, :-1], (1, 0), value=1.0)
    return pad(before * overlap, (1, 0), value=1.0).numpy()


def tau_apart(expected: np.ndarray, counted: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of expected minus counted tau, over texts."""
    k = expected.shape[1]
    found = of_sums(lambda *s: sum(s[:k]) / s[0] - sum(s[k:]) / s[k], *expected.T, *counted.T, n_resamples=2000)
    return found.low, found.high


@pytest.mark.parametrize(
    "drafter",
    [
        vanilla,
        spire,
        lambda: spire(feedback=False),
        lambda: spire(feedback=False, target_activations=False),
        lambda: spire(input="projected", unembedding="target", previous_state=True),
        eagle3,
    ],
    ids=["vanilla", "spire", "no_feedback", "no_target_activations", "previous_state", "eagle3"],
)
def test_greedy_acceptance_is_equal_step_by_step(drafter):
    target, method, draft = drafter()
    expected, counted = both_sides(target, method, draft, random_prompts([9, 21, 14, 33]), GREEDY)
    assert counted[:, 1].sum() > 0, "nothing was accepted: the test says nothing"
    assert np.array_equal(expected, counted)


@pytest.mark.parametrize(
    ("sampling", "drafter"), in_turn([Sampling(temperature=0.7, top_k=20), T1], [vanilla, spire, eagle3])
)
def test_sampled_acceptance_is_equal_on_average(drafter, sampling):
    low, high = tau_apart(*both_sides(*drafter(), random_prompts([12] * 64), sampling))
    assert low - 0.02 <= 0 <= high + 0.02
    assert high - low < 0.3, "the test could not tell a wrong computation"


def test_the_computation_of_another_drafter_does_not_pass():
    target, method, _ = vanilla()
    low, high = tau_apart(*both_sides(target, method, vanilla(0.4)[2], random_prompts([12] * 64), T1))
    assert not low <= 0 <= high
