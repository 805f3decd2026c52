"""How many nodes a tree may have, from the hardware: what maximises tokens a second (SSSD, section 3.2).

A forward of n nodes costs more with n, with the batch and with the context; the accepted tokens grow ever slower with
n. `python -m spectrain.tune budget=true` measures both on the machine at hand, and the budget of a step is the n of

    max  b tau(n) / (E[t_forward(width, b, c)] + t_outside(n, b))

where the width is that of the widest of b trees: a method that finds nothing to propose pays for one node only.

Letters: n nodes of a tree (root, guesses, probes), b rows of the batch, c committed tokens of the longest row.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import log

CANDIDATES = (1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 45, 64, 90, 128, 181, 256)
CONTEXT_BUCKET_TOKENS = 64  # a step's context is rounded up to these, so that the answer is looked up, not computed


@dataclass(frozen=True)
class Roofline:
    """SSSD, section 3.2: t(n, b, c) = t0 + max(weights, node b n) + b max(read c, attend n c), in seconds."""

    overhead_s: float  # t0: what a forward costs whatever it reads or computes
    weights_s: float  # reading the weights once
    node_s: float  # the dense layers' arithmetic for one node
    read_s: float  # reading K and V of one committed token
    attend_s: float  # one node's attention to one committed token
    error: float  # of the fit: median relative error over the measured cells

    @property
    def free_nodes(self) -> float:
        """b s_q up to which the dense layers wait for memory: the (almost) free speculation budget, roots included."""
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
    contexts: tuple[int, ...]  # committed tokens of each row
    seconds: tuple[tuple[tuple[float, ...], ...], ...]  # [nodes][batch_sizes][contexts], medians
    spread: tuple[tuple[tuple[float, ...], ...], ...]  # likewise: interquartile range / median
    roofline: Roofline | None = None  # for what lies outside the grid

    def over_nodes(self, batch_size: int, context_tokens: int) -> list[float]:
        """Seconds at each of `nodes`: interpolated in b and c; outside the grid the fit says by what it grows."""
        b, c = (_clamped(v, grid) for v, grid in ((batch_size, self.batch_sizes), (context_tokens, self.contexts)))
        i, u = _place(b, self.batch_sizes)
        j, v = _place(c, self.contexts)
        found = []
        for n, cells in zip(self.nodes, self.seconds, strict=True):
            lower, upper = (row[j] + v * (row[min(j + 1, len(row) - 1)] - row[j]) for row in _pair(cells, i))
            found.append((lower + u * (upper - lower)) * self._growth((n, batch_size, context_tokens), (n, b, c)))
        return found

    def at(self, nodes: int, batch_size: int, context_tokens: int) -> float:
        """Seconds of a forward of trees of this many nodes; exact on the grid's points."""
        n = _clamped(nodes, self.nodes)
        growth = self._growth((nodes, batch_size, context_tokens), (n, batch_size, context_tokens))
        return _interpolate(n, self.nodes, self.over_nodes(batch_size, context_tokens)) * growth

    def _growth(self, wanted: tuple[int, int, int], known: tuple[int, int, int]) -> float:
        if self.roofline is None or wanted == known:
            return 1.0
        return self.roofline.seconds(*wanted) / self.roofline.seconds(*known)

    @classmethod
    def from_json(cls, values: dict) -> ForwardCost:
        roofline = Roofline(**values["roofline"]) if values.get("roofline") else None
        return cls(**{k: _tuples(v) for k, v in values.items() if k != "roofline"}, roofline=roofline)

    def as_json(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class MethodCurve:
    """What one method gains and costs, under one sampling, at each node budget that was measured."""

    nodes: tuple[int, ...]  # ascending
    tau: tuple[float, ...]  # tokens per step and row, bonus included
    step_s: tuple[float, ...]  # seconds of a step outside the forward: drafting, verifying, committing
    row_s: tuple[float, ...]  # more of them for each row
    widths: tuple[tuple[tuple[int, float], ...], ...]  # (nodes of a row's own tree, share of its steps)
    context_tokens: int  # mean context of the measured steps
    least: int = 1  # nodes that the method can do with; 1: it can draft nothing

    def tau_at(self, nodes: int) -> float:
        """Linear in log n; a root alone gains its bonus."""
        known = [log(n) for n in self.nodes]
        values = list(self.tau)
        if self.nodes[0] > 1 and self.least == 1:
            known, values = [0.0, *known], [1.0, *values]
        return _interpolate(_clamped(log(nodes), known), known, values)

    def outside_s(self, nodes: int, batch_size: int) -> float:
        """Seconds of a step outside the forward."""
        n = _clamped(nodes, self.nodes)
        step_s, row_s = (_interpolate(n, self.nodes, values) for values in (self.step_s, self.row_s))
        return step_s + batch_size * row_s

    def widths_at(self, nodes: int, batch_size: int) -> list[tuple[int, float]]:
        """(Nodes, share of steps) of the widest of b trees under this budget, to which the others are padded.

        The rows are taken as independent, and a tree under a budget between two measured ones as the larger's cut off.
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

    def as_json(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class Rate:
    """What a node budget is expected to give."""

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
    """Nodes of a tree for a batch and a context: a whole number, or what measurements of this machine say.

    Args:
        fixed: always these; None: `cost` and `curve` decide.
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
        """Node counts that it chooses among, ascending."""
        if self.fixed is not None:
            return (self.fixed,)
        least, most = self.curve.least, self.curve.nodes[-1]
        return tuple(sorted({*(n for n in CANDIDATES if least <= n <= most), *self.curve.nodes}))

    @property
    def largest(self) -> int:
        """No answer is larger."""
        return self.fixed if self.fixed is not None else self.candidates[-1]

    @property
    def typical_context_tokens(self) -> int:
        """The context to decide by where none is known yet: that of the measured steps."""
        return self.curve.context_tokens if self.curve is not None else 0

    def nodes(self, batch_size: int, context_tokens: int) -> int:
        """Nodes of each row's tree, root, guesses and probes, for a step of b rows, the longest of c tokens."""
        if self.fixed is not None:
            return self.fixed
        key = (batch_size, -(-context_tokens // CONTEXT_BUCKET_TOKENS))
        found = self._known.get(key)
        if found is None:
            rates = self.rates(batch_size, key[1] * CONTEXT_BUCKET_TOKENS)
            # Of equal ones the smallest, which `max` takes: the first.
            found = self._known[key] = max(rates, key=lambda rate: rate.tokens_per_s).nodes
        return found

    def rates(self, batch_size: int, context_tokens: int) -> list[Rate]:
        """What each candidate is expected to give."""
        assert self.curve is not None, "a fixed budget expects nothing"
        seconds = self.cost.over_nodes(batch_size, context_tokens)
        known: dict[int, float] = {}  # width -> forward seconds; the candidates share most of them
        found = []
        for n in self.candidates:
            forward_s = 0.0
            for width, share in self.curve.widths_at(n, batch_size):
                if width not in known:
                    known[width] = self._forward_s(width, batch_size, context_tokens, seconds)
                forward_s += share * known[width]
            outside_s = self.curve.outside_s(n, batch_size)
            found.append(Rate(n, self.curve.tau_at(n), forward_s, outside_s, batch_size))
        return found

    def _forward_s(self, width: int, batch_size: int, context_tokens: int, seconds: list[float]) -> float:
        if self.cost.nodes[0] <= width <= self.cost.nodes[-1]:
            return _interpolate(width, self.cost.nodes, seconds)
        return self.cost.at(width, batch_size, context_tokens)


def _clamped(value: float, grid: Sequence[float]) -> float:
    return min(max(value, grid[0]), grid[-1])


def _place(value: float, grid: Sequence[float]) -> tuple[int, float]:
    """The grid point at or below a value inside the grid, and the share of the way to the next one."""
    i = bisect_right(grid, value) - 1
    if i >= len(grid) - 1:
        return len(grid) - 1, 0.0
    return i, (value - grid[i]) / (grid[i + 1] - grid[i])


def _interpolate(value: float, grid: Sequence[float], values: Sequence[float]) -> float:
    i, share = _place(value, grid)
    return values[i] + share * (values[i + 1] - values[i]) if share else values[i]


def _pair(cells: Sequence, i: int) -> tuple:
    return cells[i], cells[min(i + 1, len(cells) - 1)]


def _tuples(value):
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
