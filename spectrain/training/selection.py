"""The weights that a run keeps: the best by tau where it can be measured, else the last.

checkpoints/best/
    best.json                    which step, its tau and interval, and the file below
    step-00000250.safetensors    the trained module's weights, float32, whole, from any strategy

The weights are written first, then best.json is replaced: a kill leaves the old best or the new one.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning import Callback, LightningModule, Trainer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from spectrain.decoding.errors import UserError
from spectrain.stores.folder import write_json
from spectrain.training.strategies import whole_state

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tau:
    """Tokens a target forward in the real loop, with a 95 % interval over contexts."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def metrics(self) -> dict[str, float]:
        """As they are logged."""
        return {"eval/tau": self.value, "eval/tau_low": self.low, "eval/tau_high": self.high}


@dataclass(frozen=True)
class Best:
    """Which weights are kept."""

    step: int
    file: str
    tau: float | None = None  # None: not measured, the last step's
    low: float | None = None
    high: float | None = None

    def facts(self) -> dict[str, float | int | None]:
        """Step, tau and interval."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "file"}


@dataclass(frozen=True)
class BestFolder:
    """Where they lie. Reading writes nothing."""

    path: Path

    def read(self) -> Best | None:
        """Raises UserError where it is damaged."""
        file = self.path / "best.json"
        try:
            return Best(**json.loads(file.read_text())) if file.is_file() else None
        except (ValueError, TypeError) as error:
            raise UserError(
                f"{file} cannot be read ({type(error).__name__}); remove {self.path}, and the last weights are taken"
            ) from error

    def weights(self) -> dict[str, Tensor]:
        """The kept weights.

        Raises:
            UserError: the file is damaged.
        """
        best = self.read()
        assert best is not None, f"{self.path} holds no weights: the fit ended without on_train_end"
        try:
            return load_file(self.path / best.file)
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{self.path / best.file} cannot be read ({type(error).__name__}); export the run's last step with "
                "weights=last"
            ) from error

    def offer(self, step: int, weights: dict[str, Tensor], tau: Tau | None = None) -> bool:
        """Keeps these weights unless the kept ones have a higher tau; of equals the later ones are kept."""
        best = self.read()
        if tau and best and best.tau is not None and best.tau > tau.value:
            return False
        kept = Best(step, f"step-{step:08d}.safetensors", *((tau.value, tau.low, tau.high) if tau else ()))
        self.path.mkdir(parents=True, exist_ok=True)
        partial = self.path / ".partial.safetensors"
        try:
            save_file(untied(weights), partial)
            partial.replace(self.path / kept.file)
        finally:
            partial.unlink(missing_ok=True)  # a disk that is full needs the room
        write_json(self.path / "best.json", kept)
        for file in self.path.iterdir():  # the weights of before, and what a kill left: of safetensors' own too
            if file.name not in (kept.file, "best.json"):
                file.unlink()
        return True


def under(weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """Of a training's weights, those of its submodule `name`, as that submodule calls them."""
    start = f"{name}."
    return {full.removeprefix(start): t for full, t in weights.items() if full.startswith(start)}


def load_under(module: nn.Module, weights: dict[str, Tensor], name: str) -> None:
    """Gives a module the weights that a training kept under `name`, and that it kept alone.

    Raises:
        UserError: names or shapes differ from the module's.
    """
    expected = {f"{name}.{key}": t.shape for key, t in module.state_dict().items()}
    found = {key: t.shape for key, t in weights.items()}
    differing = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
    if differing:
        raise UserError(
            f"the checkpoint does not hold what the run's config.yaml describes (differs in {', '.join(differing[:4])}"
            f"{', ...' if len(differing) > 4 else ''}); was config.yaml edited?"
        )
    module.load_state_dict(under(weights, name))


def untied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights that share no memory, which safetensors refuses."""
    seen: set[int] = set()
    found = {}
    for name, t in weights.items():
        found[name] = t.clone() if t.data_ptr() in seen else t.contiguous()
        seen.add(t.data_ptr())
    return found


class KeepBest(Callback):
    """Measures tau after every `every` validations and at the end, logs it as `eval/tau`, and keeps the best weights.

    Rank zero decodes, the others wait. Give it before `Checkpoints`, whose last checkpoint says that this is done.

    Args:
        folder: where the weights are kept.
        measure: tau of whole weights, in the real loop; called on rank zero only. None: the last weights are kept.
        every: validations between two measurements; 0: never, the last weights are kept.
    """

    def __init__(
        self, folder: BestFolder, measure: Callable[[dict[str, Tensor]], Tau] | None = None, every: int = 1
    ) -> None:
        self.folder, self.measure, self.every = folder, measure if every else None, every
        self._validations = 0
        self._step = -1  # of the last measurement

    def on_validation_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        self._validations += 1
        if self.measure is None or self._validations % self.every:
            return
        tau = self._offer(trainer, module)
        for name, value in tau.metrics().items():
            module.log(name, value, sync_dist=True, prog_bar=name == "eval/tau")  # equal on all ranks

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        if self._step == trainer.global_step:  # its last validation has just measured it
            return
        tau = self._offer(trainer, module)
        for logger in trainer.loggers if tau else ():
            logger.log_metrics(tau.metrics(), step=trainer.global_step - 1)  # the number that Lightning gives the step
            logger.save()

    def _offer(self, trainer: Trainer, module: LightningModule) -> Tau | None:
        """Measures the weights and keeps them if they are the best. All ranks call it."""
        weights, tau = whole_state(trainer, module), None
        if weights is not None:
            tau = self.measure(weights) if self.measure else None
            kept = self.folder.offer(trainer.global_step, weights, tau)
            if tau:
                log.info("step %d: tau %s%s", trainer.global_step, tau, ", the best so far" if kept else "")
        self._step = trainer.global_step
        return trainer.strategy.broadcast(tau)

    def state_dict(self) -> dict[str, int]:
        return {"validations": self._validations, "step": self._step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._validations, self._step = state["validations"], state["step"]
