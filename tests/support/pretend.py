"""A device without a machine: tensors compute on the CPU but claim to be elsewhere, and each copy to or from it counts.

    with pretend_device() as device:
        generate(device.target(tiny_model()), drafter, prompts, 16)
    device.reads  # [Copy(what="_to_copy", site="decoding/loop.py:251 in _read_back", waits=True), ...]

The tensors are torch's own "meta" tensors. A meta storage has no memory: here each one carries a storage of the CPU,
and every operator runs on those. Views share the storage, so they share the memory. As on a GPU, a tensor of the host
beside one of the device is an error. Meta tensors that were made outside the `with` hold nothing, and are refused.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import spectrain
from spectrain.target import TargetModel

DEVICE, HOST = torch.device("meta"), torch.device("cpu")
PRODUCT = Path(spectrain.__file__).parent
aten = torch.ops.aten
# Composed of other operators in ways that depend on the device. Run whole, they compute what they compute on the CPU.
WHOLE = (aten.linear, aten.matmul, aten.scaled_dot_product_attention, aten.rms_norm)
INDEXING = (aten.index, aten._unsafe_index, aten.index_put_, aten.index_put, aten._index_put_impl_)
TAKE_HOST_SCALARS = (aten.fill_, aten.fill, aten.masked_fill_, aten.masked_fill, *INDEXING)
OF_SHAPES = (aten.is_same_size, aten.is_pinned)  # their results are numbers of the host, but need no values
LITERALS = (torch.tensor, torch.as_tensor, torch.asarray)


@dataclass(frozen=True)
class Copy:
    """A copy between host and device."""

    what: str  # the operator
    site: str  # the innermost place in spectrain/ that asked for it
    waits: bool  # whether the host waits until the device has done all before it and the copy: not non_blocking


@dataclass
class PretendDevice:
    """The device, and the copies so far."""

    device: torch.device = DEVICE
    reads: list[Copy] = field(default_factory=list)  # device to host
    writes: list[Copy] = field(default_factory=list)  # host to device

    def model(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return a copy of a model on the device."""
        return copy.deepcopy(model).to(self.device)

    def target(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, **options
    ) -> TargetModel:
        """Return a target on the device, of a copy of a model; `options` are TargetModel's."""
        return TargetModel(self.model(model), tokenizer, **options)


@contextmanager
def pretend_device() -> Iterator[PretendDevice]:
    """Make "meta" a device that computes. Its tensors live only inside the `with`."""
    device, swaps = PretendDevice(), torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # or a move to meta would separate tied weights
    try:
        with _Operators(device), _Functions():
            yield device
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


