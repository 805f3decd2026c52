"""A target whose weights are divided among ranks: tensor parallelism, by the plans and modules of transformers.

The ranks that torchrun starts form tensor groups of neighbours, each of which holds one copy of the target. Heads and
the columns of MLPs are divided, and each rank reads only its own slices of the safetensors files. Embedding,
unembedding and norms are whole on every rank: drafters read tokens and compute losses with them, and the two tables of
an 8B target are 2 GiB. The ranks of a group run every forward together on the same tokens, and what they decide by its
result is alike.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from math import gcd
from types import SimpleNamespace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from spectrain.errors import AllRanksError, UserError

DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")  # of a config

T = TypeVar("T")


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that hold one target together, as one of them sees them."""

    mesh: DeviceMesh  # of their one dimension

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """The number of this rank within the group."""
        return self.mesh.get_local_rank()

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        is_cpu = self.mesh.device_type == "cpu"
        return torch.device("cpu") if is_cpu else torch.device("cuda", torch.cuda.current_device())

    def agreed(self, value: T) -> T:
        """Return the value that the group's first rank has. All of its ranks call this."""
        box = [value]
        dist.broadcast_object_list(box, group=self.mesh.get_group(), group_src=0)
        return box[0]

    def check(self, error: UserError | None) -> None:
        """Raise the error of the first rank that has one, on all ranks of the group. All of them call this."""
        found = [None] * self.size
        dist.all_gather_object(found, error and str(error), self.mesh.get_group())
        if said := next(filter(None, found), None):
            raise AllRanksError(said) from error

    def gathered(self, *tensors: Tensor | None) -> list[list[Tensor | None]]:
        """Return the tensors of each rank of the group, on this rank's device. All of its ranks call this."""
        device, found = tensors[0].device, [None] * self.size
        dist.all_gather_object(found, [_moved(one, torch.device("cpu")) for one in tensors], self.mesh.get_group())
        return [[_moved(one, device) for one in of_rank] for of_rank in found]


def tensor_group(size: int | None, device: str) -> TensorGroup:
    """Return the group of this rank; all ranks call it. `size` None: one group of all ranks.

    Raises UserError without torchrun, or where the ranks make no whole groups.
    """
    if "WORLD_SIZE" not in os.environ:
        raise AllRanksError(
            "target.parallel=tp divides the target among the ranks that torchrun starts; start the command with "
            "torchrun --nproc-per-node 2 -m ..."
        )
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    n_ranks = dist.get_world_size()
    size = size or n_ranks
    if n_ranks % size:
        raise AllRanksError(
            f"target.tp={size} ranks hold a target together, and {n_ranks} ranks make no whole groups of them; start a "
            "multiple, or change target.tp"
        )
    return TensorGroup(_mesh("cuda" if on_gpu else "cpu", n_ranks // size, size)["tensor"])


@cache
def _mesh(device_type: str, n_groups: int, size: int) -> DeviceMesh:
    return init_device_mesh(device_type, (n_groups, size), mesh_dim_names=("data", "tensor"))


def sharded_class(config: PretrainedConfig, called: str, group: TensorGroup) -> type[PreTrainedModel]:
    """Return the class of a model, whose `from_pretrained` leaves its share of the weights on this rank's device.

    transformers' own would make one group of all ranks, or divide the weights among groups as well; and the tables.
    Raises UserError where the group cannot divide the model.
    """
    base = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if not (isinstance(base, type) and config.get_text_config().base_model_tp_plan):
        raise AllRanksError(
            f"{called} is of a type that transformers cannot divide among ranks; give target.parallel=device_map"
        )
    shared = {name: number for name in DIVIDED if (number := getattr(config.get_text_config(), name, None))}
    for name, number in shared.items():
        if number % group.size:
            raise AllRanksError(
                f"{called} has {name}={number}, which {group.size} ranks cannot share evenly; give "
                f"target.tp={gcd(group.size, *shared.values())}"
            )

    class Sharded(base):
        @classmethod
        def prepare_distribute_model(cls, distributed_config, device_map=None):
            return distributed_config, group.device, SimpleNamespace(get_mesh=lambda names: group.mesh)

        @classmethod
        def maybe_distribute_model(cls, model, distributed_config, meshes):
            model._is_distributed_loading_by_transformers = True
            model._device_mesh, model._tp_size = group.mesh, group.size
            tables = model.get_input_embeddings(), model.get_output_embeddings()
            whole = {name for name, module in model.named_modules() if module in tables}
            plan = model._expand_parallel_plan(model.tp_plan)
            plan = {name: style for name, style in plan.items() if not {name, name.rpartition(".")[0]} & whole}
            return apply_tensor_parallelism(model, group.mesh, plan)

    Sharded.__name__ = base.__name__
    return Sharded


def is_shard(tensor: Tensor) -> bool:
    """Whether ranks share a weight."""
    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """Return a weight as it was before it was divided. All ranks of its group call this."""
    return tensor.full_tensor() if is_shard(tensor) else tensor


def _moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)
