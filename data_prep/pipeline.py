"""How every command of `data_prep` builds its store: once, in a work folder beside it, on one rank or many.

    build = Build(fabric, "acceptance", out, config, cfg.fresh, ranks_share=cfg.target.parallel != "tp")
    tokens_per_s = build.run(lambda: LabelParts(...))    # `Build.run` reads as the steps of a build

Work is cut into parts by index, never by rank, and a part appears in the work folder by renaming. So a build can be
killed at any time and resumed at any number of ranks, and ends with the same bytes. Ranks exchange nothing but what
rank zero decides. Besides the parts of each command, the work folder holds:

    work.json     what the parts were made of (`Parts.identity`); without it they count for nothing
    store/        what becomes the store
    complete      says that store/ is whole, and only renames are left
    replaced/     the store that stood at `out` before (fresh=true)
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NotRequired, TypeVar

from lightning import Fabric
from rich.filesize import decimal
from typing_extensions import TypedDict

from data_prep.progress import Advance, token_progress
from data_prep.ranks import decided
from spectrain.errors import UserError
from spectrain.stores.folder import (
    MANIFEST,
    digest,
    json_line,
    kind_of,
    locked,
    parse_json,
    read_object,
    write_json,
)
from spectrain.stores.locations import CHECKPOINTS
from spectrain.stores.typed import MORE
from spectrain.stores.writing import free_bytes, real_path, rename, to_disk

log = logging.getLogger(__name__)

WORK, COMPLETE, STORE, REPLACED = "work.json", "complete", "store", "replaced"
DISK_MARGIN = 1.1  # of the estimated need
OTHER_OUT = ", or give another out"
NOT_HASHED_OF_TARGET = ("device", "engine", "parallel")  # they change nothing but rounding

T = TypeVar("T")


def hashed_config(config: dict, not_hashed: Sequence[str]) -> dict:
    """Return the options of a command, resolved, that its store depends on."""
    config = {key: value for key, value in config.items() if key not in (*not_hashed, "max_prompt_bytes")}
    if "corpus" in config:  # limits only refuse inputs
        limits = ("max_document_bytes", "max_files")
        config["corpus"] = {key: value for key, value in config["corpus"].items() if key not in limits}
    return config | {"target": {k: v for k, v in config["target"].items() if k not in NOT_HASHED_OF_TARGET}}


def store_path(out: str | None, kind: str, named_by: dict) -> Path:
    """Return the folder `out`, or one below checkpoints/ that is named by what the store depends on.

    Where that is a link, the folder that it points to is returned: the work folder lies beside it.
    """
    path = real_path(Path(out or CHECKPOINTS / f"{kind}-{digest(named_by)}"))
    if path.name in ("", ".."):  # the working folder, one above, or a root: nothing can be renamed to it
        raise UserError(f"out={out} has no name of its own; give the path of a folder that is to be made")
    return path


def check_disk(out: Path, need_bytes: int, less: str = "lower keep or keep_tokens") -> None:
    """Raise UserError where the disk of `out` has no room for so many more bytes; `less` says how to need fewer."""
    free = free_bytes(out)
    if free < need_bytes * DISK_MARGIN:
        raise UserError(
            f"the disk of {out} has {decimal(free)} free, but this build needs about "
            f"{decimal(int(need_bytes * DISK_MARGIN))}; free some, {less}, or give out=<folder on another disk>"
        )


def read_part(path: Path, read: Callable[[Path], T]) -> T:
    """Read a part that an earlier attempt may have written, or raise UserError where it is damaged."""
    try:
        return read(path)
    except Exception as error:  # numpy, zipfile, datasets and arrow each raise their own types here
        raise UserError(f"{path} is damaged ({type(error).__name__}); remove it and give the command again") from error


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


class Begun(TypedDict):
    """The content of `work.json`: the config of an unfinished build, and whether it was started with `fresh`."""

    __pydantic_config__ = MORE
    fresh: bool
    config: NotRequired[dict[str, object]]


@dataclass(frozen=True)
class Complete:
    """The content of `complete`: which store only lacks its last renames."""

    out: str  # the name of its folder
    config: dict
    fresh: bool

    def __post_init__(self) -> None:
        if Path(self.out).name != self.out:
            raise ValueError(f"{self.out} is no name of a folder")


@dataclass(frozen=True)
class Build:
    """A store that is to be built, and where."""

    fabric: Fabric  # the ranks
    kind: str  # of the manifest
    out: Path
    config: dict  # what the store depends on, as far as it is known before the work begins
    fresh: bool = False  # replace a finished store; throw away a build that was begun without this option
    ranks_share: bool = True  # False: all ranks hold one target together and work on the same parts
    work_name: str = ""  # of the work folder, where it is not the name of `out`

    @property
    def work(self) -> Path:
        return self.out.with_name(f".{self.work_name or self.out.name}.partial")

    @property
    def store(self) -> Path:
        """The folder that is filled and then published."""
        return self.work / STORE

    @property
    def writes(self) -> bool:
        """Whether this rank writes its parts; where all ranks make the same ones, rank zero does."""
        return self.ranks_share or self.fabric.is_global_zero

    def run(self, load: Callable[[], Parts]) -> float | None:
        """Build the store, all ranks together.

        Args:
            load: opens what the parts are made with; not called where nothing is left to make.

        Returns:
            Tokens/s of the parts that were missing; None where nothing was left to make.

        Raises:
            UserError: the folder is in use, finished, or of another build, or the parts cannot be made.
        """
        fabric = self.fabric
        with contextlib.ExitStack() as lock:
            if decided(fabric, partial(self._open, lock)):
                return None
            parts = load()
            todo = decided(fabric, partial(self._begin, parts))
            mine = todo[fabric.global_rank :: fabric.world_size] if self.ranks_share else todo
            n_units = sum(int(parts.sizes[index]) for index in mine)
            start_s = time.monotonic()
            with (
                self._cleared_if_nothing_begun(fabric.world_size),
                token_progress(parts.stage, n_units, bool(mine) and fabric.is_global_zero) as advance,
            ):
                parts.make(self, mine, advance)
            fabric.barrier()
            elapsed_s = max(time.monotonic() - start_s, 1e-9)
            n_tokens = decided(fabric, partial(parts.n_tokens, self, todo))
            decided(fabric, partial(parts.write_store, self))
            return n_tokens / elapsed_s if todo else None

    def _open(self, lock: contextlib.ExitStack) -> bool:
        """Lock `out` and the work folder. Return whether this very store was complete but for its last renames."""
        lock.enter_context(locked(self.out, otherwise=OTHER_OUT))
        lock.enter_context(held(self.work))
        if (self.work / COMPLETE).is_file():
            complete = self._read_complete()
            self._finish_move(complete)
            mine = complete.out == self.out.name and complete.config == self.config
            if mine and (complete.fresh or not self.fresh):  # fresh repeats a build that was not begun with it
                self.clear()
                return True
        if self._stands(self.out) and not self.fresh:
            raise UserError(f"{self.out} is finished; change an option, give another out, or give fresh=true")
        return False

    def _begin(self, parts: Parts) -> list[int]:
        """Keep of the work folder what this build goes on with, and return the parts that are missing."""
        identity = parse_json(json_line(parts.identity))
        (self.work / COMPLETE).unlink(missing_ok=True)  # of another store, which stands in its place by now
        known = self._read_work()
        if known is None or (self.fresh and known != identity | {"fresh": True}):
            self.clear()
            known = identity | {"fresh": self.fresh}
            write_json(self.work / WORK, known)
        for name, value in identity.items():
            if known.get(name) != value:
                what = f"another {name.replace('_', ' ')}"
                if name == "config":
                    before = known.get("config", {})
                    differing = sorted(key for key in before.keys() | value.keys() if before.get(key) != value.get(key))
                    what = f"another config (differs in {', '.join(differing)})"
                raise UserError(f"{self.work} holds a build with {what}; remove it, give another out, or fresh=true")
        with self._cleared_if_nothing_begun():
            todo = parts.missing(self)
        n_parts = len(parts.sizes)
        if len(todo) < n_parts and not parts.finish_early:
            log.info("%d of %d %s already", n_parts - len(todo), n_parts, parts.made_before)
        return todo

    @contextlib.contextmanager
    def _cleared_if_nothing_begun(self, world_size: int = 1) -> Iterator[None]:
        """Clear the work folder where the block fails before anything worth resuming was written."""
        try:
            yield
        except BaseException:
            children = [child for child in self.work.iterdir() if child.name not in (WORK, STORE)]
            parts = [child for child in children if not child.name.startswith(".")]
            if world_size == 1 and not any(part.is_dir() or part.stat().st_size for part in parts):
                self.clear()
            raise

    def new_store(self) -> Path:
        """Return the folder `store` as it is to be filled: not there."""
        shutil.rmtree(self.store, ignore_errors=True)
        return self.store

    def publish(self) -> None:
        """Put the whole `store` in its place. Raise UserError where something else stands there by now."""
        to_disk(self.store)
        write_json(self.work / COMPLETE, Complete(self.out.name, self.config, self._read_work()["fresh"]))
        self._move(self.out)
        self.clear()

    def clear(self) -> None:
        """Empty the work folder.

        `work.json` goes first, because without it the parts count for nothing. `complete` goes last, so that after a
        kill in between the next command still knows that the store is in its place.
        """
        order = {WORK: 0, COMPLETE: 2}
        for child in sorted(self.work.iterdir(), key=lambda child: order.get(child.name, 1)):
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            else:
                child.unlink()

    def _finish_move(self, complete: Complete) -> None:
        """Move a store into its place that a kill left complete in the work folder.

        Builds with one work folder and different `out` may finish each other's store; its place is then locked as well.
        """
        out = self.work.with_name(complete.out)
        with contextlib.nullcontext() if out == self.out else locked(out, otherwise=OTHER_OUT):
            self._move(out)

    def _move(self, out: Path) -> None:
        """Rename the store to `out`, and before that a store that stands there to `replaced` in the work folder.

        After a kill `out` is therefore the whole old store, the whole new one, or not there.
        """
        if not self.store.is_dir():  # it was moved before the kill
            return
        if self._stands(out):
            shutil.rmtree(self.work / REPLACED, ignore_errors=True)
            rename(out, self.work / REPLACED)
        rename(self.store, out)

    def _stands(self, out: Path) -> bool:
        """Return whether a finished store, whose manifest is written last, is there; UserError for anything else."""
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return False
        # None: damaged, which fresh=true may replace.
        if not (out / MANIFEST).is_file() or kind_of(out / MANIFEST) not in (self.kind, None):
            raise UserError(f"out={out} exists and was not written by data_prep.{self.kind}; give another out")
        return True

    def _read_work(self) -> dict | None:
        """Return what the parts were made of; None where no build has begun. Raises UserError where it is damaged."""
        file = self.work / WORK
        return read_object(file, Begun, f"remove {self.work}, or give another out") if file.is_file() else None

    def _read_complete(self) -> Complete:
        return read_object(self.work / COMPLETE, Complete, f"remove {self.work}, or give another out")


@contextlib.contextmanager
def held(work: Path) -> Iterator[None]:
    """Make the work folder and keep other builds out of it, whatever their `out`. Remove it at the end if it is empty.

    Raises UserError where another build is at work in it.
    """
    with locked(work, "another build", OTHER_OUT):
        work.mkdir(exist_ok=True)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # not empty, or gone
                work.rmdir()
