"""What every kind of training shares. Each kind is a module of this package with its own two classes.

The `Training` of a kind is its Lightning module: training and validation steps. The `Experiment` puts it together from
the run's config, and says what its weights make. Its options are a class of config/training.py.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from hydra.utils import get_class
from lightning import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from spectrain.config.training import Train
from spectrain.decoding import Drafter
from spectrain.errors import UserError
from spectrain.target import TargetModel
from spectrain.training.data import RowBatch, RowData, Rows
from spectrain.training.losses import chunk_loss
from spectrain.training.optim import OptimizerSettings, build_optimizer, warmup_then_down
from spectrain.training.runs import RunFolder
from spectrain.training.sources import Source
from spectrain.training.strategies import FSDP2Strategy, divide_gradients
from spectrain.training.sums import Sums

log = logging.getLogger(__name__)

MOST_PASSES = 10  # over the training rows, if tokens_per_parameter says how many steps there are
IN_PROGRESS_BAR = ("eval/alpha", "eval/tau_expected", "eval/kl_binary", "eval/calibration_error")


class Training(LightningModule):
    """The base of all trainings: an optimizer, the sums of a validation, and a target that is only read.

    A frozen target is no submodule: it stays out of the optimizer and of checkpoints.
    """

    fits_input = False  # whether `begin` fits the drafter's input
    compiles = False  # whether blocks and loss are compiled before the first step
    chunk_loss: Callable | None = None  # `losses.chunk_loss`, once it is compiled

    def __init__(self, optimizer: OptimizerSettings, sums: Sums, target: TargetModel | None) -> None:
        super().__init__()
        self.optimizer_settings, self.sums, self.target = optimizer, sums, target
        self._step_sums: dict[str, Tensor] = {}  # of the optimizer step, by metric: a sum and its weight, float64

    def setup(self, stage: str) -> None:
        if self.target is not None:
            self.target.to(self.device)
        if self.compiles:
            self.compile_blocks()
            self.compiles = False

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, FSDP2Strategy) and not isinstance(self, FSDPModule):
            self.trainer.strategy.shard(self, self.plain_blocks)

    @property
    def plain_blocks(self) -> list[nn.Module]:
        """The blocks whose weights a step reads in their `forward` alone, once: FSDP2 gathers them one by one."""
        return []

    def compile_blocks(self, backend: str = "inductor") -> None:
        """Compile what takes most of a step: the blocks of models, where they are ours, and the loss."""
        self.chunk_loss = compiled(chunk_loss, backend)
        if self.target is not None and self.target.device.type != "cpu":  # where it has kernels of its own
            compile_methods(self.target.text_blocks, ("before_in_text", "after_in_text"), backend)

    def summed(self, **sums: tuple[Tensor, Tensor]) -> Tensor:
        """Return the sum `loss` of a batch, for the backward pass.

        Args:
            sums: for each metric its sum over the batch, and the weight of that sum, usually the number of positions.
                At the optimizer step, those of all batches and ranks are added. The total sum, like the gradient, is
                divided by the total weight.
        """
        for name, pair in sums.items():
            self._step_sums[name] = self._step_sums.get(name, 0) + torch.stack([one.detach().double() for one in pair])
        return sums["loss"][0]

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if self.trainer.fit_loop._should_accumulate():  # DeepSpeed comes here with each batch
            return
        sums = self.trainer.strategy.reduce(torch.stack([*self._step_sums.values()]), reduce_op="sum").tolist()
        for name, (total, weight) in zip(self._step_sums, sums, strict=True):
            self.log(f"train/{name}", total / (weight or 1), prog_bar=name in ("loss", "alpha"))
            if name == "loss":
                divide_gradients(self.trainer, weight or 1)
        self._step_sums.clear()

    def begin(self, rows: Rows) -> None:
        """Do what a training from its first step begins with, and a resumed one does not; all ranks call it."""

    def on_validation_epoch_start(self) -> None:
        self.sums.reset()

    def on_validation_epoch_end(self) -> None:
        for name, value in self.sums.compute().items():  # equal on all ranks
            self.log(name, value, sync_dist=True, prog_bar=name in IN_PROGRESS_BAR)

    def configure_optimizers(self) -> dict:
        settings = self.optimizer_settings
        if settings.lr is None:
            settings = replace(settings, lr=settings.lr_times_width / self.width)
            log.info("learning rate %.2g at width %d", settings.lr, self.width)
        optimizer = build_optimizer(self.named_parameters(), settings)
        schedule = warmup_then_down(optimizer, settings, lambda: self.trainer.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def objective(self, batch: RowBatch) -> Tensor:
        """Return the loss of a batch, as `training_step` computes it in the first epoch; of drafters only."""
        raise NotImplementedError

    @property
    @abstractmethod
    def width(self) -> int:
        """The width of what is trained, with which the learning rate falls."""

    @abstractmethod
    def recompute_activations(self) -> None:
        """Compute the inside of blocks again in the backward pass, in place of keeping it."""


def compiled(function: Callable, backend: str) -> Callable:
    """Return a function compiled for all sizes. One that cannot be compiled, or too often, raises: it never runs as is.

    The graph of a block is the same for all blocks, because weights are inputs of it.
    """
    return torch.compile(function, fullgraph=True, dynamic=True, backend=backend)


def compile_methods(modules: Iterable[nn.Module], names: Sequence[str], backend: str) -> None:
    """Compile methods of modules in place; names of weights stay as they are."""
    for module in modules:
        for name in names:
            setattr(module, name, compiled(getattr(module, name), backend))


@dataclass(frozen=True)
class Parts:
    """A training that is put together."""

    module: Training
    data: RowData
    source: dict = field(default_factory=dict)  # what a resumed run must find again, besides the module's target


class Experiment(ABC):
    """One kind of training, of a run's resolved config. Raise UserError where an option does not fit the target."""

    drafts: bool = False  # whether the model drafts by itself; then its tau is measured
    sources: tuple[str, ...] = ("online",)  # values of `data` that it can be trained with
    has_target: bool = True  # whether it is trained for a target
    exports: str  # the kind of folder that it is exported to, see `spectrain.models.kinds`

    def __init__(self, run: RunFolder, data: Source, open_target: Callable[[], TargetModel]) -> None:
        if data.source not in self.sources:
            known = " or ".join(f"data={source}" for source in self.sources)
            raise UserError(f"data={data.source} is for other experiments than +exp={run.config.kind}; give {known}")
        self.run, self.config, self.own, self.data = run, run.config, run.config.own, data
        self.target = open_target() if self.has_target else None

    @staticmethod
    def needs_blocks(config: Train) -> bool:
        """Whether a training of this config runs the target's blocks; else the target may have its tables alone."""
        return True

    @abstractmethod
    def prepare(self) -> Parts:
        """Put the training together. Raise UserError where there are too few rows."""

    def blank(self) -> Training:
        """Return the training of a new model, without data; of drafters only."""
        raise NotImplementedError

    @abstractmethod
    def save(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write the model of the module's whole weights, with its config, into an export folder."""

    def drafter(self, weights: dict[str, Tensor]) -> Drafter | None:
        """The method that decodes with these weights, as they are exported; None: nothing drafts with them alone."""
        return None

    def steps_of(self, n_trained: int, n_rows: int | None = None) -> int:
        """Return the optimizer steps of `max_steps`, else of `epochs`, else of `tokens_per_parameter`.

        Args:
            n_trained: parameters that are trained.
            n_rows: for training; None: not known yet, and passes over the text are not bounded.
        """
        config = self.config
        if config.max_steps is not None:
            return config.max_steps
        n_rows_read = config.own.tokens_per_parameter * n_trained / config.data.row_tokens
        epochs = getattr(config.own, "epochs", None)  # which not every kind has
        if n_rows is not None and epochs is not None:
            n_rows_read = epochs * n_rows
        elif n_rows is not None and n_rows_read > MOST_PASSES * n_rows:
            log.warning(
                "tokens_per_parameter=%g asks for %.0f passes over the text, but at most %d are made; give more "
                "text or max_steps",
                *(config.own.tokens_per_parameter, n_rows_read / n_rows, MOST_PASSES),
            )
            n_rows_read = MOST_PASSES * n_rows
        return max(1, round(n_rows_read / (config.data.batch_size * config.trainer.accumulate_grad_batches)))


def experiment_type(config: Train) -> type[Experiment]:
    """Return the class that a training's config names as `experiment._target_`."""
    return get_class(config.experiment["_target_"])


def open_experiment(run: RunFolder, open_target: Callable[[], TargetModel]) -> Experiment:
    """Return the experiment of a run, with the source of rows that its config's `data` node names."""
    return experiment_type(run.config)(run, get_class(run.config.data._target_)(**vars(run.config.data)), open_target)
