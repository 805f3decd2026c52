"""Where a training runs: devices, precision, DeepSpeed's ZeRO and FSDP2 on GPUs or CPU ranks, and whole weights.

ZeRO divides the optimizer's state and gradients (stage 2), and the parameters too (stage 3), among the ranks. FSDP2
divides all three, and writes the checkpoints of a single process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import distribute_tensor
from torch.optim import Optimizer

from spectrain.config import training as options
from spectrain.errors import UserError
from spectrain.kernels import multiplies
from spectrain.target.sharded import is_shard, whole
from spectrain.training.checkpoints import read_file


def uses_gpu(accelerator: str) -> bool:
    """Whether a trainer with this `trainer.accelerator` runs on GPUs."""
    return accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())


def fast_precision(precision: str | None, device_type: str) -> str | None:
    """Return `precision`, with "auto" replaced by what the device multiplies the fastest: bf16-mixed or 32-true."""
    if precision != "auto":
        return precision
    is_gpu = device_type == "cuda"
    fast = torch.cuda.is_bf16_supported(including_emulation=False) if is_gpu else multiplies(torch.bfloat16)
    return "bf16-mixed" if fast else "32-true"


def precision_of(trainer: options.Trainer) -> str | None:
    """Return the precision of a trainer's options, with "auto" replaced likewise."""
    return fast_precision(trainer.precision, "cuda" if uses_gpu(trainer.accelerator) else "cpu")


def ranks_of_torchrun() -> dict[str, int]:
    """The values under torchrun of trainer.devices and trainer.num_nodes; {} without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return {}
    world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    return {"devices": local, "num_nodes": world // local}


def planned_ranks(trainer: options.Trainer) -> int:
    """Return how many ranks will train."""
    trainer = replace(trainer, **ranks_of_torchrun())
    devices = trainer.devices
    if devices in ("auto", -1):
        devices = max(1, torch.cuda.device_count()) if trainer.accelerator == "gpu" else 1
    n_devices = len(devices) if isinstance(devices, list) else devices if isinstance(devices, int) else 1
    return max(1, n_devices) * trainer.num_nodes


def check_shared(batch_size: int, n_ranks: int) -> None:
    """Raise UserError unless the rows of a batch can be shared out evenly."""
    if batch_size % n_ranks:
        raise UserError(
            f"data.batch_size={batch_size} rows cannot be shared out evenly by {n_ranks} ranks; give a multiple of "
            f"{n_ranks}, or fewer ranks"
        )


def deepspeed(accelerator: str, stage: int = 2, offload_optimizer: bool = False) -> ZeroStrategy:
    """Lightning's DeepSpeed strategy for GPUs or CPU ranks.

    Args:
        accelerator: that of the trainer.
        stage: 1 divides the optimizer's state, 2 gradients too, 3 parameters too.
        offload_optimizer: keep the optimizer's state in CPU memory, and step it there.
    """
    on_cpu = not uses_gpu(accelerator)
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is first imported
    strategy = (CPUZeroStrategy if on_cpu else ZeroStrategy)(
        stage=stage,
        offload_optimizer=offload_optimizer,
        process_group_backend="gloo" if on_cpu else None,
        logging_level=logging.ERROR,
        logging_batch_size_per_gpu=1,  # else Lightning makes a loader to ask; it serves DeepSpeed's logs alone
    )
    # Offloaded state is stepped by torch's AdamW: DeepSpeed's own must be compiled on the machine.
    strategy.config["zero_force_ds_cpu_optimizer"] = False
    return strategy


class ZeroStrategy(DeepSpeedStrategy):
    """Lightning's strategy, made to resume on another number of ranks and to validate without an engine."""

    def read_universal(self) -> None:
        """From now on, read the universal form of checkpoints (`spectrain.training.checkpoints.reshard`)."""
        self.config["checkpoint"] = {"load_universal": True}

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict:
        universal = "checkpoint" in self.config
        decays = [group["weight_decay"] for group in self.optimizers[0].param_groups]
        client_state = super().load_checkpoint(checkpoint_path, weights_only)
        if universal and self.zero_stage_3:
            # deepspeed 0.19 gives all groups the first one's weight decay, and all their states one tensor of steps,
            # which each of them would then count up.
            optimizer = self.optimizers[0].optimizer
            for group, decay in zip(optimizer.param_groups, decays, strict=True):
                group["weight_decay"] = decay
            for state in optimizer.state.values():
                state["step"] = state["step"].clone()
        return client_state

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        found = super().optimizer_step(*args, **kwargs)
        self.model.optimizer.loss_scale = 1.0  # see `divide_gradients`
        return found

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        if self.zero_stage_3:
            super()._initialize_deepspeed_inference(model)
        else:  # an engine would make bfloat16 optimizer state for nothing, and print about it
            self.model_to_device()


class CPUZeroStrategy(ZeroStrategy):
    """The same on CPU ranks, which Lightning's own strategy refuses."""

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()  # without the check for CUDA

    def setup_distributed(self) -> None:
        import deepspeed

        # All-reduce through shared memory serves inference alone, and would be compiled on this machine first.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)  # deepspeed reads the index


