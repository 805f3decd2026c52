"""Run folders: one a resolved config, so that the same command finds its own interrupted run.

runs/spire-1f0c93ab/
    config.yaml        the resolved config
    run.json           the run's id, its target's fingerprint, the command as it was typed, and for each attempt when,
                       where and with which code it ran
    checkpoints/       of the latest step, written every few minutes and at an interruption; best/: what is exported
    metrics/version_0/metrics.csv   every logged number, a folder an attempt
    result.json        written last: the run is finished
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from spectrain.decoding.errors import AllRanksError, UserError
from spectrain.stores.environment import TYPED_COMMAND
from spectrain.stores.folder import locked, write_json
from spectrain.training.checkpoints import CheckpointFolder
from spectrain.training.curve import Curve, merged
from spectrain.training.selection import BestFolder

# They do not change what is trained.
NOT_HASHED = ("run_dir", "fresh", "logger", "out", "tau", "vanilla", "checkpoint_s")
# A run may go on with another number of ranks.
NOT_HASHED_OF_TRAINER = ("devices", "num_nodes", "log_every_n_steps", "activation_checkpointing")


class FinishedRun(AllRanksError):
    """The run that was asked for is finished already: a sweep leaves it out, on all ranks or on none."""


@dataclass(frozen=True)
class RunFolder:
    """A run that may begin: a new one, or an interrupted one that goes on."""

    path: Path
    config: dict  # resolved
    id: str  # a name that no other run has, kept when the run is resumed
    result: str = "result.json"  # written last: the run is finished

    @classmethod
    def find(cls, cfg: DictConfig, result: str = "result.json") -> RunFolder:
        """The folder of this config. Writes nothing.

        An unfinished run of this very config goes on, `fresh` or not; `fresh` replaces a finished or another one.

        Raises:
            UserError: the run is finished already, or the folder holds something else.
        """
        resolved = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        digest = hashlib.sha256(json.dumps(_hashed(resolved), sort_keys=True).encode()).hexdigest()[:8]
        path = Path(str(cfg.run_dir or "") or f"runs/{cfg.kind}-{digest}")
        run = cls(path, resolved, id=f"{plain(path.name)}-{uuid.uuid4().hex[:8]}", result=result)
        if not run.path.exists():
            return run
        if rank_zero_only.rank != 0:
            run._refuse_finished(cfg.fresh)
            return run
        if not run.config_file.is_file():
            if any(run.path.iterdir()):
                raise UserError(f"run_dir={run.path} is not empty and holds no run; give another run_dir")
            return run
        reason = run._why_not_to_go_on()
        if reason and not cfg.fresh:
            raise reason
        begun = run._begun()
        return run if reason or begun is None else dataclasses.replace(run, id=begun["id"])

    def _refuse_finished(self, fresh: bool) -> None:
        """Raises FinishedRun as rank zero does; without `fresh` rank zero replaces nothing that is read here."""
        if not fresh and self.result_file.is_file() and self.config_file.is_file():
            reason = self._why_not_to_go_on()
            if isinstance(reason, FinishedRun):
                raise reason

    def _why_not_to_go_on(self) -> UserError | None:
        before = _hashed(OmegaConf.to_container(OmegaConf.load(self.config_file)))
        ours = _hashed(self.config)
        differing = sorted(key for key in before.keys() | ours.keys() if before.get(key) != ours.get(key))
        if differing:
            return UserError(
                f"run_dir={self.path} holds a run of another config (differs in {', '.join(differing)}); "
                "give another run_dir or fresh=true"
            )
        if self.result_file.is_file():
            return FinishedRun(
                f"this run is finished ({self.path}); change an option, or repeat it from nothing with fresh=true"
            )
        return None

    @rank_zero_only
    def begin(self, target_fingerprint: str | None = None) -> None:
        """Makes the folder and keeps the config, in place of an earlier run that stands there; or goes on in its own.

        Raises:
            UserError: the interrupted run trained against another target.
        """
        begun = self._begun()
        if begun is not None and begun["id"] == self.id:
            if target_fingerprint and begun["target_fingerprint"] != target_fingerprint:
                raise UserError(
                    f"{self.path} was begun with target {begun['target_fingerprint']}, not {target_fingerprint}; "
                    "remove the folder to train for the new target"
                )
            remove_leftovers(self.path)
            return
        facts = {
            "id": self.id,
            "target_fingerprint": target_fingerprint,
            "command": TYPED_COMMAND.get(),
            "attempts": [],
        }

        def write(folder: Path) -> None:
            OmegaConf.save(OmegaConf.create(self.config), folder / self.config_file.name)
            (folder / self._facts_file.name).write_text(json.dumps(facts) + "\n")
            if self._export_file.is_file():  # this run replaces the one that stood here, and its export too
                shutil.copy(self._export_file, folder)

        write_folder(self.path, write, replace=True)

    def held(self) -> AbstractContextManager[None]:
        """Keeps other processes out of the folder: two would write the same checkpoints.

        Raises:
            UserError: on entering; the same command is at work there, if only in ranks that outlived their launcher.
        """
        return locked(self.path, "another process") if rank_zero_only.rank == 0 else nullcontext()

    @rank_zero_only
    def note_attempt(self, done_steps: int, facts: dict) -> None:
        """Adds to run.json that the command was started once more.

        Args:
            done_steps: of the checkpoint that it goes on from, 0 without one.
            facts: of the environment.
        """
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        attempt = {"started": started, "done_steps": done_steps, **facts}
        begun = self._begun()
        begun["attempts"] = [*self.attempts, attempt]
        write_json(self._facts_file, begun)

    @property
    def attempts(self) -> list[dict]:
        """What is known of each start of this run so far."""
        begun = self._begun()
        return begun.get("attempts", []) if begun and begun["id"] == self.id else []

    def metrics_file(self, attempt: int) -> Path:
        return self.path / "metrics" / f"version_{attempt}" / "metrics.csv"

    def curve(self) -> Curve:
        """Every number that was logged, by step, as if the run had never been interrupted."""
        return merged([(facts["done_steps"], self.metrics_file(i)) for i, facts in enumerate(self.attempts)])

    @property
    def _facts_file(self) -> Path:
        return self.path / "run.json"

    def _begun(self) -> dict | None:
        """What `begin` wrote into the folder, if it did."""
        return json.loads(self._facts_file.read_text()) if self._facts_file.is_file() else None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def result_file(self) -> Path:
        return self.path / self.result

    @property
    def checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(self.path / "checkpoints")

    @property
    def best(self) -> BestFolder:
        """The weights that are kept: by tau, or the last."""
        return BestFolder(self.path / "checkpoints" / "best")

    def note_export(self, out: Path) -> None:
        """Says that `out` is about to be this run's export: if a kill leaves it there, the run may replace it."""
        write_json(self._export_file, {"out": str(out.resolve())})

    def exported_to(self, out: Path) -> bool:
        """Whether an earlier attempt of this unfinished run, or the one that it replaced, may have written `out`."""
        if not self._export_file.is_file() or not self.attempts:
            return False
        return json.loads(self._export_file.read_text())["out"] == str(out.resolve())

    def read_result(self) -> dict | None:
        """The numbers that `finish` kept; None of an unfinished run."""
        return json.loads(self.result_file.read_text()) if self.result_file.is_file() else None

    @property
    def _export_file(self) -> Path:
        return self.path / "export.json"

    def finish(self, result: dict) -> None:
        """Marks the run as finished and keeps its numbers."""
        write_json(self.result_file, result)


