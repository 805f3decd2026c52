"""What commands share that build a store once, in a work folder beside it (work_folder.py), on one rank or many."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from lightning import Fabric
from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from data_prep.ranks import decided
from spectrain.stores import work_folder

NOT_HASHED_OF_TARGET = ("device", "parallel")  # they change nothing, or not beyond rounding

T = TypeVar("T")


class Job(Protocol):
    """A store to make, and where."""

    out: Path
    work: Path  # the folder it is made in
    identity: dict  # what it depends on


def hashed_config(cfg: DictConfig, not_hashed: Sequence[str]) -> dict:
    """What of a command's options the store depends on, resolved."""
    config = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    config = {key: value for key, value in config.items() if key not in not_hashed}
    config["target"] = {key: value for key, value in config["target"].items() if key not in NOT_HASHED_OF_TARGET}
    return config


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C ends the command with 130, and says that it can be given again."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        raise SystemExit(130) from None


def make_once(fabric: Fabric, job: Job, fresh: bool, kind: str, make: Callable[[], T]) -> T | None:
    """Holds the work folder while `make()` builds the store; None where it was complete but for its last renames.

    Raises:
        UserError: another build holds the folder, or something else stands at the store's place.
    """
    with ExitStack() as folder:

        def decide() -> bool:
            folder.enter_context(work_folder.held(job.work))
            return work_folder.is_done(job.out, job.work, job.identity, fresh, kind)

        return None if decided(fabric, decide) else make()


def facts_table(title: str) -> Table:
    """Two columns: what, and its value."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def target_override(path: str) -> str:
    """How the next command names this target."""
    return "" if path == "pystdlib-8l" else f" target={path}"
