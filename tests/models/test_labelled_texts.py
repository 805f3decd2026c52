"""Acceptance labels against the definition, token by token and by Hugging Face's warpers: of an ordinary draft model
and of a SPIRe drafter."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from spectrain.decoding import Sampling
from spectrain.models.draft_states import DraftStates, ModelStates
from spectrain.models.labelled_texts import LabelledTexts, label_texts, mix_tokens
from spectrain.models.rollout import SpireStates
from spectrain.models.spire import SpireDrafter
from spectrain.target import TargetModel
from spectrain.target.fingerprint import module_fingerprint
from tests.conftest import FAMILIES, SCALED, VOCAB_SIZE, WINDOWED, noisy_copy, tiny_model
from tests.models.spire_reference import slow_rollout
from tests.models.test_spire import make as make_spire

SAMPLINGS = {
    "unwarped": Sampling(1.0),
    "top_k": Sampling(0.8, top_k=5),
    "all": Sampling(1.2, top_k=12, top_p=0.9, min_p=0.05),
    "greedy": Sampling(),
}
BLOCK_TOKENS = 5
N_TOKENS, N_PROMPT = 27, 6  # ends inside a block of a SPIRe drafter; begins there too
N_DRAWS = 3


def vanilla() -> tuple[TargetModel, DraftStates]:
    model = tiny_model("llama")
    return TargetModel(model), ModelStates(TargetModel(noisy_copy(model, 0.1)), VOCAB_SIZE)


def spire() -> tuple[TargetModel, DraftStates]:
    target, drafter = make_spire(window_tokens=7, sink_tokens=2)
    return target, SpireStates(drafter, BLOCK_TOKENS)


def test_a_drafter_has_the_name_that_earlier_versions_gave_it():
    """Stores of labels and heads know their drafter by it, so later options count only where they are changed."""
    _, states = spire()
    config = states.drafter.config
    described = dataclasses.asdict(config)
    del described["own_key"], described["shape"]["layer_types"]
    name = module_fingerprint(states.drafter, described)
    assert states.fingerprint() == name
    states.drafter.config = dataclasses.replace(config, own_key=False)
    assert states.fingerprint() != name


def asked(states: DraftStates, n_rows: int, n_tokens: int = N_TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Random texts, the positions to draft at, uniforms."""
    tokens = torch.randint(4, VOCAB_SIZE, (n_rows, n_tokens))
    may_draft = (torch.arange(n_tokens) >= N_PROMPT).expand(n_rows, -1) & states.reads_drafts(n_tokens)
    return tokens, may_draft, torch.rand(n_rows, n_tokens, N_DRAWS)


