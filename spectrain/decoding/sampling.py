"""How a token is chosen from logits: one set of options for target and drafter alike.

Randomness is one CPU generator per row, and a row takes from it only for itself: its sample does not depend on its
neighbours in the batch, nor on the device. A draw costs one uniform number (inverse of the cumulative distribution).
With `draws=shared` random numbers belong to places in the text instead; see `SharedNoise`. By default the drafter says
which of the two it gains from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from spectrain import kernels
from spectrain.errors import UserError, check_choice, check_number, check_whole
from spectrain.kernels import reference
from spectrain.kernels.reference import GAMMA, mixed
from spectrain.target.device import to_device, without

DRAWS = ("auto", "inverse", "shared")
GREEDY_BELOW = 1e-5  # a lower temperature counts as 0, as in vLLM: logits divided by it may overflow
UNIFORM_ABOVE = 1e30  # a higher one counts as this: as float32 it could be infinite
MOST_TOP_K = 2**31 - 1


@dataclass(frozen=True)
class Sampling:
    """Temperature, top-k, top-p and min-p, applied in Hugging Face's order. The default is greedy decoding."""

    temperature: float = 0.0  # 0, and below GREEDY_BELOW: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    draws: str = "auto"  # inverse, or shared: by noise that all methods share; auto: as the drafter has it

    def __post_init__(self) -> None:
        for name, interval in (("temperature", "[0, inf)"), ("top_p", "(0, 1]"), ("min_p", "[0, 1)")):
            check_number(f"sampling.{name}", getattr(self, name), interval)
        check_whole("sampling.top_k", self.top_k, 0, MOST_TOP_K)
        check_choice("sampling.draws", self.draws, DRAWS)
        temperature = 0.0 if self.temperature < GREEDY_BELOW else min(self.temperature, UNIFORM_ABOVE)
        object.__setattr__(self, "temperature", temperature)
        with torch.inference_mode(False):  # [1, 4] float64, as kernels read them
            numbers = [[self.temperature, self.top_p, self.min_p, self.top_k]]
            object.__setattr__(self, "options", torch.tensor(numbers, dtype=torch.float64, device="cpu"))

    @classmethod
    def from_options(cls, options: Mapping[str, float]) -> Sampling:
        """Take named options, for instance a config's `sampling` node. Raise UserError if one is not supported.

        An option that depends on the text so far, such as a repetition penalty, is not: a tree is scored before it is
        known which of its tokens will have been written.
        """
        supported = [field.name for field in fields(cls)]
        unknown = [name for name in options if name not in supported]
        if unknown:
            raise UserError(
                f"unknown sampling option: {unknown[0]}; speculation supports {', '.join(supported)}, and nothing that "
                "depends on the text so far, which a draft tree does not have yet"
            )
        return cls(**options)

    @cached_property  # each step asks several times
    def greedy(self) -> bool:
        return self.temperature == 0

    @cached_property
    def shares_noise(self) -> bool:
        """Whether target and drafters draw with the same noise."""
        return self.draws == "shared" and not self.greedy

    def drawn_by(self, draws: str) -> Sampling:
        """Return the same options, with a drafter's own way to draw where none was asked for."""
        return replace(self, draws=draws) if self.draws == "auto" else self

    def same_distribution(self, other: Sampling) -> bool:
        """Whether both choose alike: greedy decoding reads no other option."""
        return replace(self, draws=other.draws) == other or (self.greedy and other.greedy)

    def distribution(self) -> dict[str, float]:
        """The options by name that say what is drawn, not how: what records of data keep."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "draws"}

    def describe(self) -> str:
        """Only what is not at its default: "temperature 0.8, top_k 50"; "greedy"."""
        if self.greedy:
            return "greedy"
        changed = [f.name for f in fields(self) if f.name == "temperature" or getattr(self, f.name) != f.default]
        values = ((name, getattr(self, name)) for name in changed)
        return ", ".join(f"{name} {value}" if isinstance(value, str) else f"{name} {value:g}" for name, value in values)

    def warp(self, logits: Tensor) -> Tensor:
        """Turn logits [..., V] of any dtype into the probabilities [..., V] float32 that tokens are drawn from.

        Tokens that tie with the last one kept are kept too, whatever their order. Greedy gives a one-hot row.
        """
        if (self.top_k or self.top_p < 1 or self.min_p) and not self.greedy and kernels.reads(logits):
            return kernels.warp(logits.contiguous(), self.options)  # torch would sort the vocabulary for top_p
        return reference.warp(logits, self.temperature, self.top_k, self.top_p, self.min_p)

    def draw(self, logits: Tensor, uniforms: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Draw one token per row from logits [B, V], by the next number of each row, which greedy does not read.

        The numbers [B] are float32 in [0, 1) of `Uniforms`, or int64 of `SharedNoise`. Returns the tokens [B] int64,
        and the probabilities [B, V] they were drawn from (None when greedy).
        """
        if self.greedy:
            return argmax(logits), None
        if kernels.reads(logits):
            return kernels.warp_and_draw(logits, self.options, uniforms)
        probs = self.warp(logits)
        return draw_token(probs, uniforms), probs


