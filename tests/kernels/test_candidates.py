"""The first tokens of a distribution, compiled, are those of the reference."""

from __future__ import annotations

import pytest
import torch

from spectrain import kernels
from spectrain.kernels import reference


@pytest.mark.parametrize("shape", [(1, 1, 700), (2, 3, 65), (1, 2, 3)])
def test_the_likeliest_tokens_are_those_of_a_full_sort(shape):
    logits, sharpness = torch.randn(shape) * 4, torch.tensor([1 / 0.7, 1.0])[: shape[0]]
    found, expected = (one.top_tokens(logits, sharpness, 3) for one in (kernels, reference))
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("has_names", [False, True])
def test_the_first_tokens_by_noise_are_those_of_a_full_sort(has_names):
    probs, keys = torch.randn(3, 2, 40).mul(2).softmax(-1), reference.mixed(torch.arange(3))
    names = torch.randperm(90)[:40] if has_names else None
    found, expected = (one.first_by_noise(probs, keys, names, 5) for one in (kernels, reference))
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=0)