class _Functions(TorchFunctionMode):
    """Sees to the few functions that do not reach an operator as they would on a GPU.

    Numbers of Python become a tensor of the device by a copy from the host, where torch would make an empty meta
    tensor. Pinned memory, which torch refuses without a GPU, is ordinary memory.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is Tensor.pin_memory:
            return args[0].clone()
        if func in LITERALS and torch.device(kwargs.get("device") or HOST) == DEVICE:
            return func(*args, **{**kwargs, "device": HOST}).to(DEVICE)
        if func is Tensor.new_tensor and args[0].is_meta:
            return torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)).to(DEVICE)
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_meta:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(one, list) for one in index):
                args = (args[0], tuple(_index(one) if isinstance(one, list) else one for one in index), *args[2:])
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    """Runs every operator on the memory of the CPU behind its tensors, and notes the copies."""

    def __init__(self, device: PretendDevice) -> None:
        super().__init__()
        self.reads, self.writes = device.reads, device.writes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, inputs = dict(kwargs or {}), []
        _map(inputs.append, (*args, *kwargs.values()))
        inside = [one for one in inputs if one.is_meta]
        to_device = torch.device(kwargs["device"]) == DEVICE if kwargs.get("device") is not None else bool(inside)
        if not inside and not to_device:
            return func(*args, **kwargs)
        op = func.overloadpacket
        if op not in WHOLE:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if op is aten.copy_:
            to_device = args[0].is_meta
            self._note(op, args[1].is_meta, to_device, waits=True not in args[2:] and not kwargs.get("non_blocking"))
        elif op is aten._to_copy:
            self._note(op, args[0].is_meta, to_device, waits=not kwargs.get("non_blocking"))
        elif inside:
            self._check(func, args, inside, [one for one in inputs if not one.is_meta])
        if to_device and kwargs.get("generator") is not None:
            raise RuntimeError(f"{op}: expected a generator of the device but found one of the host")
        draws = torch.Tag.nondeterministic_seeded in func.tags  # from the device's generator: the host's stands still
        with torch.random.fork_rng(devices=[], enabled=draws):
            return _compute(func, args, kwargs, inside, to_device)

    def _note(self, op, from_device: bool, to_device: bool, waits: bool = True) -> None:
        if from_device != to_device:
            (self.writes if to_device else self.reads).append(Copy(op.__name__, _site(), waits))

    def _check(self, func, args: tuple, inside: list[Tensor], outside: list[Tensor]) -> None:
        """Refuse to mix host and device where CUDA does, and note what copies without being called a copy."""
        op, reads = func.overloadpacket, torch.Tag.dynamic_output_shape in func.tags
        if op in INDEXING and args[0].is_meta:
            indices = [one for one in args[1] if one is not None]
            reads = any(one.is_meta and one.dtype in (torch.bool, torch.uint8) for one in indices)  # how many are true
            for one in indices:
                self._note(op, one.is_meta, True)
            outside = outside[sum(not one.is_meta for one in indices) :]  # the indices come before the values
        if reads or (op not in OF_SHAPES and any(_is_number(one.type) for one in func._schema.returns)):
            self._note(op, True, False)
        scalars = torch.Tag.pointwise in func.tags or op in TAKE_HOST_SCALARS
        if any(one.dim() or not scalars for one in outside) or (outside and not args[0].is_meta and _writes(func)):
            found = ", ".join(f"{tuple(one.shape)} on {one.device}" for one in (*inside, *outside))
            raise RuntimeError(f"{op}: expected all tensors to be on the same device, but found {found}")


def _compute(func, args: tuple, kwargs: dict, inside: Sequence[Tensor], to_device: bool):
    """Run an operator on the CPU. Results share storages with inputs where they share memory."""
    behind = {id(one): _host(one) for one in inside}
    inputs = {id(behind[id(one)]): one for one in inside}
    owners = {one.untyped_storage().host._cdata: one for one in inside}

    def wrapped(result: Tensor) -> Tensor:
        given = inputs.get(id(result))  # of an operator that works in place
        if given is not None and (given.shape, given.stride()) == (result.shape, result.stride()):
            return given
        memory = result.untyped_storage()
        if (owner := owners.get(memory._cdata)) is not None:
            storage, is_inference = owner.untyped_storage(), owner.is_inference()
        else:
            storage = torch.empty(memory.nbytes(), dtype=torch.uint8, device=DEVICE).untyped_storage()
            storage.host, is_inference = memory, torch.is_inference_mode_enabled()
        with torch.inference_mode(is_inference):  # a view of a tensor that is none for inference is none, either
            found = torch.empty(0, dtype=result.dtype, device=DEVICE) if given is None else given
            return found.set_(storage, result.storage_offset(), result.shape, result.stride())

    args = _map(lambda one: behind.get(id(one), one), args)
    kwargs = {name: _map(lambda one: behind.get(id(one), one), value) for name, value in kwargs.items()}
    results = func(*args, **{**kwargs, "device": HOST} if "device" in kwargs else kwargs)
    return _map(wrapped, results) if to_device else results


def _map(change: Callable, value):
    """Change the tensors among an operator's arguments or results."""
    if isinstance(value, Tensor):
        return change(value)
    return [_map(change, one) for one in value] if isinstance(value, (list, tuple)) else value


def _index(values: list) -> Tensor:
    return torch.tensor(values, dtype=None if values else torch.int64).to(DEVICE)


def _is_number(kind: torch._C.JitType) -> bool:
    return str(kind) in ("bool", "int", "float", "number")


def _writes(func) -> bool:
    """Whether an operator writes into its first argument."""
    first = func._schema.arguments[0].alias_info
    return first is not None and first.is_write


def _host(tensor: Tensor) -> Tensor:
    """Return the tensor of the CPU behind one of the device."""
    memory = getattr(tensor.untyped_storage(), "host", None)
    if memory is None:
        raise RuntimeError("this meta tensor holds nothing: it was made outside pretend_device(), or by no operator")
    return torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def _site() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PRODUCT):
            return f"{path.relative_to(PRODUCT)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "a test"
