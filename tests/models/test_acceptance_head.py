"""The head computes what section 3 of methods.md says, block by block."""

from __future__ import annotations

import pytest
import torch

from spectrain.decoding.errors import UserError
from spectrain.models.acceptance_head import AcceptanceHead, HeadConfig


def random_head(n_blocks: int) -> AcceptanceHead:
    head = AcceptanceHead(HeadConfig(hidden_size=6, n_blocks=n_blocks))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    return head


@pytest.mark.parametrize("n_blocks", range(5))
def test_residual_blocks_then_a_linear_layer(n_blocks):
    head, hidden = random_head(n_blocks), torch.randn(3, 4, 6)
    h = hidden.double()
    for block in head.blocks:
        z = h @ block.weight.double().T + block.bias.double()
        h = h + z / (1 + torch.exp(-z))
    log_odds = (h * head.output.weight.double()[0]).sum(-1) + head.output.bias.double()
    torch.testing.assert_close(head(hidden).double(), log_odds, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(head.probability(hidden).double(), 1 / (1 + torch.exp(-log_odds)), atol=1e-5, rtol=1e-5)


def test_blocks_do_not_share_weights():
    head = random_head(3)
    assert len({id(parameter) for parameter in head.parameters()}) == 2 * 3 + 2
    assert len({parameter.data_ptr() for parameter in head.parameters()}) == 2 * 3 + 2
    head(torch.randn(5, 6)).sum().backward()
    gradients = [block.weight.grad for block in head.blocks]
    assert not torch.allclose(gradients[0], gradients[1])
    assert not torch.allclose(gradients[1], gradients[2])


def test_every_depth_begins_as_the_linear_layer_alone():
    head = AcceptanceHead(HeadConfig(hidden_size=6, n_blocks=4))
    hidden = torch.randn(5, 6)
    torch.testing.assert_close(head(hidden), head.output(hidden)[:, 0])
    head(hidden).sum().backward()
    assert all(block.weight.grad.abs().max() > 0 for block in head.blocks)  # and none is stuck there


def test_half_precision_states_are_judged_in_float32():
    assert random_head(2)(torch.randn(5, 6, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("n_blocks", [-1, 5, 1.5, True])
def test_depths_out_of_range_are_refused(n_blocks):
    with pytest.raises(UserError, match="from 0 to 4"):
        HeadConfig(hidden_size=6, n_blocks=n_blocks)