class RowSampling:
    """The sampling of a batch whose rows differ. It answers as `Sampling` does, row by row.

    Greedy rows draw from one-hot distributions, so that all rows are drafted and verified by the same rules.

    Args:
        rows: of each row. All of them draw alike: `draws` is one for a batch.
    """

    greedy = False
    draw = Sampling.draw

    def __init__(self, rows: Sequence[Sampling]) -> None:
        self.rows = tuple(rows)
        self.options = torch.cat([row.options for row in rows])  # [B, 4]
        self.shares_noise = any(row.shares_noise for row in rows)

    def warp(self, logits: Tensor) -> Tensor:
        """See `Sampling.warp`; logits are [B, .., V]."""
        if kernels.reads(logits):
            return kernels.warp(logits, self.options)
        probs = torch.empty_like(logits, dtype=torch.float32)
        for sampling in set(self.rows):  # the host knows who shares options
            own = to_device(torch.tensor([row == sampling for row in self.rows]).nonzero()[:, 0], logits.device)
            probs[own] = sampling.warp(logits[own])
        return probs


def sampling_of(rows: Sequence[Sampling]) -> Sampling | RowSampling:
    """Return one sampling for rows, which is a plain one where they choose alike."""
    alike = len({*map(id, rows)}) == 1 or all(row == rows[0] for row in rows)  # mostly one object
    return rows[0] if alike else RowSampling(rows)


def argmax(logits: Tensor) -> Tensor:
    """Return the likeliest tokens [...] int64 of logits [..., V]: of equal ones the first."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.numel():
        return torch.from_numpy(np.asarray(logits.detach().numpy().argmax(-1)))  # twenty times as fast as torch's
    return logits.argmax(-1)


def draw_token(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from rows of weights [B, V] float32 that need not sum to one; uniforms [B] in [0, 1). Return [B] int64.

    Instead of uniforms there may be keys [B] int64 of `SharedNoise`. A token of weight 0 is never drawn.
    """
    return kernels.draw(weights, uniforms) if kernels.reads(weights) else reference.draw(weights, uniforms)


def row_generator(seed: int, prompt_index: int) -> torch.Generator:
    """Return the generator of one prompt. The prompts of a run never share a stream, and neighbours are unrelated."""
    # torch seeds by 32 bits, so the pair is mixed by a bijection of 32 bits (murmur3's finaliser).
    mixed = (seed * 0x9E3779B1 + prompt_index) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return torch.Generator().manual_seed(mixed ^ (mixed >> 16))


