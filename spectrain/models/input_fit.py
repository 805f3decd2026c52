"""The input of a new SPIRe drafter: what the first draft block reads of a token, fitted by ridge regression.

The block was copied from a late block of the target, whose input has passed all blocks before it. W e(token), with the
target's embedding e, comes as near to that input as a linear map of the token alone can:

    W = argmin sum_t |W e_t - y_t|^2 + ridge,    y_t: the target's own input of that block at token t.

With `previous_state`, W2 of the target's final state one token earlier is fitted with it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.models.spire import SpireDrafter

FIT_TOKENS = 24_000
RIDGE = 1e-2  # penalty of a weight, as a share of its input's sum of squares


class RidgeRegression:
    """The normal equations of a linear map without an offset, added up over batches in float64.

    Args:
        n_inputs, n_outputs: I and O.
        device: of the batches.
    """

    def __init__(self, n_inputs: int, n_outputs: int, device: torch.device) -> None:
        sums = {"dtype": torch.float64, "device": device}
        self.gram, self.cross = torch.zeros(n_inputs, n_inputs, **sums), torch.zeros(n_inputs, n_outputs, **sums)

    def add(self, inputs: Tensor, outputs: Tensor) -> None:
        """Add samples: inputs [N, I], outputs [N, O]."""
        inputs, outputs = inputs.double(), outputs.double()
        self.gram += inputs.T @ inputs
        self.cross += inputs.T @ outputs

    def solve(self) -> Tensor:
        """Return the map [O, I] float64."""
        penalty = (RIDGE * self.gram.diagonal()).clamp_min(torch.finfo(torch.float64).eps)  # of inputs that are all 0
        return torch.linalg.solve(self.gram + penalty.diag(), self.cross).T


class InputFit:
    """Fits the input of a drafter whose config has another one than `tied`."""

    def __init__(self, drafter: SpireDrafter) -> None:
        self.drafter, self.embedding = drafter, drafter.tables.embedding  # [V, D]
        width = drafter.config.shape.hidden_size
        n_inputs = width * (1 + drafter.config.previous_state)
        self.regression = RidgeRegression(n_inputs, width, self.embedding.device)

    def add(self, tokens: Tensor, wanted: Tensor, final_hidden: Tensor, starts: Tensor | None = None) -> None:
        """Add rows of tokens [B, L] with what the target says of them, [B, L, D] each.

        Args:
            tokens: int64.
            wanted: the inputs of the block that the first draft block was copied from.
            final_hidden: the final states.
            starts: [B, L] int64, where the document of each token begins; None: each row is one.

        The first position of each document is left out: there many targets have activations that are thousands of
        times as large, and no draft begins there.
        """
        inputs = F.embedding(tokens[:, 1:], self.embedding)
        if self.drafter.config.previous_state:
            inputs = torch.cat([inputs.float(), final_hidden[:, :-1].float()], dim=-1)
        starts = torch.zeros_like(tokens) if starts is None else starts
        inside = starts[:, 1:] == starts[:, :-1]
        self.regression.add(inputs[inside], wanted[:, 1:][inside])

    @torch.no_grad()
    def finish(self) -> None:
        """Write what was fitted into the drafter."""
        found = self.regression.solve()
        if self.drafter.config.previous_state:
            found, of_previous = found.chunk(2, dim=1)
            self.drafter.previous.weight.copy_(of_previous)
        if self.drafter.config.input == "projected":
            self.drafter.input.weight.copy_(found)
        else:
            self.drafter.embed_tokens.weight.copy_(F.linear(self.embedding, found.to(self.embedding.dtype)))
