"""The acceptance head of SpecDec++ (Huang et al. 2024, section 4.3 and equation 4.1).

It reads the draft model's final hidden state of a drafted token and says how probable it is that the target accepts the
token, given that it accepts all before it.

Letters: D hidden size of the drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.decoding.errors import UserError, check_whole


@dataclass(frozen=True)
class HeadConfig:
    """What fixes a head's computation.

    Args:
        hidden_size: D, of the drafter's final hidden state.
        n_blocks: residual blocks before the linear layer; the paper tries 0 to 4.
    """

    hidden_size: int
    n_blocks: int = 3

    def __post_init__(self) -> None:
        check_whole("hidden_size", self.hidden_size, 1)
        if isinstance(self.n_blocks, bool) or not isinstance(self.n_blocks, int) or not 0 <= self.n_blocks <= 4:
            raise UserError(f"n_blocks={self.n_blocks} must be a whole number from 0 to 4")


class AcceptanceHead(nn.Module):
    """Blocks h <- h + SiLU(W h + b), then a linear layer to one logit. All in float32, whatever the drafter's dtype."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        # Differs from the reference: every block has weights of its own.
        self.blocks = nn.ModuleList(nn.Linear(size, size) for _ in range(config.n_blocks))
        self.output = nn.Linear(size, 1)
        for block in self.blocks:
            nn.init.zeros_(block.weight)  # a block starts as the identity, so that depth costs nothing at first
            nn.init.zeros_(block.bias)

    def forward(self, hidden: Tensor) -> Tensor:  # [..., D] any dtype -> [...] float32, log odds
        h = hidden.float()
        for block in self.blocks:
            h = h + F.silu(F.linear(h, block.weight, block.bias))
        return F.linear(h, self.output.weight, self.output.bias)[..., 0]

    def probability(self, hidden: Tensor) -> Tensor:
        """f: the predicted acceptance probability, [...] float32 of hidden [..., D]."""
        return torch.sigmoid(self(hidden))
