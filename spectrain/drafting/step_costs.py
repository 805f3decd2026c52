"""The table of seconds by which methods choose how much they draft (`budget.py`).

It holds the seconds of a step's forward by (rows, nodes) and of its draft by (rows, reads of the draft model). They are
timed once for target, drafter and machine before a generation starts, and kept in
`checkpoints/seconds-<target>-<machine>.json`.

The environment variable SPECTRAIN_SECONDS names a file with another table, from which all seconds are read; nothing is
timed then. Its "*" stands for all that it does not name.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spectrain import kernels
from spectrain.decoding import Context, Drafter, Sampling, stream
from spectrain.decoding.graph_capture import any_tree
from spectrain.errors import UserError
from spectrain.kernels import ROWS, padded
from spectrain.stores.environment import OtherWork, cpu_name, is_disturbed
from spectrain.stores.files import from_json, load_json, write_json
from spectrain.stores.folder import digest
from spectrain.stores.locations import CHECKPOINTS
from spectrain.target import DraftTree, KVCache, TargetModel, fingerprint
from spectrain.terminal import stage

log = logging.getLogger(__name__)

FILE = "SPECTRAIN_SECONDS"
SCHEMA = 1  # of the file; another one also where steps have become faster, so that all is timed again
MOST_NODES = 128  # up to which forwards are known
MOST_READS = 32
NODES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
RECORDED = (0, 1, 2, 3, 5, 7, 11, 15)  # lengths of chains where each is a graph; with the root, most fill a padded tree
MOST_SCORED = {"cpu": 64, "cuda": 1024}  # nodes of all rows in a timed step; larger ones are extrapolated
DEAR = 5.0  # larger trees than the first that costs so many forwards of one node are not timed
# In each round a size is visited twice; more than the first rounds only while the seconds disagree.
ROUNDS, MOST_ROUNDS = 3, 12
MOST_S = 4.0  # after which no more rounds begin
SPREAD, TOLERANCE_S = 1.2, 5e-5  # of the two fastest visits of one size
MASK_S = 5e-4  # that the mask of several nodes may take, which a single one does not have
CONTEXT_TOKENS = 160  # of the timed text, at its beginning
MOST_READ = 256  # of all rows, on a CPU, which takes half a second for so many
TEXT = (
    "def read_config(path):\n    with open(path) as file:\n        return json.load(file)\n\nThe next day, she said: "
)

Seconds = dict[str, dict[int, float]]  # by what was timed, and its size
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
        self.forwards = _between(*(curve(one, MOST_NODES) for one in forward), n_rows)  # [rows, nodes + 1]
        self.drafts = _between(*(curve(one, MOST_READS) for one in draft), n_rows)  # [rows, reads + 1]
        self.lengths = np.array(RECORDED) if pads else np.arange(MOST_READS + 1)  # of chains that may be drafted
        if pads:
            rows = [min(padded(row, ROWS), n_rows) - 1 for row in range(1, n_rows + 1)]
            nodes = [padded(n, kernels.NODES) for n in range(MOST_NODES + 1)]
            self.forwards, self.drafts = self.forwards[rows][:, nodes], self.drafts[rows]

    def forward_s(self, n_rows: int) -> np.ndarray:
        """Seconds by nodes of all of a step but its draft."""
        return self.forwards[n_rows - 1]

    def draft_s(self, n_rows: int) -> np.ndarray:
        """Seconds by reads of a draft."""
        return self.drafts[n_rows - 1]

    def step_s(self, n_rows: int, n_nodes: float, n_reads: float) -> float:
        """Seconds of a step, or of steps that have so many nodes and reads on average."""
        of = ((self.forward_s(n_rows), n_nodes), (self.draft_s(n_rows), n_reads))
        return float(sum(np.interp(size, np.arange(len(seconds)), seconds) for seconds, size in of))


def curve(seconds: Mapping[int, float], most: int) -> np.ndarray:
    """Return the seconds of sizes 0..most, which never fall.

    Beyond the timed ones they go on along the last line, or along all but the first size where that is steeper.
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
        is_given: whether the user gave them, so that nothing is timed.
    """

    def __init__(self, file: Path, seconds: Seconds, is_given: bool = False):
        self.file, self.seconds, self.is_given = file, seconds, is_given
        self.spoiled: set[str] = set()  # what cannot be right: used, but not kept

    @classmethod
    def of(cls, target: TargetModel) -> Table:
        """The table of the file that the user gave, of this process, or of the file in `checkpoints/`."""
        if given := os.environ.get(FILE):
            return cls.read(Path(given), is_given=True)
        machine = machine_of(target)
        known = _of_process.setdefault(target.model, {})
        if (key := digest(machine)) not in known:
            file = CHECKPOINTS / f"seconds-{fingerprint(target.model, target.tokenizer)}-{key}.json"
            known[key] = target.agreed(cls.read(file))
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
            log.warning("%s cannot be used (%s); its steps are timed again", file, problem)
        if is_given:
            raise UserError(f"{FILE}={file} is no table of seconds ({problem}); give another file or unset {FILE}")
        return cls(file, {})

    def costs(self, target: TargetModel, sampling: Sampling, n_rows: int, drafter: Drafter) -> Costs:
        """Return what steps of up to n rows cost, and time what is not known.

        Args:
            target: of the table.
            sampling: of the generation; verifying takes longer where tokens are drawn.
            n_rows: the most rows.
            drafter: whose drafts are asked for.
        """
        most = 1 << (n_rows - 1).bit_length()
        is_chain = drafter.drafts_chains
        what = "forward of chains" if is_chain else "forward of trees"
        forward = [self._seconds(what, target, sampling, n, partial(_forward_steps, is_chain)) for n in (1, most)]
        pads = target.graphs is not None
        before = Costs(forward, [{0: 0.0}] * 2, most, pads)

        def steps(target: TargetModel, sampling: Sampling, n: int) -> Paced:
            if drafter.budget is not None:
                drafter.budget.costs = before
            return Paced(drafter, [reads for reads in drafter.timed_reads if _is_timed(target, n, reads + 1)])

        name = drafter.timed_as or type(drafter).__name__
        return Costs(forward, [self._seconds(name, target, sampling, n, steps) for n in (1, most)], most, pads)

    def _seconds(self, what: str, target: TargetModel, sampling: Sampling, n_rows: int, steps) -> dict[int, float]:
        kind = f"{'greedy' if sampling.greedy else 'sampled'}, rows {n_rows}"
        key = f"{what}, {kind}"
        if self.is_given:
            found = next((self.seconds[one] for one in (key, what, "*") if one in self.seconds), None)
            if found is None:
                raise UserError(f'{FILE}={self.file} has no seconds of "{key}"; add them, or those of "{what}" or "*"')
            return found
        if key not in self.seconds:
            began, others = time.perf_counter(), OtherWork()
            with stage(f"timing {key}, once on this machine", shown=target.leads):
                self.seconds[key], problem = timed(target, sampling, n_rows, steps(target, sampling, n_rows))
            log.info("timed %s in %.1f s", key, time.perf_counter() - began)
            share = others.share() if target.device.type == "cpu" and "WORLD_SIZE" not in os.environ else None
            if problem is None and is_disturbed(share):  # which may slow all sizes alike
                problem = f"other processes took {share:.0%} of the cores"
            if problem:
                self.spoiled.add(key)
            if problem and target.leads:
                log.warning("the seconds of %s look disturbed (%s); they are timed again next time", key, problem)
            if target.leads:
                self._keep(machine_of(target))
        return self.seconds[key]

    def _keep(self, machine: Mapping) -> None:
        kept = {key: one for key, one in self.seconds.items() if key not in self.spoiled}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.file, Kept("seconds", SCHEMA, dict(machine), kept))
        except (OSError, UserError) as error:
            log.warning("%s could not be written (%s); steps are timed again next time", self.file, error)


def n_timed(target: TargetModel) -> int:
    """Count what was timed of this target, or read from its file."""
    return sum(len(table.seconds) for table in _of_process.get(target.model, {}).values())


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


class Paced(Drafter):
    """Drafts with a method, each size in its turn, and notes what the draft and the rest of each step took.

    Args:
        inner: the method. With several sizes, it takes the size of its next draft by `inner.pace`.
        sizes: reads of the drafts, or nodes of the trees.
        times_rest: whether not the draft is timed but the rest of the step.
    """

    def __init__(self, inner: Drafter, sizes: Sequence[int], times_rest: bool = False):
        self.inner, self.times_rest = inner, times_rest
        self.capture_layers = inner.capture_layers
        self.taken: dict[int, list[float]] = {size: [] for size in sizes}
        self.order, self.turns = Random(0), []
        self.rounds_left = 0

    def rehearsals(self) -> Iterator:
        return iter(())  # the first round is one

    def start(self, target: TargetModel, cache: KVCache) -> None:
        self.wait = torch.cuda.synchronize if target.device.type == "cuda" else lambda: None
        self.inner.start(target, cache)

    def read_of_prompts(self, lengths: Tensor) -> Tensor | None:
        return self.inner.read_of_prompts(lengths)

    def prefill(self, context: Context, output, rows: range) -> None:
        self.inner.prefill(context, output, rows)

    def _now(self) -> float:
        self.wait()
        return time.perf_counter()

    def propose(self, context: Context) -> DraftTree:
        if not self.turns:
            # Twice in a row: a step of another size left other data in the caches.
            self.turns = [size for size in self.order.sample([*self.taken], len(self.taken)) for _ in range(2)]
            self.rounds_left -= 1
        self.inner.pace = self.size = self.turns.pop()
        began = self._now()
        tree = self.inner.propose(context)
        self._drafted = self._now()
        self._draft_s = self._drafted - began
        return tree

    def observe(self, context: Context, tree: DraftTree, output, verified) -> Tensor | None:
        began = self._now()
        asked = self.inner.observe(context, tree, output, verified)
        self._observe_s = self._now() - began
        return asked

    def extend(self, context: Context, emitted: Sequence[list[int]], asked: Sequence[list[int]]) -> None:
        began = self._now()
        self.inner.extend(context, emitted, asked)
        own_s = self._observe_s + self._now() - began
        rest_s = began - self._drafted - self._observe_s
        size = self.size if self.times_rest else self.inner.reads
        self.taken.setdefault(size, []).append(rest_s if self.times_rest else self._draft_s + own_s)

    def free(self, row: int) -> None:
        self.inner.free(row)

    def drop_dear(self) -> None:
        """Leave out sizes beyond the first that is dear: nobody scores so many nodes."""
        best = {size: min(taken) for size, taken in self.taken.items() if taken}
        dear = [size for size in sorted(best) if best[size] > DEAR * best[min(best)]]
        for size in dear[1:]:
            del self.taken[size]
        self.turns = [size for size in self.turns if size in self.taken]


class _AnyTrees(Drafter):
    """Chains, or binary trees, of any tokens."""

    pace = 1

    def __init__(self, is_chain: bool):
        self.is_chain = is_chain

    def propose(self, context: Context) -> DraftTree:
        return any_tree(context, self.pace, self.is_chain)


def _forward_steps(is_chain: bool, target: TargetModel, sampling: Sampling, n_rows: int) -> Paced:
    sizes = NODES if target.graphs is None else [n for n in kernels.NODES if n <= NODES[-1]]
    return Paced(_AnyTrees(is_chain), [n for n in sizes if _is_timed(target, n_rows, n)], times_rest=True)


def _is_timed(target: TargetModel, n_rows: int, nodes: int) -> bool:
    """Whether a step of so many nodes of each row is timed; those of a chain are its reads and the root."""
    return nodes <= 4 or nodes * n_rows <= MOST_SCORED.get(target.device.type, MOST_SCORED["cuda"])


def timed(target: TargetModel, sampling: Sampling, n_rows: int, paced: Paced) -> tuple[dict[int, float], str | None]:
    """Run steps in turns, and return the fastest of each size; and why they cannot be right, if they cannot."""
    _run(target, sampling, n_rows, paced, 1)  # which compile, record and warm up
    if paced.times_rest:
        paced.drop_dear()
    n_rounds, problem, began, goes_on = 0, None, time.perf_counter(), True
    while goes_on:
        _run(target, sampling, n_rows, paced, ROUNDS)
        n_rounds += ROUNDS
        problem = doubt(paced.taken)
        goes_on = target.agreed(problem and n_rounds < MOST_ROUNDS and time.perf_counter() - began < MOST_S)
    paced.inner.pace = None
    paced.inner.forget()  # its drafts were only timed
    return {size: min(taken) for size, taken in sorted(paced.taken.items()) if taken}, problem


def _run(target: TargetModel, sampling: Sampling, n_rows: int, paced: Paced, n_rounds: int) -> None:
    room = target.max_positions - NODES[-1]
    length = max(1, min(CONTEXT_TOKENS, room // 2))
    if target.device.type == "cpu":
        length = min(length, max(16, MOST_READ // n_rows))
    text = target.tokenizer(TEXT)["input_ids"] if target.tokenizer is not None else [*range(min(61, target.vocab_size))]
    prompts = [[*text[row % len(text) :], *text * length][: max(1, length - row % 8)] for row in range(n_rows)]
    paced.rounds_left, paced.turns = n_rounds, []
    options = {"batch_size": n_rows, "stop_token_ids": (), "seed": 1}
    while paced.rounds_left or paced.turns:
        for _ in stream(target, paced, prompts, max(2, min(room - length, 512)), sampling, **options):
            if not (paced.rounds_left or paced.turns):
                break
    paced.taken = target.agreed(paced.taken)


def doubt(taken: Mapping[int, Sequence[float]]) -> str | None:
    """Say what cannot be right about the seconds of some sizes: something disturbed them; None: nothing is wrong."""
    best = {size: sorted(seconds) for size, seconds in sorted(taken.items()) if seconds}
    first = next((size for size in best if size), 0)
    lower = [seconds[0] for seconds in best.values()]
    for i, (size, seconds) in enumerate(best.items()):
        if len(seconds) > 1 and seconds[1] > SPREAD * seconds[0] + TOLERANCE_S:
            return f"size {size} took {seconds[0]:.2g} s and {seconds[1]:.2g} s"
        if seconds[0] > SPREAD * min(lower[i:]) + TOLERANCE_S:
            return f"size {size} took longer than a larger one"
        if size > first and seconds[0] > SPREAD * size / max(1, first) * best[first][0] + MASK_S:
            return f"size {size} took more than {size} times size {first}"
    return None
