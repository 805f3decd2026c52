"""Count what a training step takes by running it on torch's device `meta`, without weights.

Each operation is the one that the training really does, on tensors that have a shape and no memory. So the peak of the
bytes that live at the same time, the FLOPs, and the bytes that are read and written are those of the step, for a model
of any size, in about a second. Attention counts as fused kernels do it, which never keep its scores.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Variable
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from spectrain.planning.peaks import Peaks

aten = torch.ops.aten
PRODUCTS = {F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__}
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu  # of the fused kernels the one with masks and `meta`


def _halved(kernel: object, place: int) -> Callable[..., float]:
    """Return the count of an attention kernel, whose causal form leaves half out; `place` is where it is asked for."""
    count = flop_registry[kernel]
    return lambda *args, **kwargs: count(*args, **kwargs) / (2 if args[place : place + 1] == (True,) else 1)


FLOPS = flop_registry | {
    ATTENTION: _halved(aten._scaled_dot_product_flash_attention, 4),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _halved(
        aten._scaled_dot_product_flash_attention_backward, 7
    ),
}


@dataclass(frozen=True)
class StepCost:
    """The operations of a forward and a backward pass."""

    peak_bytes: int  # of what it allocates, gradients included, at the moment when it is most
    flops: np.ndarray  # [operations]
    moved_bytes: np.ndarray  # [operations] read and written

    def seconds(self, peaks: Peaks) -> float:
        """Predict its time: of each operation the longer one of computing and reading."""
        return float(np.maximum(self.flops / peaks.flops_per_s, self.moved_bytes / peaks.bytes_per_s).sum())


def cost_of(step: Callable[[], Tensor], half: bool) -> StepCost:
    """Count what `step`, which returns a loss, and the backward pass take. All tensors must be on the device `meta`.

    `half`: products are in bfloat16, as under `bf16-mixed`.
    """
    counter, products = _Counter(), _Products(half)
    with counter, products:
        loss = step()
        products.cast.clear()  # as autocast does when it ends
        # Not `loss.backward()`, which would leave the mode: blocks may be computed again.
        options = {"allow_unreachable": True, "accumulate_grad": True}
        Variable._execution_engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), **options)
    return StepCost(counter.peak, np.array(counter.flops, dtype=np.float64), np.array(counter.moved, dtype=np.float64))


class _Counter(TorchDispatchMode):
    """Counts FLOPs, traffic, and the bytes of all storages that operations make and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: dict[int, int] = {}  # address of a storage -> its bytes
        self.flops: list[float] = []
        self.moved: list[float] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.nonzero.default:  # as if no value were zero: all positions are learned
            out = torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64, device="meta")
        elif func is aten._local_scalar_dense.default:  # transformers asks whether rows are single texts
            out = True
        else:
            out = func(*args, **kwargs)
        if func.is_view or func is aten._unsafe_view.default:
            return out
        read, made = ([one for one in tree_leaves(of) if isinstance(one, Tensor)] for of in ((args, kwargs), out))
        given = {one.untyped_storage()._cdata for one in read}  # weights, or what is changed in place
        for one in made:
            if one.untyped_storage()._cdata not in given:
                self._keep(one.untyped_storage())
        count = FLOPS.get(func._overloadpacket)
        self.flops.append(count(*args, **kwargs, out_val=out) if count else 0)
        self.moved.append(sum(one.numel() * one.itemsize for one in (*read, *made)))
        return out

    def _keep(self, storage: torch.UntypedStorage) -> None:
        key, n_bytes = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known[key] = n_bytes
            self.live += n_bytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.live -= self.known.pop(key, 0)


class _Products(TorchFunctionMode):
    """Runs attention as fused kernels do, and if `half` products in bfloat16, as autocast does, which has no `meta`.

    Like autocast it keeps the cast of a weight.
    """

    def __init__(self, half: bool) -> None:
        super().__init__()
        self.half = half
        self.cast: dict[int, Tensor] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in PRODUCTS:
            args = [self._rounded(one) for one in args]
        elif func is F.scaled_dot_product_attention:
            queries, keys, values = map(self._rounded, args)
            mask = kwargs.get("attn_mask")
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.zeros(mask.shape, dtype=queries.dtype, device="meta").masked_fill_(~mask, -torch.inf)
            return ATTENTION(queries, keys, values, 0.0, kwargs.get("is_causal", False), attn_mask=mask)[0]
        return func(*args, **kwargs)

    def _rounded(self, value: object) -> object:
        if not self.half or not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        if not isinstance(value, torch.nn.Parameter):  # what else is a leaf dies, and its id means another tensor
            return value.bfloat16()
        if id(value) not in self.cast:
            self.cast[id(value)] = value.bfloat16()
        return self.cast[id(value)]
