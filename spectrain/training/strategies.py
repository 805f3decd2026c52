"""Training on many ranks: DeepSpeed's ZeRO on GPUs or CPU ranks, and the weights put together again.

ZeRO shares out the optimizer's state and gradients (stage 2) and the parameters too (stage 3) among the ranks.
`whole_state` gathers what the ranks hold, whatever the strategy.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from torch import Tensor, nn

from spectrain.errors import UserError


def uses_gpu(accelerator: str) -> bool:
    """Whether a trainer with this `trainer.accelerator` runs on GPUs."""
    return accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())


def strategy(config: Mapping) -> str | Strategy:
    """The strategy of a `trainer` node: a name that Lightning knows, or Lightning's DeepSpeed with a node's options.

    `stage` 1 shares out the optimizer's state, 2 gradients too, 3 parameters too. With `offload_optimizer` the state
    lies in CPU memory and is stepped there. Raise UserError for anything else, and for an optimizer that needs whole
    matrices.
    """
    given = config["trainer"]["strategy"]
    if not isinstance(given, Mapping):
        return given
    if given.get("name") != "deepspeed":
        raise UserError(f"trainer.strategy={given} is unknown; give ddp, auto or trainer=deepspeed_zero2")
    if config["optimizer"]["name"] == "muon":
        raise UserError(
            "optimizer.name=muon needs whole matrices, which DeepSpeed cuts into pieces; give optimizer.name=adamw, or "
            "trainer=ddp"
        )
    options = {"stage": 2, "offload_optimizer": False}
    for name, value in given.items():
        if name not in ("name", *options):
            raise UserError(f"trainer.strategy has no option {name}; it has {', '.join(options)}")
        options[name] = value
    if options["stage"] not in (1, 2, 3):
        raise UserError(f"trainer.strategy.stage={options['stage']} must be 1, 2 or 3")
    on_cpu = not uses_gpu(config["trainer"]["accelerator"])
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is first imported
    made = (CPUZeroStrategy if on_cpu else ZeroStrategy)(
        stage=options["stage"],
        offload_optimizer=options["offload_optimizer"],
        process_group_backend="gloo" if on_cpu else None,
        logging_level=logging.ERROR,
        logging_batch_size_per_gpu=1,  # else Lightning makes a loader to ask; it serves DeepSpeed's logs alone
    )
    # Offloaded state is stepped by torch's AdamW: DeepSpeed's own must be compiled on the machine.
    made.config["zero_force_ds_cpu_optimizer"] = False
    return made


class ZeroStrategy(DeepSpeedStrategy):
    """Lightning's strategy, made to resume on another number of ranks and to validate without an engine."""

    def read_universal(self) -> None:
        """From now on, read the universal form of checkpoints (`spectrain.training.checkpoints.cut_anew`)."""
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


def whole_state(trainer: Trainer, module: LightningModule) -> dict[str, Tensor] | None:
    """Put the weights in training together from all ranks. All ranks call it, between optimizer steps of a fit.

    Under DeepSpeed these are the float32 weights that the optimizer steps; `on_train_end` is the last hook that finds
    them.

    Returns:
        On rank zero the module's state dict: float32 copies on the CPU, tied weights under each of their names. None on
        other ranks.
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
    """The whole of a parameter of which this rank may hold a part, float32 where DeepSpeed steps it so."""
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
