"""Run folders: one a resolved config, so that the same command finds its own interrupted run.

runs/spire-1f0c93ab/
    config.yaml        the resolved config
    checkpoints/       last.ckpt, written every few minutes and at an interruption
    run.json           the run's id and its target's fingerprint
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

NOT_HASHED = ("run_dir", "fresh", "logger", "out", "tau", "vanilla")  # they do not change what is trained


@dataclass(frozen=True)
class RunFolder:
    """A run that may begin: a new one, or an interrupted one that goes on."""

    path: Path
    config: dict  # resolved
    replaces: bool  # throw away the earlier run that stands there

    @classmethod
    def find(cls, cfg: DictConfig) -> RunFolder:
        """The folder of this config. Writes nothing.

        An unfinished run of this very config goes on, `fresh` or not; `fresh` replaces a finished or another one.

        Raises:
            UserError: the run is finished already, or the folder holds something else.
        """
        resolved = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        digest = hashlib.sha256(json.dumps(_hashed(resolved), sort_keys=True).encode()).hexdigest()[:8]
        run = cls(Path(cfg.run_dir or f"runs/{cfg.kind}-{digest}"), resolved, replaces=False)
        if rank_zero_only.rank != 0 or not run.path.exists():
            return run
        if not run.config_file.is_file():
            if any(run.path.iterdir()):
                raise UserError(f"run_dir={run.path} is not empty and holds no run; give another run_dir")
            return run
        reason = run._why_not_to_go_on()
        if reason and not cfg.fresh:
            raise UserError(reason)
        return dataclasses.replace(run, replaces=reason is not None)

    def _why_not_to_go_on(self) -> str | None:
        before = _hashed(OmegaConf.to_container(OmegaConf.load(self.config_file)))
        ours = _hashed(self.config)
        differing = sorted(key for key in before.keys() | ours.keys() if before.get(key) != ours.get(key))
        if differing:
            return (
                f"run_dir={self.path} holds a run of another config (differs in {', '.join(differing)}); "
                "give another run_dir or fresh=true"
            )
        if self.result_file.is_file():
            return f"this run is finished ({self.path}); change an option, or repeat it from nothing with fresh=true"
        return None

    @rank_zero_only
    def begin(self, target_fingerprint: str | None = None) -> None:
        """Makes the folder and keeps the config, or goes on in it.

        Raises:
            UserError: the interrupted run trained against another target.
        """
        if self.replaces:
            shutil.rmtree(self.path)
        facts = {"id": f"{self.name}-{uuid.uuid4().hex[:8]}", "target_fingerprint": target_fingerprint}
        if self._facts_file.is_file():
            begun = json.loads(self._facts_file.read_text())
            if target_fingerprint and begun["target_fingerprint"] != target_fingerprint:
                raise UserError(
                    f"{self.path} was begun with target {begun['target_fingerprint']}, not {target_fingerprint}; "
                    "remove the folder to train for the new target"
                )
            return
        self.path.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(OmegaConf.create(self.config), self.config_file)
        self._facts_file.write_text(json.dumps(facts) + "\n")

    @property
    def _facts_file(self) -> Path:
        return self.path / "run.json"

    @property
    def id(self) -> str:
        """A name that no other run has, kept when the run is resumed."""
        if self._facts_file.is_file() and not self.replaces:
            return json.loads(self._facts_file.read_text())["id"]
        return f"{self.name}-{uuid.uuid4().hex[:8]}"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def result_file(self) -> Path:
        return self.path / "result.json"

    @property
    def checkpoint_file(self) -> Path:
        return self.path / "checkpoints" / "last.ckpt"

    def finish(self, result: dict) -> None:
        """Marks the run as finished and keeps its numbers."""
        temporary = self.result_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(result, indent=2) + "\n")
        temporary.rename(self.result_file)


def _hashed(config: dict) -> dict:
    return {key: value for key, value in config.items() if key not in NOT_HASHED}


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
