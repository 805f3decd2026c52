"""What steps cost, by which methods choose how much they draft (`budget.py`).

Nothing is timed on purpose. Decoding starts with the shape that was measured elsewhere, and each step that is run says
what its forward took, by its rows and nodes, and its draft, by its rows and the reads of the draft model. What was
learnt is kept in `checkpoints/seconds-<target>-<machine>.json`, where the next process begins with it.

Other work on a machine only ever adds to a time. So the estimate of a size follows faster steps at once and slower ones
late, and a table that a busy minute has spoiled recovers within some answers. The estimates of neighbouring sizes hold
each other: what one slow step says of a size that is seldom run counts little.

Where a text depends on what is drafted (`Sampling.draws` is "inverse"), costs stay as they are while a batch is
written. The next batch begins with what was learnt meanwhile, so the same seed gives the same text with a given table
alone.

The environment variable SPECTRAIN_SECONDS names a file with another table, from which all seconds are read; nothing is
learnt then. Its "*" stands for all that it does not name.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedModel

from spectrain import kernels
from spectrain.decoding import Drafter, Sampling
from spectrain.errors import UserError
from spectrain.kernels import ROWS, padded
from spectrain.stores.environment import cpu_name
from spectrain.stores.files import from_json, load_json, write_json
from spectrain.stores.folder import digest
from spectrain.stores.locations import CHECKPOINTS
from spectrain.target import TargetModel, fingerprint

log = logging.getLogger(__name__)

FILE = "SPECTRAIN_SECONDS"
SCHEMA = 1  # of the file
MOST_NODES = 128  # up to which forwards are known
MOST_READS = 32
RECORDED = (0, 1, 2, 3, 5, 7, 11, 15)  # lengths of chains where each is a graph; with the root, most fill a padded tree
# A forward by the nodes of all rows, over one of a single node: medians of SmolLM2-135M and the bundled target, in
# float32 on two cores of an AMD EPYC with AVX2 (docs/results/forward_shape.json).
SHAPE = {1: 1.0, 2: 1.05, 4: 1.1, 8: 1.3, 16: 2.2, 32: 4.4, 48: 6.3}
DRAFT, READ = 0.02, 0.1  # of a forward: a draft without reads, and each read; too cheap, so that methods are tried
FASTER, SLOWER = 0.3, 0.03  # shares of the way to a faster and to a slower step that an estimate goes
MOST_SLOWER = 2.0  # times an estimate, that a slower step counts as, and reads over what fewer take in proportion
DOUBTED = 1.5  # times what SHAPE makes of a plain step, that a trial holds a larger one for at most
MOST_WEIGHT, READ_WEIGHT = 20.0, 8.0  # steps that an estimate counts as, at most, and where it was read from a file
WIDTH = 0.35  # in which what a size says of another falls to 1 / e: of the logarithm of their ratio
LEAST_S = 1e-9
REFRESH = 32  # times that something is learnt, after which costs are computed anew
KEEP_S = 20.0  # between two writes of the file

PADDED = np.array([padded(n, kernels.NODES) for n in range(MOST_NODES + 1)])  # nodes as graphs have them

Seconds = dict[str, dict[int, float]]  # by what was run, and its size
_of_process: WeakKeyDictionary[PreTrainedModel, dict[str, Table]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Kept:
    """The content of the file that keeps a table."""

    kind: Literal["seconds"]
    schema: Literal[SCHEMA]
    machine: dict[str, object]
    seconds: Seconds


class Costs:
    """Seconds of the steps of one generation, by the number of active rows.

    Args:
        forward: seconds by nodes of one row, and of the most rows.
        draft: seconds by reads, likewise.
        n_rows: the most rows.
        pads: whether rows and nodes are padded, as CUDA graphs have them.
    """

    def __init__(
        self,
        forward: Sequence[Mapping[int, float]],
        draft: Sequence[Mapping[int, float]],
        n_rows: int,
        pads: bool = False,
    ):
        self.n_rows, self.pads = n_rows, pads
        self._forwards = _between(*(curve(one, MOST_NODES) for one in forward), n_rows)  # [rows, nodes + 1]
        self._drafts = _between(*(curve(one, MOST_READS) for one in draft), n_rows)  # [rows, reads + 1]

    @property
    def lengths(self) -> np.ndarray:
        """Lengths of chains that may be drafted."""
        return np.array(RECORDED) if self.pads else np.arange(MOST_READS + 1)

    def forward_s(self, n_rows: int) -> np.ndarray:
        """Seconds by nodes of all of a step but its draft."""
        return self._forward(self._padded(n_rows))[PADDED] if self.pads else self._forward(n_rows)

    def doubted_s(self, n_rows: int) -> np.ndarray:
        """The same, but no size takes far longer than elsewhere: a busy minute may have spoiled what is known of it."""
        return self.forward_s(n_rows)

    def draft_s(self, n_rows: int) -> np.ndarray:
        """Seconds by reads of a draft."""
        return self._draft(self._padded(n_rows) if self.pads else n_rows)

    def step_s(self, n_rows: int, n_nodes: float, n_reads: float) -> float:
        """Seconds of a step, or of steps that have so many nodes and reads on average."""
        of = ((self.forward_s(n_rows), n_nodes), (self.draft_s(n_rows), n_reads))
        return float(sum(np.interp(size, np.arange(len(seconds)), seconds) for seconds, size in of))

    def _forward(self, n_rows: int) -> np.ndarray:
        return self._forwards[n_rows - 1]

    def _draft(self, n_rows: int) -> np.ndarray:
        return self._drafts[n_rows - 1]

    def _padded(self, n_rows: int) -> int:
        return min(padded(n_rows, ROWS), self.n_rows)


class LearntCosts(Costs):
    """The same from a table that learns.

    Args:
        table: what was learnt.
        forwards: the key of its forwards.
        drafts: the key of its drafts.
        n_rows, pads: see `Costs`.
        is_live: whether it follows the table; else it stays as it is now.
    """

    def __init__(self, table: Table, forwards: str, drafts: str, n_rows: int, pads: bool, is_live: bool):
        self.table, self.keys, self.n_rows, self.pads, self.is_live = table, (forwards, drafts), n_rows, pads, is_live
        self._refresh()

    def _refresh(self) -> None:
        self._until = self.table.n_steps + REFRESH
        self._known = [dict(self.table.known.get(key, {})) for key in self.keys]
        self._forwards, self._drafts = {}, {}  # curves by rows

    def _forward(self, n_rows: int) -> np.ndarray:
        if self.is_live and self.table.n_steps >= self._until:
            self._refresh()
        if n_rows not in self._forwards:
            self._forwards[n_rows] = forward_curve(self._known[0], n_rows, is_flat=self.pads)
        return self._forwards[n_rows]

    def doubted_s(self, n_rows: int) -> np.ndarray:
        known = self.forward_s(n_rows)
        elsewhere = forward_curve({(n_rows, 1): (known[1], 1.0)}, n_rows, is_flat=self.pads)
        return np.minimum(known, DOUBTED * elsewhere)

    def _draft(self, n_rows: int) -> np.ndarray:
        plain_s = float(self._forward(n_rows)[1])
        if n_rows not in self._drafts:
            self._drafts[n_rows] = draft_curve(self._known[1], n_rows, plain_s)
        return self._drafts[n_rows]


Known = dict[tuple[int, int], tuple[float, float]]  # by rows and size: seconds, and the steps that they count as


def forward_curve(known: Known, n_rows: int, is_flat: bool = False) -> np.ndarray:
    """Return the seconds [MOST_NODES + 1] of forwards of n rows by their nodes, which never fall.

    It is SHAPE, or `is_flat` up to its end, scaled at each size by how much longer than that near sizes took.
    """
    sizes, shape = np.arange(1, MOST_NODES + 1), _flat if is_flat else _of_cores
    expected, scale = shape(n_rows * sizes), np.zeros(len(sizes))
    if known:
        of, (seconds, weights) = np.array([*known]), np.array([*known.values()]).T
        for rows in {*of[:, 0]}:  # a larger size bounds a smaller one: other work only ever adds to a time
            (places,) = np.nonzero(of[:, 0] == rows)
            places = places[of[places, 1].argsort()[::-1]]
            seconds[places] = np.minimum.accumulate(seconds[places])
        ratios = np.log(seconds / shape(of[:, 0] * of[:, 1]))
        away = np.abs(np.log(of[:, 1])[:, None] - np.log(sizes)) + np.abs(np.log(of[:, :1] / n_rows))
        near = weights[:, None] * np.exp((away.min(axis=0) - away) / WIDTH)  # the nearest size always says something
        scale = ratios @ near / near.sum(axis=0)
    found = np.maximum.accumulate(expected * np.exp(scale))
    return np.concatenate([found[:1], found])


def draft_curve(known: Known, n_rows: int, plain_s: float) -> np.ndarray:
    """Return the seconds [MOST_READS + 1] of drafts of n rows by their reads, which never fall.

    Until a draft was run they are shares of a plain step of `plain_s`.
    """
    steps: dict[int, float] = {}
    for (rows, _), (_, weight) in known.items():
        steps[rows] = steps.get(rows, 0.0) + weight
    # A few steps of as many rows say less than many of others.
    rows = min(steps, key=lambda rows: abs(np.log(rows / n_rows)) + (steps[rows] < READ_WEIGHT), default=n_rows)
    seconds = {size: found[0] for (of, size), found in known.items() if of == rows}
    for size in sorted(seconds):  # one that was slow once would never be run again
        fewer = [MOST_SLOWER * size * found / n for n, found in seconds.items() if 0 < n < size]
        seconds[size] = min([seconds[size], *fewer])
    first = {0: DRAFT * plain_s} if 0 not in seconds else {}
    guessed = {} if any(seconds) else {1: seconds.get(0, DRAFT * plain_s) + READ * plain_s}
    return curve(first | guessed | seconds, MOST_READS)


def _of_cores(nodes: np.ndarray) -> np.ndarray:
    """A forward of so many nodes over one of a single node; beyond SHAPE in proportion."""
    return np.interp(nodes, [*SHAPE], [*SHAPE.values()]) * _flat(nodes)


def _flat(nodes: np.ndarray) -> np.ndarray:
    """The same where nodes are free as far as SHAPE goes; no GPU was measured, and what is too cheap is tried."""
    return np.maximum(1.0, nodes / max(SHAPE))


def curve(seconds: Mapping[int, float], most: int) -> np.ndarray:
    """Return the seconds of sizes 0..most, which never fall.

    Beyond the known ones they go on along the last line, or along all but the first size where that is steeper.
    """
    sizes = np.array(sorted(seconds))
    # A larger size bounds a smaller one: other work on the machine only ever adds to a time.
    values = np.minimum.accumulate(np.array([seconds[size] for size in sizes])[::-1])[::-1]
    starts = (-2, min(1, len(sizes) - 2)) if len(sizes) > 1 else ()
    slope = max(((values[-1] - values[i]) / (sizes[-1] - sizes[i]) for i in starts), default=0.0)
    wanted = np.arange(most + 1)
    return np.interp(wanted, sizes, values) + slope * np.maximum(0, wanted - sizes[-1])


def _between(one: np.ndarray, all_rows: np.ndarray, n_rows: int) -> np.ndarray:
    """Interpolate between the seconds of one row and those of n rows, [n, sizes]."""
    return one + np.linspace(0, 1, n_rows)[:, None] * (all_rows - one) if n_rows > 1 else one[None]


class Table:
    """The seconds of one target on one machine.

    Args:
        file: that keeps them.
        seconds: that are known.
        is_given: whether the user gave them, so that nothing is learnt.
    """

    def __init__(self, file: Path, seconds: Seconds, is_given: bool = False):
        self.file, self.seconds, self.is_given = file, seconds, is_given
        self.known: dict[str, Known] = {}
        self.n_steps, self._kept_s, self._machine = 0, None, {}
        self._met: set[tuple[str, int, int]] = set()  # sizes that this process has run
        for key, sizes in {} if is_given else seconds.items():
            what, _, rows = key.rpartition(", rows ")
            least = what.startswith("forward of ")  # node
            if rows.isdigit() and int(rows):
                kept = {(int(rows), n): (max(s, LEAST_S), READ_WEIGHT) for n, s in sizes.items() if n >= least}
                self.known.setdefault(what, {}).update(kept)

    @classmethod
    def of(cls, target: TargetModel) -> Table:
        """The table of the file that the user gave, of this process, or of the file in `checkpoints/`."""
        if given := os.environ.get(FILE):
            return cls.read(Path(given), is_given=True)
        machine = machine_of(target)
        known = _of_process.setdefault(target.model, {})
        if (key := digest(machine)) not in known:
            file = CHECKPOINTS / f"seconds-{fingerprint(target.model, target.tokenizer)}-{key}.json"
            table = known[key] = target.agreed(cls.read(file))
            table._machine = machine
            if target.leads:
                atexit.register(table.keep)
        known[key].known = target.agreed(known[key].known)  # ranks that share the target decide alike
        return known[key]

    @classmethod
    def read(cls, file: Path, is_given: bool = False) -> Table:
        """Read a file. One that is missing or unreadable holds nothing, unless the user gave it."""
        try:
            return cls(file, from_json(Kept, load_json(file)).seconds, is_given)
        except FileNotFoundError:
            problem = "it does not exist"
        except (OSError, ValueError) as error:
            problem = str(error)
            log.warning("%s cannot be used (%s); what steps cost is learnt anew", file, problem)
        if is_given:
            raise UserError(f"{FILE}={file} is no table of seconds ({problem}); give another file or unset {FILE}")
        return cls(file, {})

    def costs(self, target: TargetModel, sampling: Sampling, n_rows: int, drafter: Drafter) -> Costs:
        """Return what steps of up to n rows cost with a drafter. Verifying takes longer where tokens are drawn."""
        most, pads = 1 << (n_rows - 1).bit_length(), target.graphs is not None
        keys = self.keys_of(drafter, sampling)
        if self.is_given:
            return Costs(*([self._given(key, n) for n in (1, most)] for key in keys), most, pads)
        is_live = (sampling.greedy or sampling.shares_noise) and target.group is None
        return LearntCosts(self, *keys, most, pads, is_live)

    @staticmethod
    def keys_of(drafter: Drafter, sampling: Sampling) -> tuple[str, str]:
        """Under which keys the forwards and the drafts of a method stand."""
        kind = "greedy" if sampling.greedy else "sampled"
        forwards = "forward of chains" if drafter.method.drafts_chains else "forward of trees"
        return f"{forwards}, {kind}", f"{drafter.method.name or type(drafter).__name__}, {kind}"

    def _given(self, key: str, n_rows: int) -> dict[int, float]:
        what = key.rpartition(", ")[0]
        found = next((self.seconds[one] for one in (f"{key}, rows {n_rows}", what, "*") if one in self.seconds), None)
        if found is None:
            raise UserError(f'{FILE}={self.file} has no seconds of "{key}"; add them, or those of "{what}" or "*"')
        return found

    def learn(self, key: str, n_rows: int, size: int, seconds: float) -> None:
        """Take what a forward of so many nodes, or a draft of so many reads, took in a step of n rows."""
        if (key, n_rows, size) not in self._met:  # the first step of a size makes its program, or compiles
            self._met.add((key, n_rows, size))
            return
        known = self.known.setdefault(key, {})
        found, weight = known.get((n_rows, size), (seconds, 0.0))
        found += (FASTER if seconds < found else SLOWER) * (min(seconds, MOST_SLOWER * found) - found)
        known[n_rows, size] = max(found, LEAST_S), min(weight + 1, MOST_WEIGHT)
        self.n_steps += 1

    def keep(self, least_s: float = 0.0) -> None:
        """Write the file, where something was learnt, and the last write is so long ago."""
        now = time.monotonic()
        if self.n_steps == 0 or (self._kept_s is not None and now - self._kept_s < least_s):
            return
        self._kept_s, seconds = now, {}
        for key, known in [*self.known.items()]:  # another thread may learn meanwhile
            for (rows, size), (found, _) in sorted([*known.items()]):
                seconds.setdefault(f"{key}, rows {rows}", {})[size] = found
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.file, Kept("seconds", SCHEMA, dict(self._machine), seconds))
        except (OSError, UserError) as error:
            log.warning("%s could not be written (%s); what steps cost is learnt anew next time", self.file, error)


def machine_of(target: TargetModel) -> dict[str, object]:
    """Return what seconds depend on: device, dtype, number of threads, engine."""
    device = target.device
    if device.type == "cuda":
        n_devices = len({p.device for p in target.model.parameters()})
        name, threads = f"{n_devices} x {torch.cuda.get_device_name(device)}", None
    else:
        name, threads = f"{cpu_name()} ({device.type})", torch.get_num_threads()
    dtype, graphs = str(target.dtype).removeprefix("torch."), target.graphs is not None
    facts = {"device": name, "dtype": dtype, "threads": threads, "engine": target.engine, "graphs": graphs}
    return facts | ({"fused": True} if target.fuses else {})
