"""A preallocated KV cache in which every row has its own length.

Rows are dense: 0..n-1 are active. The nodes of a forward are written after the row's committed tokens, node i at slot
length + i. `commit` moves the accepted ones down, which is correct because RoPE was applied at position = depth. The
model's attention calls `update`, which receives no positions, so `begin` sets the slots of each step beforehand.

Letters: n active rows, R rows of a forward, H key/value heads, S slots, N nodes, A path entries, D_head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


@dataclass
class _Step:
    """Where the current forward writes; shared by the layers of a cache."""

    max_rows: int
    capacity: int = 0  # slots of a row
    rows: range = range(0)
    starts: Sequence[int] = ()  # first slot written in each row
    common_start: int | None = None  # where all rows start at the same slot: a slice copy then replaces the scatter
    n_nodes: int = 0
    used: int = 0  # slots that attention reads
    slots: Tensor | None = None  # [R, N] int64, computed when first needed

    def slots_like(self, states: Tensor) -> Tensor:
        """The slots of each node, expanded to `states` [R, H, N, D_head] for a scatter."""
        if self.slots is None or self.slots.device != states.device:
            starts = torch.tensor(self.starts, device=states.device)
            self.slots = starts[:, None] + torch.arange(self.n_nodes, device=states.device)
        return self.slots[:, None, :, None].expand_as(states)


class SlotLayer(CacheLayerMixin):
    """Keys and values of one block, [max_rows, H, S, D_head] each."""

    def __init__(self, step: _Step):
        super().__init__()
        self._step = step

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate buffers with the heads, width, dtype and device of the first states [R, H, N, D_head]."""
        rows, slots = self._step.max_rows, self._step.capacity
        # Zeros, not empty: a masked slot has weight 0, but 0 * NaN of uninitialised memory is NaN.
        self.keys = key_states.new_zeros(rows, key_states.shape[1], slots, key_states.shape[3])
        self.values = value_states.new_zeros(rows, value_states.shape[1], slots, value_states.shape[3])
        self.is_initialized = True

    def grow(self, capacity: int) -> None:
        """Extend each row to `capacity` slots."""
        missing = capacity - self.keys.shape[2]
        self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, missing))
        self.values = torch.nn.functional.pad(self.values, (0, 0, 0, missing))

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write the step's K and V [R, H, N, D_head]. Return all slots that it may read, [R, H, used, D_head]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        step, first, n_rows = self._step, self._step.rows.start, len(self._step.rows)
        whole = n_rows == step.max_rows
        written = []
        # `narrow` rather than slicing: this runs twice per layer, and a Python slice costs as much as the copy.
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            rows = buffer if whole else buffer.narrow(0, first, n_rows)
            if step.common_start is not None:
                rows.narrow(2, step.common_start, step.n_nodes).copy_(states)
            else:  # scatter_ is several times cheaper here than advanced indexing
                rows.scatter_(2, step.slots_like(states), states)
            written.append(rows.narrow(2, 0, step.used))
        return written[0], written[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._step.used, 0

    def get_seq_length(self) -> int:
        return self._step.used - self._step.n_nodes

    def get_max_length(self) -> int:
        return -1


class KVCache(Cache):
    """A slot cache for ragged rows and trees; Hugging Face models use it like any other `past_key_values`.

    Args:
        max_rows: rows to allocate for.
        block_tokens: the slots of a row grow in multiples of this.
    """

    def __init__(self, max_rows: int, block_tokens: int = 256):
        self._step = _Step(max_rows)
        self.block_tokens = block_tokens
        self.lengths: list[int] = []  # committed tokens of each active row
        super().__init__(layers=[])

    @property
    def max_rows(self) -> int:
        return self._step.max_rows

    @property
    def n_rows(self) -> int:
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        """Slots per row."""
        return self._step.capacity

    @property
    def cache_bytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers if layer.is_initialized)

    def begin(self, rows: range, starts: Sequence[int], n_nodes: int) -> int:
        """Set where the next forward writes: row rows[r] from slot starts[r] on. Return how many slots it will read."""
        step = self._step
        assert len(starts) == len(rows), (rows, starts)
        assert rows.stop <= step.max_rows, (rows, step.max_rows)
        first = starts[0]
        step.rows, step.starts, step.n_nodes, step.slots = rows, starts, n_nodes, None
        step.common_start = first if all(start == first for start in starts) else None
        step.used = max(starts) + n_nodes
        if step.used > step.capacity:
            step.capacity = -(-step.used // self.block_tokens) * self.block_tokens
            for layer in self.layers:
                if layer.is_initialized:
                    layer.grow(step.capacity)
        return step.used

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Called by each attention layer; see `SlotLayer.update`."""
        while len(self.layers) <= layer_idx:
            self.layers.append(SlotLayer(self._step))
        return self.layers[layer_idx].update(key_states, value_states)

    def commit(self, path: Tensor | None, counts: Sequence[int]) -> None:
        """Keep the accepted nodes of the last forward, in place, and forget the rest.

        Args:
            path: [n, A] int64, the accepted nodes of each row in order, root first; entries past counts[b] are ignored.
                None: the accepted nodes are 0..counts[b]-1, as in a chain, and nothing has to move.
            counts: accepted nodes of each row, root included.
        """
        if path is not None:
            path = path[:, : max(counts)]
            n_rows, width = path.shape
            starts = torch.tensor(self.lengths, device=path.device)[:, None]
            places = torch.arange(width, device=path.device)
            accepted = places < torch.tensor(counts, device=path.device)[:, None]
            read = starts + torch.where(accepted, path, places)  # past the end a node is written onto itself
            write = starts + places
            for layer in self.layers:
                for states in (layer.keys[:n_rows], layer.values[:n_rows]):
                    shape = (n_rows, states.shape[1], width, states.shape[3])
                    moved = states.gather(2, read.to(states.device)[:, None, :, None].expand(shape))
                    states.scatter_(2, write.to(states.device)[:, None, :, None].expand(shape), moved)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def free(self, row: int) -> None:
        """Remove a row: the last row moves into its place."""
        last, length = self.n_rows - 1, self.lengths[-1]
        if row != last:
            for layer in self.layers:
                layer.keys[row, :, :length] = layer.keys[last, :, :length]
                layer.values[row, :, :length] = layer.values[last, :, :length]
            self.lengths[row] = length
        self.lengths.pop()

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget each row's tokens past lengths[b], for example rejected drafts."""
        assert all(new <= old for new, old in zip(lengths, self.lengths, strict=True)), (lengths, self.lengths)
        self.lengths = list(lengths)

    def read(self, layer_idx: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the slots [n, K] int64 of one layer. Return keys and values [n, H, K, D_head]."""
        layer = self.layers[layer_idx]
        slots = slots.to(layer.keys.device)[:, None, :, None]
        keys, values = layer.keys[: slots.shape[0]], layer.values[: slots.shape[0]]
        return (
            keys.gather(2, slots.expand(-1, keys.shape[1], -1, keys.shape[3])),
            values.gather(2, slots.expand(-1, values.shape[1], -1, values.shape[3])),
        )

    def fill(self, layer_idx: int, keys: Tensor, values: Tensor, lengths: Sequence[int]) -> None:
        """Replace one layer's content: the first lengths[b] tokens of row b are keys and values [n, H, K, D_head].

        After one such call per layer the cache has n rows of these lengths, as if the model had read them.
        """
        n_rows, n_tokens = keys.shape[0], keys.shape[2]
        assert len(lengths) == n_rows, (lengths, n_rows)
        assert max(lengths) <= n_tokens, (lengths, n_tokens)
        self.begin(range(n_rows), [0] * n_rows, n_tokens)
        self.update(keys, values, layer_idx)
        self.lengths = list(lengths)
