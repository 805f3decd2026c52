"""Run folders: one a resolved config, so that the same command finds its own interrupted run.

runs/spire-1f0c93ab/
    config.yaml        the resolved config
    run.json           the run's id and its target's fingerprint
    checkpoints/       of the latest step, written every few minutes and at an interruption
    metrics/version_0/metrics.csv   every logged number, a folder an attempt
    result.json        written last: the run is finished
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from spectrain.errors import UserError
from spectrain.training.checkpoints import CheckpointFolder

NOT_HASHED = ("run_dir", "fresh", "logger", "out", "tau", "vanilla")  # they do not change what is trained
NOT_HASHED_OF_TRAINER = ("devices", "num_nodes", "log_every_n_steps")  # a run may go on with another number of ranks


class FinishedRun(UserError):
    """The run that was asked for is finished already."""


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
        run = cls(path, resolved, id=f"{path.name}-{uuid.uuid4().hex[:8]}", result=result)
        if rank_zero_only.rank != 0 or not run.path.exists():
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
            return
        if self.config_file.is_file():
            shutil.rmtree(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        facts = {"id": self.id, "target_fingerprint": target_fingerprint}
        OmegaConf.save(OmegaConf.create(self.config), self.config_file)
        self._facts_file.write_text(json.dumps(facts) + "\n")

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

    def finish(self, result: dict) -> None:
        """Marks the run as finished and keeps its numbers."""
        temporary = self.result_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(result, indent=2) + "\n")
        temporary.rename(self.result_file)


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
    temporary = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        if destination.exists():
            shutil.rmtree(destination)
        temporary.rename(destination)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_existing(destination: Path) -> None:
    """Raises UserError where an export would replace something."""
    if destination.exists():
        raise UserError(f"out={destination} exists already; give another out or remove it")
