"""Checkpoints of a run: the newest whole one, whenever the process is killed.

checkpoints/
    step-00000380.ckpt     the newest: a file, or under DeepSpeed a folder
    .partial.ckpt          one that was being written; never read

A checkpoint is written under the partial name, put on disk, and renamed; only then the one before is removed.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from lightning import Trainer

NAME = re.compile(r"step-(\d+)\.ckpt")
PARTIAL = ".partial.ckpt"


@dataclass(frozen=True)
class CheckpointFolder:
    """Where a run keeps its checkpoints. Reading writes nothing."""

    path: Path

    def newest(self) -> Path | None:
        """The whole checkpoint of the latest step, None where there is none."""
        found = self._by_step()
        return found[max(found)] if found else None

    def save(self, trainer: Trainer) -> Path:
        """Writes the trainer's state as the newest checkpoint. All ranks call it, after a whole optimizer step."""
        partial = self.path / PARTIAL
        final = self.path / f"step-{trainer.global_step:08d}.ckpt"
        if trainer.strategy.broadcast(final.exists()):  # of this step, as at the end of a run that had just saved
            return final
        if trainer.is_global_zero:
            self.path.mkdir(parents=True, exist_ok=True)
            _remove(partial)
        trainer.strategy.barrier("before a checkpoint")
        trainer.save_checkpoint(partial, weights_only=False)
        trainer.strategy.barrier("after a checkpoint")
        if trainer.is_global_zero:
            _to_disk(partial)
            partial.rename(final)
            for checkpoint in self._by_step().values():
                if checkpoint != final:
                    _remove(checkpoint)
        trainer.strategy.barrier("renamed a checkpoint")
        return final

    def _by_step(self) -> dict[int, Path]:
        if not self.path.is_dir():
            return {}
        return {int(found[1]): child for child in self.path.iterdir() if (found := NAME.fullmatch(child.name))}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _to_disk(path: Path) -> None:
    """Makes sure that what was written outlives the machine, not only the process."""
    for file in [path, *path.rglob("*")] if path.is_dir() else [path]:
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
