"""What follows from the throughput model: where a method pays off, what its training earns, what is verified for free.

SPIRe section 5 (cost analysis) and SSSD section 3.2 (roofline of a forward's matrix products).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from spectrain.measure.cost import CostModel, Hardware, Method, Shape

AUTOREGRESSIVE = "autoregressive"
SEARCHED = 256  # context lengths that are looked at before the borders between them are bisected

Span = tuple[int, int]  # first and last context length


@dataclass(frozen=True)
class CostGrid:
    """Methods on a grid of batch sizes and context lengths, both rising."""

    title: str  # of tables and figures
    model: CostModel
    methods: Sequence[Method]  # what is compared with autoregressive decoding
    batch: Sequence[int]
    context_tokens: Sequence[int]
    spot: tuple[int, int]  # (batch, context) of the cost analysis; curves are drawn at its batch

    def multiplier(self, method: Method) -> np.ndarray:
        """[B, L]"""
        return self.model.multiplier(method, self.batch, self.context_tokens)

    def faster(self, batch: int) -> dict[str, list[Span]]:
        """Context lengths where one beats another at this batch size, by "one > other"."""
        found = {}
        for one, other in [*((m, None) for m in self.methods), *((b, a) for a, b in combinations(self.methods, 2))]:
            pair = f"{one.name} > {AUTOREGRESSIVE if other is None else other.name}"
            found[pair] = where_faster(self.model, one, other, batch, self.context_tokens[0], self.context_tokens[-1])
        return found


def spans_where(holds: Callable[[np.ndarray], np.ndarray], low: int, high: int, gap: int = 0) -> list[Span]:
    """Find the runs of context lengths in low .. high where a condition holds: contexts [n] -> bool [n].

    Runs shorter than 2 to 3 % of a length may be missed. Runs no further apart than `gap` count as one.
    """
    lengths = np.unique(np.geomspace(low, high, SEARCHED).round().astype(np.int64))
    found = holds(lengths)
    borders = [low]  # where the condition begins or ceases to hold
    for i in np.flatnonzero(found[1:] != found[:-1]):
        left, right = int(lengths[i]), int(lengths[i + 1])
        while right - left > 1:
            middle = (left + right) // 2
            left, right = (middle, right) if holds(np.array([middle]))[0] == found[i] else (left, middle)
        borders.append(right)
    spans: list[Span] = []
    first = 0 if found[0] else 1
    for begin, end in zip(borders[first::2], [*borders, high + 1][first + 1 :: 2], strict=True):
        near = spans and begin - spans[-1][1] <= gap
        spans.append((spans.pop()[0] if near else begin, end - 1))
    return spans


def where_faster(model: CostModel, method: Method, other: Method | None, batch: int, low: int, high: int) -> list[Span]:
    """Find the context lengths where a method beats another one; None: autoregressive decoding (multiplier above 1)."""

    def holds(contexts: np.ndarray) -> np.ndarray:
        rival = 1 if other is None else model.multiplier(other, [batch], contexts)[0]
        return model.multiplier(method, [batch], contexts)[0] > rival

    # A window of L // share is a staircase: near a crossing the sign changes with every stair.
    budgets = [m.budget for m in (method, other) if m is not None and m.budget is not None]
    stair = max((budget.share for budget in budgets if budget.window_tokens is None), default=0)
    return spans_where(holds, low, high, gap=stair)


def best_methods(
    model: CostModel, methods: Sequence[Method], batch: Sequence[int], context_tokens: Sequence[int]
) -> np.ndarray:
    """Find which has the highest throughput, [B, L] int: 0 autoregressive decoding, i + 1 the i-th method."""
    plain = np.ones((len(batch), len(context_tokens)))
    return np.argmax([plain, *(model.multiplier(method, batch, context_tokens) for method in methods)], axis=0)


def investment(multiplier: float, training: float, decoding: float) -> dict[str, float]:
    """Compute what a drafter saves, in units of the target's training (SPIRe section 5).

    Args:
        multiplier: throughput relative to autoregressive decoding.
        training: cost of the drafter's.
        decoding: spent on autoregressive decoding if there were no drafter.

    Returns:
        The arguments; `saved` of the decoding; `net`, less the training; `break_even_decoding`, which pays for the
        training: inf where decoding gets no cheaper.
    """
    saved_share = 1 - 1 / multiplier
    saved = decoding * saved_share
    break_even = training / saved_share if saved_share > 0 else math.inf
    return {
        "multiplier": multiplier,
        "training": training,
        "decoding": decoding,
        "saved": saved,
        "net": saved - training,
        "break_even_decoding": 0.0 if training == 0 and saved_share >= 0 else break_even,
    }


def investments(grid: CostGrid, costs: Mapping[str, float | None]) -> list[dict]:
    """Apply SPIRe's section 5 at the spot.

    Args:
        grid: its model and methods.
        costs: `decoding`, and each method's training; None: the drafter's share of the target's body parameters.
    """
    found = []
    for method in grid.methods:
        training = costs.get(method.name)
        training = method.shape.body / grid.model.target.body if training is None else training
        # Rounded as in the paper, so that the printed numbers follow from one another.
        multiplier = round(grid.model.multiplier(method, grid.spot[:1], grid.spot[1:]).item(), 2)
        decoding = float(costs["decoding"] or 0)
        found.append({"method": method.name} | investment(multiplier, float(training), decoding))
    return found


def free_tokens(hardware: Hardware, inputs: int, outputs: int) -> float:
    """Solve SSSD's equation for X W, W [i, o]: 2 x i o FLOPs over x i + i o + x o values of `weight_bytes` each.

    Returns the tokens x = b s_q that the product takes before it is compute-bound; inf: any number. For i = o = h and
    two bytes the equation is the printed 1 / (2 (1 / h + 1 / (2 x))) = peak FLOPs / bandwidth.
    """
    flops_per_value = hardware.operational_intensity * hardware.weight_bytes
    spare = 2.0 * inputs * outputs - flops_per_value * (inputs + outputs)
    return flops_per_value * inputs * outputs / spare if spare > 0 else math.inf


def free_attention_tokens(hardware: Hardware, shape: Shape, context_tokens: Sequence[int]) -> np.ndarray:
    """Compute the queries s_q per row until attention is compute-bound, [L]; each row reads its own cache.

    4 s_q (s_q + s) FLOPs per query head and width over 2 (s + s_q) values of K and V and 2 s_q of queries and output
    per query head (SSSD's Table 1), as a quadratic equation in s_q.
    """
    group = shape.n_head // shape.n_kv_head
    flops_per_value = hardware.operational_intensity * hardware.kv_bytes
    s = np.asarray(context_tokens, dtype=np.float64)
    a, b, c = 4.0 * group, 4.0 * group * s - 2 * flops_per_value * (1 + group), -2 * flops_per_value * s
    return (-b + np.sqrt(b * b - 4 * a * c)) / (2 * a)


def roofline(grid: CostGrid, printed: float | None) -> dict:
    """Compute the free budgets of attention and of every matrix product of a decoder block (SSSD's Table 1).

    `printed` is what a paper prints for the query projection, or None.
    """
    hardware, shape, contexts = grid.model.hardware, grid.model.target, grid.context_tokens
    d, ff = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.n_head * shape.head_dim, shape.n_kv_head * shape.head_dim
    matrices = {
        "queries": (d, queries),
        "keys, values": (d, keys),
        "output": (queries, d),
        "MLP in": (d, ff),
        "MLP out": (ff, d),
    }
    products = [
        {"operation": name, "inputs": i, "outputs": o, "tokens": free_tokens(hardware, i, o)}
        for name, (i, o) in matrices.items()
    ]
    tokens = free_attention_tokens(hardware, shape, contexts).tolist()
    return {"products": products, "printed": printed, "attention": {"context_tokens": contexts, "tokens": tokens}}
