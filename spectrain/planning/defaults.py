"""Replace options that are `auto` or null by values that fit the machine and the target.

A training keeps what its first start has found, so that it goes on elsewhere as it began.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import replace

import torch

from spectrain.config.groups import Hardware
from spectrain.config.training import Train
from spectrain.models.kinds import about
from spectrain.models.packages import context_of, dtype_of
from spectrain.planning.peaks import hardware_named, read_peaks
from spectrain.planning.plan import Machine, Outline, Plan, plan_of
from spectrain.stores.features import open_features
from spectrain.training.sources import contexts_of
from spectrain.training.strategies import planned_ranks, precision_of, ranks_of_torchrun, uses_gpu

log = logging.getLogger(__name__)

BATCH_ROWS = 4
ROW_TOKENS = 1024
MEMORY_SHARE = 0.92  # of a GPU's memory, that is planned with; CUDA and fragments take the rest


def settled(config: Train) -> Train:
    """Return the config of a training with a value for everything that fits the machine and the target.

    Raises:
        UserError: the target has no config that says how large it is, where that is asked.
    """
    config = copy.deepcopy(config)
    trainer, data = config.trainer, config.data
    on_that_gpu = bool(config.hardware and config.hardware.flops_per_s)
    elsewhere = config.plan and trainer.accelerator != "cpu" and on_that_gpu
    trainer.accelerator = "gpu" if elsewhere or uses_gpu(trainer.accelerator) else "cpu"
    trainer.precision = "bf16-mixed" if elsewhere and trainer.precision == "auto" else precision_of(trainer)
    config.target.dtype = dtype_of(vars(config.target), trainer.accelerator == "gpu")
    n_ranks = planned_ranks(trainer)
    divides = trainer.accumulate_grad_batches is None
    trainer.accumulate_grad_batches = trainer.accumulate_grad_batches or 1
    if data.row_tokens is None and data.source == "offline" and data.path and about(config.kind).option == "drafter":
        data.row_tokens = open_features(data.path, verify=False).row_tokens
    data.row_tokens = data.row_tokens or min(ROW_TOKENS, context_of(config.target.path) or ROW_TOKENS)
    config.tau.context_tokens = config.tau.context_tokens or contexts_of(data.row_tokens)
    if data.batch_size is None:
        data.batch_size = -(-BATCH_ROWS // n_ranks) * n_ranks
    tried = [trainer.activation_checkpointing] if trainer.activation_checkpointing is not None else [False, True]
    trainer.activation_checkpointing = tried[0]
    if divides and trainer.accelerator == "gpu" and data.batch_size % n_ranks == 0:
        _divide(config, n_ranks, tried)
    return config


def plan_for(config: Train) -> tuple[Plan, Machine]:
    """Predict what the training of a settled config takes, on the hardware of the config or of this machine."""
    machine = _machine(config)
    return plan_of(config, machine, planned_ranks(config.trainer)), machine


def peak_tokens_per_s(config: Train) -> float | None:
    """Return at which speed the ranks of a settled config would reach the peak of their arithmetic.

    FLOPs are those of the forward and the backward pass, without what is computed again; of drafters only. None where
    `hardware` is not given and this machine's GPU is not known.
    """
    on_gpu, trainer = config.trainer.accelerator == "gpu", config.trainer
    node = config.hardware or (_known() if on_gpu else None)
    if node is None:
        return None
    try:
        peaks = _machine(replace(config, hardware=node)).peaks
        outline = Outline.of(replace(config, trainer=replace(trainer, activation_checkpointing=False)))
        flops = outline.step(1).flops.sum() / config.data.row_tokens
    except Exception as error:  # a training must not end for it
        log.debug("no train/mfu: %s", error)
        return None
    return planned_ranks(trainer) * peaks.flops_per_s / flops


def _divide(config: Train, n_ranks: int, tried: list[bool]) -> None:
    """Divide the rows of a step into as few batches as fit the memory of a GPU.

    `tried` are values of trainer.activation_checkpointing: a later one where not even one row fits by an earlier one.
    """
    share, found = config.data.batch_size // n_ranks, None
    try:
        memory = _machine(config).memory_bytes
        for recomputes in tried if memory else ():
            config.trainer.activation_checkpointing = recomputes
            outline = Outline.of(config)
            left = MEMORY_SHARE * memory - sum(outline.weights(n_ranks).values())
            divisors = [n for n in range(1, share + 1) if share % n == 0]
            fitting = (n for n in divisors if outline.pass_bytes(outline.step(share // n), n_ranks) <= left)
            if found := next(fitting, None):
                break
    except Exception as error:  # the training will say what is wrong, or has no plan
        config.trainer.activation_checkpointing = tried[0]
        log.debug("batches are not divided: %s", error)
        return
    if memory:
        n_batches = found or share
        config.data.batch_size //= n_batches
        config.trainer.accumulate_grad_batches = n_batches


def _machine(config: Train) -> Machine:
    """Return the hardware of a config, else that of this machine."""
    on_gpu = config.trainer.accelerator == "gpu"
    node = config.hardware or _here(on_gpu)
    peaks = read_peaks(node, "bf16" if str(config.trainer.precision).startswith("bf16") else "fp32")
    memory, trainer = node.memory_bytes, config.trainer
    if on_gpu and config.hardware is None and torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory
    link = node.network_bytes_per_s if trainer.num_nodes > 1 else node.link_bytes_per_s
    together = 1 if on_gpu or ranks_of_torchrun() else planned_ranks(trainer)  # ranks that share the CPU's threads
    return Machine(peaks, memory, node.training_share / together, link, node.link_bytes_per_s)


def _here(on_gpu: bool) -> Hardware:
    """Return the file of conf/hardware/ that describes this machine; of an unknown GPU that of an H100."""
    found = _known() if on_gpu else hardware_named("this CPU")
    if found is None:
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "GPU"
        found = replace(hardware_named("H100"), name=f"{name} as an H100")
    return found


def _known() -> Hardware | None:
    """Return the file of this machine's GPU; None: there is none."""
    return hardware_named(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
