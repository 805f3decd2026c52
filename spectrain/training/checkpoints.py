"""The weights of a run on disk: the newest whole checkpoint, and the weights that are exported.

checkpoints/
    step-00000380.ckpt     the newest checkpoint: a file, or under DeepSpeed a folder
    .partial.ckpt          one that was being written; never read
    best/
        best.json                    which step, its tau with interval, what was expected, the file below
        step-00000250.safetensors    the trained module's weights, float32, whole, from any strategy

Each is written under another name, put on disk and renamed, and only then is the one before removed. So a kill leaves
the old one or the new one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from spectrain.errors import UserError
from spectrain.stores.folder import read_object, write_json
from spectrain.stores.writing import is_disk_full, rename, to_disk, write_whole

NAME = re.compile(r"step-(\d+)\.ckpt")
PARTIAL = ".partial.ckpt"
FOLDERS = ("checkpoint", "universal")  # of DeepSpeed's pieces, the second as `cut_anew` makes them
PIECES = ("checkpoint/*.pt", "universal/*.pt", "universal/*/*.pt", "universal/*/*/*.pt")  # which DeepSpeed unpickles


class StraightToDisk(TorchCheckpointIO):
    """Writes a checkpoint where it belongs, not by way of memory and the system's temporary folder as Lightning does.

    A kill would leave it there.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: object = None) -> None:
        with open(path, "wb") as file:
            torch.save(checkpoint, file)


@dataclass(frozen=True)
class CheckpointFolder:
    """Where a run keeps its checkpoints. Reading writes nothing."""

    path: Path

    def newest(self) -> Path | None:
        """The whole checkpoint of the latest step, None where there is none."""
        return max(self.all(), key=step_of, default=None)

    def all(self) -> list[Path]:
        """All whole checkpoints: one, but for a kill while the one before was removed."""
        return [file for file in self.path.glob("*") if NAME.fullmatch(file.name)]

    def save(self, trainer: Trainer) -> Path:
        """Write the trainer's state as the newest checkpoint. All ranks call it, after a whole optimizer step."""
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
            to_disk(partial)
            rename(partial, final)
            for checkpoint in self.all():
                if checkpoint != final:
                    _remove(checkpoint)
        trainer.strategy.barrier("renamed a checkpoint")
        return final


def step_of(checkpoint: Path) -> int:
    """Optimizer steps that were done when a checkpoint was written."""
    return int(NAME.fullmatch(checkpoint.name)[1])


def ranks_of(checkpoint: Path) -> int | None:
    """Ranks that a DeepSpeed checkpoint is cut for; None of a plain one, which any number of ranks can read."""
    return len(list(checkpoint.glob("checkpoint/*_optim_states.pt"))) if checkpoint.is_dir() else None


def check_readable(checkpoint: Path) -> None:
    """Raise UserError where a checkpoint is damaged, or would run code of its own when DeepSpeed reads it."""
    with _damage_of(checkpoint):
        if not checkpoint.is_dir():
            torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)  # meta fits any size
            return
        if any(file.read_text() not in FOLDERS for file in checkpoint.glob("latest*")):
            raise ValueError("its pieces lie elsewhere")
        files = [file for pattern in PIECES for file in sorted(checkpoint.glob(pattern))]
        with torch.serialization.safe_globals(_classes_of_deepspeed() if files else []):
            for file in files:
                torch.load(file, map_location="cpu", weights_only=True, mmap=True)


@contextlib.contextmanager
def _damage_of(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # torch, pickle, zipfile and DeepSpeed each raise their own types here
        if is_disk_full(error):
            raise
        raise UserError(
            f"checkpoint {checkpoint} cannot be read ({type(error).__name__}); delete it to start over"
        ) from error


def _classes_of_deepspeed() -> list[type | tuple[Callable, str]]:
    """Return the classes in DeepSpeed's pieces besides tensors and plain values. Importing them takes seconds."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    def member(kind: type, name: str) -> ZeroStageEnum:
        """Stand for `getattr`, by which Python 3.11.2 pickles the member of an enumeration, and for nothing else."""
        if kind is not ZeroStageEnum:
            raise ValueError(f"it takes {name} from {kind}")
        return ZeroStageEnum[name]

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address, (member, "builtins.getattr")]


def whole_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The trained weights of a checkpoint, float32 on the CPU, as the LightningModule calls them.

    DeepSpeed's pieces are put together. Tied weights stand under each of their names. Raises UserError where the
    checkpoint is damaged.
    """
    check_readable(checkpoint)
    if not checkpoint.is_dir():
        return torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)["state_dict"]
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint  # takes seconds to import

    with _damage_of(checkpoint), _quiet():
        return dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint, tag=FOLDERS[0]))


