"""How every command of `data_prep` builds its store: once, in a work folder beside it, on one rank or many.

    build = Build("acceptance", out, identity, cfg.fresh, ranks_share=cfg.target.parallel != "tp")
    tokens_per_s = build.run(fabric, identity, LabelParts(...))    # see `Parts`; `run` shows the steps of a build

Work is cut into parts by index, never by rank, and a part appears in the work folder by renaming. So a build can be
killed at any time and resumed at any number of ranks, and ends with the same bytes. Ranks exchange nothing but what
rank zero decides. Besides the parts of each command, the work folder holds:

    work.json     what the parts were made of (`identity`); without it they count for nothing
    store/        what becomes the store
    complete      says that store/ is whole, and only renames are left
    replaced/     the store that stood at `out` before (fresh=true)
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from lightning import Fabric
from rich.filesize import decimal

from data_prep.progress import Advance, token_progress
from data_prep.ranks import decided
from spectrain.decoding.errors import UserError
from spectrain.stores.folder import MANIFEST, digest, kind_of, locked, read_json, write_json
from spectrain.stores.locations import CHECKPOINTS

log = logging.getLogger(__name__)

WORK, COMPLETE, STORE, REPLACED = "work.json", "complete", "store", "replaced"
MAX_PADDING = 1 / 16  # of a row, in batches that are large enough
BUSY_PART = 8  # a batch of 1 / 8 of the budget is
DISK_MARGIN = 1.1  # of the estimated need
NOT_HASHED_OF_TARGET = ("device", "parallel")  # they change nothing but rounding

T = TypeVar("T")


def hashed_config(config: dict, not_hashed: Sequence[str]) -> dict:
    """The options of a command, resolved, that its store depends on."""
    config = {key: value for key, value in config.items() if key not in not_hashed}
    return config | {"target": {k: v for k, v in config["target"].items() if k not in NOT_HASHED_OF_TARGET}}


def store_path(out: str | None, kind: str, named_by: dict) -> Path:
    """The folder `out`, or one below checkpoints/ that is named by what the store depends on."""
    path = Path(out or CHECKPOINTS / f"{kind}-{digest(named_by)}")
    if path.name in ("", ".."):  # the working folder, one above, or a root: nothing can be renamed to it
        raise UserError(f"out={out} has no name of its own; give the path of a folder that is to be made")
    return path


def length_buckets(lengths: Sequence[int], budget_tokens: int) -> Iterator[list[int]]:
    """Indices in batches of at most budget_tokens with padding, longest rows first; a longer row stands alone.

    A batch ends early before a row that would be more than a sixteenth padding, unless the batch is still so small that
    it would not keep the device busy.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        full = max(1, budget_tokens // longest)
        busy = max(1, full // BUSY_PART)
        stop = start + 1
        while stop < min(start + full, len(order)):
            if stop - start >= busy and lengths[order[stop]] < longest * (1 - MAX_PADDING):
                break
            stop += 1
        yield order[start:stop]
        start = stop


def check_disk(out: Path, need_bytes: int, less: str = "lower keep or keep_tokens") -> None:
    """Raises UserError where the disk of `out` has no room for so many more bytes; `less` says how to need fewer."""
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < need_bytes * DISK_MARGIN:
        raise UserError(
            f"{folder} has {decimal(free)} free, but this build needs about {decimal(int(need_bytes * DISK_MARGIN))}; "
            f"free some, {less}, or give out=<folder on another disk>"
        )


class Parts(Protocol):
    """What a store is made of, cut into parts by index."""

    stage: str  # what is done to a part, one word beside the progress bar
    sizes: Sequence[int]  # tokens of each part

    def missing(self, build: Build) -> list[int]:
        """On rank zero: the parts that are still to be made. Writes nothing; UserError where it cannot be done."""

    def make(self, work: Path, parts: Sequence[int], advance: Advance, writes: bool) -> None:
        """On each rank: make these parts, and put each into the work folder by renaming where this rank `writes`."""

    def write_store(self, build: Build) -> None:
        """On rank zero: fill `build.store` from all parts, and publish it."""


@dataclass(frozen=True)
class Build:
    """A store that is to be built, and where. Only rank zero calls the methods that do not take the ranks."""

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

    def run(self, fabric: Fabric, identity: dict, parts: Parts) -> float | None:
        """Build the store, all ranks together.

        Returns:
            Tokens/s of the parts that were missing; None where the store was complete but for its last renames.
        """
        with self.opened(fabric) as unfinished:
            if not unfinished:
                return None
            todo = decided(fabric, partial(self.start, identity, partial(parts.missing, self)))
            make = partial(parts.make, self.work, writes=self.writes(fabric))
            elapsed_s = self.work_through(fabric, parts.stage, todo, parts.sizes, make)
            decided(fabric, partial(parts.write_store, self))
            return sum(parts.sizes[index] for index in todo) / max(elapsed_s, 1e-9)

    @contextlib.contextmanager
    def opened(self, fabric: Fabric) -> Iterator[bool]:
        """Lock the work folder, on rank zero. False: the store was complete but for its last renames.

        Raises:
            UserError: another build holds the folder, or a finished store or something else stands at `out`.
        """
        with contextlib.ExitStack() as lock:

            def decide() -> bool:
                lock.enter_context(held(self.work))
                return self._is_done()

            yield not decided(fabric, decide)

    def start(self, identity: dict, begin: Callable[[], T]) -> T:
        """Keep of the work folder what this build goes on with; return what `begin` finds is left to do.

        Args:
            identity: what the parts depend on; a difference in its `config` is named option by option.
            begin: writes nothing. Where it raises, a new build leaves no trace.

        Raises:
            UserError: another build was begun there, and `fresh` does not throw it away.
        """
        identity = json.loads(json.dumps(identity))
        (self.work / COMPLETE).unlink(missing_ok=True)  # of another store, which stands in its place by now
        known = self._read(WORK)
        if known is None or (self.fresh and known != identity | {"fresh": True}):
            self.clear()
            known = identity
        for name, value in identity.items():
            if known.get(name) != value:
                what = f"another {name.replace('_', ' ')}"
                if name == "config":
                    before = known.get("config", {})
                    differing = sorted(key for key in before.keys() | value.keys() if before.get(key) != value.get(key))
                    what = f"another config (differs in {', '.join(differing)})"
                raise UserError(f"{self.work} holds a build with {what}; remove it, give another out, or fresh=true")
        found = begin()
        if not (self.work / WORK).is_file():
            write_json(self.work / WORK, identity | {"fresh": self.fresh})
        return found

    def work_through(
        self,
        fabric: Fabric,
        stage: str,
        todo: Sequence[int],
        sizes: Sequence[int],
        work: Callable[[Sequence[int], Advance], None],
    ) -> float:
        """Let each rank make its share of the parts that are missing; returns seconds until all ranks had ended.

        Args:
            fabric: the ranks.
            stage: what is done to a part, one word.
            todo: the missing parts, as rank zero found them.
            sizes: of all parts, in units of progress: usually tokens.
            work: makes the parts that it is given, and advances the progress.
        """
        mine = todo[fabric.global_rank :: fabric.world_size] if self.ranks_share else todo
        start_s = time.monotonic()
        with (
            self.cleared_if_nothing_begun(fabric.world_size),
            token_progress(stage, int(sum(sizes[index] for index in mine)), fabric.is_global_zero) as advance,
        ):
            work(mine, advance)
        fabric.barrier()
        return time.monotonic() - start_s

    def writes(self, fabric: Fabric) -> bool:
        """Whether this rank writes its parts; where all ranks make the same ones, rank zero does."""
        return self.ranks_share or fabric.is_global_zero

    @contextlib.contextmanager
    def cleared_if_nothing_begun(self, world_size: int = 1) -> Iterator[None]:
        """Clear the work folder where the block fails before anything worth resuming was written."""
        try:
            yield
        except BaseException:
            children = [child for child in self.work.iterdir() if child.name not in (WORK, STORE)]
            parts = [child for child in children if child.suffix != ".tmp" and not child.name.startswith(".")]
            if world_size == 1 and not any(part.is_dir() or part.stat().st_size for part in parts):
                self.clear()
            raise

    def new_store(self) -> Path:
        """The folder `store` as it is to be filled: not there."""
        shutil.rmtree(self.store, ignore_errors=True)
        return self.store

    def publish(self) -> None:
        """Put the whole `store` in its place. Raises UserError where something else stands there by now."""
        facts = {"out": self.out.name, "config": self.config, "fresh": self._read(WORK)["fresh"]}
        write_json(self.work / COMPLETE, facts)
        self._move(self.out)
        self.clear()

    def clear(self) -> None:
        """Remove first what makes the rest count and last what says that the store is complete: a kill is noticed."""
        order = {WORK: 0, COMPLETE: 2}
        for child in sorted(self.work.iterdir(), key=lambda child: order.get(child.name, 1)):
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            else:
                child.unlink()

    def _is_done(self) -> bool:
        """Whether this very store was complete already, and its build cut at the very end, which is made up for."""
        complete = self._read(COMPLETE)
        if complete is not None:
            self._move(self.work.with_name(complete["out"]))
            mine = complete["out"] == self.out.name and complete["config"] == self.config
            if mine and (complete["fresh"] or not self.fresh):  # fresh repeats a build that was not begun with it
                self.clear()
                return True
        if self._stands(self.out) and not self.fresh:
            raise UserError(
                f"{self.out} is finished; change an option, give another out, or build it anew with fresh=true"
            )
        return False

    def _move(self, out: Path) -> None:
        """By renames alone: at any time `out` is the old store, nothing, or the new one, and never half of either."""
        if not self.store.is_dir():  # it was moved before the kill
            return
        if self._stands(out):
            shutil.rmtree(self.work / REPLACED, ignore_errors=True)
            out.rename(self.work / REPLACED)
        self.store.rename(out)

    def _stands(self, out: Path) -> bool:
        """Whether a finished store is there; its manifest is written last. Raises UserError where something else is."""
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return False
        # None: damaged, which fresh=true may replace.
        if not (out / MANIFEST).is_file() or kind_of(out / MANIFEST) not in (self.kind, None):
            raise UserError(f"out={out} exists and was not written by data_prep.{self.kind}; give another out")
        return True

    def _read(self, name: str) -> dict | None:
        file = self.work / name
        return read_json(file) if file.is_file() else None


@contextlib.contextmanager
def held(work: Path) -> Iterator[None]:
    """Make the folder and keep other builds out of it (or raise UserError); remove it where nothing is left inside."""
    made = [folder for folder in work.parents if not folder.exists()]
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{work} cannot be made ({error.strerror}); give out=<folder elsewhere>") from error
    try:
        with locked(work, "another build", ", or give another out"):
            yield
    finally:
        with contextlib.suppress(OSError):  # not empty, or gone
            for folder in (work, *made):
                folder.rmdir()