class Uniforms:
    """Each row's own stream of random numbers in [0, 1), read on the device.

    A row reads what its CPU generator yields, number after number, so its sample depends neither on its neighbours nor
    on the device. Numbers are drawn ahead, and how many a row has read stands on the device: nothing waits for it.

    Args:
        generators: one per row.
        device: where the numbers are read.
        ahead: numbers that are drawn at once for each row.
    """

    def __init__(
        self, generators: Sequence[torch.Generator] = (), device: torch.device | str = "cpu", ahead: int = 1024
    ) -> None:
        self.device, self.ahead = torch.device(device), ahead
        self.generators: list[torch.Generator] = []
        self.places = torch.zeros(0, dtype=torch.int64, device=device)  # [B] numbers of a row's block that were read
        self._drawn = torch.zeros(0, ahead, dtype=torch.float32)  # [B, ahead] the blocks, on the host
        self._numbers = self._drawn.to(device)
        self._most_read = 0  # no row has read more of its block
        self.append(generators)

    def append(self, generators: Sequence[torch.Generator], lengths: Sequence[int] = ()) -> None:
        """Add rows at the end. The lengths of their texts are not read here."""
        if not generators:
            return
        blocks = [torch.rand(self.ahead, generator=generator, dtype=torch.float32) for generator in generators]
        self.generators += generators
        self._set(torch.cat([self._drawn, torch.stack(blocks)]), torch.nn.functional.pad(self.places, (0, len(blocks))))

    def free(self, row: int) -> None:
        """Remove a row: the last row moves into its place."""
        self.generators[row] = self.generators[-1]
        self.generators.pop()
        self._drawn, self._numbers, self.places = (without(v, row) for v in (self._drawn, self._numbers, self.places))

    def follow(self, lengths: Tensor) -> None:
        """The rows' texts have these lengths [B] now, which is not read here."""

    def take(self, count: int, used: Tensor | None = None) -> Tensor:
        """Return the next `count` numbers of each row, [B, count] float32.

        Only the first used[b] count as read, [B] int64; None: all of them.
        """
        numbers = self.next(count)
        self.skip(count if used is None else used, count)
        return numbers

    def next(self, count: int) -> Tensor:
        """Return the next `count` numbers of each row, [B, count] float32, without counting them as read.

        Nobody may write to them. `skip` follows, with at most as many.
        """
        self.reserve(count)
        if len(self.generators) == 1 and self.device.type == "cpu":
            place = int(self.places)
            return self._numbers[:, place : place + count]
        steps = torch.arange(count, device=self.device)
        return self._numbers.gather(1, self.places[:, None] + steps)

    def skip(self, used: int | Tensor, most: int) -> None:
        """Count numbers as read: `used` of each row, or [B] int64, none of which is above `most`.

        Below 0 they are given back, and read again; only numbers that were taken since the last `reserve` may be.
        """
        self._most_read += most
        self.places += used

    def reserve(self, count: int) -> None:
        """Draw more numbers where fewer than `count` may be left. Only then the host asks how many were read."""
        if self._most_read + count <= self.ahead:
            return
        self.ahead = max(self.ahead, 2 * count)
        blocks = []
        for row, place in enumerate(self.places.tolist()):
            left = self._drawn[row, place:]
            more = torch.rand(self.ahead - len(left), generator=self.generators[row], dtype=torch.float32)
            blocks.append(torch.cat([left, more]))
        self._set(torch.stack(blocks), torch.zeros_like(self.places))
        self._most_read = 0

    def _set(self, drawn: Tensor, places: Tensor) -> None:
        self._drawn, self._numbers, self.places = drawn, to_device(drawn, self.device), places


class SharedNoise:
    """Random numbers that belong to places in a text, in place of `Uniforms`: keys of those whose tokens come next.

    A token is drawn by Gumbel-max: of all tokens the one for which E / p is smallest, p being its probability and E its
    number from the exponential distribution. This draws from p exactly (Maddison et al. 2014). E is fixed by the row's
    seed, the place in the text and the token. So whoever knows the seed knows the noise of tokens that are still to
    come: a draft model that draws with the same noise often draws what the target will (Daliri et al. 2024), and a
    guess whose E is large need not be scored. A key is read as often as somebody draws at its place; so nothing is used
    up.

    Of a row's generator only the seed is read. `device` is where the keys are read.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._host_seeds = torch.zeros(0, dtype=torch.int64)  # [B]
        self._seeds = self._host_seeds.to(device)
        self._places = torch.zeros(0, dtype=torch.int64, device=device)  # [B] where the next token of each row stands

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

    def skip(self, *_: object) -> None:
        """Nothing is used up."""

    reserve = skip
