"""Run folders: one a resolved config, so that the same command finds its own interrupted run.

runs/spire-1f0c93ab/
    config.yaml        the resolved config
    checkpoints/       last.ckpt, written every few minutes and at an interruption
    metrics/0/metrics.csv   every logged number, a folder an attempt
    result.json        written last: the run is finished
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from spectrain.errors import UserError

NOT_HASHED = ("run_dir", "fresh", "logger", "out")  # they do not change what is trained


@dataclass(frozen=True)
class RunFolder:
    """A run that may begin: a new one, or an interrupted one that goes on."""

    path: Path
    config: dict  # resolved
    fresh: bool

    @classmethod
    def find(cls, cfg: DictConfig) -> RunFolder:
        """The folder of this config. Writes nothing.

        Raises:
            UserError: the run is finished already, or the folder holds something else.
        """
        resolved = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
        digest = hashlib.sha256(json.dumps(_hashed(resolved), sort_keys=True).encode()).hexdigest()[:8]
        run = cls(Path(cfg.run_dir or f"runs/{cfg.kind}-{digest}"), resolved, cfg.fresh)
        if run.config_file.is_file():
            if not run.fresh:
                run._refuse_other()
        elif run.path.exists() and any(run.path.iterdir()):
            raise UserError(f"run_dir={run.path} is not empty and holds no run; give another run_dir")
        return run

    def _refuse_other(self) -> None:
        before = _hashed(OmegaConf.to_container(OmegaConf.load(self.config_file)))
        ours = _hashed(self.config)
        differing = sorted(key for key in before.keys() | ours.keys() if before.get(key) != ours.get(key))
        if differing:
            raise UserError(
                f"run_dir={self.path} holds a run of another config (differs in {', '.join(differing)}); "
                "give another run_dir or fresh=true"
            )
        if self.result_file.is_file():
            raise UserError(
                f"this run is finished ({self.path}); change an option, or repeat it from nothing with fresh=true"
            )

    def begin(self) -> None:
        """Makes the folder and keeps the config; with `fresh`, throws the earlier run away first."""
        if self.fresh and self.config_file.is_file():
            shutil.rmtree(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(OmegaConf.create(self.config), self.config_file)

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


def write_folder(destination: Path, write: Callable[[Path], object]) -> None:
    """Fills a folder through `write(folder)` so that it appears whole or not at all.

    Raises:
        UserError: `destination` exists already.
    """
    refuse_existing(destination)
    temporary = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        temporary.rename(destination)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_existing(destination: Path) -> None:
    """Raises UserError where an export would replace something."""
    if destination.exists():
        raise UserError(f"out={destination} exists already; give another out or remove it")
