"""CUDA graphs: what the host would launch anew in every step is recorded once for each shape, and replayed.

A forward of 32 blocks is some 500 kernels, and launching one takes the host longer than a small one takes the GPU. A
graph fixes shapes and addresses, so steps are padded to a few sizes, and caches are kept from one generation to the
next.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from itertools import count

import torch
from torch import Tensor

NODES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # of a row's tree; larger ones are not padded
SLOTS = 256  # of a row that attention reads: a multiple of this
MOST_GRAPHS = 64  # kept; of more the one that was not used for the longest time is forgotten

log = logging.getLogger(__name__)
unique = count().__next__  # a number for whatever has fixed addresses; an `id` may return


class Graphs:
    """Replays functions of tensors.

    Args:
        record: makes of a function without arguments, which works on fixed addresses, one that replays it.
    """

    n_recorded = 0  # of all objects of this process

    def __init__(self, record: Callable[[Callable[[], object]], Callable[[], object]] | None = None) -> None:
        self._record: Callable | None = record or _record  # None: it failed
        self._recorded: OrderedDict[Hashable, tuple[list[Tensor], Callable[[], object]] | None] = OrderedDict()

    def run(self, key: Hashable, function: Callable[..., object], *inputs: Tensor) -> object:
        """Return function(*inputs), from the second call with a key and these shapes on by replaying it.

        Args:
            key: names the function and all that it depends on besides its inputs: options, and the addresses that it
                reads and writes.
            function: of tensors only; what else it does in Python happens in the first two calls only.
            inputs: are copied to where the graph reads them.

        Returns:
            What the function returns; the next call with the key overwrites it.
        """
        if self._record is None:
            return function(*inputs)
        key = key, *(input.shape for input in inputs)
        if key not in self._recorded:  # the libraries set themselves up in a first call, which must not be recorded
            self._recorded[key] = None
            if len(self._recorded) > MOST_GRAPHS:
                self._recorded.popitem(last=False)
            return function(*inputs)
        self._recorded.move_to_end(key)
        if self._recorded[key] is None:
            fixed = [input.clone() for input in inputs]
            try:
                self._recorded[key] = fixed, self._record(lambda: function(*fixed))
                Graphs.n_recorded += 1
            except RuntimeError as error:
                log.warning("CUDA graphs are not used: %s", str(error).splitlines()[0])
                self._record = None
                return function(*inputs)
        fixed, replay = self._recorded[key]
        for place, input in zip(fixed, inputs, strict=True):
            place.copy_(input)
        return replay()


def record(function: Callable[..., object], *examples: Tensor) -> Callable[..., object]:
    """Return what computes function(*inputs) for inputs shaped like the examples.

    On a GPU a graph is recorded here, whose outputs the next call overwrites. Elsewhere it is the function itself.
    """
    if examples[0].device.type != "cuda":
        return function
    graphs = Graphs()
    for _ in range(2):  # the first call sets libraries up, the second records
        graphs.run("recorded", function, *examples)
    return partial(graphs.run, "recorded", function)


def _record(function: Callable[[], object]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()

    def replay() -> object:
        graph.replay()
        return outputs

    return replay


def padded_nodes(n_nodes: int) -> int:
    """Return the size that a tree of so many nodes is padded to."""
    return next((size for size in NODES if size >= n_nodes), n_nodes)