def cut_anew(checkpoint: Path) -> None:
    """Add to a DeepSpeed checkpoint its universal form, one file per parameter, which any number of ranks can read."""
    folder, latest = checkpoint / "universal", checkpoint / "latest_universal"
    if latest.is_file():
        return
    from deepspeed.checkpoint.ds_to_universal import main as convert

    partial = checkpoint / ".universal.partial"
    for leftover in (partial, folder):
        _remove(leftover)
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    paths = {"input_folder": str(checkpoint / "checkpoint"), "output_folder": str(partial)}
    with _damage_of(checkpoint), _quiet():
        convert(argparse.Namespace(**paths, **options, inject_missing_state=True))
    to_disk(partial)
    rename(partial, folder)
    write_whole(latest, folder.name)  # the converter has named the partial one


@contextlib.contextmanager
def _quiet():
    """DeepSpeed's converters print every step."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@dataclass(frozen=True)
class Best:
    """Which weights are kept for the export."""

    step: int
    file: str
    tau: float | None = None  # None: not measured; these are the last step's
    low: float | None = None
    high: float | None = None
    expected: float | None = None  # tau that validation lets expect, by which the best are chosen; None: not known

    def facts(self) -> dict[str, float | int | None]:
        """Step, tau and interval, and the tau that was expected."""
        return {name: value for name, value in asdict(self).items() if name != "file"}


@dataclass(frozen=True)
class BestFolder:
    """The weights that are exported. Reading writes nothing."""

    path: Path

    def read(self) -> Best | None:
        """The facts of the kept weights, None where there are none. Raises UserError where they are damaged."""
        file = self.path / "best.json"
        if not file.is_file():
            return None
        return read_object(file, Best, f"remove {self.path}, and the last weights are taken")

    def weights(self) -> dict[str, Tensor]:
        """The kept weights. Raises UserError where the file is damaged."""
        best = self.read()
        if best is None:
            raise UserError("no step was trained with these options of trainer=; raise max_steps or remove the others")
        try:
            return load_file(self.path / best.file)
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{self.path / best.file} cannot be read ({type(error).__name__}); export the run's last step with "
                "weights=last"
            ) from error

    def offer(
        self,
        step: int,
        weights: dict[str, Tensor],
        tau: tuple[float, float, float] | None = None,
        expected: float | None = None,
    ) -> bool:
        """Keep these weights of a step unless the kept ones are better; of equals the later ones are kept.

        Args:
            step: of the training.
            weights: whole.
            tau: measured, with the bounds of its 95 % interval; None: not measured.
            expected: the tau that validation lets expect, which decides; None: not known, `tau` decides.
        """
        expected = expected if expected is not None and math.isfinite(expected) else None
        best, measured = self.read() or Best(0, ""), tau[0] if tau else None
        for before, now in ((best.expected, expected), (best.tau, measured)):
            if before is not None and now is not None:
                if before > now:
                    return False
                break
        kept = Best(step, f"step-{step:08d}.safetensors", *(tau or (None,) * 3), expected)
        self.path.mkdir(parents=True, exist_ok=True)
        # Clones, because safetensors refuses tied weights, which share memory.
        untied = {name: t.clone(memory_format=torch.contiguous_format) for name, t in weights.items()}
        write_whole(self.path / kept.file, lambda out: save_file(untied, out.name))
        write_json(self.path / "best.json", kept)
        for file in self.path.iterdir():  # the weights of before, and what a kill left: of safetensors' own too
            if file.name not in (kept.file, "best.json"):
                file.unlink()
        return True


def filled(module: nn.Module, weights: dict[str, Tensor], name: str) -> nn.Module:
    """The module with the weights that a training kept under `name`. Raise UserError where it kept others."""
    expected = {f"{name}.{key}": t.shape for key, t in module.state_dict().items()}
    differing = sorted(dict(expected.items() ^ {key: t.shape for key, t in weights.items()}.items()))
    if differing:
        more = ", ..." if len(differing) > 4 else ""
        raise UserError(
            f"the checkpoint does not hold what the run's config.yaml describes (differs in {', '.join(differing[:4])}"
            f"{more}); was config.yaml edited?"
        )
    module.load_state_dict({key.removeprefix(f"{name}."): t for key, t in weights.items()})
    return module


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
