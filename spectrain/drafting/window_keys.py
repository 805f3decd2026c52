"""Where a drafter of our own blocks keeps the keys and values of each row: those of a window, or of the whole text."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.kernels import unique
from spectrain.target.kv_cache import States, zeros
from spectrain.target.llama import KeysValues, LlamaShape
from spectrain.target.tree import DraftTree


class Window(Protocol):
    """What a token sees of the text before it: the config of a drafter."""

    shape: LlamaShape
    window_tokens: int  # a query at t sees positions t - window + 1 .. t
    sink_tokens: int  # first positions of the text, always seen
    own_key: bool  # whether a token sees its own key

    def sees_itself(self, others: Tensor) -> Tensor:
        """Return whether each query sees its own key, [..] bool, given which other keys it sees, [.., S] bool."""


class WindowKeys:
    """K/V of the sinks and of the last positions, of each row and draft block, in slots found by position.

    Position p stands at slot p where it is a sink, else at slot s + p mod (W + g). Behind these are slots for the nodes
    of a tree that is being drafted, which several of one position may share. The last slot takes what is to be thrown
    away. `positions` [rows, S] int64 says what stands where, -1 nothing, or a node.

    Args:
        window: which positions are seen.
        n_blocks: of the drafter.
        like: a tensor of the device and the dtype of keys and values.
        ring_tokens: positions behind the sinks that have a slot, those of the window and of a chain.
        max_rows: of a batch.
        tree_nodes: most nodes of a tree that are read, the root included; 0: chains only.
    """

    is_whole = False  # whether all of a text is kept, see `WholeKeys`

    def __init__(
        self, window: Window, n_blocks: int, like: Tensor, ring_tokens: int, max_rows: int, tree_nodes: int = 0
    ) -> None:
        self.window, self.ring_tokens, shape = window, ring_tokens, window.shape
        self.first_node = window.sink_tokens + self.ring_tokens  # the slot of a tree's root
        n_slots = self.first_node + tree_nodes + 1
        size = (max_rows, shape.n_kv_head, n_slots, shape.head_dim)
        of = size, like.dtype, like.device
        self.stores = [KeysValues(zeros(*of), zeros(*of)) for _ in range(n_blocks)]
        self.positions = torch.full((max_rows, n_slots), -1, dtype=torch.int64, device=like.device)
        self.n_rows = 0
        self.storage = unique()

    def kept(self, lengths: Tensor) -> Tensor:
        """Return the positions [R, s + W + g] that are kept of texts of lengths [R]; -1 where there are fewer."""
        last = lengths[:, None]
        near = last - self.ring_tokens + torch.arange(self.ring_tokens, device=last.device)
        near = near.masked_fill(near < self.window.sink_tokens, -1)  # a sink is not taken twice
        sinks = torch.arange(self.window.sink_tokens, device=last.device).expand(len(lengths), -1)
        return torch.cat([sinks.masked_fill(sinks >= last, -1), near], dim=1)

    def join(self, rows: range) -> None:
        """Let rows begin with nothing kept, up to the last one."""
        self.positions[rows.start : rows.stop] = -1
        self.n_rows = rows.stop

    def write(self, keys_values: list[KeysValues], positions: Tensor, rows: slice) -> None:
        """Stores K/V [n, H_kv, P, D_head] of positions [n, P] in rows `rows`."""
        self.put(keys_values, self.claim(positions, rows), rows)

    def claim(self, positions: Tensor, rows: slice) -> Tensor:
        """Note that positions [n, P] are about to be stored in rows `rows`. Return their slots [n, P]."""
        n_sinks = self.window.sink_tokens
        slots = torch.where(positions < n_sinks, positions, n_sinks + positions % self.ring_tokens)
        slots = slots.masked_fill(positions < 0, self.positions.shape[1] - 1)
        self.positions[rows].scatter_(1, slots, positions)
        return slots

    def put(self, keys_values: list[KeysValues], slots: Tensor, rows: slice) -> None:
        """Stores K/V [n, H_kv, P, D_head] in slots [n, P] of rows `rows`."""
        for store, new in zip(self.stores, keys_values, strict=True):
            index = slots[:, None, :, None].expand_as(new.keys)
            store.keys[rows].scatter_(2, index, new.keys)
            store.values[rows].scatter_(2, index, new.values)

    def sees(self, stored: Tensor, queries: Tensor, end: Tensor) -> Tensor:
        """Return whether queries see what is stored, where that stands before the position `end`; all are positions."""
        near = (stored > queries - self.window.window_tokens) | (stored < self.window.sink_tokens)
        return near & (stored >= 0) & (stored < end)

    def all_of(self, n_rows: int) -> list[KeysValues]:
        """All slots of the first rows."""
        return [KeysValues(store.keys[:n_rows], store.values[:n_rows]) for store in self.stores]

    def context(self, seen: Tensor, lengths: Tensor | None) -> tuple[list[KeysValues], Tensor]:
        """Return slots [n, K, S, E] of the rows by block, and which of them nodes see, [n, m, S], given `read_by`."""
        return self.all_of(len(seen)), seen

    def read_one(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return of single tokens at positions [n] what `read_by` returns of nodes. They are about to be stored."""
        t, slots = positions[:, None], self.claim(positions[:, None], slice(0, len(positions)))
        stored = self.positions[: len(positions)]
        earlier = self.sees(stored, t, t)
        itself = (stored == t) & self.window.sees_itself(earlier)[:, None]
        return (earlier | itself)[:, None], slots, None

    def read_by(self, tree: DraftTree, roots: Tensor, n_new: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what the last n_new nodes of each row's tree see, and where they stand.

        Which slots they see, [n, n_new, S] bool; their own, [n, n_new]; and how many slots [n] int64 all of them see,
        behind which the first of those S is (None: 0).

        `roots` [n] are the positions of the roots.
        """
        n_rows, n_nodes = tree.shape
        roots = roots[:, None, None]
        seen = self.sees(self.positions[:n_rows, None], roots + tree.depth[:, -n_new:, None], roots)
        seen[:, :, self.first_node : self.first_node + n_nodes] = tree.ancestors[:, -n_new:]
        slots = torch.arange(n_nodes - n_new, n_nodes, device=seen.device) + self.first_node
        own = slots.expand(n_rows, -1)[..., None]
        seen.scatter_(2, own, False)  # a node is one of its ancestors
        return seen.scatter(2, own, self.window.sees_itself(seen)[..., None]), own[..., 0], None

    def clear(self) -> None:
        """Forget all rows."""
        self.positions.fill_(-1)
        self.n_rows = 0

    def free(self, row: int) -> None:
        """A row ended: the last one moves into its place."""
        last = self.n_rows - 1
        if row != last:
            self.positions[row] = self.positions[last]
            for store in self.stores:
                store.keys[row], store.values[row] = store.keys[last], store.values[last]
        self.n_rows = last


class WholeKeys(WindowKeys):
    """K/V of whole texts, in order, for drafters that see all of them: position p stands at slot p.

    So a token sees all slots before the root's, without a mark for each, and a row pays for its own length alone. The
    nodes of a tree stand behind the text, from the root's slot on, where they see what is marked.
    """

    is_whole = True

    @property
    def n_marks(self) -> int:
        """Slots from the root's on that are marked for each node."""
        return max(1, self.positions.shape[1] - 1 - self.ring_tokens)

    def kept(self, lengths: Tensor) -> Tensor:
        every = torch.arange(int(lengths.max()), device=lengths.device).expand(len(lengths), -1)
        return every.masked_fill(every >= lengths[:, None], -1)

    def states_of(self, row: int, n_tokens: int) -> States:
        """Return K/V of the first positions of a row, where they lie."""
        return [(store.keys[row, :, :n_tokens], store.values[row, :, :n_tokens]) for store in self.stores]

    def restore(self, row: int, states: States, n_tokens: int) -> None:
        """Write the first positions of `states_of` to a row."""
        self.positions[row, :n_tokens] = torch.arange(n_tokens, device=self.positions.device)
        for store, (keys, values) in zip(self.stores, states, strict=True):
            store.keys[row, :, :n_tokens], store.values[row, :, :n_tokens] = keys[:, :n_tokens], values[:, :n_tokens]

    def context(self, seen: Tensor, lengths: Tensor | None) -> tuple[list[KeysValues], Tensor]:
        n_rows, n_nodes, n_marks = seen.shape
        used = int(lengths.max()) + n_marks if seen.device.type == "cpu" else self.positions.shape[1]
        slots = torch.arange(used, device=seen.device)
        whole = (slots < lengths[:, None])[:, None].repeat(1, n_nodes, 1)
        marked = (lengths[:, None] + slots[:n_marks])[:, None].expand_as(seen)
        past = [KeysValues(one.keys[:, :, :used], one.values[:, :, :used]) for one in self.all_of(n_rows)]
        return past, whole.scatter_(2, marked, seen)

    def read_one(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        itself = torch.arange(self.n_marks, device=positions.device) == 0
        return itself.expand(len(positions), 1, -1), positions[:, None], positions

    def read_by(self, tree: DraftTree, roots: Tensor, n_new: int) -> tuple[Tensor, Tensor, Tensor | None]:
        n_nodes = tree.shape[1]
        slots = roots[:, None] + torch.arange(n_nodes - n_new, n_nodes, device=roots.device)
        return F.pad(tree.ancestors[:, -n_new:], (0, self.n_marks - n_nodes)), slots, roots


def kind_of_keys(window: Window, gamma: int, capacity: int) -> tuple[type[WindowKeys], int]:
    """Return how a drafter's keys are kept, and how many positions behind the sinks have a slot.

    A chain has at most `gamma` tokens, and the longest text `capacity`; 0: it is not known.
    """
    most = window.shape.max_positions
    if window.window_tokens < min(capacity or most, most) or window.sink_tokens or not window.own_key:
        return WindowKeys, window.window_tokens + gamma
    return WholeKeys, (capacity or most) + gamma
