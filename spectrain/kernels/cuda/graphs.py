"""CUDA graphs: what the host would launch anew in every step is recorded once for each shape, and replayed.

A forward of 32 blocks is some 500 kernels, and launching one takes the host longer than a small one takes the GPU. A
graph fixes shapes and addresses, so steps are padded to a few sizes, and caches are kept from one generation to the
next.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import count

import torch
from torch import Tensor

ROWS = (1, 2, 4, 8, 16, 32, 64)  # of a batch; more are not padded
NODES = (1, 4, 8, 16, 32, 64, 128)  # of a row's tree, likewise
MOST_GRAPHS = 512  # kept; of more the one that was not used for the longest time is forgotten

log = logging.getLogger(__name__)
unique = count(1 << 40).__next__  # a number for whatever has fixed addresses; an `id` may return


class Graphs:
    """Replays functions of tensors.

    Args:
        record: makes of a function without arguments, which works on fixed addresses, one that replays it.
    """

    n_prepared = 0  # first calls and recordings, of all objects of this process

    def __init__(self, record: Callable[[Callable[[], object]], Callable[[], object]] | None = None) -> None:
        self._record: Callable | None = record or _record  # None: it failed
        self._recorded: OrderedDict[Hashable, tuple[list[Tensor], Callable[[], object] | None]] = OrderedDict()
        self.rehearsed: set[tuple] = set()  # what all was recorded for

    def run(self, key: Hashable, function: Callable[..., object], *inputs: Tensor) -> object:
        """Return function(*inputs), from the second call with a key and these shapes on by replaying it.

        The rows of the batch are padded to one of ROWS by rows of an earlier call, or by copies of the first row, so
        that a batch which drains records nothing. What the function computes for these is cut off.

        Args:
            key: a tuple that names the function and all that it depends on besides its inputs: a name, the numbers of
                the memory that it reads and writes (see `unique`), options.
            function: of tensors only; what else it does in Python happens in the first two calls only.
            inputs: [n, ..] each, the first at least, or padded already. They are copied to where the graph reads them.

        Returns:
            What the function returns, tensors [n, ..]; the next call with the key overwrites them.
        """
        n_rows = len(inputs[0])
        padded_rows = padded(n_rows, ROWS)
        key = key, padded_rows, *(input.shape[1:] for input in inputs)
        fixed, replay = self._recorded.get(key, (None, None))
        if self._record is None or fixed is None:  # libraries set themselves up in a first call: it is not recorded
            fixed = [_with_rows(input, padded_rows) for input in inputs]
            outputs = function(*fixed)
            if self._record is not None:
                self._recorded[key] = fixed, None
                Graphs.n_prepared += 1
                if len(self._recorded) > MOST_GRAPHS:
                    self._recorded.popitem(last=False)
                    self.rehearsed.clear()
        else:
            self._recorded.move_to_end(key)
            for place, input in zip(fixed, inputs, strict=True):
                place[: len(input)].copy_(input)
            if replay is None:
                replay = self._recording(key, function, fixed)
            outputs = replay()
        return outputs if n_rows == padded_rows else _first_rows(outputs, n_rows)

    def _recording(self, key: Hashable, function: Callable[..., object], fixed: list[Tensor]) -> Callable[[], object]:
        """Return what replays the function; where it cannot be recorded the function, and nothing is from now on."""
        replay = partial(function, *fixed)
        try:
            replay = self._record(replay)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.warning("CUDA graphs are not used: %s", str(error).splitlines()[0])
            self._record = None
        self._recorded[key] = fixed, replay
        Graphs.n_prepared += 1
        return replay

    def forget(self, *addresses: int) -> None:
        """Forget graphs that work on memory which is gone: a part of their key is one of these numbers."""
        for key in [key for key in self._recorded if set(addresses) & set(key[0][1:3])]:
            del self._recorded[key]
        self.rehearsed.clear()


def _with_rows(input: Tensor, n_rows: int) -> Tensor:
    """Return a copy of a tensor whose first row is repeated at its end."""
    missing = n_rows - len(input)
    return torch.cat([input, input[:1].expand(missing, *input.shape[1:])]) if missing > 0 else input.clone()


def _first_rows(outputs: object, n_rows: int) -> object:
    if isinstance(outputs, Tensor):
        return outputs[:n_rows]
    return type(outputs)(_first_rows(one, n_rows) for one in outputs) if isinstance(outputs, list | tuple) else outputs


def _record(function: Callable[[], object]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()

    def replay() -> object:
        graph.replay()
        return outputs

    return replay


def padded(size: int, sizes: Sequence[int]) -> int:
    """Return the first of these ascending sizes that holds one; a larger one as it is."""
    return next((one for one in sizes if one >= size), size)
