"""Weights as decoding reads them on a CPU: in oneDNN's own layout, or as 8-bit integers with a scale for each row.

A step multiplies a few rows by every matrix of the model, so it costs what reading the matrices costs. `F.linear` reads
them several times as soon as there are two rows; the packed layout is read once for up to some sixteen.

The operators are internal to torch (its compiler uses them). They are tried at first use; where they are missing or
wrong, decoding goes on with plain weights, and the log says so.

Letters: n rows of all leading dimensions, I input features, O output features.
"""

from __future__ import annotations

import copy
import logging
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.decoding.errors import UserError, check_choice

log = logging.getLogger(__name__)

DRAFT_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
TRIED = (5, 72, 40)  # rows, inputs and outputs of the product by which the operators are tried


class PackedLinear(nn.Module):
    """A linear layer for inference whose weight is in oneDNN's layout, exact in float32.

    Args:
        linear: with plain weight [O, I].
    """

    ROWS = 16  # that the layout is chosen for; it serves others as well

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), self.ROWS)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:  # [.., I] -> [.., O]
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")

    def plain(self) -> Tensor:
        """Return the weight [O, I] as it was, bit for bit."""
        return self._packed.to_dense()


class Int8Linear(nn.Module):
    """A linear layer for inference with weights of 8 bits, and one scale for each row: the largest weight is 127.

    Inputs are rounded to bfloat16. For drafters only: verification keeps the target's distribution whatever q is.

    Args:
        linear: with plain weight [O, I].
    """

    INPUTS = 32  # torch's operator reads past the end of a row that is no multiple of 16 long, so rows are padded

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._padding = (0, -linear.in_features % self.INPUTS)
        weight = F.pad(linear.weight.detach().float(), self._padding)
        scale = weight.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        self._integers = (weight / scale[:, None]).round().to(torch.int8)
        self._scale = scale.bfloat16()
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:  # [.., I] -> [.., O]
        rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        if self._padding[1]:
            rows = F.pad(rows, self._padding)
        y = torch._weight_int8pack_mm(rows, self._integers, self._scale).to(x.dtype).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


KINDS = {"packed": PackedLinear, "int8": Int8Linear}


@cache
def works(kind: str, dtype: torch.dtype) -> bool:
    """Whether this machine's torch has the operators of a key of KINDS, and they compute what plain weights do."""
    n_rows, n_in, n_out = TRIED
    draws = torch.Generator().manual_seed(0)
    plain = nn.Linear(n_in, n_out, dtype=dtype).requires_grad_(False)
    plain.weight.copy_(torch.randn(n_out, n_in, generator=draws))
    x = torch.randn(n_rows, n_in, generator=draws).to(dtype)
    try:
        with torch.inference_mode():
            layer, expected = KINDS[kind](plain), plain(x).float()
            error = (layer(x).float() - expected).abs().max() / expected.abs().max()
            exact = kind != "packed" or torch.equal(layer.plain(), plain.weight)
    except (AttributeError, RuntimeError) as fault:  # the operator is missing; or not for this CPU, dtype or build
        why = str(fault).splitlines()[0]
    else:
        if error < (1e-5 if kind == "packed" and dtype == torch.float32 else 0.05) and exact:
            return True
        why = f"the products differ by {error:.1e}"
    log.warning("%s weights do not work with this torch (%s): plain ones are used, which are slower", kind, why)
    return False


def version(module: nn.Module) -> int:
    """Count how often a module's weights were changed in place, by its final norm's: training changes all of them."""
    weight = module.norm.weight
    return 0 if weight.is_inference() else weight._version  # which of inference tensors is not kept


def draft_weights(draft_dtype: str, device: torch.device, dtype: torch.dtype) -> tuple[torch.dtype, str]:
    """Return the dtype in which a drafter computes, and the kind of its weights: "plain" or a key of KINDS.

    Args:
        draft_dtype: a key of DRAFT_DTYPES; "auto" is int8 on a CPU, else the target's dtype.
        device, dtype: of the target.

    Raises:
        UserError: the name is unknown, or the machine has no operators for it.
    """
    check_choice("draft_dtype", draft_dtype, DRAFT_DTYPES)
    has_int8 = device.type == "cpu" and works("int8", dtype)
    if draft_dtype == "int8" and not has_int8:
        raise UserError(f"draft_dtype=int8 has no operators on {device}; give draft_dtype=bfloat16 or auto")
    if has_int8 and draft_dtype in ("auto", "int8"):
        return dtype, "int8"
    dtype = DRAFT_DTYPES[draft_dtype] or dtype
    return dtype, "packed" if device.type == "cpu" and works("packed", dtype) else "plain"


def with_weights(module: nn.Module, kind: str) -> nn.Module:
    """Return a copy of a module whose linear layers have weights of a key of KINDS; all else is shared with it."""
    if isinstance(module, nn.Linear):
        return KINDS[kind](module)
    other = copy.copy(module)
    other._modules = {name: with_weights(child, kind) for name, child in module._modules.items()}
    return other


def for_drafting(module: nn.Module, draft_dtype: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return a drafter as decoding runs it; `module` itself is only moved. For arguments, errors: `draft_weights`."""
    dtype, kind = draft_weights(draft_dtype, device, dtype)
    module = module.to(device).eval()
    if next(module.parameters()).dtype != dtype:
        module = copy.deepcopy(module).to(dtype)
    return module if kind == "plain" else with_weights(module, kind)
