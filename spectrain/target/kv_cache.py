"""A preallocated KV cache in which every row has its own length.

Rows are dense: 0..n-1 are active. The nodes of a forward are written after the row's committed tokens, node i at slot
length + i. `commit` moves the accepted ones down, which is correct because RoPE was applied at position = depth. The
model's attention calls `update`, which receives no positions, so `begin` sets the slots of each step beforehand.

Lengths are known twice: to the device, where `commit` changes them right after verification, and to the host, which
learns them when the step has been read back, by `extend`.
"""

from __future__ import annotations

import math
import mmap
import operator
from collections.abc import Hashable, Sequence
from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor
from transformers import Cache

from spectrain import kernels
from spectrain.kernels import Programs, unique
from spectrain.target.device import to_device, without

HUGE_PAGE = 1 << 21
States = list[tuple[Tensor, Tensor]]  # keys and values of a text, by block, [H, T, D_head]


class OwnKeys(Protocol):
    """A drafter that keeps keys and values of its own for all tokens of a cache's rows."""

    def states_of(self, row: int, n_tokens: int) -> States:
        """Return those of the first tokens of a row, where they lie."""

    def begin_with(self, states: States | None, n_tokens: int) -> None:
        """Say that the next prompt shares its first tokens with a text of these states. None: they are not known."""


