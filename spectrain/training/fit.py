"""Lightning's Trainer of a config, and what every training goes through with it.

`config` is the whole resolved config; its `trainer` node holds the Trainer's arguments. A training runs on one process,
or on the ranks that torchrun or Lightning starts.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from lightning import Callback, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from spectrain.decoding import fingerprint
from spectrain.decoding.memory import is_out_of_memory
from spectrain.errors import UserError
from spectrain.stores.environment import commit_of, environment
from spectrain.stores.locations import PACKAGE
from spectrain.training.callbacks import (
    Checkpoints,
    KeepBest,
    ProgressBar,
    ProgressLines,
    StopOnBadLoss,
    TokensPerSecond,
)
from spectrain.training.checkpoints import StraightToDisk, check_readable, cut_anew, ranks_of
from spectrain.training.experiments import Experiment
from spectrain.training.loggers import keep_config, loggers
from spectrain.training.precision import precision_of
from spectrain.training.runs import RunFolder
from spectrain.training.strategies import ZeroStrategy, strategy, uses_gpu

log = logging.getLogger(__name__)

OURS = ("strategy", "activation_checkpointing")  # options of the `trainer` node that are not Lightning's
LOST_RANK = ("Connection closed by peer", "Connection reset by peer")  # as gloo says it
Measure = Callable[[dict[str, Tensor]], tuple[float, float, float]]


def fit(
    config: Mapping, run: RunFolder, experiment: Experiment, measure: Measure | None = None, in_sweep: bool = False
) -> Trainer:
    """Train, or resume where the run was interrupted, and validate.

    Args:
        config: the whole config.
        run: where checkpoints and metrics go; begun here.
        experiment: what is trained.
        measure: tau of whole weights, with the bounds of its 95 % interval; the best weights are kept in `run.best`.
            None: the last are.
        in_sweep: whether this is one of several trainings of one command.

    Raises:
        UserError: the trainer's hardware is missing, there are too few rows, the checkpoint
            cannot be read, the loss is no number any more, or memory runs out.
    """
    module, data, target = experiment.module, experiment.data, experiment.module.target
    trainer = build_trainer(config, callbacks(config, run, measure), loggers(config["logger"], run), in_sweep)
    check_batches(config, trainer, len(data.train))
    run.begin(fingerprint(target.model, target.tokenizer) if target else None)
    if experiment.source:
        run.keep_to(experiment.source)
    log.info("run folder: %s", run.path)
    meet(trainer)  # no rank looks for a checkpoint before rank zero has begun the run
    checkpoint = run.checkpoints.newest()
    if checkpoint:
        log.info("resuming from %s", checkpoint)
        prepare_resume(checkpoint, trainer)
    if config["trainer"]["activation_checkpointing"]:
        module.recompute_activations()
    keep_config(trainer, run)
    facts = {"code": commit_of(PACKAGE), "environment": environment(trainer.world_size)}
    run.note_attempt(run.checkpoint_step, facts)
    with naming_the_remedy(config["data"]):
        if not checkpoint:
            with trainer.precision_plugin.forward_context():  # as the steps, and as stores were computed
                module.begin(data.train)
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
        trainer.validate(module, datamodule=data, verbose=False)
    return trainer


def final_metrics(trainer: Trainer) -> dict[str, float]:
    """The metrics of the last validation and the last step, by name."""
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def callbacks(config: Mapping, run: RunFolder, measure: Measure | None) -> list[Callback]:
    """In the order in which they act: what a checkpoint speaks of is done before it is written."""
    return [
        TokensPerSecond(),
        StopOnBadLoss(run.checkpoints),
        KeepBest(run.best, measure, config["select"]["every"]),
        Checkpoints(run.checkpoints, config["checkpoint_s"]),
        ProgressBar(leave=True) if sys.stderr.isatty() else ProgressLines(),
    ]


@contextmanager
def naming_the_remedy(data: Mapping) -> Iterator[None]:
    """Turn running out of memory, and losing another rank, into a UserError that says what to change."""
    try:
        yield
    except Exception as error:
        lost = isinstance(error, RuntimeError) and any(said in str(error) for said in LOST_RANK)
        if lost or isinstance(error, torch.distributed.DistError):
            raise UserError(
                "another rank ended, and this one cannot go on alone; see what it said, then give the same command"
            ) from error
        if not is_out_of_memory(error):
            raise
        rank = f" on rank {rank_zero_only.rank}" if rank_zero_only.rank else ""
        raise UserError(
            f"out of memory{rank}: lower data.batch_size={data['batch_size']} (and raise "
            f"trainer.accumulate_grad_batches) or data.row_tokens={data['row_tokens']}, or give "
            "trainer.activation_checkpointing=true"
        ) from error


def build_trainer(config: Mapping, callbacks: list[Callback], loggers: list[Logger], in_sweep: bool = False) -> Trainer:
    """The Trainer of a config; writes nothing yet.

    Raise UserError where Lightning does not take the `trainer` node, or ranks cannot share a batch or a sweep.
    """
    precision = precision_of(config["trainer"])
    if str(precision).startswith("16"):  # the gradients of `losses.py` are computed with the loss
        raise UserError(
            f"trainer.precision={precision} would round gradients before they are scaled; give bf16-mixed or 32-true"
        )
    options = {name: value for name, value in config["trainer"].items() if name not in OURS}
    options |= {"precision": precision, **ranks_of_torchrun()}
    try:
        trainer = Trainer(
            **options,
            strategy=strategy(config),
            max_steps=config["max_steps"],
            check_val_every_n_epoch=None,  # val_check_interval counts batches of the run, not of an epoch
            use_distributed_sampler=False,  # SeededLoader gives each rank its share
            callbacks=callbacks,
            logger=loggers,
            plugins=[StraightToDisk()],
            enable_progress_bar=sys.stderr.isatty(),
            enable_checkpointing=False,  # Checkpoints saves, at whole steps only
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
    except Exception as error:  # what Lightning raises of its options has no type in common
        line = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
        raise UserError(
            f"the trainer cannot be made as configured ({line}); change trainer=... or its options"
        ) from error
    if in_sweep and trainer.world_size > 1 and not ranks_of_torchrun():
        raise UserError(  # Lightning starts the other ranks with this very command: each would run the whole sweep
            f"-m on {trainer.world_size} ranks needs torchrun --nproc-per-node {trainer.world_size} -m spectrain.train "
            "... -m; or give trainer.devices=1"
        )
    batch_size = config["data"]["batch_size"]
    if batch_size % trainer.world_size:
        raise UserError(
            f"data.batch_size={batch_size} rows cannot be shared out evenly by {trainer.world_size} ranks; give a "
            f"multiple of {trainer.world_size}, or fewer ranks"
        )
    return trainer


def target_device(config: Mapping) -> str:
    """Where the frozen target runs: with the trainer."""
    accelerator, rank = config["trainer"]["accelerator"], os.environ.get("LOCAL_RANK")
    if accelerator == "cpu":
        return "cpu"
    return f"cuda:{rank}" if rank is not None and uses_gpu(accelerator) else config["target"]["device"]


def ranks_of_torchrun() -> dict[str, int]:
    """The values under torchrun of trainer.devices and trainer.num_nodes; {} without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return {}
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    return {"devices": local, "num_nodes": world // local}


def check_batches(config: Mapping, trainer: Trainer, n_rows: int) -> None:
    """Raise UserError where the training rows make no batch, or no whole steps.

    DeepSpeed would carry a gradient from one epoch into the next, which Lightning does not count.
    """
    batch_size, accumulated = config["data"]["batch_size"], config["trainer"]["accumulate_grad_batches"]
    n_batches = n_rows // batch_size
    if not n_batches:
        raise UserError(
            f"there are {n_rows} training rows, fewer than one batch of {batch_size}; lower data.batch_size or "
            "data.row_tokens, or give more text"
        )
    left = n_batches % accumulated and trainer.max_steps > n_batches // accumulated
    if left and isinstance(trainer.strategy, ZeroStrategy):
        raise UserError(
            f"trainer.accumulate_grad_batches={accumulated} does not divide the {n_batches} batches of an epoch, as it "
            "must under DeepSpeed; give a divisor, or trainer=ddp"
        )


def prepare_resume(checkpoint: Path, trainer: Trainer) -> None:
    """Make sure that this trainer can resume from a checkpoint, if need be by cutting it for other ranks.

    Raise UserError where it is damaged, or was written with DeepSpeed and is read without, or the other way.
    """
    sharded, ranks = isinstance(trainer.strategy, ZeroStrategy), ranks_of(checkpoint)
    if sharded != (ranks is not None):
        before, now = ("without", "with") if sharded else ("with", "without")
        raise UserError(
            f"{checkpoint} was written {before} DeepSpeed and cannot be resumed {now} it; give the trainer=... that "
            "began the run, or another run_dir"
        )
    check_readable(checkpoint)
    if sharded and ranks != trainer.world_size:
        if trainer.is_global_zero:
            cut_anew(checkpoint)
        trainer.strategy.read_universal()
        meet(trainer)


def meet(trainer: Trainer) -> None:
    """Under torchrun, wait for all ranks; Lightning starts the others itself, later."""
    if ranks_of_torchrun() and trainer.world_size > 1:
        trainer.strategy.setup_environment()
        trainer.strategy.barrier("met")
