"""How many nodes a draft tree has: the measurements, in one JSON file per target and machine, and the choice.

    checkpoints/budget-<fingerprint of the target>-<hash of device, dtype and threads>.json

A target forward costs more with more nodes, rows and context tokens, while each further node gains fewer accepted
tokens. `python -m spectrain.tune budget=true` measures both. With max_nodes=auto a step has the n with the largest

    b tau(n) / (E[t_forward(width, b, c)] + t_outside(n, b))        (SSSD, section 3.2)

where width is the node count of the widest of the b trees: a method that finds nothing to propose pays for one node.
Seconds measured with another device, dtype or thread count say nothing, so such a file is refused.

Letters: n nodes of a tree (root, guesses, probes), b rows of the batch, c committed tokens of the longest row.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike
from typing_extensions import TypedDict

from spectrain.decoding import Sampling, TargetModel, fingerprint
from spectrain.decoding.errors import UserError
from spectrain.stores.environment import cpu_name
from spectrain.stores.folder import digest, load_json, locked, write_json
from spectrain.stores.typed import Count, from_json

log = logging.getLogger(__name__)

SCHEMA = 1
COMMAND = "python -m spectrain.tune budget=true"
NO_OPTIONS = ("max_nodes", "datastore")  # the curve's own axis, and the place of a file
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

    def seconds(self, nodes: ArrayLike, batch_size: ArrayLike, context_tokens: ArrayLike) -> np.ndarray:
        dense = np.maximum(self.weights_s, self.node_s * batch_size * nodes)
        attention = np.maximum(self.read_s, self.attend_s * nodes) * batch_size * context_tokens
        return self.overhead_s + dense + attention


@dataclass(frozen=True)
class ForwardCost:
    """Seconds of one target forward on a grid."""

    nodes: Sequence[Count]  # ascending, as the two below
    batch_sizes: Sequence[Count]
    contexts: Sequence[Count]  # committed tokens per row
    seconds: Sequence[Sequence[Sequence[float]]]  # [nodes][batch_sizes][contexts], medians
    spread: Sequence[Sequence[Sequence[float]]]  # likewise: interquartile range / median
    roofline: Roofline | None = None  # for sizes outside the grid

    def at(self, nodes: ArrayLike, batch_size: int, context_tokens: int) -> np.ndarray:
        """Return the seconds for each number of nodes.

        They are exact on the grid's points and linear between them. Outside the grid, the border's seconds grow as the
        roofline's do.
        """
        by_batch = [[np.interp(context_tokens, self.contexts, row) for row in cells] for cells in self.seconds]
        measured = np.array([np.interp(batch_size, self.batch_sizes, cells) for cells in by_batch])
        if self.roofline is None:
            return np.interp(nodes, self.nodes, measured)
        fit, known_nodes = self.roofline.seconds, np.asarray(self.nodes)
        b, c = _clipped(batch_size, self.batch_sizes), _clipped(context_tokens, self.contexts)
        measured *= fit(known_nodes, batch_size, context_tokens) / fit(known_nodes, b, c)
        nodes, inside = np.asarray(nodes), _clipped(nodes, self.nodes)
        growth = fit(nodes, batch_size, context_tokens) / fit(inside, batch_size, context_tokens)
        return np.interp(inside, self.nodes, measured) * growth


@dataclass(frozen=True)
class MethodCurve:
    """The gain and cost of one method, under one sampling, at each node budget that was measured."""

    nodes: Sequence[Count]  # ascending
    tau: Sequence[float]  # tokens per step of a row, bonus included
    step_s: Sequence[float]  # seconds per step outside the forward: drafting, verifying, committing
    row_s: Sequence[float]  # further seconds per row
    widths: Sequence[Sequence[tuple[int, float]]]  # (nodes of a row's own tree, share of its steps)
    context_tokens: int  # mean context of the measured steps
    least: int = 1  # nodes that the method needs; 1: it may draft nothing

    def tau_at(self, nodes: ArrayLike) -> np.ndarray:
        """Return the acceptance length, linear in log n; a root alone gains its bonus."""
        known, values = self.nodes, self.tau
        if known[0] > 1 and self.least == 1:
            known, values = [1, *known], [1.0, *values]
        return np.interp(np.log(nodes), np.log(known), values)

    def outside_s(self, nodes: ArrayLike, batch_size: int) -> np.ndarray:
        """Return the seconds of a step outside the forward."""
        return np.interp(nodes, self.nodes, self.step_s) + batch_size * np.interp(nodes, self.nodes, self.row_s)

    def widths_at(self, nodes: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return nodes [W] of the widest of b trees, to which the others are padded, and the share [W] of such steps.

        Rows count as independent. Under a budget between two measured ones, trees are those of the larger, cut off.
        """
        own = self.widths[min(bisect_left(self.nodes, nodes), len(self.nodes) - 1)]
        widths, shares = np.array(own).T
        no_wider = np.minimum(1.0, np.cumsum(shares)) ** batch_size
        return np.minimum(widths, nodes).astype(int), np.diff(no_wider, prepend=0.0)


