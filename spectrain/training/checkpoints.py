"""The weights of a run on disk: the newest checkpoint, and the weights that are exported.

checkpoints/
    step-00000380.ckpt     the newest checkpoint: a file, or a folder under DeepSpeed
    .partial.ckpt          a checkpoint that was being written; never read
    begun.pt               the weights of a new drafter whose input was fitted, until the first checkpoint
    best/
        best.json                    their step, the expected tau, and the file below
        step-00000250.safetensors    the whole weights of the trained module in float32, from any strategy

Each is written under another name and renamed, and the one before is removed only then. A kill leaves the old one or
the new one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from spectrain.errors import UserError
from spectrain.stores.files import read_json, rename, to_disk, write_json, write_whole

NAME = re.compile(r"step-(\d+)\.ckpt")
PARTIAL = ".partial.ckpt"


@dataclass(frozen=True)
class CheckpointFolder:
    """Where a run keeps its checkpoints. Reading writes nothing."""

    path: Path

    @property
    def begun(self) -> Path:
        """Where the weights are kept that a training begins with, if they were fitted, until the first checkpoint."""
        return self.path / "begun.pt"

    def newest(self) -> Path | None:
        """The whole checkpoint of the latest step, None where there is none."""
        return max((file for file in self.path.glob("*") if NAME.fullmatch(file.name)), key=step_of, default=None)

    def replace(self, partial: Path, final: Path) -> None:
        """Give a checkpoint that was written its name, and remove the others."""
        to_disk(partial)
        rename(partial, final)
        for file in (self.begun, *self.path.glob("step-*.ckpt")):
            if file.name != final.name:
                remove(file)


def step_of(checkpoint: Path) -> int:
    """Optimizer steps that were done when a checkpoint was written."""
    return int(NAME.fullmatch(checkpoint.name)[1])


def ranks_of(checkpoint: Path) -> int | None:
    """Ranks that a DeepSpeed checkpoint is divided for; None of a plain one, which any number of ranks can read."""
    return len(list(checkpoint.glob("checkpoint/*_optim_states.pt"))) if checkpoint.is_dir() else None


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Keep what DeepSpeed's converters print off the terminal."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def whole_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The trained weights of a checkpoint, float32 on the CPU, as the LightningModule calls them.

    DeepSpeed's shards are put together. Tied weights stand under each of their names.
    """
    if not checkpoint.is_dir():
        return read_file(checkpoint)["state_dict"]
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint  # takes seconds to import

    with silenced():
        return dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint, tag="checkpoint"))


def read_file(checkpoint: str | Path) -> dict:
    """A plain checkpoint, whose tensors are read from the disk only where they are used."""
    return torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)


def reshard(checkpoint: Path) -> None:
    """Add to a DeepSpeed checkpoint its universal form, one file per parameter, which any number of ranks can read."""
    folder, latest = checkpoint / "universal", checkpoint / "latest_universal"
    if latest.is_file():
        return
    from deepspeed.checkpoint.ds_to_universal import main as convert

    partial = checkpoint / ".universal.partial"
    for leftover in (partial, folder):
        remove(leftover)
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    paths = {"input_folder": str(checkpoint / "checkpoint"), "output_folder": str(partial)}
    with silenced():
        convert(argparse.Namespace(**paths, **options, inject_missing_state=True))
    to_disk(partial)
    rename(partial, folder)
    write_whole(latest, folder.name)  # the converter has named the partial one


@dataclass(frozen=True)
class Best:
    """Which weights are kept for the export."""

    step: int
    file: str
    expected: float | None = None  # tau that validation lets expect; None: not known, these are the last step's

    def facts(self) -> dict[str, float | int | None]:
        return {"step": self.step, "expected": self.expected}


@dataclass(frozen=True)
class BestFolder:
    """The weights that are exported. Reading writes nothing."""

    path: Path

    def read(self) -> Best | None:
        """The facts of the kept weights, None where there are none."""
        file = self.path / "best.json"
        return Best(**read_json(file)) if file.exists() else None

    def weights(self) -> dict[str, Tensor]:
        """The kept weights. Raises UserError where there are none."""
        best = self.read()
        if best is None:
            raise UserError("no step was trained with these options of trainer=; raise max_steps or remove the others")
        return load_file(self.path / best.file)

    def offer(self, step: int, weights: dict[str, Tensor], expected: float | None = None) -> bool:
        """Keep these whole weights of a step unless the kept ones are better; of equals the later ones are kept.

        `expected` is the tau that validation lets expect. Weights of which it is not known replace any others.
        """
        best = self.read()
        if expected is not None and best is not None and best.expected is not None and best.expected > expected:
            return False
        kept = Best(step, f"step-{step:08d}.safetensors", expected)
        self.path.mkdir(parents=True, exist_ok=True)
        # Clones, because safetensors refuses tied weights, which share memory.
        untied = {name: t.clone(memory_format=torch.contiguous_format) for name, t in weights.items()}
        write_whole(self.path / kept.file, lambda out: save_file(untied, out.name))
        write_json(self.path / "best.json", kept)
        for file in self.path.iterdir():  # the weights of before, and what a kill left
            if file.name not in (kept.file, "best.json"):
                file.unlink()
        return True


def load_weights(module: nn.Module, weights: dict[str, Tensor], name: str) -> nn.Module:
    """Load the weights that a training kept under `name`."""
    module.load_state_dict({key.removeprefix(f"{name}."): t for key, t in weights.items()})
    return module


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
