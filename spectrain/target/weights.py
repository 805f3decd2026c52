"""Linear layers as decoding runs them on a CPU: by our kernel where it is faster, for weights of any dtype it knows."""

from __future__ import annotations

import copy
from functools import cache
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.errors import UserError, check_choice
from spectrain.kernels import LEAST_OUTPUTS, LEAST_TILED, fits, multiplies, outruns_torch, product, works

DRAFT_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
MOST_ROWS = 64  # up to which the kernel is the fastest, where torch is faster for more
MOST_HALF_ROWS = 8  # the same for half precision that the processor multiplies itself
MOST_EMULATED = 16  # rows up to which torch is faster than with a copy of the weights in float32


@cache
def is_emulated(dtype: torch.dtype) -> bool:
    """Whether torch multiplies this dtype very slowly on this processor."""
    return not multiplies(dtype)


@cache
def most_rows(dtype: torch.dtype, weights: torch.dtype) -> float:
    """Return the rows of inputs of a dtype up to which the kernel is the fastest for weights of another."""
    if dtype == torch.float32 or is_emulated(dtype):
        return inf if outruns_torch(weights) else MOST_ROWS
    return MOST_HALF_ROWS


class RowsLinear(nn.Module):
    """A linear layer for inference, over the weight of another. It computes in the dtype of its inputs."""

    scale: Tensor | None = None  # [O]
    most_emulated = MOST_EMULATED
    least_tiled = LEAST_TILED

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.fits = fits(linear.weight)

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        """Return the outputs [.., O - first] of inputs [.., I], from the row `first` of the weight on."""
        weight, scale = self.weight[first:], None if self.scale is None else self.scale[first:]
        n_rows = x.numel() // x.shape[-1]
        few = 0 < n_rows <= self.most_rows(x.dtype) and len(weight) >= LEAST_OUTPUTS
        if self.fits and few and not (x.requires_grad and torch.is_grad_enabled()):
            rows = x.reshape(n_rows, -1).float().contiguous()
            y = product(rows, weight, scale, self.least_tiled).to(x.dtype).view(*x.shape[:-1], -1)
        else:
            slow = x.device.type == "cpu" and n_rows > self.most_emulated and is_emulated(x.dtype)
            dtype = torch.float32 if slow else x.dtype
            weight = weight.to(dtype) if scale is None else (weight * scale[:, None]).to(dtype)
            y = F.linear(x.to(dtype), weight).to(x.dtype)
        return y if self.bias is None else y + self.bias[first:]

    def most_rows(self, dtype: torch.dtype) -> float:
        """Return up to how many rows of this dtype the kernel takes."""
        return most_rows(dtype, self.weight.dtype)


class TextLinear(RowsLinear):
    """A linear layer for whole texts: a text's states must not depend on what is computed beside it."""

    most_emulated, least_tiled = 0, 1  # all texts alike

    def most_rows(self, dtype: torch.dtype) -> float:
        most = most_rows(dtype, self.weight.dtype)
        return most if most == inf else 0  # the kernel rounds differently, so it takes all texts or none


class Int8Linear(RowsLinear):
    """A linear layer with weights of 8 bits, and one scale for each output: its largest weight is 127.

    For drafters only, which may round: verification keeps the target's distribution whatever they draft.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        weight = linear.weight.detach().float()
        self.scale = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        self.weight, self.bias = (weight / self.scale[:, None]).round().to(torch.int8), linear.bias
        self.fits = fits(self.weight)


def on_cpu(module: nn.Module, kind: type[RowsLinear] = RowsLinear) -> nn.Module:
    """Return a copy of a module with other linear layers; all else is shared with it."""
    if isinstance(module, nn.Linear):
        return kind(module)
    other = copy.copy(module)
    other._modules = {name: on_cpu(child, kind) for name, child in module._modules.items()}
    return other


def version(module: nn.Module) -> int:
    """Count how often a module's weights were changed in place, by its final norm's: training changes all of them."""
    weight = module.norm.weight
    return 0 if weight.is_inference() else weight._version  # which of inference tensors is not kept


def to_dtype(parameters: list[nn.Parameter], dtype: torch.dtype) -> None:
    """Change the dtype of parameters, but of no buffer: rotary frequencies must stay in float32."""
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)


def draft_dtype_of(draft_dtype: str, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a drafter's weights.

    Args:
        draft_dtype: a key of DRAFT_DTYPES; "auto" is int8 on a CPU, else the target's dtype.
        device, dtype: of the target.

    Raises:
        UserError: the name is unknown, or the machine has no kernels for it.
    """
    check_choice("draft_dtype", draft_dtype, DRAFT_DTYPES)
    has_int8 = device.type == "cpu" and works(torch.int8)
    if draft_dtype == "int8" and not has_int8:
        raise UserError(
            f"draft_dtype=int8 has no kernels on this machine's {device}; give draft_dtype=bfloat16 or auto"
        )
    if draft_dtype == "auto":
        return torch.int8 if has_int8 else dtype
    return DRAFT_DTYPES[draft_dtype]


def for_drafting(module: nn.Module, draft_dtype: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return a drafter as decoding runs it; `module` itself is only moved.

    On a CPU it computes in the target's dtype whatever its weights are; on a GPU in that of its weights. For arguments
    and errors see `draft_dtype_of`.
    """
    weights, module = draft_dtype_of(draft_dtype, device, dtype), module.to(device).eval()
    if device.type == "cpu":
        if next(module.parameters()).dtype != dtype:
            module = copy.deepcopy(module).to(dtype)
        if weights == torch.int8:
            return on_cpu(module, Int8Linear)
        if weights != dtype:
            module = copy.deepcopy(module)
            to_dtype([layer.weight for layer in module.modules() if isinstance(layer, nn.Linear)], weights)
        return on_cpu(module)
    return module if next(module.parameters()).dtype == weights else copy.deepcopy(module).to(weights)