class FSDP2Strategy(ModelParallelStrategy):
    """FSDP2 over all ranks: each keeps a share of the weights, gradients and optimizer state.

    Weights are float32 and products in the trainer's precision by autocast, as on a single process, so that losses are
    the same. A checkpoint is the single file of such a process, too: any number of ranks reads it, with FSDP2 or not.
    """

    lightning_restore_optimizer = True  # by `load_optimizer_state_dict`, as without FSDP2

    def __init__(self) -> None:
        super().__init__(save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        self._setup_distributed()

    def shard(self, module: LightningModule, blocks: list[nn.Module]) -> None:
        """Divide the weights of a module. `blocks` are gathered one by one, the rest for a whole step."""
        mesh = init_device_mesh(self.root_device.type, (self.world_size,))
        for part in (*blocks, module):
            fully_shard(part, mesh=mesh)
        for step in ("training_step", "validation_step"):
            register_fsdp_forward_method(module, step)

    def validation_step(self, *args: Any, **kwargs: Any) -> None:
        super().validation_step(*args, **kwargs)
        self.lightning_module.reshard()  # what a backward pass would do

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        return {name: self._gathered(one) for name, one in self.lightning_module.state_dict().items()}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        ours = self.lightning_module.state_dict()
        state = {name: _divided_as(ours.get(name), one) for name, one in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(state, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = optimizer.state_dict()
        gathered = {i: {name: self._gathered(one) for name, one in of.items()} for i, of in state["state"].items()}
        return state | {"state": gathered}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        (optimizer,), (state,) = self.optimizers, checkpoint["optimizer_states"]
        ours = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        divided = {
            i: {name: _divided_as(ours[i] if one.ndim else None, one) for name, one in of.items()}
            for i, of in state["state"].items()
        }
        optimizer.load_state_dict(state | {"state": divided})

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        return read_file(checkpoint_path)

    def _gathered(self, value: Tensor) -> Tensor | None:
        """Put a tensor together on rank zero, in CPU memory; None on others. All ranks call it."""
        found = whole(value)
        return found.cpu() if self.is_global_zero else None


def _divided_as(parameter: Tensor | None, value: Tensor) -> Tensor:
    """Return this rank's share of a whole tensor, if the parameter that it belongs to is divided."""
    if not is_shard(parameter):
        return value
    device = parameter.to_local().device
    return distribute_tensor(value.to(device), parameter.device_mesh, parameter.placements, src_data_rank=None)


def share_of(parameter: nn.Parameter) -> Tensor:
    """Return what this rank holds of a parameter."""
    return parameter.to_local() if is_shard(parameter) else getattr(parameter, "ds_tensor", parameter)


def divide_gradients(trainer: Trainer, weight: float) -> None:
    """Divide the gradient of a step, in which losses were summed, by the weight of its positions on all ranks.

    It is called before gradients are clipped. Until then Lightning has divided each loss by the number of accumulated
    batches, and the strategy the gradient by the number of ranks.
    """
    accumulated = trainer.accumulate_grad_batches
    divisor = weight / (accumulated * trainer.world_size)
    if isinstance(trainer.strategy, ZeroStrategy):  # whose engine holds the gradients
        # DeepSpeed divides gradients by its loss scale, and has divided by `accumulated` once more than Lightning.
        trainer.model.optimizer.loss_scale = divisor / accumulated
        return
    for parameter in trainer.lightning_module.parameters():
        if parameter.grad is not None:
            parameter.grad /= divisor


def whole_state(trainer: Trainer, module: LightningModule) -> dict[str, Tensor] | None:
    """Gather the weights in training from all ranks. All ranks call it, between optimizer steps of a fit.

    Under DeepSpeed these are the float32 weights that the optimizer steps; `on_train_end` is the last hook that finds
    them. Returns on rank zero the module's state dict: float32 copies on the CPU, tied weights under each of their
    names. None on other ranks.
    """
    whole: dict[int, Tensor] = {}
    for parameter in module.parameters():  # one at a time: under ZeRO-3 no rank need have room for all
        value = _whole(parameter)
        if trainer.is_global_zero:
            whole[id(parameter)] = _float32_copy(value)
    if not trainer.is_global_zero:
        return None
    state = module.state_dict(keep_vars=True)
    return {name: whole[id(t)] if id(t) in whole else _float32_copy(t) for name, t in state.items()}


def _whole(parameter: nn.Parameter) -> Tensor:
    """The whole of a parameter of which this rank may hold a shard, float32 where DeepSpeed steps it so."""
    if is_shard(parameter):
        return whole(parameter)
    partitioned = hasattr(parameter, "ds_id")
    if not partitioned and not hasattr(parameter, "_hp_mapping"):
        return parameter
    import deepspeed  # seconds to import, and only the strategies of DeepSpeed need it

    value = deepspeed.utils.safe_get_full_fp32_param(parameter)
    if value is not None or not partitioned:
        return parameter if value is None else value
    with deepspeed.zero.GatheredParameters([parameter]):  # frozen: the optimizer does not know it
        return parameter.detach().clone()


def _float32_copy(t: Tensor) -> Tensor:
    return t.detach().float().cpu().clone()