@dataclass(frozen=True)
class Rate:
    """The expected speed under a node budget."""

    nodes: Count
    tau: float
    forward_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class NodeBudget:
    """Nodes of a tree for a batch and a context: a whole number, or chosen from measurements of this machine."""

    fixed: int | None = None  # always this number; None: cost and curve decide
    cost: ForwardCost | None = None  # of the target on this machine
    curve: MethodCurve | None = None  # of the method
    _known: dict[tuple[int, int], int] = field(default_factory=dict, init=False, repr=False, compare=False)

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

    def nodes(self, batch_size: int, context_tokens: int | None = None) -> int:
        """Return the nodes of each row's tree, root, guesses and probes, for a step of b rows.

        `context_tokens` are those of the longest row; None: the mean of the measured steps.
        """
        if self.fixed is not None:
            return self.fixed
        tokens = self.curve.context_tokens if context_tokens is None else context_tokens
        key = (batch_size, -(-tokens // CONTEXT_BUCKET_TOKENS))
        if key not in self._known:
            rates = self.rates(batch_size, key[1] * CONTEXT_BUCKET_TOKENS)
            # Of equal rates `max` takes the first, which has the fewest nodes.
            self._known[key] = max(rates, key=lambda rate: rate.tokens_per_s).nodes
        return self._known[key]

    def rates(self, batch_size: int, context_tokens: int) -> list[Rate]:
        """Return the expected speed of each candidate of a budget that is not fixed."""
        nodes, curve = np.array(self.candidates), self.curve
        seconds = self.cost.at(np.arange(self.largest + 1), batch_size, context_tokens)  # [n]: of n nodes
        widths = [curve.widths_at(n, batch_size) for n in self.candidates]
        tau, forward_s = curve.tau_at(nodes), np.array([shares @ seconds[width] for width, shares in widths])
        tokens_per_s = batch_size * tau / (forward_s + curve.outside_s(nodes, batch_size))
        columns = (column.tolist() for column in (nodes, tau, forward_s, tokens_per_s))
        return [Rate(*values) for values in zip(*columns, strict=True)]


@dataclass(frozen=True)
class CurveEntry:
    """The curve of one method or variant under one sampling."""

    name: str  # of the method or variant
    options: dict  # its yaml, `_target_` included, without max_nodes
    sampling: Sampling
    curve: MethodCurve

    def differing(self, options: Mapping) -> list[str]:
        """Return the names of the options that the method was not measured with."""
        names = sorted((self.options.keys() | options.keys()) - set(NO_OPTIONS))
        return [name for name in names if self.options.get(name) != options.get(name)]


class Machine(TypedDict, total=False):
    """The machine, dtype and number of threads that the measured seconds hold for."""

    device: str
    dtype: str
    threads: int | None


class Facts(TypedDict, total=False):
    """What was measured and when, which reports repeat."""

    target: str
    date: str
    prompts: str
    n_prompts: int
    max_new_tokens: int


@dataclass(frozen=True)
class BudgetTable:
    """All that was measured of one target on one machine."""

    target_fingerprint: str
    machine: Machine
    cost: ForwardCost
    entries: Sequence[CurveEntry] = ()
    facts: Facts = field(default_factory=dict)

    def save(self, folder: Path) -> Path:
        """Write the file whole. Curves of other methods and samplings that it holds already are kept.

        Raise UserError where another process is about to do the same, whose curves would be lost.
        """
        file = folder / file_name(self.target_fingerprint, self.machine)
        with locked(file, otherwise=" and run the same command again", is_file=True):
            before = BudgetTable.load(file).entries if file.is_file() else ()
            measured = [(entry.name, entry.options, entry.sampling) for entry in self.entries]
            kept = [entry for entry in before if (entry.name, entry.options, entry.sampling) not in measured]
            values = {
                "kind": "budget",
                "schema": SCHEMA,
                "target_fingerprint": self.target_fingerprint,
                "machine": self.machine,
                "facts": self.facts,
                "cost": asdict(self.cost),
                "curves": [asdict(entry) for entry in (*kept, *self.entries)],
            }
            write_json(file, values)
        return file

    @classmethod
    def load(cls, file: Path) -> BudgetTable:
        """Read a file. Raises UserError where it is not a table of this version."""
        try:
            values = load_json(file)
            if values["kind"] != "budget" or values["schema"] != SCHEMA:
                raise ValueError(f"schema {values['schema']}")
            entries = [from_json(CurveEntry, one) for one in values["curves"]]
            cost = from_json(ForwardCost, values["cost"])
            machine, facts = from_json(Machine, values["machine"]), from_json(Facts, values["facts"])
            return cls(str(values["target_fingerprint"]), machine, cost, entries, facts)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{file} holds no budget table of schema {SCHEMA} ({error}); remove it and run {COMMAND}"
            ) from error

    def budget(self, options: Mapping, sampling: Sampling) -> NodeBudget:
        """Return the budget of a method, given by its resolved yaml, for decoding under this sampling.

        Raises UserError where it was not measured, or not under this sampling.
        """
        method = options["_target_"].split(".")[-2]
        own = [entry for entry in self.entries if entry.options.get("_target_") == options["_target_"]]
        fitting = [entry for entry in own if entry.sampling == sampling]
        if not fitting:
            known = "; ".join(sorted({entry.sampling.describe() for entry in own}))
            under = f"under {sampling.describe()}, only under {known}" if known else "on this machine"
            raise UserError(
                f"max_nodes=auto: {method} was not measured {under}; run {COMMAND} methods=[{method}] "
                "with this target and sampling"
            )
        nearest = min(fitting, key=lambda entry: len(entry.differing(options)))
        if differing := nearest.differing(options):
            said = "max_nodes=auto: %s was measured with other %s; tune it as a variant for its own budget"
            log.warning(said, nearest.name, ", ".join(differing))
        return NodeBudget(cost=self.cost, curve=nearest.curve)


def _clipped(values: ArrayLike, grid: Sequence[int]) -> np.ndarray:
    return np.clip(values, grid[0], grid[-1])


def machine_of(target: TargetModel) -> Machine:
    """Return the device, dtype and number of threads, on which seconds depend."""
    device = target.device
    if device.type == "cuda":
        n_devices = len({p.device for p in target.model.parameters()})
        name, threads = f"{n_devices} x {torch.cuda.get_device_name(device)}", None
    else:
        name, threads = f"{cpu_name()} ({device.type})", torch.get_num_threads()
    return {"device": name, "dtype": str(target.dtype).removeprefix("torch."), "threads": threads}


def file_name(target_fingerprint: str, machine: Machine) -> str:
    return f"budget-{target_fingerprint}-{digest(machine)}.json"


def find_table(folder: Path, target: TargetModel) -> BudgetTable:
    """Return the table of this target on this machine. Else the error says what the folder's tables are of."""
    prints, machine = fingerprint(target.model, target.tokenizer), machine_of(target)
    file = folder / file_name(prints, machine)
    if file.is_file():
        return BudgetTable.load(file)
    others = [BudgetTable.load(other).machine for other in sorted(folder.glob(f"budget-{prints}-*.json"))]
    if others:
        name = next((key for key in machine if machine[key] != others[0].get(key)), "device")
        why = f"{folder} holds measurements of this target with {name} {others[0].get(name)}, not {machine[name]}"
    else:
        targets = sorted({other.name.split("-")[1] for other in folder.glob("budget-*.json")})
        held = f", only of {', '.join(targets)}" if targets else ""
        why = f"{folder} holds no measurements of target {prints}{held}"
    raise UserError(f"max_nodes=auto: {why}; run {COMMAND} with this target, device and number of threads")