def plain(name: str) -> str:
    """A name of the characters that W&B takes in ids and artifacts: a folder may be called k=1,loss=hard."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)


def _hashed(config: dict) -> dict:
    kept = {key: value for key, value in config.items() if key not in NOT_HASHED}
    if "trainer" in kept:
        kept["trainer"] = {k: v for k, v in kept["trainer"].items() if k not in NOT_HASHED_OF_TRAINER}
    return kept


def write_folder(destination: Path, write: Callable[[Path], object], replace: bool = False) -> None:
    """Fills a folder through `write(folder)` so that it appears whole or not at all.

    Raises:
        UserError: `destination` exists already and is not to be replaced.
    """
    if not replace:
        refuse_existing(destination)
    remove_leftovers(destination)
    temporary, old = beside(destination)
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        if destination.exists():
            destination.rename(old)  # a kill in the middle of its removal would leave a part of it
        temporary.rename(destination)
    finally:
        remove_leftovers(destination)


def beside(destination: Path) -> tuple[Path, Path]:
    """Where a folder is written before it appears, and where the one that it replaces waits to be removed."""
    return tuple(destination.with_name(f".{destination.name}.{name}") for name in ("partial", "old"))


def remove_leftovers(destination: Path) -> None:
    """Removes what a kill left of either."""
    for leftover in beside(destination):
        shutil.rmtree(leftover, ignore_errors=True)


def refuse_existing(destination: Path) -> None:
    """Raises UserError where an export would replace something."""
    if destination.exists():
        raise UserError(f"out={destination} exists already; give another out or remove it")
