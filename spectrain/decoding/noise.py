"""Random numbers that belong to a place in a text (`draws=shared`): the sample depends on target and seed alone.

A token is drawn by Gumbel-max: of all tokens the one for which E / p is smallest, p being its probability and E its
number from the exponential distribution. This draws from p exactly (Maddison et al. 2014). E is fixed by the row's
seed, the place in the text and the token. So whoever knows the seed knows the noise of tokens that are still to come:
a draft model that draws with the same noise often draws what the target will (Daliri et al. 2024), and a guess whose E
is large need not be scored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spectrain.kernels.reference import GAMMA, mixed
from spectrain.target.transfer import to_device, without


class SharedNoise:
    """The random numbers of each row, in place of `Uniforms`: keys of the positions whose tokens come next.

    A key is read as often as somebody draws at its place; so nothing is used up.

    Args:
        generators: one per row, of which only the seed is read.
        device: where the keys are read.
    """

    def __init__(self, generators: Sequence[torch.Generator] = (), device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self._host_seeds = torch.zeros(0, dtype=torch.int64)  # [B]
        self._seeds = self._host_seeds.to(device)
        self._places = torch.zeros(0, dtype=torch.int64, device=device)  # [B] where the next token of each row stands
        self.append(generators, [0] * len(generators))

    def append(self, generators: Sequence[torch.Generator], lengths: Sequence[int]) -> None:
        """Add rows at the end, whose texts have these lengths."""
        if generators:
            seeds = mixed(torch.tensor([generator.initial_seed() for generator in generators]))
            places = torch.tensor(lengths, dtype=torch.int64)
            self._host_seeds = torch.cat([self._host_seeds, seeds])
            self._seeds = torch.cat([self._seeds, to_device(seeds, self.device)])
            self._places = torch.cat([self._places, to_device(places, self.device)])

    def free(self, row: int) -> None:
        """Remove a row: the last row moves into its place."""
        kept = (without(values, row) for values in (self._host_seeds, self._seeds, self._places))
        self._host_seeds, self._seeds, self._places = kept

    def follow(self, lengths: Tensor) -> None:
        """The rows' texts have these lengths [B] now."""
        self._places = lengths

    def take(self, count: int, used: Tensor | None = None) -> Tensor:
        return self.next(count)

    def next(self, count: int) -> Tensor:
        """Return the keys [B, count] int64 of the places of each row's next tokens."""
        steps = torch.arange(count, device=self.device)
        return mixed(self._seeds[:, None] + (self._places[:, None] + steps) * GAMMA)

    def on_host(self, lengths: Sequence[int], count: int) -> Tensor:
        """The same on the host, which knows the lengths of the rows' texts."""
        places = torch.tensor(lengths)[:, None] + torch.arange(count)
        return mixed(self._host_seeds[:, None] + places * GAMMA)

    def skip(self, used: int | Tensor, most: int) -> None:
        pass

    def reserve(self, count: int) -> None:
        pass
