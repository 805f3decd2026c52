"""Lightning's Trainer of a run, and what every training goes through with it.

A training runs on one process, or on the ranks that torchrun or Lightning starts.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from hydra.utils import instantiate
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch.utils._triton import has_triton

from spectrain.config import PACKAGE, plain
from spectrain.config.training import Data, Train
from spectrain.config.training import Trainer as TrainerOptions
from spectrain.data.overlap import TRAINED_ON, Sample
from spectrain.errors import LostRankError, UserError
from spectrain.stores.environment import commit_of, environment
from spectrain.stores.files import write_whole
from spectrain.target import fingerprint
from spectrain.target.device import is_out_of_memory
from spectrain.terminal import stage
from spectrain.training.base import Parts
from spectrain.training.callbacks import UNKNOWN_STEPS, callbacks
from spectrain.training.checkpoints import ranks_of, read_file, reshard
from spectrain.training.loggers import of_wandb
from spectrain.training.runs import RunFolder
from spectrain.training.strategies import ZeroStrategy, check_shared, precision_of, ranks_of_torchrun, uses_gpu

log = logging.getLogger(__name__)

OWN_OPTIONS = ("activation_checkpointing", "compile")  # of `trainer`, which Lightning does not know
POLL_S = 0.1
ENDS_WITHIN_S = 10.0  # a process that has closed its connections
LOST_RANK = ("Connection closed by peer", "Connection reset by peer")  # as gloo says it


def fit(
    run: RunFolder,
    parts: Parts,
    max_steps: int,
    in_sweep: bool = False,
    peak_tokens_per_s: float | None = None,
    ends_s: float | None = None,
) -> Trainer:
    """Train, or resume where the run was interrupted, and validate. The run, where checkpoints go, is begun here.

    `in_sweep`: this is one of several trainings of one command. For `peak_tokens_per_s` see `TokensPerSecond`,
    for `ends_s` `StepsForHours`.

    Raises:
        UserError: the trainer's hardware is missing, there are too few rows, the loss is no number any more, or memory
            runs out.
    """
    config, module, data, target = run.config, parts.module, parts.data, parts.module.target
    loggers = instantiate(config.logger, _partial_=True, _convert_="all")(run)
    trainer = build_trainer(
        config, max_steps, callbacks(config, run, peak_tokens_per_s, ends_s, len(data.train)), loggers, in_sweep
    )
    check_batches(config, trainer, len(data.train))
    run.begin()
    if max_steps != UNKNOWN_STEPS:
        run.note_steps(max_steps)
    if target:
        rows = {"corpus": data.digest} if data.digest else {}
        run.keep_to({"target": fingerprint(target.model, target.tokenizer)} | rows | parts.source)
    log.info("run folder: %s", run.path)
    if trainer.is_global_zero and not (run.path / TRAINED_ON).is_file():
        with stage("noting which text is trained on"):
            Sample.of(data.train.texts()).save(run.path)
    barrier(trainer)  # no rank looks for a checkpoint before rank zero has begun the run
    checkpoint, begun = run.checkpoints.newest(), run.checkpoints.begun.is_file()
    if checkpoint:
        log.info("resuming from %s", checkpoint)
        prepare_resume(checkpoint, trainer)
    if config.trainer.activation_checkpointing:
        module.recompute_activations()
    module.compiles = compiles(config.trainer, trainer)
    facts = {"code": commit_of(PACKAGE), "environment": environment(trainer.world_size)}
    run.note_attempt(run.checkpoint_step, facts)
    for logger in of_wandb(trainer):
        logger.experiment.define_metric("eval/tau_expected", summary="max")  # by which sweeps choose
    with naming_the_remedy(config.data, trainer), ExitStack() as until_steps:
        until_steps.enter_context(stage(f"resuming from {checkpoint}" if checkpoint else "preparing the first step"))
        trainer.callbacks.insert(0, LambdaCallback(on_train_start=lambda *_: until_steps.close()))
        if not checkpoint and begun:
            module.load_state_dict(read_file(run.checkpoints.begun))
        elif not checkpoint:
            with trainer.precision_plugin.forward_context():  # as the steps, and as stores were computed
                module.begin(data.train)
            barrier(trainer)  # all ranks have looked
            if module.fits_input and trainer.is_global_zero:
                run.checkpoints.path.mkdir(exist_ok=True)
                write_whole(run.checkpoints.begun, lambda file: torch.save(module.state_dict(), file))
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
        if "eval/loss" not in trainer.callback_metrics:  # a run that was killed after its last step
            trainer.validate(module, datamodule=data, verbose=False)
    return trainer


def final_metrics(trainer: Trainer) -> dict[str, float]:
    """The metrics of the last validation, by name."""
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("eval/")}


def compiles(options: TrainerOptions, trainer: Trainer) -> bool:
    """Whether a training with these `trainer` options compiles its blocks. ZeRO-3 gathers weights inside of them."""
    if options.compile != "auto" or not uses_gpu(options.accelerator):
        return False
    if getattr(trainer.strategy, "zero_stage_3", False) or not has_triton():
        log.warning(
            "nothing is compiled, because %s", "ZeRO-3 gathers weights" if has_triton() else "Triton is missing"
        )
        return False
    torch._dynamo.config.optimize_ddp = False  # it would cut graphs of blocks, which already end where DDP's do
    return True


@contextmanager
def naming_the_remedy(data: Data, trainer: Trainer) -> Iterator[None]:
    """Turn running out of memory, and losing another rank, into a UserError that says what to change."""
    try:
        yield
    except Exception as error:
        lost = isinstance(error, RuntimeError) and any(said in str(error) for said in LOST_RANK)
        if lost or isinstance(error, torch.distributed.DistError):
            if has_spoken(trainer):
                raise SystemExit(2) from error
            raise LostRankError(
                "another rank ended, and this one cannot go on alone; see what it said, then give the same command"
            ) from error
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            said = str(error.__cause__ or error).strip().splitlines()[0]
            raise UserError(f"torch.compile refused a block or the loss ({said}); give trainer.compile=none") from error
        if not is_out_of_memory(error):
            raise
        rank = f" on rank {rank_zero_only.rank}" if rank_zero_only.rank else ""
        raise UserError(
            f"out of memory{rank}: lower data.batch_size={data.batch_size} (and raise "
            f"trainer.accumulate_grad_batches) or data.row_tokens={data.row_tokens}, or give "
            "trainer.activation_checkpointing=true"
        ) from error


def has_spoken(trainer: Trainer) -> bool:
    """Whether a rank that Lightning started has ended with an error, which it has printed."""
    processes, ends_s = getattr(trainer.strategy.launcher, "procs", ()), time.monotonic() + ENDS_WITHIN_S
    while not any(codes := [one.poll() or 0 for one in processes]) and processes and time.monotonic() < ends_s:
        time.sleep(POLL_S)
    return max(codes, default=0) > 0


def build_trainer(
    config: Train, max_steps: int, callbacks: list[Callback], loggers: list[Logger], in_sweep: bool = False
) -> Trainer:
    """The Trainer of a config; writes nothing yet.

    Raise UserError where Lightning does not take the `trainer` node, or ranks cannot share a batch or a sweep.
    """
    precision = precision_of(config.trainer)
    options = {name: value for name, value in plain(config.trainer).items() if name not in OWN_OPTIONS}
    options |= {"precision": precision, **ranks_of_torchrun()}
    if str(precision).startswith("16"):  # the gradients of `losses.py` are computed with the loss
        raise UserError(
            f"trainer.precision={precision} would round gradients before they are scaled; give bf16-mixed or 32-true"
        )
    try:
        trainer = instantiate(options, _partial_=True, _convert_="all")(
            max_steps=max_steps,
            check_val_every_n_epoch=None,  # val_check_interval counts batches of the run, not of an epoch
            use_distributed_sampler=False,  # SeededLoader gives each rank its share
            callbacks=callbacks,
            logger=loggers,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
    except Exception as error:  # what Hydra and Lightning raise of its options has no type in common
        cause = error.__cause__ or error
        line = f"{type(cause).__name__}: {(str(cause).strip() or 'no message').splitlines()[0]}"
        raise UserError(
            f"the trainer cannot be made as configured ({line}); change trainer=... or its options"
        ) from error
    if isinstance(trainer.strategy, ZeroStrategy) and config.own.optimizer.name == "muon":
        raise UserError(
            "optimizer.name=muon needs whole matrices, which DeepSpeed divides; give optimizer.name=adamw, or "
            "trainer=ddp"
        )
    if in_sweep and trainer.world_size > 1 and not ranks_of_torchrun():
        raise UserError(  # Lightning starts the other ranks with this very command: each would run the whole sweep
            f"-m on {trainer.world_size} ranks needs torchrun --nproc-per-node {trainer.world_size} -m spectrain.train "
            "... -m; or give trainer.devices=1"
        )
    check_shared(config.data.batch_size, trainer.world_size)
    return trainer


def target_device(config: Train) -> str:
    """Where the frozen target runs: with the trainer."""
    accelerator, rank = config.trainer.accelerator, os.environ.get("LOCAL_RANK")
    if accelerator == "cpu":
        return "cpu"
    return f"cuda:{rank}" if rank is not None and uses_gpu(accelerator) else config.target.device


def check_batches(config: Train, trainer: Trainer, n_rows: int) -> None:
    """Raise UserError where the training rows make no batch, or under DeepSpeed no step.

    DeepSpeed would carry a gradient from one epoch into the next, which Lightning does not count.
    """
    batch_size, accumulated = config.data.batch_size, config.trainer.accumulate_grad_batches
    n_batches = n_rows // batch_size
    if not n_batches:
        raise UserError(
            f"there are {n_rows} training rows, fewer than one batch of {batch_size}; lower data.batch_size or "
            "data.row_tokens, or give more text"
        )
    if n_batches < accumulated and isinstance(trainer.strategy, ZeroStrategy):
        raise UserError(
            f"trainer.accumulate_grad_batches={accumulated} is more than the {n_batches} batches of an epoch, which "
            "DeepSpeed cannot step on; lower it, or give trainer=ddp"
        )


def prepare_resume(checkpoint: Path, trainer: Trainer) -> None:
    """Make sure that this trainer can resume from a checkpoint, if need be by resharding it for other ranks.

    Raises UserError where it was written with DeepSpeed and is read without, or the other way.
    """
    sharded, ranks = isinstance(trainer.strategy, ZeroStrategy), ranks_of(checkpoint)
    if sharded != (ranks is not None):
        before, now = ("without", "with") if sharded else ("with", "without")
        raise UserError(
            f"{checkpoint} was written {before} DeepSpeed and cannot be resumed {now} it; give the trainer=... that "
            "began the run, or another run_dir"
        )
    if sharded and ranks != trainer.world_size:
        if trainer.is_global_zero:
            reshard(checkpoint)
        trainer.strategy.read_universal()
        barrier(trainer)


def barrier(trainer: Trainer) -> None:
    """Under torchrun, wait for all ranks; Lightning starts the others itself, later."""
    if ranks_of_torchrun() and trainer.world_size > 1:
        meet(trainer.global_rank, trainer.world_size)
        trainer.strategy.setup_environment()
        trainer.strategy.barrier()


def meet(rank: int, n_ranks: int) -> None:
    """Wait for all ranks of torchrun. If one has failed, SIGTERM ends this wait; it would end none of torch's own."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # a rank would have to be the server
        return
    store, *_ = next(torch.distributed.rendezvous("env://"))
    store.set(f"here/{rank}", "")
    while not store.check([f"here/{one}" for one in range(n_ranks)]):
        time.sleep(POLL_S)
