"""How every command of `data_prep` builds its store: once, in a work folder beside it, on one rank or many.

    build = Build(fabric, "acceptance", out, config, options.fresh, group_size=1)
    tokens_per_s = build.run(lambda: LabelParts(...))    # `Build.run` reads as the steps of a build

Work is cut into parts by index, never by rank, and a part appears in the work folder by renaming. So a build can be
killed at any time and resumed at any number of ranks, and ends with the same bytes. Ranks exchange nothing but what
rank zero decides. Besides the parts of each command, the work folder holds:

    work.json     what the parts were made of (`Parts.identity`); without it they count for nothing
    store/        what becomes the store
    replaced/     the store that stood at `out` before (fresh=true)
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from lightning import Fabric
from lightning.fabric.strategies import DDPStrategy
from rich.filesize import decimal

from data_prep.progress import Advance, token_progress
from spectrain.config import plain
from spectrain.errors import UserError
from spectrain.stores.files import free_bytes, json_line, parse_json, read_json, real_path, rename, to_disk, write_json
from spectrain.stores.folder import digest, locked, stands
from spectrain.stores.locations import CHECKPOINTS
from spectrain.terminal import stage

log = logging.getLogger(__name__)

WORK, STORE, REPLACED = "work.json", "store", "replaced"
DISK_MARGIN = 1.1  # of the estimated need
OTHER_OUT = ", or give another out"
NOT_HASHED_OF_TARGET = ("device", "engine", "parallel", "tp")  # they change nothing but rounding
WAIT = datetime.timedelta(days=30)  # ranks wait for each other, for example while rank zero reads a whole corpus

T = TypeVar("T")


def launch(device: str, parallel: str) -> Fabric:
    """Return this process alone, or as one of torchrun's ranks, for `target.device` and `target.parallel`."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Fabric(accelerator="cpu", devices=1)  # only counts ranks: the target stands where target.device says
    if parallel == "device_map":
        raise UserError(f"target.parallel=device_map works in one process, not in {world}; start it without torchrun")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    # Ranks that share out parts exchange nothing but "done"; one target on many GPUs talks through NCCL.
    backend = "nccl" if on_gpu and parallel == "tp" else "gloo"
    strategy = DDPStrategy(process_group_backend=backend, timeout=WAIT)
    accelerator = "cuda" if on_gpu else "cpu"
    fabric = Fabric(accelerator=accelerator, devices=local, num_nodes=world // local, strategy=strategy)
    fabric.launch()
    if not fabric.is_global_zero:
        logging.getLogger().setLevel(logging.WARNING)
    return fabric


def rank_device(fabric: Fabric) -> str | None:
    """Return the device of this rank's target; None: as configured."""
    return str(fabric.device) if fabric.world_size > 1 else None


def decided(fabric: Fabric, decide: Callable[[], T]) -> T:
    """Call `decide` on rank zero and return its answer on all ranks.

    Where it raises UserError, only rank zero reports it, and the others end with exit code 2.
    """
    answer, refusal = None, None
    if fabric.is_global_zero:
        try:
            answer = decide()
        except UserError as error:
            refusal = error
    answer, refused = fabric.broadcast((answer, refusal is not None))
    if refusal:
        raise refusal
    if refused:
        raise SystemExit(2)
    return answer


def hashed_config(options: object, not_hashed: Sequence[str]) -> dict:
    """Return the options of a command that its store depends on, as plain values."""
    target = {key: value for key, value in plain(options.target).items() if key not in NOT_HASHED_OF_TARGET}
    return {key: value for key, value in plain(options).items() if key not in not_hashed} | {"target": target}


def store_path(out: str | None, kind: str, named_by: dict) -> Path:
    """Return the folder `out`, or one below checkpoints/ that is named by what the store depends on.

    Where that is a link, the folder that it points to is returned: the work folder lies beside it.
    """
    path = real_path(Path(out or CHECKPOINTS / f"{kind}-{digest(named_by)}"))
    if path.name in ("", ".."):  # the working folder, one above, or a root: nothing can be renamed to it
        raise UserError(f"out={out} has no name of its own; give the path of a folder that is to be made")
    return path


def check_disk(out: Path, need_bytes: int, less: str) -> None:
    """Raise UserError where the disk of `out` has no room for so many more bytes; `less` says how to need fewer."""
    free = free_bytes(out)
    if free < need_bytes * DISK_MARGIN:
        raise UserError(
            f"the disk of {out} has {decimal(free)} free, but this build needs about "
            f"{decimal(int(need_bytes * DISK_MARGIN))}; free some, {less}, or give out=<folder on another disk>"
        )


class Parts(ABC):
    """The parts that a store is made of, cut by index. Only `make` is called on all ranks."""

    stage: str  # what is done to a part, one word beside the progress bar
    made_before: str  # how the log calls parts of an earlier attempt
    identity: dict  # what the parts depend on
    sizes: Sequence[int]  # units of progress of each part: tokens
    finish_early = False  # whether the store is finished without the parts that are missing

    @abstractmethod
    def missing(self, build: Build) -> list[int]:
        """Return the parts that are still to be made; UserError where that cannot be done."""

    @abstractmethod
    def make(self, build: Build, parts: Sequence[int], advance: Advance) -> None:
        """Make these parts, and put each into the work folder by renaming where `build.writes`."""

    @abstractmethod
    def write_store(self, build: Build) -> None:
        """Fill `build.store` from all parts, and publish it."""

    def n_tokens(self, build: Build, made: Sequence[int]) -> int:
        """Return the tokens of the parts that were made in this attempt."""
        return sum(int(self.sizes[index]) for index in made)


@dataclass(frozen=True)
class Build:
    """A store that is to be built, and where."""

    fabric: Fabric  # the ranks
    kind: str  # of the manifest
    out: Path
    config: dict  # what the store depends on, as far as it is known before the work begins
    fresh: bool = False  # replace a finished store; throw away a build that was begun without this option
    group_size: int = 1  # ranks that hold one target together, `Target.ranks_of_group`, and work on the same parts

    @property
    def work(self) -> Path:
        return self.out.with_name(f".{self.out.name}.partial")

    @property
    def store(self) -> Path:
        """The folder that is filled and then published."""
        return self.work / STORE

    @property
    def writes(self) -> bool:
        """Whether this rank writes its parts; where several ranks make the same ones, the first of them does."""
        return self.fabric.global_rank % self.group_size == 0

    def run(self, load: Callable[[], Parts]) -> float | None:
        """Build the store, all ranks together; `load` opens what its parts are made with.

        Returns:
            Tokens/s of the parts that were missing; None where nothing was left to make.

        Raises:
            UserError: the folder is in use, finished, or of another build, or the parts cannot be made.
        """
        fabric = self.fabric
        with contextlib.ExitStack() as held:
            decided(fabric, partial(self._open, held))
            parts = load()
            todo = decided(fabric, partial(self._begin, parts))
            group, n_groups = fabric.global_rank // self.group_size, fabric.world_size // self.group_size
            mine = todo[group::n_groups]
            n_units = sum(int(parts.sizes[index]) for index in mine)
            start_s = time.monotonic()
            with token_progress(parts.stage, n_units, bool(mine) and fabric.is_global_zero) as advance:
                parts.make(self, mine, advance)
            fabric.barrier()
            elapsed_s = max(time.monotonic() - start_s, 1e-9)
            n_tokens = decided(fabric, partial(parts.n_tokens, self, todo))
            with stage("writing the store", shown=fabric.is_global_zero):
                decided(fabric, partial(parts.write_store, self))
            return n_tokens / elapsed_s if todo else None

    def _open(self, held: contextlib.ExitStack) -> None:
        """Hold `out` and the work folder. Raise UserError where a finished store is not to be replaced."""
        held.enter_context(self._held())
        if stands(self.out, self.kind):
            file = self.work / WORK
            begun_fresh = file.is_file() and read_json(file)["fresh"]
            if not begun_fresh or (self.work / REPLACED).is_dir():  # killed when only the parts were left to remove
                self.clear()
            if not self.fresh:
                raise UserError(f"{self.out} is finished; change an option, give another out, or give fresh=true")

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Keep other processes out of `out`. Remove the work folder at the end if it holds no part."""
        with locked(self.out, otherwise=OTHER_OUT):
            self.work.mkdir(exist_ok=True)
            try:
                yield
            finally:
                parts = (child for child in self.work.glob("[!.]*") if child.name != WORK)
                if not any(any(part.glob("[!.]*")) if part.is_dir() else part.stat().st_size for part in parts):
                    shutil.rmtree(self.work)

    def _begin(self, parts: Parts) -> list[int]:
        """Keep of the work folder what this build goes on with, and return the parts that are missing."""
        identity, file = parse_json(json_line(parts.identity)), self.work / WORK
        known = read_json(file) if file.is_file() else None
        if known is None or (self.fresh and known != identity | {"fresh": True}):
            self.clear()
            known = identity | {"fresh": self.fresh}
            write_json(file, known)
        for name, value in identity.items():
            before = known.get(name)
            if before == value:
                continue
            what = f"another {name.replace('_', ' ')}"
            if name == "config":
                differing = sorted(key for key in before.keys() | value.keys() if before.get(key) != value.get(key))
                what = f"another config (differs in {', '.join(differing)})"
            raise UserError(f"{self.work} holds a build with {what}; remove it, give another out, or fresh=true")
        todo, n_parts = parts.missing(self), len(parts.sizes)
        if len(todo) < n_parts and not parts.finish_early:
            log.info("%d of %d %s already", n_parts - len(todo), n_parts, parts.made_before)
        return todo

    def new_store(self) -> Path:
        """Return the folder `store` as it is to be filled: not there."""
        shutil.rmtree(self.store, ignore_errors=True)
        return self.store

    def publish(self) -> None:
        """Put the whole `store` in its place. Raise UserError where something else stands there by now.

        After a kill `out` is the whole old store, the whole new one, or not there, and then the same command goes on.
        """
        to_disk(self.store)
        if stands(self.out, self.kind):
            rename(self.out, self.work / REPLACED)
        rename(self.store, self.out)
        self.clear()

    def clear(self) -> None:
        """Empty the work folder; `work.json` goes first, because without it the parts count for nothing."""
        for child in sorted(self.work.iterdir(), key=lambda child: child.name != WORK):
            shutil.rmtree(child) if child.is_dir() else child.unlink()
