"""What follows from the throughput model: where a method pays off, what its training earns, what is verified for free.

SPIRe section 5 (cost analysis) and SSSD section 3.2 (roofline of a forward's matrix products).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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
    methods: tuple[Method, ...]  # what is compared with autoregressive decoding
    batch: tuple[int, ...]
    context_tokens: tuple[int, ...]
    spot: tuple[int, int]  # (batch, context) of the cost analysis; curves are drawn at its batch

    @property
    def ends(self) -> tuple[int, int]:
        """First and last context length."""
        return self.context_tokens[0], self.context_tokens[-1]

    def multiplier(self, method: Method) -> np.ndarray:
        """[B, L]"""
        return self.model.multiplier(method, self.batch, self.context_tokens)

    def faster(self, batch: int) -> dict[str, tuple[Span, ...]]:
        """Context lengths where one beats another at this batch size, by "one > other"."""
        found = {}
        for one, other in [*((m, None) for m in self.methods), *((b, a) for a, b in combinations(self.methods, 2))]:
            pair = f"{one.name} > {AUTOREGRESSIVE if other is None else other.name}"
            found[pair] = where_faster(self.model, one, other, batch, *self.ends)
        return found


def spans_where(holds: Callable[[np.ndarray], np.ndarray], low: int, high: int, gap: int = 0) -> tuple[Span, ...]:
    """Find the runs of context lengths in low .. high where a condition holds: contexts [n] -> bool [n].

    Runs shorter than 2 to 3 % of a length may be missed. Runs no further apart than `gap` count as one.
    """
    lengths = np.unique(np.geomspace(low, high, SEARCHED).round().astype(np.int64))
    found = holds(lengths)
    spans: list[Span] = []
    begun = int(lengths[0]) if found[0] else None
    for left, right, before, after in zip(lengths, lengths[1:], found, found[1:], strict=False):
        if before == after:
            continue
        a, b = int(left), int(right)  # holds differs between them
        while b - a > 1:
            middle = (a + b) // 2
            a, b = (middle, b) if holds(np.array([middle]))[0] == before else (a, middle)
        if not after:
            spans.append((begun, a))
            begun = None
        elif spans and b - spans[-1][1] <= gap:
            begun = spans.pop()[0]
        else:
            begun = b
    if begun is not None:
        spans.append((begun, int(lengths[-1])))
    return tuple(spans)


def where_faster(
    model: CostModel, method: Method, other: Method | None, batch: int, low: int, high: int
) -> tuple[Span, ...]:
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
    """Which has the highest throughput, [B, L] int: 0 autoregressive decoding, i + 1 the i-th method."""
    contexts = np.asarray(context_tokens)
    plain = np.ones((len(batch), len(contexts)))
    return np.argmax([plain, *(model.multiplier(method, batch, contexts) for method in methods)], axis=0)


@dataclass(frozen=True)
class Investment:
    """What a drafter costs and saves, in units of the target's training (SPIRe section 5)."""

    method: str
    multiplier: float
    training: float
    decoding: float  # spent on autoregressive decoding if there were no drafter

    @property
    def saved_share(self) -> float:
        return 1 - 1 / self.multiplier

    @property
    def saved(self) -> float:
        return self.decoding * self.saved_share

    @property
    def net(self) -> float:
        return self.saved - self.training

    @property
    def break_even_decoding(self) -> float:
        """How much decoding pays for the training; inf where decoding gets no cheaper."""
        if self.training == 0 and self.saved_share >= 0:
            return 0.0
        return self.training / self.saved_share if self.saved_share > 0 else math.inf

    def as_json(self) -> dict[str, str | float]:
        derived = {"saved": self.saved, "net": self.net, "break_even_decoding": self.break_even_decoding}
        return asdict(self) | derived


def investments(grid: CostGrid, training: dict[str, float | None], decoding: float) -> list[Investment]:
    """Apply SPIRe's section 5 at the spot. A training without a cost costs the drafter's share of body parameters."""
    found = []
    for method in grid.methods:
        cost = training.get(method.name)
        cost = method.shape.body / grid.model.target.body if cost is None else cost
        # Rounded as in the paper, so that the printed numbers follow from one another.
        multiplier = round(grid.model.multiplier(method, grid.spot[:1], grid.spot[1:]).item(), 2)
        found.append(Investment(method.name, multiplier, float(cost), float(decoding or 0)))
    return found


@dataclass(frozen=True)
class FreeBudget:
    """Tokens b x s_q that a matrix product can take before it becomes compute-bound."""

    operation: str
    inputs: int  # rows of the weight matrix
    outputs: int
    tokens: float  # inf: memory-bound at any number


def free_tokens(hardware: Hardware, inputs: int, outputs: int) -> float:
    """Solve SSSD's equation for X W, W [i, o]: 2 x i o FLOPs over x i + i o + x o values of `weight_bytes` each.

    For i = o = h and two bytes it is the printed 1 / (2 (1 / h + 1 / (2 x))) = peak FLOPs / bandwidth.
    """
    flops_per_value = hardware.operational_intensity * hardware.weight_bytes
    spare = 2.0 * inputs * outputs - flops_per_value * (inputs + outputs)
    return flops_per_value * inputs * outputs / spare if spare > 0 else math.inf


def free_budgets(hardware: Hardware, shape: Shape) -> tuple[FreeBudget, ...]:
    """Compute the budget of every matrix product of a decoder block (SSSD's Table 1, with grouped queries)."""
    d, ff = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.n_head * shape.head_dim, shape.n_kv_head * shape.head_dim
    matrices = {
        "queries": (d, queries),
        "keys, values": (d, keys),
        "output": (queries, d),
        "MLP in": (d, ff),
        "MLP out": (ff, d),
    }
    return tuple(FreeBudget(name, i, o, free_tokens(hardware, i, o)) for name, (i, o) in matrices.items())


def free_attention_tokens(hardware: Hardware, shape: Shape, context_tokens: Sequence[int]) -> np.ndarray:
    """Queries s_q per row until attention is compute-bound, [L], at any batch size: each row reads its own cache.

    4 s_q (s_q + s) FLOPs per query head and width over 2 (s + s_q) values of K and V and 2 s_q of queries and output
    per query head (SSSD's Table 1), as a quadratic equation in s_q.
    """
    group = shape.n_head // shape.n_kv_head
    flops_per_value = hardware.operational_intensity * hardware.kv_bytes
    s = np.asarray(context_tokens, dtype=np.float64)
    a, b, c = 4.0 * group, 4.0 * group * s - 2 * flops_per_value * (1 + group), -2 * flops_per_value * s
    return (-b + np.sqrt(b * b - 4 * a * c)) / (2 * a)


def roofline(grid: CostGrid, printed: float | None) -> dict[str, object]:
    """SSSD's budgets as plain values."""
    hardware, target, contexts = grid.model.hardware, grid.model.target, grid.context_tokens
    tokens = free_attention_tokens(hardware, target, contexts).tolist()
    products = [asdict(one) for one in free_budgets(hardware, target)]
    return {"products": products, "printed": printed, "attention": {"context_tokens": contexts, "tokens": tokens}}
