"""Acceptance by draft position from several sides under one definition: they differ only if something is wrong.

It is counted in the real loop, computed teacher forced as validation does, and counted in transformers' assisted
generation. A step is full if its drafter was free to draft gamma tokens: that is known when it begins, so leaving the
others out selects nothing. At position j, acceptance is

    (full steps whose first j draft tokens were accepted) / (full steps whose first j - 1 were)

and tau = 1 + the mean number accepted. After the root of a step the loop's text is drawn from p, whatever the drafter
does, so teacher forcing predicts the counts from that text alone: with x_i its tokens,

    P(first j accepted) = E_p[ prod_{i < j} min(1, q_i(x_i) / p_i(x_i)) * sum_v min(p_j(v), q_j(v)) ]

as the loop keeps x_i with that probability. Under greedy decoding every factor is 0 or 1, and both agree step by step.

Each side has counts [T, k + 1] float64: in each text, full steps whose first 0, 1, .. k draft tokens were accepted.

Letters: T texts, S full steps of a text, k = gamma, L tokens of a text, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from spectrain.decoding import Drafter, Generation, Sampling, TargetModel
from spectrain.measure.baselines import build_baseline
from spectrain.measure.statistics import Estimate, of_sums
from spectrain.measure.tau import Setting, continue_rows
from spectrain.methods.speculative import Speculative
from spectrain.methods.spire import Spire
from spectrain.models.rollout import rollout

log = logging.getLogger(__name__)

N_RESAMPLES = 4000
LEAST_STEPS = 100  # that came to a position, for a bootstrap of its acceptance to mean anything

# The sides
LOGGED = "validation"  # on the data's text
EVERYWHERE = "computed, all text"  # at every position of what the loop wrote
AT_STEPS = "computed, steps"  # at the steps that the loop took
LOOP = "the loop"
ASSISTED = "assisted (HF)"

# (tokens [L], positions [S, k]) -> logits [S, k, V] after the tokens at these positions. Row s holds the root of a step
# and the draft tokens after it: what the drafter reads in that step.
Logits = Callable[[Tensor, Tensor], Tensor]


def measure_sides(
    target: TargetModel,
    method: Drafter,
    contexts: Sequence[list[int]],
    setting: Setting,
    new_tokens: int,
    batch_size: int,
    seed: int = 0,
    assisted: bool = True,
) -> dict[str, np.ndarray]:
    """Count the acceptance of a Spire or Speculative method on each side, on the same contexts.

    `assisted`: transformers' assisted generation is measured too, for a vanilla drafter.
    """
    gamma, sampling = method.gamma, Sampling(temperature=setting.temperature)
    log.info("%s: the loop continues %d contexts", setting.sampling, len(contexts))
    written = continue_rows(target, method, contexts, setting, new_tokens, batch_size, seed=seed)
    steps = [full_steps(context, one, gamma) for context, one in zip(contexts, written, strict=True)]
    everywhere, at_steps = computed(steps, gamma, draft_logits(method, target), logits_of(target), sampling)
    found = {EVERYWHERE: everywhere, AT_STEPS: at_steps, LOOP: counted(steps, gamma)}
    if assisted and isinstance(method, Speculative):
        log.info("%s: transformers' assisted generation", setting.sampling)
        # It drafts from the context's last token on, our loop from the first token that it drew.
        begun = [[*context, one.tokens[0]] for context, one in zip(contexts, written, strict=True)]
        baseline = build_baseline("hf_assisted", target, speculative=method)
        theirs = baseline(begun, new_tokens - 1, sampling, seed=seed, stop_token_ids=())
        steps = [full_steps(c, one, gamma, of_context=True) for c, one in zip(begun, theirs, strict=True)]
        found[ASSISTED] = counted(steps, gamma)
    return found


# Estimates from counts


def estimate(
    counts: np.ndarray, other: np.ndarray | None = None, position: int | None = None, level: float = 0.95
) -> Estimate:
    """Estimate acceptance at a position, nan where no step came so far, or tau where no position is given.

    With `other`, the counts of another side of the same texts, it is how much larger these are.
    """

    def rate(sums: Sequence[np.ndarray]) -> np.ndarray:
        return sum(sums) / sums[0] if position is None else sums[position] / sums[position - 1]

    if other is None:
        return of_sums(lambda *sums: rate(sums), *counts.T, n_resamples=N_RESAMPLES, level=level)
    width = counts.shape[1]
    columns = *counts.T, *other.T
    return of_sums(lambda *s: rate(s[:width]) - rate(s[width:]), *columns, n_resamples=N_RESAMPLES, level=level)


def described(counts: np.ndarray, other: np.ndarray | None = None) -> dict:
    """Return acceptance by position, tau and steps, or their differences, as parity.json holds them."""
    positions = range(1, counts.shape[1])
    return {
        "acceptance": [estimate(counts, other, position).as_json() for position in positions],
        "tau": estimate(counts, other).as_json(),
        "steps": int(counts[:, 0].sum()),
    }


def positions_apart(counts: np.ndarray, other: np.ndarray) -> list[int]:
    """Return the positions where two sides differ; all intervals together hold at 95 % (Bonferroni)."""
    positions = range(1, counts.shape[1])
    reached = np.minimum(counts.sum(0), other.sum(0))
    level = 1 - 0.05 / len(positions)
    enough = [i for i in positions if reached[i - 1] >= LEAST_STEPS]
    return [i for i in enough if estimate(counts, other, i, level).resolved]


def verdict(name: str, counts: np.ndarray, loop: np.ndarray, greedy: bool) -> str:
    """Say in one sentence whether a side that takes the loop's steps agrees with the loop."""
    tau, apart = estimate(counts, loop), positions_apart(counts, loop)
    said = f"{name} less the loop: tau {tau.value:+.3f} [{tau.low:+.3f}, {tau.high:+.3f}]"
    positions = f"position {', '.join(map(str, apart))}"
    if greedy and np.array_equal(counts, loop):
        return f"{said}; equal in all {counts[:, 0].sum():.0f} steps"
    if not tau.low <= 0 <= tau.high:
        return f"{said}: THEY DIFFER" + (f", at {positions}" if apart else "")
    return f"{said}, but {positions} DIFFERS" if apart else f"{said}; no difference resolved, at no position"