class KVCache(Cache):
    """A slot cache for ragged rows and trees; Hugging Face models use it like any other `past_key_values`.

    Args:
        max_rows: rows to allocate for.
        block_tokens: the slots of a row are a multiple of this.
        n_tokens: slots of a row to begin with. More are added where they do not suffice, which copies all of them.
        n_layer: blocks whose buffers are one tensor, so that their nodes are moved at once; 0: each has its own.
    """

    def __init__(self, max_rows: int, block_tokens: int = 256, n_tokens: int = 0, n_layer: int = 0):
        super().__init__(layers=[])
        self.max_rows, self.block_tokens = max_rows, block_tokens
        self.keys: list[Tensor] = []  # of each block, [max_rows, H, S, D_head]
        self.values: list[Tensor] = []
        self.lengths: list[int] = []  # committed tokens of each active row, on the host
        self.touched = [0] * max_rows  # most tokens that have stood in each row, whose slots stay in memory
        self._lengths: Tensor | None = None  # [n] int64 the same on the device; None: the host knows them better
        self.capacity = -(-n_tokens // block_tokens) * block_tokens  # S
        self.storage = unique()  # another number whenever keys and values have moved in memory
        self.n_layer, self._whole = n_layer, None  # [2, n_layer, max_rows, H, S, D_head], of which those are parts
        self.programs: Programs | None = None  # that run forwards against it
        self.weights: tuple[int, ...] = ()  # addresses of the model's, for which the cache was made
        self.beside: dict[OwnKeys, Hashable] = {}  # drafters of the same rows, and what says whose keys theirs are
        # Where the current forward writes: rows, the first slot of each, the slot that all rows start at (if they do),
        # nodes per row, slots that attention reads, the slots [R, N] where a row has its own, and `_lines` of them.
        self._rows, self._starts, self._common_start = range(0), (), None
        self._n_nodes, self._used, self._slots = 0, 0, None
        self._lines: dict[tuple[torch.device, int], Tensor] = {}

    @property
    def n_rows(self) -> int:
        return len(self.lengths)

    @property
    def bytes(self) -> int:
        """Memory that keys and values take."""
        return sum(states.nbytes for states in (*self.keys, *self.values))

    def slots_taken(self, lengths: Sequence[int]) -> int:
        """Return how many slots are in memory when the rows have reached these lengths."""
        return sum(max(one) for one in zip_longest(self.touched, lengths, fillvalue=0))

    def __len__(self) -> int:
        return len(self.keys)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._used - self._n_nodes

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._used, 0

    def lengths_on(self, device: torch.device) -> Tensor:
        """Return the committed tokens [n] int64 of each active row, on the device of the model."""
        if self._lengths is None or self._lengths.device != device:
            self._lengths = to_device(torch.tensor(self.lengths, dtype=torch.int64), device)
        return self._lengths

    def begin(self, rows: range, starts: Sequence[int], n_nodes: int, slots: Tensor | None = None) -> int:
        """Set where the next forward writes: row rows[r] from slot starts[r] on. Return how many slots it will read.

        `slots` [R, N] int64 are the same, on the device, where the caller has them.
        """
        assert len(starts) == len(rows), (rows, starts)
        assert rows.stop <= self.max_rows, (rows, self.max_rows)
        first = starts[0]
        self._rows, self._starts, self._n_nodes, self._slots, self._lines = rows, starts, n_nodes, slots, {}
        self._common_start = first if min(starts) == max(starts) else None
        self._used = max(starts) + n_nodes
        if self._used > self.capacity:
            missing = -(-self._used // self.block_tokens) * self.block_tokens - self.capacity
            self.capacity += missing
            self.storage, self.programs = unique(), None
            if self._whole is not None:
                self._whole = torch.nn.functional.pad(self._whole, (0, 0, 0, missing))
                self.keys, self.values = (list(half)[: len(self.keys)] for half in self._whole)
                return self._used
            for buffers in (self.keys, self.values):
                for i, states in enumerate(buffers):  # one by one, so that the old ones are freed on the way
                    buffers[i] = torch.nn.functional.pad(states, (0, 0, 0, missing))
        return self._used

    def allocate(self, n_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make the buffers of one more block. Zeros: a masked slot has weight 0, but 0 * NaN of empty memory is NaN."""
        shape, place = (self.max_rows, n_heads, self.capacity, size), len(self.keys)
        if place == 0 and self.n_layer:
            self._whole = zeros((2, self.n_layer, *shape), dtype, device)
        if self._whole is not None and self._whole.shape[2:] != shape:  # blocks differ
            self.keys, self.values = ([one.clone() for one in buffers] for buffers in (self.keys, self.values))
            self._whole = None
        for half, buffers in enumerate((self.keys, self.values)):
            own = zeros(shape, dtype, device) if self._whole is None else self._whole[half, place]
            buffers.append(own)

    def place(self, slots: Tensor, used: int) -> None:
        """Let the next forward of the first R rows write to slots [R, N] int64, and read the first `used` ones."""
        self._rows, self._n_nodes = range(len(slots)), slots.shape[1]
        self._slots, self._common_start, self._used, self._lines = slots, None, used, {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Write a block's K and V [R, H, N, D_head]. Return all slots that it may read, [R, H, used, D_head].

        Each attention layer of the model calls this.
        """
        if layer_idx == len(self.keys):
            self.allocate(key_states.shape[1], key_states.shape[3], key_states.dtype, key_states.device)
        first, n_rows = self._rows.start, len(self._rows)
        written = []
        # `narrow` rather than slicing: this runs twice per layer, and a Python slice costs as much as the copy.
        for buffer, states in ((self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)):
            rows = buffer if n_rows == self.max_rows else buffer.narrow(0, first, n_rows)
            if self._common_start is not None:
                rows.narrow(2, self._common_start, self._n_nodes).copy_(states)
            else:  # in bfloat16 on a CPU, scatter_ takes up to 200 times as long
                width = states.shape[3]
                rows.view(-1, width).index_copy_(0, self._lines_of(states), states.reshape(-1, width))
            written.append(rows.narrow(2, 0, self._used))
        return written[0], written[1]

    def _lines_of(self, states: Tensor) -> Tensor:
        """Return where states [R, H, N, D_head] lie in buffers seen as [R H S, D_head], as [R H N] int64."""
        device, n_heads = states.device, states.shape[1]
        if (device, n_heads) not in self._lines:
            slots = self._slots
            if slots is None or slots.device != device:
                starts = to_device(torch.tensor(self._starts), device)
                slots = starts[:, None] + torch.arange(self._n_nodes, device=device)
            before = torch.arange(len(slots) * n_heads, device=device).view(-1, n_heads, 1) * self.capacity
            self._lines[device, n_heads] = (before + slots[:, None]).flatten()
        return self._lines[device, n_heads]

    def commit(self, path: Tensor | None, accepted: Tensor) -> None:
        """Keep the root and the accepted nodes of the last forward, in place, and forget the rest; then `extend`.

        Args:
            path: [n, A] int64, these nodes of each row in order, root first, then -1.
                None: they are 0..accepted[b], as in a chain, and nothing has to move.
            accepted: [n] int64 nodes of each row, the root not counted.
        """
        lengths = self.lengths_on(accepted.device)
        if path is not None:
            self.move(path, lengths)
        self._lengths = lengths + accepted + 1

    def move(self, path: Tensor, lengths: Tensor) -> None:
        """Move nodes path[b, j] behind the first lengths[b] tokens of rows to place j; see `kernels.move`."""
        is_one = self._whole is not None and path.device.type != "cpu"
        kernels.move([self._whole.flatten(0, 1)] if is_one else [*self.keys, *self.values], path, lengths)

    def extend(self, counts: Sequence[int]) -> None:
        """The same on the host: each row has counts[b] tokens more, the root included."""
        self.lengths = [*map(operator.add, self.lengths, counts)]

    def keep(self, n_nodes: int) -> None:
        """Commit the first nodes of the last forward in every row, on device and host."""
        if self._lengths is not None:
            self._lengths = self._lengths + n_nodes
        self.extend([n_nodes] * self.n_rows)

    def join(self, lengths: Sequence[int]) -> None:
        """New rows at the end hold the first lengths[r] nodes of the last forwards."""
        self.lengths.extend(lengths)
        self._lengths = None

    def clear(self) -> None:
        """Forget all rows, and who keeps keys beside them."""
        self.lengths, self._lengths = [], None
        self.beside.clear()

    def leave(self, row: int, n_tokens: int) -> None:
        """Remember that so many tokens of a row that is given up stay in memory."""
        self.touched[row] = max(self.touched[row], n_tokens)

    def free(self, row: int) -> None:
        """Remove a row: the last row moves into its place."""
        last, length = self.n_rows - 1, self.lengths[-1]
        for one in {row, last}:
            self.leave(one, self.lengths[one])
        if row != last:
            for states in (*self.keys, *self.values):
                states[row, :, :length] = states[last, :, :length]
            self.lengths[row] = length
        self.lengths.pop()
        if self._lengths is not None:
            self._lengths = without(self._lengths, row)

    def states_of(self, row: int, n_tokens: int) -> States:
        """Return keys and values of the first tokens of a row, where they lie: [H, n_tokens, D_head] for each block."""
        rows = zip(self.keys, self.values, strict=True)
        return [(keys[row, :, :n_tokens], values[row, :, :n_tokens]) for keys, values in rows]

    def restore(self, row: int, states: States, n_tokens: int) -> None:
        """Write the first tokens of `states_of` to a row, which has not joined yet."""
        self.begin(range(row, row + 1), [0], n_tokens)
        for layer_idx, pair in enumerate(states):
            self.update(*(one[None, :, :n_tokens] for one in pair), layer_idx)

    def truncate(self, lengths: Sequence[int], on_device: Tensor | None = None) -> None:
        """Forget each row's tokens past lengths[b], for example rejected drafts; `on_device` [n] int64 is the same."""
        assert all(new <= old for new, old in zip(lengths, self.lengths, strict=True)), (lengths, self.lengths)
        self.lengths, self._lengths = list(lengths), on_device

    def read(self, layer_idx: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the slots [n, K] int64 of one layer. Return keys and values [n, H, K, D_head]."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        slots = slots.to(keys.device)[:, None, :, None]
        return (
            keys.gather(2, slots.expand(-1, keys.shape[1], -1, keys.shape[3])),
            values.gather(2, slots.expand(-1, values.shape[1], -1, values.shape[3])),
        )

    def fill(self, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """Replace the first tokens of one layer by keys and values [n, H, K, D_head], as if the model had read them."""
        n_rows, _, n_tokens, _ = keys.shape
        self.begin(range(n_rows), [0] * n_rows, n_tokens)
        self.update(keys, values, layer_idx)

    def hold(self, lengths: Sequence[int]) -> None:
        """Say how many tokens of each row the cache holds: those that were filled, or written by a graph."""
        self.lengths, self._lengths = list(lengths), None


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On a CPU slots take no memory before they are written."""
    n_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or n_bytes < 2 * HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, n_bytes, access=mmap.ACCESS_COPY)  # private: a process that is forked has its own
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # one token of each row and head would take a huge page each
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
