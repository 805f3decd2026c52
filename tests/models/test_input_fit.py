"""The fitted input of a SPIRe drafter finds the linear map that made its data."""

from __future__ import annotations

import pytest
import torch

from spectrain.models.pruned_init import InputFit
from tests.conftest import VOCAB_SIZE
from tests.models.test_spire import make


@pytest.mark.parametrize("kind", ["projected", "trained"])
def test_a_map_of_the_embedding_is_found_again_without_the_first_positions(kind):
    target, drafter = make(input=kind, unembedding="target")
    embedding = target.model.model.embed_tokens.weight
    wanted = torch.randn(32, 32)
    fit = InputFit(drafter)
    for _ in range(20):
        tokens = torch.randint(0, VOCAB_SIZE, (2, 30))
        inputs = embedding[tokens] @ wanted.T
        inputs[:, 0] = 1e6
        fit.add(tokens, inputs, torch.zeros_like(inputs))
    fit.finish()
    found = drafter.embed(torch.arange(VOCAB_SIZE))
    error = (found - embedding @ wanted.T).square().mean() / found.square().mean()
    assert error < 1e-3  # of the ridge


def test_a_map_of_the_token_and_of_the_state_before_it_are_found_together():
    target, drafter = make(input="projected", unembedding="target", previous_state=True)
    embedding = target.model.model.embed_tokens.weight
    of_token, of_state = torch.randn(32, 32), torch.randn(32, 32)
    fit = InputFit(drafter)
    for _ in range(20):
        tokens, states = torch.randint(0, VOCAB_SIZE, (2, 30)), torch.randn(2, 30, 32)
        inputs = embedding[tokens] @ of_token.T
        inputs[:, 1:] += states[:, :-1] @ of_state.T
        fit.add(tokens, inputs, states)
    fit.finish()
    found = drafter.joined(drafter.embed(tokens)[:, 1:], states[:, :-1])
    assert (found - inputs[:, 1:]).square().mean() < 2e-3 * inputs.square().mean()