def slow_logits(target: TargetModel, states: DraftStates, text: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [T, V] of target and drafter after each token of one text, through other code."""
    output = target.model(text[None], output_hidden_states=True)
    if isinstance(states, ModelStates):
        # Each position by a forward of its own over the tokens before it.
        steps = [states.model.model(text[None, : t + 1]).logits[0, -1] for t in range(len(text))]
        return output.logits[0], torch.stack(steps)
    drafter: SpireDrafter = states.drafter
    inputs = torch.stack([output.hidden_states[layer][0] for layer in drafter.config.target_layers], dim=1)
    return output.logits[0], slow_rollout(drafter, text, inputs, states.block_tokens) @ drafter.lm_head.weight.T


def slow_warp(sampling: Sampling, logits: Tensor) -> np.ndarray:
    """[V] float64 by Hugging Face's warpers."""
    if sampling.greedy:
        return np.eye(len(logits))[int(logits.argmax())]
    scores = TemperatureLogitsWarper(float(sampling.temperature))(None, logits[None])
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    return scores[0].double().softmax(-1).numpy()


def check_text(found: LabelledTexts, row: int, text, may_draft, uniforms, target, states, sampling) -> int:
    """Every position of a row against the definition; how many labels lie strictly between 0 and 1."""
    p_logits, q_logits = slow_logits(target, states, text)
    between = 0
    for t in range(len(text)):
        for k in range(N_DRAWS):
            drafted, p, q, label = (float(values[row, t, k]) for values in dataclasses.astuple(found)[:4])
            if not may_draft[t]:
                assert (drafted, p, q, label) == (0, 0, 0, 0)
                continue
            slow_p, slow_q = slow_warp(sampling, p_logits[t - 1]), slow_warp(sampling, q_logits[t - 1])
            # The inverse of the cumulative distribution, by hand.
            y = int(np.searchsorted(np.cumsum(slow_q), float(uniforms[t, k]) * slow_q.sum(), side="right"))
            assert drafted == y
            np.testing.assert_allclose([p, q], [slow_p[y], slow_q[y]], rtol=2e-4, atol=1e-7)
            np.testing.assert_allclose(label, min(1.0, slow_p[y] / slow_q[y]), rtol=4e-4, atol=1e-7)
            between += 0.01 < label < 0.99
    return between


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("make", [vanilla, spire])
def test_labels_equal_the_definition(make, name):
    sampling = SAMPLINGS[name]
    target, states = make()
    tokens, may_draft, uniforms = asked(states, 2)
    found = label_texts(target, states, tokens, may_draft, sampling, uniforms)
    assert [values.shape for values in (found.drafts, found.p, found.q, found.labels)] == [(2, N_TOKENS, N_DRAWS)] * 4
    assert (found.drafts.dtype, found.labels.dtype) == (torch.int64, torch.float32)
    rows = zip(range(2), tokens, may_draft, uniforms, strict=True)
    between = sum(check_text(found, *row, target, states, sampling) for row in rows)
    if sampling.greedy:
        labels = found.labels[may_draft]
        assert set(labels.unique().tolist()) <= {0.0, 1.0}
        assert bool(torch.all(found.q[may_draft] == 1))
    else:
        assert between > 5  # the ratio itself was looked at


@pytest.mark.parametrize("make", [vanilla, spire])
def test_padding_and_neighbours_change_nothing(make):
    target, states = make()
    tokens, may_draft, uniforms = asked(states, 3)
    may_draft[1, 15:] = False  # the second text is shorter; the rest is padding
    sampling = SAMPLINGS["all"]
    together = label_texts(target, states, tokens, may_draft, sampling, uniforms)
    other = tokens.clone()
    other[1, 15:] = 7
    padded = label_texts(target, states, other, may_draft, sampling, uniforms)
    alone = label_texts(target, states, tokens[1:2, :15], may_draft[1:2, :15], sampling, uniforms[1:2, :15])
    for name in ("drafts", "p", "q", "labels"):
        row = getattr(together, name)[1]
        torch.testing.assert_close(getattr(padded, name)[1], row)
        torch.testing.assert_close(getattr(alone, name)[0], row[:15], rtol=1e-4, atol=1e-6)
        assert not row[15:].any()


def test_drafts_are_distributed_as_q():
    target, states = vanilla()
    tokens = torch.randint(4, VOCAB_SIZE, (1, 8))
    may_draft = torch.tensor([[False] * 7 + [True]])
    uniforms = torch.rand(1, 8, 20_000)
    sampling = SAMPLINGS["all"]
    drafts = label_texts(target, states, tokens, may_draft, sampling, uniforms).drafts[0, 7]
    q = slow_warp(sampling, slow_logits(target, states, tokens[0])[1][6])
    counts = np.bincount(drafts.numpy(), minlength=VOCAB_SIZE)
    assert (q > 0).sum() > 2
    assert counts[q == 0].sum() == 0
    assert scipy.stats.chisquare(counts[q > 0], q[q > 0] * len(drafts)).pvalue > 1e-3


def test_mixed_texts_take_drafts_where_the_uniform_says_so():
    text, drafts = torch.tensor([1, 2, 3, 4]), torch.tensor([5, 6, 7, 8])
    may_draft = torch.tensor([False, True, True, True])
    mixed, drafted = mix_tokens(text, drafts, may_draft, 0.15, torch.tensor([0.9, 0.9, 0.1, 0.15]))
    assert mixed.tolist() == [1, 6, 3, 8]
    assert drafted.tolist() == [False, True, False, True]


@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED, *SCALED])
def test_p_and_q_are_the_models_own_whatever_they_do_behind_the_unembedding(family):
    model, draft_model = tiny_model(family), noisy_copy(tiny_model(family), 0.1)
    target, states = TargetModel(model), ModelStates(TargetModel(draft_model), VOCAB_SIZE)
    tokens, may_draft, uniforms = asked(states, n_rows=2)
    found = label_texts(target, states, tokens, may_draft, Sampling(1.0), uniforms)
    for probabilities, other in ((found.p, model), (found.q, draft_model)):
        expected = other(tokens).logits.softmax(-1)[:, N_PROMPT - 1 : -1].gather(2, found.drafts[:, N_PROMPT:])
        torch.testing.assert_close(probabilities[:, N_PROMPT:], expected, rtol=1e-3, atol=1e-5)
