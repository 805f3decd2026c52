"""Choose how many nodes a draft tree has: the number that maximises tokens per second (SSSD, section 3.2).

A target forward costs more with more nodes, rows and context tokens, while each further node gains fewer accepted
tokens. `python -m spectrain.tune budget=true` measures both on this machine. The budget of a step is the n with the
largest

    b tau(n) / (E[t_forward(width, b, c)] + t_outside(n, b))

where width is the node count of the widest of the b trees: a method that finds nothing to propose pays for one node.

Letters: n nodes of a tree (root, guesses, probes), b rows of the batch, c committed tokens of the longest row.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import log

CANDIDATES = (1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 45, 64, 90, 128, 181, 256)
CONTEXT_BUCKET_TOKENS = 64  # a step's context is rounded up to these, so that the answer is looked up, not computed


@dataclass(frozen=True)
class Roofline:
    """SSSD, section 3.2: t(n, b, c) = t0 + max(weights, node b n) + b max(read c, attend n c), in seconds."""

    overhead_s: float  # t0: the cost of a forward whatever it reads or computes
    weights_s: float  # reading the weights once
    node_s: float  # the dense layers' arithmetic for one node
    read_s: float  # reading K and V of one committed token
    attend_s: float  # one node's attention to one committed token
    error: float  # of the fit: median relative error over the measured cells

    @property
    def free_nodes(self) -> float:
        """The free speculation budget: b n up to which the dense layers wait for memory, roots included."""
        return self.weights_s / self.node_s if self.node_s > 0 else float("inf")

    def seconds(self, nodes: float, batch_size: float, context_tokens: float) -> float:
        dense = max(self.weights_s, self.node_s * batch_size * nodes)
        attention = max(self.read_s, self.attend_s * nodes) * batch_size * context_tokens
        return self.overhead_s + dense + attention


@dataclass(frozen=True)
class ForwardCost:
    """Seconds of one target forward on a grid."""

    nodes: tuple[int, ...]  # ascending, as the two below
    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]  # committed tokens per row
    seconds: tuple[tuple[tuple[float, ...], ...], ...]  # [nodes][batch_sizes][contexts], medians
    spread: tuple[tuple[tuple[float, ...], ...], ...]  # likewise: interquartile range / median
    roofline: Roofline | None = None  # for sizes outside the grid

    def of_nodes(self, batch_size: int, context_tokens: int) -> Callable[[int], float]:
        """The function from nodes to seconds for one batch size and context.

        It is exact on the grid's points and linear between them. Outside the grid, the border's seconds grow as the
        roofline's do.
        """
        b, c = _clamped(batch_size, self.batch_sizes), _clamped(context_tokens, self.contexts)
        measured = []
        for n, cells in zip(self.nodes, self.seconds, strict=True):
            seconds = _interpolate(b, self.batch_sizes, [_interpolate(c, self.contexts, row) for row in cells])
            measured.append(seconds * self._growth((n, batch_size, context_tokens), (n, b, c)))

        @cache  # the candidates of a step share most widths
        def at(nodes: int) -> float:
            n = _clamped(nodes, self.nodes)
            growth = self._growth((nodes, batch_size, context_tokens), (n, batch_size, context_tokens))
            return _interpolate(n, self.nodes, measured) * growth

        return at

    def at(self, nodes: int, batch_size: int, context_tokens: int) -> float:
        return self.of_nodes(batch_size, context_tokens)(nodes)

    def _growth(self, wanted: tuple[int, int, int], known: tuple[int, int, int]) -> float:
        if self.roofline is None or wanted == known:
            return 1.0
        return self.roofline.seconds(*wanted) / self.roofline.seconds(*known)

    @classmethod
    def from_json(cls, values: dict) -> ForwardCost:
        roofline = Roofline(**values["roofline"]) if values.get("roofline") else None
        return cls(**{k: _tuples(v) for k, v in values.items() if k != "roofline"}, roofline=roofline)


@dataclass(frozen=True)
class MethodCurve:
    """The gain and cost of one method, under one sampling, at each node budget that was measured."""

    nodes: tuple[int, ...]  # ascending
    tau: tuple[float, ...]  # tokens per step of a row, bonus included
    step_s: tuple[float, ...]  # seconds per step outside the forward: drafting, verifying, committing
    row_s: tuple[float, ...]  # further seconds per row
    widths: tuple[tuple[tuple[int, float], ...], ...]  # (nodes of a row's own tree, share of its steps)
    context_tokens: int  # mean context of the measured steps
    least: int = 1  # nodes that the method needs; 1: it may draft nothing

    def tau_at(self, nodes: int) -> float:
        """Acceptance length, linear in log n; a root alone gains its bonus."""
        known, values = [log(n) for n in self.nodes], list(self.tau)
        if self.nodes[0] > 1 and self.least == 1:
            known, values = [0.0, *known], [1.0, *values]
        return _interpolate(log(nodes), known, values)

    def outside_s(self, nodes: int, batch_size: int) -> float:
        """Seconds of a step outside the forward."""
        step_s, row_s = (_interpolate(nodes, self.nodes, values) for values in (self.step_s, self.row_s))
        return step_s + batch_size * row_s

    def widths_at(self, nodes: int, batch_size: int) -> list[tuple[int, float]]:
        """(Nodes, share of steps) of the widest of b trees under this budget, to which the others are padded.

        Rows count as independent. Under a budget between two measured ones, trees are those of the larger, cut off.
        """
        own = self.widths[min(bisect_left(self.nodes, nodes), len(self.nodes) - 1)]
        found: dict[int, float] = {}
        below = before = 0.0
        for width, share in own:
            below = min(1.0, below + share)
            width = min(width, nodes)
            found[width] = found.get(width, 0.0) + below**batch_size - before
            before = below**batch_size
        return list(found.items())

    @classmethod
    def from_json(cls, values: dict) -> MethodCurve:
        return cls(**{key: _tuples(value) for key, value in values.items()})


@dataclass(frozen=True)
class Rate:
    """The expected speed under a node budget."""

    nodes: int
    tau: float
    forward_s: float
    outside_s: float
    batch_size: int

    @property
    def tokens_per_s(self) -> float:
        return self.batch_size * self.tau / (self.forward_s + self.outside_s)


@dataclass(frozen=True)
class NodeBudget:
    """Nodes of a tree for a batch and a context: a whole number, or chosen from measurements of this machine.

    Args:
        fixed: always this number; None: `cost` and `curve` decide.
        cost: of the target on this machine.
        curve: of the method.
    """

    fixed: int | None = None
    cost: ForwardCost | None = None
    curve: MethodCurve | None = None
    _known: dict[tuple[int, int], int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert (self.fixed is None) == (self.cost is not None) == (self.curve is not None), self

    @property
    def candidates(self) -> tuple[int, ...]:
        """The node counts to choose among, ascending."""
        if self.fixed is not None:
            return (self.fixed,)
        least, most = self.curve.least, self.curve.nodes[-1]
        return tuple(sorted({*(n for n in CANDIDATES if least <= n <= most), *self.curve.nodes}))

    @property
    def largest(self) -> int:
        return self.candidates[-1]

    @property
    def typical_context_tokens(self) -> int:
        """The context to decide by while none is known: that of the measured steps."""
        return self.curve.context_tokens if self.curve is not None else 0

    def nodes(self, batch_size: int, context_tokens: int) -> int:
        """Nodes of each row's tree, root, guesses and probes, for a step of b rows, the longest of c tokens."""
        if self.fixed is not None:
            return self.fixed
        key = (batch_size, -(-context_tokens // CONTEXT_BUCKET_TOKENS))
        found = self._known.get(key)
        if found is None:
            rates = self.rates(batch_size, key[1] * CONTEXT_BUCKET_TOKENS)
            # Of equal rates `max` takes the first, which has the fewest nodes.
            found = self._known[key] = max(rates, key=lambda rate: rate.tokens_per_s).nodes
        return found

    def rates(self, batch_size: int, context_tokens: int) -> list[Rate]:
        """The expected speed of each candidate."""
        assert self.curve is not None, "a fixed budget expects nothing"
        seconds = self.cost.of_nodes(batch_size, context_tokens)
        found = []
        for n in self.candidates:
            forward_s = 0.0
            for width, share in self.curve.widths_at(n, batch_size):
                forward_s += share * seconds(width)
            outside_s = self.curve.outside_s(n, batch_size)
            found.append(Rate(n, self.curve.tau_at(n), forward_s, outside_s, batch_size))
        return found


def _clamped(value: float, grid: Sequence[float]) -> float:
    return min(max(value, grid[0]), grid[-1])


def _interpolate(value: float, grid: Sequence[float], values: Sequence[float]) -> float:
    """Linear between the grid's points; outside it, the value at the border."""
    value = _clamped(value, grid)
    i = bisect_right(grid, value) - 1
    if value == grid[i]:
        return values[i]
    return values[i] + (value - grid[i]) / (grid[i + 1] - grid[i]) * (values[i + 1] - values[i])


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
