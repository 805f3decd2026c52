"""Checkpoints of a run: the newest whole one, whenever the process is killed.

checkpoints/
    step-00000380.ckpt     the newest: a file, or under DeepSpeed a folder
    .partial.ckpt          one that was being written; never read

A checkpoint is written under the partial name, put on disk, and renamed; only then the one before is removed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from spectrain.decoding.errors import UserError
from spectrain.stores.folder import to_disk

NAME = re.compile(r"step-(\d+)\.ckpt")
PARTIAL = ".partial.ckpt"


class StraightToDisk(TorchCheckpointIO):
    """Writes a checkpoint where it belongs. Lightning's own makes it in memory, copies it there, and moves it by way of
    the system's temporary folder, where a kill would leave it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: object = None) -> None:
        with open(path, "wb") as file:
            torch.save(checkpoint, file)


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
        try:
            trainer.save_checkpoint(partial, weights_only=False)
        except Exception:
            if trainer.is_global_zero:
                _remove(partial)  # a disk that is full needs the room
            raise
        trainer.strategy.barrier("after a checkpoint")
        if trainer.is_global_zero:
            for file in [partial, *partial.rglob("*")] if partial.is_dir() else [partial]:
                to_disk(file)
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


def step_of(checkpoint: Path) -> int:
    """Optimizer steps that were done when it was written."""
    return int(NAME.fullmatch(checkpoint.name)[1])


def whole_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The trained weights of a checkpoint, float32 on the CPU, as the LightningModule calls them.

    DeepSpeed's pieces are put together. Tied weights stand under each of their names.

    Raises:
        UserError: it is damaged.
    """
    check_readable(checkpoint)
    if not checkpoint.is_dir():
        return torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)["state_dict"]
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint  # seconds to import

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # it tells what it finds
        return dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint))


def cut_anew(checkpoint: Path) -> None:
    """Adds to a DeepSpeed checkpoint its universal form, a file a parameter, which any number of ranks can read."""
    folder, latest = checkpoint / "universal", checkpoint / "latest_universal"
    if latest.is_file():
        return
    from deepspeed.checkpoint.ds_to_universal import main as convert

    partial = checkpoint / ".universal.partial"
    for leftover in (partial, folder):
        _remove(leftover)
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    paths = {"input_folder": str(checkpoint / "checkpoint"), "output_folder": str(partial)}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # it tells each step
        convert(argparse.Namespace(**paths, **options, inject_missing_state=True))
    partial.rename(folder)
    latest.write_text(folder.name)  # the converter has named the partial one


def ranks_of(checkpoint: Path) -> int | None:
    """How many ranks a DeepSpeed checkpoint is cut for; None of a plain one, which any number of ranks can read."""
    return len(list(checkpoint.glob("checkpoint/*_optim_states.pt"))) if checkpoint.is_dir() else None


def check_readable(checkpoint: Path) -> None:
    """Raises UserError where a checkpoint is damaged."""
    folder = checkpoint.is_dir()
    try:
        for file in sorted(checkpoint.glob("checkpoint/*.pt")) if folder else [checkpoint]:
            # DeepSpeed's hold objects of its own.
            torch.load(file, map_location="meta", weights_only=not folder, mmap=True)
    except Exception as error:  # torch, pickle and zipfile each raise their own types here
        raise UserError(
            f"checkpoint {checkpoint} cannot be read ({type(error).__name__}); delete it to start over"
        ) from error


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
