"""Programs: lists of operations on fixed buffers, written once and run as often as needed by one call.

A step of a small model is some hundred operations of a few microseconds each, so calling them one by one from Python
costs more than they do. Each method here appends what its name says; arguments are tensors, whose memory the program
reads and writes at every run.

Letters: n tokens per row, M = B n, F width of the MLP, K key/value heads, E width of a head.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from spectrain.kernels.cpu import operations as ops
from spectrain.kernels.cpu import products, tiles
from spectrain.kernels.cpu.attention import CHUNK
from spectrain.kernels.cpu.running import Table, line_of, product_lines
from spectrain.kernels.cpu.warping import N_OPTIONS, warping_bytes

MOST_TOKENS = 64  # of a forward
MOST_PROGRAMS = 96  # kept


class Program:
    """Operations on fixed buffers, for M tokens: B rows of n. All norms have the same `eps`."""

    def __init__(self, n_rows: int, n_tokens: int, eps: float = 1e-5) -> None:
        self.n_rows, self.n = n_rows, n_tokens
        self.n_threads = torch.get_num_threads()
        self._lines: list[list[int]] = []
        self._kept: list[object] = []  # whose addresses the operations hold
        self._buffers: dict[Hashable, Tensor] = {}  # that operations of one kind use one after the other
        self.own_bytes = 0
        self._work: Tensor | None = None  # of `drawn`
        self._eps = self.hold(torch.tensor([eps], dtype=torch.float32))
        self.positions, self.slots, self.tokens = (self.whole_numbers(n_rows, n_tokens) for _ in range(3))
        self.lengths = self.whole_numbers(n_rows)  # slots of each row that all its tokens see

    def hold(self, values: Tensor) -> Tensor:
        """Keep a tensor as long as the program lives."""
        self._kept.append(values)
        return values

    def floats(self, *shape: int) -> Tensor:
        return self.hold(torch.zeros(shape, dtype=torch.float32, device="cpu"))

    def whole_numbers(self, *shape: int) -> Tensor:
        return self.hold(torch.zeros(shape, dtype=torch.int64, device="cpu"))

    def __len__(self) -> int:
        return len(self._lines)

    def finish(self) -> None:
        """After the last operation."""
        self._table = Table(self._lines, self.n_threads, self.own_bytes)
        self.run, self.lines = self._table.run, self._table.lines

    def point(self, places: int | Sequence[int], field: int, values: Tensor | Sequence[int] | int) -> None:
        """Let operations at these places read or write other memory, or a number, as an argument (from 1 on)."""
        self.lines[places, field] = values.data_ptr() if isinstance(values, Tensor) else values

    def shift(self, places: Sequence[int], fields: slice, n_bytes: int) -> None:
        """Move the memory of some arguments by so many bytes."""
        self.lines[places, fields] += n_bytes

    def goes_on(self, place: int) -> int:
        """Let threads begin the next operation, which reads nothing of this one, before all have ended it."""
        self._lines[place][ops.GOES_ON] = 1
        return place

    def _add(self, operation: Callable | int, *arguments: int | Tensor | None, pieces: int = 0) -> int:
        """Append an operation. Return its place."""
        self._hold_memory(*arguments)
        kind = operation if isinstance(operation, int) else ops.kind_of(operation)
        self._lines.append(line_of(kind, *arguments, pieces=pieces))
        return len(self._lines) - 1

    def _hold_memory(self, *arguments: int | Tensor | None) -> None:
        """Keep the memory of tensors, not the tensors themselves: a parameter may get another."""
        self._kept += [one.detach() for one in arguments if isinstance(one, Tensor)]

    def product(self, x: Tensor, weight: Tensor, y: Tensor, scale: Tensor | None = None) -> int:
        """y [M, N] = x [M, K] @ weight [N, K].T, times scale [N]."""
        self._hold_memory(x, weight, y, scale)
        packed = splitting = None
        if tiles.takes(x, weight):
            packed = self._shared("packed", tiles.packed_size(*x.shape))
            splitting = self.hold(tiles.splitting(x, packed))
        lines, own_bytes = product_lines(x, weight, scale, y, self.n_threads, packed, splitting)
        self.own_bytes = max(self.own_bytes, own_bytes)
        self._lines += lines
        return len(self._lines) - 1

    def norm(self, x: Tensor, added: Tensor | None, weight: Tensor, y: Tensor) -> int:
        """x += added, then y = RMSNorm(x) [M, D]. x and y may be columns of wider matrices."""
        sizes = x.shape[1], x.shape[0], x.stride(0), y.stride(0)
        pieces = min(self.n_threads, len(x))  # none is without a row
        return self._add(ops.norm, x, added, weight, y, self._eps, *sizes, pieces=pieces)

    def embed(self, table: Tensor, x: Tensor) -> int:
        """Write the rows of a table, float32 or bfloat16, of `tokens` to x [M, D]."""
        return self._add(ops.embed, self.tokens, table, 8 * table.element_size(), x, table.shape[1], len(x), len(table))

    def angles(self, frequencies: Tensor, scaling: float, cos: Tensor, sin: Tensor) -> int:
        """Write cos and sin [M, E / 2] of `positions` times frequencies [E / 2], times a number."""
        scaling = self.hold(torch.tensor([scaling], dtype=torch.float32))
        return self._add(ops.angles, self.positions, frequencies, cos, sin, scaling, cos.shape[1], len(cos))

    def rotate(
        self,
        joined: Tensor,
        bias: Tensor | None,
        norms: tuple[Tensor | None, Tensor | None],
        rope: tuple[Tensor, Tensor],
        queries: Tensor | None,
        keys: Tensor,
        values: Tensor,
    ) -> int:
        """Split a joined projection [M, (H + 2 K) E], and rotate it.

        Args:
            joined: queries, keys, values; without queries [M, 2 K E].
            bias: that is added first.
            norms: weights [E] of the norms of queries and keys.
            rope: as `angles` writes it.
            queries: [M, H E], where they go.
            keys, values: [B, K, S, E], into whose `slots` they go.
        """
        n_kv, size, m = keys.shape[1], keys.shape[3], len(joined)
        n_query = joined.shape[1] // size - 2 * n_kv if queries is not None else 0
        sizes = self.n, n_query, n_kv, size, keys.stride(0), keys.stride(1), m
        return self._add(
            *(ops.rotate, joined, queries, keys, values, *rope, self.slots),
            *(None if bias is None else bias.float(), *norms, self._eps, *sizes),
        )

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, attended: Tensor, seen: Tensor) -> int:
        """Attend to slots up to `lengths`, then to the next W ones as flags seen [B or 1, n, W] say.

        queries and attended: [M, H E]; keys and values: [B, K, S, E].
        """
        (_, n_kv, _, size), m = keys.shape, len(queries)
        n_query, stride = queries.shape[1] // size, 0 if len(seen) == 1 else seen[0].numel()
        parts = self._shared("parts", self.n_threads, m * n_query, size + 2)
        scores = self._shared("scores", self.n_threads, self.n * (n_query // n_kv) * CHUNK + ops.LINE_BYTES // 4)
        scale = self.hold(torch.tensor([size**-0.5], dtype=torch.float32))
        kernels = self.hold(torch.tensor(products.attention_kernels())) if products.mixes(size) else None
        heads = n_query, n_kv, size
        place = self._add(
            *(ops.attend, queries, keys, values, parts, self.lengths, seen, stride, seen.shape[2], self.n, *heads),
            *(keys.stride(0), keys.stride(1), self.n_rows, scores, scale, kernels),
        )
        self._add(ops.combine, parts, attended, self.n, *heads, self.n_rows)
        return place

    def _shared(self, name: str, *shape: int) -> Tensor:
        """Memory that operations of one kind use one after the other."""
        if (name, shape) not in self._buffers:
            self._buffers[name, shape] = self.floats(*shape)
        return self._buffers[name, shape]

    def silu(self, gate_up: Tensor, y: Tensor) -> int:
        """y [M, F] = silu(gate) * up of a joined projection [M, 2 F]."""
        return self._add(ops.silu, gate_up, y, y.shape[1], len(y))

    def copy(self, x: Tensor, y: Tensor | None) -> int:
        """y [M, D] = x, which the next operations may change only after one that waits. None: `point` says where."""
        return self._add(ops.copy, x, y, x.shape[1], len(x))

    def mix(self, states: Tensor, weights: Tensor, y: Tensor) -> int:
        """y [M, D] = the sum of states [L, M, D], weighted."""
        return self._add(ops.mix, states, weights, y, len(states), y.numel())

    def window(self, stored: Tensor, seen: Tensor, window: int, n_sinks: int, n_ring: int, own_key: bool = True) -> int:
        """Write `slots` of `positions` in a ring behind sinks, and which slots they see [B, 1, S]; see `WindowKeys`.

        stored: [B, S] int64, the positions of what stands in each slot. Without `own_key` tokens see themselves only
        where they see no other slot.
        """
        return self._add(
            *(ops.window, stored, self.positions, self.slots, seen),
            *(window, n_sinks, n_ring, stored.shape[1], self.n_rows, int(own_key)),
        )

    def keep(self, stored: Tensor, accepted: Tensor, n_sinks: int, n_ring: int) -> int:
        """Write `slots` of `positions` for accepted [B] nodes of chains; the others go to the last slot."""
        places = self.n, n_sinks, n_ring, stored.shape[1], self.n_rows
        return self._add(ops.keep, stored, self.positions, accepted, self.slots, *places)

    def argmax(
        self,
        logits: Tensor,
        size: int,
        chosen: Tensor | None,
        stride: int = 1,
        following: tuple[Tensor, Tensor] | None = None,
        names: Tensor | None = None,
    ) -> tuple[int, int]:
        """Write the argmax of `size` tokens of each row to `chosen`, whose rows are `stride` apart.

        `following` are tokens and positions of the next step, which the tokens become. `names` [size] int64 are the
        tokens that the logits stand for; None: 0, 1, ... Return the places of the two operations.
        """
        n_rows = len(logits)
        best, places = self.floats(n_rows, self.n_threads), self.whole_numbers(n_rows, self.n_threads)
        tokens, positions = following or (None, None)
        search = self._add(ops.argmax, logits, best, places, size, n_rows)
        return search, self._add(ops.pick, best, places, tokens, chosen, positions, stride, n_rows, names)

    def drawn(
        self,
        logits: Tensor,
        options: Tensor,
        numbers: Tensor,
        chosen: Tensor,
        following: tuple[Tensor, Tensor],
        names: Tensor | None = None,
    ) -> tuple[int, int]:
        """Draw a token of each row from logits [B, K] by numbers [B], and write it to `chosen` [B].

        For options [B, 4] see `Sampling.options`; for `following` and `names` see `argmax`. Return the places of two
        operations: one writes the probabilities [B, K], the other draws from them. Each call says where they stand, and
        how far apart their rows are: in fields 3 and 4 of the first, 1 and 2 of the second.
        """
        (n_rows, size), n_bytes = logits.shape, warping_bytes(logits.shape[1])
        if self._work is None:
            self._work = self.floats(self.n_threads * n_bytes // 4)
        warped = self._add(ops.warp, logits, size, 0, 0, n_rows, size, options, N_OPTIONS, self._work, n_bytes, 1)
        drawing = numbers, numbers.stride(0), following[0], chosen, following[1], chosen.stride(0), n_rows, size
        return warped, self._add(ops.draw, 0, 0, *drawing, names, int(numbers.dtype == torch.int64))

    def leave(self, state: Tensor, steps: Tensor | None = None) -> int:
        """End the program here if no row of state [4, B] int64 goes on; else count a step."""
        return self._add(ops.LEAVE, state, state.shape[1], steps)

    def count(self, state: Tensor, chosen: Tensor, least: int) -> int:
        """Count a token of each row that goes on; `point` gives tokens that end a text in fields 4 and 5."""
        return self._add(ops.count, state, chosen, chosen.stride(0), 0, 0, least, state.shape[1])

    def bend(self, x: Tensor, y: Tensor, bias: Tensor, out: Tensor) -> int:
        """out [B, D] = x + silu(y + bias)."""
        return self._add(ops.bend, x, y, bias, out, x.shape[1], len(x))

    def judge_states(
        self, x: Tensor, weight: Tensor, numbers: Tensor, accepted: Tensor, state: Tensor, i: int, least: int, due: bool
    ) -> int:
        """End rows whose i tokens are hardly accepted: see `judging.judge_states`."""
        return self._add(ops.judge_states, x, weight, numbers, accepted, state, x.shape[1], i, least, int(due), len(x))


class Programs:
    """Programs by what they depend on. The latest are kept, and live as long as the cache that they work on."""

    def __init__(self) -> None:
        self._programs: OrderedDict[Hashable, Program] = OrderedDict()

    def __deepcopy__(self, memo: dict) -> Programs:
        return Programs()  # they hold addresses of what is copied

    def forget(self, storage: int, n: int) -> None:
        """Leave the latest n programs of the weights that this number stands for, the first of what they depend on."""
        own = [(key, program) for key, program in self._programs.items() if key[0][0] == storage]
        self._programs = OrderedDict(own[-n:])

    def get(self, key: Hashable, make: Callable[[], Program]) -> Program:
        key = key, torch.get_num_threads()
        if key not in self._programs:
            self._programs[key] = make()
            if len(self._programs) > MOST_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return self._programs[key]