# Counts of texts


@dataclass(frozen=True)
class Steps:
    """The full steps of one text."""

    tokens: list[int]  # context and continuation, [L]
    begins: int  # position of the first root, full step or not
    roots: list[int]  # position of the last token before each draft, [S]
    accepted: list[int]  # of gamma draft tokens, [S]


def full_steps(context: Sequence[int], generation: Generation, gamma: int, of_context: bool = False) -> Steps:
    """Take the steps of a continuation that drafted gamma tokens.

    `of_context`: the first root is the context's last token, as in assisted generation; else the first token written.
    """
    begins = len(context) - 1 if of_context else len(context)
    root, roots, accepted = begins, [], []
    for drafted, kept in zip(generation.drafted, generation.accepted, strict=True):
        if drafted == gamma:
            roots.append(root)
            accepted.append(kept)
        root += kept + 1
    return Steps([*context, *generation.tokens], begins, roots, accepted)


def counted(texts: Sequence[Steps], gamma: int) -> np.ndarray:
    """Count how far the drafts of the steps got, [T, k + 1]."""
    return np.array([[sum(a >= j for a in text.accepted) for j in range(gamma + 1)] for text in texts], np.float64)


@torch.inference_mode()
def computed(
    texts: Sequence[Steps], gamma: int, draft: Logits, target: Logits, sampling: Sampling
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the expected counts of texts that were written under `sampling`, from the two models' logits.

    Returns:
        Counts [T, k + 1] as if a draft began at each position of what was written; and at the loop's own steps.
    """
    everywhere, at_steps = np.zeros((len(texts), gamma + 1)), np.zeros((len(texts), gamma + 1))
    for row, text in enumerate(texts):
        roots = np.arange(text.begins, len(text.tokens) - gamma)
        if not len(roots):
            continue
        tokens = torch.tensor(text.tokens)
        positions = torch.from_numpy(roots)[:, None] + torch.arange(gamma)  # [S, k]
        p, q = (sampling.warp(logits(tokens, positions)).cpu() for logits in (target, draft))  # [S, k, V]
        reached = _reached(p, q, tokens[positions + 1])
        everywhere[row] = reached.sum(0)
        at_steps[row] = reached[np.isin(roots, text.roots)].sum(0)
    return everywhere, at_steps


def _reached(p: Tensor, q: Tensor, written: Tensor) -> np.ndarray:
    """Compute the probabilities [S, k + 1] that the first 0, 1, .. k draft tokens of each step are accepted.

    p, q: [S, k, V]; written: [S, k] the tokens of the text that follow the root.
    """
    overlap = torch.minimum(p, q).sum(-1).double()  # [S, k]: sum_v min(p, q)
    written = written[..., None]
    p_written, q_written = (values.gather(-1, written)[..., 0].double() for values in (p, q))
    kept = torch.where(q_written > 0, q_written / p_written, 0.0).clamp_max(1)  # 0 / 0: a tie that was rounded apart
    before = pad(kept.cumprod(1)[:, :-1], (1, 0), value=1.0)
    return pad(before * overlap, (1, 0), value=1.0).numpy()


def logits_of(model: TargetModel) -> Logits:
    """Return logits by one plain forward over a text; they do not depend on where drafts begin."""
    return lambda tokens, positions: model.forward(tokens[None].to(model.device)).logits[0][positions.to(model.device)]


def draft_logits(method: Drafter, target: TargetModel) -> Logits:
    """Return the logits of a vanilla or SPIRe drafter as training computes them, but with the weights of drafting."""
    if isinstance(method, Speculative):
        return logits_of(method.draft_model)
    assert isinstance(method, Spire), method
    drafter = method.fitted(target)
    reading = target.with_capture(drafter.config.captured_layers)

    def logits(tokens: Tensor, positions: Tensor) -> Tensor:
        """Run the training rollout, once for each place of a block's root modulo k."""
        tokens, positions = tokens[None].to(target.device), positions.to(target.device)
        captured = reading.features(tokens).captured
        roots = positions[:, 0] % method.gamma
        states = {  # [L, D]
            root: rollout(drafter, tokens, captured, block_tokens=method.gamma, first_root=root)[0]
            for root in roots.unique().tolist()
        }
        hidden = torch.stack([states[root][row] for root, row in zip(roots.tolist(), positions, strict=True)])
        return drafter.logits(hidden)

    return logits
