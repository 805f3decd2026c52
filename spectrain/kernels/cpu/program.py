"""Forwards of a few tokens as programs: which models they can run, and how their operations are written down.

Letters: B rows, n tokens of a row, M = B n, D hidden size, V vocabulary, C captured layers, S slots.
"""

from __future__ import annotations

import ctypes
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from llvmlite import binding as llvm
from torch import Tensor, nn

from spectrain.decoding import kernels
from spectrain.decoding.kv_cache import KVCache
from spectrain.decoding.llama import LlamaBlock, LlamaDecoder, LlamaShape, Rope
from spectrain.decoding.weights import RowsLinear

if TYPE_CHECKING:
    from spectrain.decoding.sampling import Sampling

log = logging.getLogger(__name__)
FIELDS = 22  # int64 numbers of an operation: its kind, then addresses and sizes
PIECES = FIELDS - 2  # where it says into how many pieces it is cut
STATE_BYTES = 64  # of an operation that runs: pieces that were taken, that are done, and which of a product are
PATIENCE = 2000  # rounds of waiting for a thread, some twenty microseconds; then it has lost its core
MOST_PIECES = 64
PIECE_BYTES = 1 << 17  # of a matrix
(
    PRODUCT,
    NORM,
    ANGLES,
    ROTATE,
    ATTEND,
    COMBINE,
    SILU,
    COPY,
    MIX,
    WINDOW,
    EMBED,
    ARGMAX,
    PICK,
    KEEP,
    WARP,
    DRAW,
    JUDGE,
    LEAVE,
    COUNT,
    BEND,
    JUDGE_STATES,
    JUDGE_LOGITS,
) = range(22)
ROOM, LENGTH, GOING, DUE = range(4)  # of `DraftEnds.state`
CHUNK = 512  # slots that a thread attends to at a time
MOST_TOKENS = 64  # of a forward
MOST_PROGRAMS = 96  # kept
BUCKETS = 2048  # of 64 bits that a thread sorts weights into, see `warping.py`


@cache
def runner() -> int | None:
    """Return the address of the function that runs programs; None where it cannot be compiled."""
    try:
        kernels.openmp()
        llvm.add_symbol("sched_yield", ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value)
        from spectrain.decoding.operations import compiled

        return compiled().address
    except (OSError, AttributeError, ImportError, RuntimeError) as error:
        log.warning("steps take torch's own operations, which are slower (%s)", str(error).splitlines()[0])
        return None


def run_alone(n_threads: int, *operations: tuple[int, ...]) -> None:
    """Run operations, of a kind and arguments each, by themselves. `runner` has said that they can be."""
    table = np.zeros((len(operations), FIELDS), dtype=np.int64)
    for line, operation in zip(table, operations, strict=True):
        line[: len(operation)] = operation
        line[PIECES] = n_threads
    _start(table, n_threads, 0, 0)


def _start(table, n_threads, memory, n_bytes):
    state = np.zeros((len(table) + 1) * STATE_BYTES, dtype=np.uint8)
    header = np.array(
        [len(table), table.ctypes.data, state.ctypes.data + -state.ctypes.data % 64, n_threads, memory, n_bytes]
    )
    kernels.openmp().GOMP_parallel(runner(), header.ctypes.data, n_threads, 0)


def product_fields(x, weight, scale, y, n_threads):
    n_out, n_in, n_rows = *weight.shape, len(x)
    unit = kernels.matrix_rows(weight.dtype, n_rows)
    n_pieces = min(MOST_PIECES, n_out // kernels.LEAST_OUTPUTS, max(2 * n_threads, weight.nbytes // PIECE_BYTES))
    if n_threads == 1:
        n_pieces = min(n_pieces, 8)
    code = kernels.kernel(weight.dtype, n_rows)
    n_bytes = 4 * n_rows * (n_out // n_pieces + 2 * kernels.LEAST_OUTPUTS) + 128
    return (PRODUCT, code, x, weight, y, scale, n_out, n_in, n_rows, unit, weight.element_size()), n_pieces, n_bytes


def multiplied(x, weight, scale):
    y = x.new_empty(len(x), weight.shape[0])
    n_threads = torch.get_num_threads()
    fields, n_pieces, n_bytes = product_fields(x, weight, 0 if scale is None else scale, y, n_threads)
    table = np.zeros((1, FIELDS), dtype=np.int64)
    table[0, : len(fields)] = [one.data_ptr() if isinstance(one, Tensor) else one for one in fields]
    table[0, PIECES] = n_pieces
    n_bytes = -(-n_bytes // 64) * 64
    memory = torch.empty(n_threads * n_bytes + 64, dtype=torch.uint8)
    _start(table, n_threads, memory.data_ptr() + -memory.data_ptr() % 64, n_bytes)
    return y


def warping_bytes(size: int) -> int:
    """Return the bytes that a thread needs to warp a row of `size` logits, and to judge by it.

    They hold BUCKETS sums, then the weights that may be kept, and at the end the probabilities that `judge` compares;
    behind these it has 8 bytes more for each node.
    """
    return 8 * BUCKETS + 2 * 64 * -(-4 * size // 64)


def can_fuse(module: nn.Module, shape: LlamaShape) -> bool:
    """Whether programs can run the blocks of this module: in float32 on a CPU, and nothing unusual in them."""
    linears = [layer for layer in module.modules() if isinstance(layer, RowsLinear)]
    return (
        bool(linears)
        and all(layer.fits for layer in linears)
        and module.norm.weight.dtype == torch.float32
        and shape.hidden_act == "silu"
        and not (shape.output_bias or shape.mlp_bias)
        and module.embed_tokens.weight.dtype in (torch.float32, torch.bfloat16)
        and 2 * shape.n_kv_head * shape.head_dim >= kernels.LEAST_OUTPUTS  # what memories are projected to
        and shape.head_dim % 2 == 0
        and runner() is not None
    )


class Program:
    """Operations on fixed buffers, for M tokens: B rows of n."""

    def __init__(self, shape: LlamaShape, n_rows: int, n_tokens: int) -> None:
        self.shape, self.n_rows, self.n = shape, n_rows, n_tokens
        self.n_threads = torch.get_num_threads()
        self.operations: list[list[int]] = []
        self.own_bytes = 64
        self.kept: list[object] = []  # whose addresses the operations hold
        self.work: Tensor | None = None  # of `drawn`
        m, d, e = n_rows * n_tokens, shape.hidden_size, shape.head_dim
        heads, half = shape.n_head + 2 * shape.n_kv_head, e // 2
        self.x, self.normed, self.added = self.floats(m, d), self.floats(m, d), self.floats(m, d)
        self.qkv, self.queries = self.floats(m, heads * e), self.floats(m, shape.n_head * e)
        self.attended, self.gate_up = self.floats(m, shape.n_head * e), self.floats(m, 2 * shape.intermediate_size)
        self.inner = self.floats(m, shape.intermediate_size)
        self.cos, self.sin = self.floats(m, half), self.floats(m, half)
        self.parts = self.floats(self.n_threads, m * shape.n_head, e + 2)
        groups = shape.n_head // shape.n_kv_head
        self.scores = self.floats(self.n_threads, n_tokens * groups * CHUNK + 16)  # 16: arguments of a kernel
        self.kernels = self.hold(torch.tensor(kernels.attention_kernels()))
        self.positions, self.slots = (self.hold(torch.zeros(n_rows, n_tokens, dtype=torch.int64)) for _ in range(2))
        self.lengths = self.hold(torch.zeros(n_rows, dtype=torch.int64))
        self.tokens = self.hold(torch.zeros(n_rows, n_tokens, dtype=torch.int64))
        self.scalars = self.hold(torch.tensor([shape.rms_norm_eps, e**-0.5, 1.0], dtype=torch.float32))

    def hold(self, values: Tensor) -> Tensor:
        self.kept.append(values)
        return values

    def floats(self, *shape: int) -> Tensor:
        return self.hold(torch.zeros(shape, dtype=torch.float32, device="cpu"))

    def scalar(self, i: int) -> int:
        return self.scalars.data_ptr() + 4 * i

    def add(self, kind: int, *arguments: int | Tensor) -> int:
        """Append an operation. Return its index."""
        for value in arguments:
            if isinstance(value, Tensor):
                self.hold(value.detach())  # the memory itself: a parameter may get another
        numbers = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
        self.operations.append([kind, *numbers, *[0] * (FIELDS - 1 - len(numbers))])
        self.operations[-1][PIECES] = self.n_threads
        return len(self.operations) - 1

    def product(self, x: Tensor, linear: RowsLinear, y: Tensor, first: int = 0) -> int:
        weight, scale = linear.weight[first:], None if linear.scale is None else linear.scale[first:]
        fields, n_pieces, n_bytes = product_fields(x, weight, 0 if scale is None else scale, y, self.n_threads)
        self.own_bytes = max(self.own_bytes, n_bytes)
        place = self.add(*fields)
        self.operations[place][PIECES] = n_pieces
        return place

    def norm(self, x: Tensor, added: Tensor | None, norm: nn.RMSNorm, y: Tensor) -> int:
        sizes = x.shape[1], x.shape[0]
        return self.add(NORM, x, 0 if added is None else added, norm.weight, y, self.scalar(0), *sizes)

    def embed(self, table: Tensor, x: Tensor) -> int:
        """Write the rows of a table, float32 or bfloat16, of `tokens` to x."""
        return self.add(EMBED, self.tokens, table, 8 * table.element_size(), x, table.shape[1], len(x), len(table))

    def angles(self, rope: Rope) -> int:
        self.scalars[2] = rope.scaling
        frequencies = self.hold(rope.inv_freq.float().contiguous())
        return self.add(
            ANGLES, self.positions, frequencies, self.cos, self.sin, self.scalar(2), self.cos.shape[1], len(self.cos)
        )

    def rotate(self, block: LlamaBlock, keys: Tensor, values: Tensor) -> int:
        shape, bias = self.shape, block.qkv.bias
        norms = (block.query_norm.weight, block.key_norm.weight) if shape.qk_norm else (0, 0)
        return self.add(
            *(ROTATE, self.qkv, self.queries, keys, values, self.cos, self.sin, self.slots),
            *(0 if bias is None else bias.float(), *norms, self.scalar(0), self.n, shape.n_head, shape.n_kv_head),
            *(shape.head_dim, keys.stride(0), keys.stride(1), len(self.x)),
        )

    def remember(self, block: LlamaBlock, normed: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write the keys and values of normed memories into their slots."""
        shape, bias = self.shape, block.qkv.bias
        first = shape.n_head * shape.head_dim
        self.product(normed, block.qkv, self.qkv, first)
        norm = block.key_norm.weight if shape.qk_norm else 0
        self.add(
            *(ROTATE, self.qkv, 0, keys, values, self.cos, self.sin, self.slots),
            *(0 if bias is None else bias[first:].float(), 0, norm, self.scalar(0), self.n, 0, shape.n_kv_head),
            *(shape.head_dim, keys.stride(0), keys.stride(1), len(self.x)),
        )

    def attend(self, keys: Tensor, values: Tensor, seen: Tensor, n_seen: int) -> int:
        """Attend to slots up to `lengths`, then to the next n_seen ones as flags [B or 1, n, n_seen] say."""
        shape, stride = self.shape, 0 if len(seen) == 1 else seen[0].numel()
        place = self.add(
            *(ATTEND, self.queries, keys, values, self.parts, self.lengths, seen, stride, n_seen, self.n),
            *(shape.n_head, shape.n_kv_head, shape.head_dim, keys.stride(0), keys.stride(1), self.n_rows),
            *(self.scores, self.scalar(1), self.kernels if kernels.mixes(shape.head_dim) else 0),
        )
        sizes = self.n, shape.n_head, shape.n_kv_head, shape.head_dim, self.n_rows
        self.add(COMBINE, self.parts, self.attended, *sizes)
        return place

    def mlp(self, block: LlamaBlock) -> None:
        """The block behind its attention; what it adds to x is left in `added`."""
        self.product(self.attended, block.output, self.added)
        self.norm(self.x, self.added, block.mlp_norm, self.normed)
        self.product(self.normed, block.gate_up, self.gate_up)
        self.add(SILU, self.gate_up, self.inner, self.inner.shape[1], len(self.x))
        self.product(self.inner, block.down, self.added)

    def likeliest(
        self,
        logits: Tensor,
        size: int,
        chosen: Tensor | int,
        stride: int = 1,
        following: tuple[Tensor, Tensor] = (),
        names: Tensor | None = None,
    ) -> tuple[int, int]:
        """Write the likeliest of `size` tokens of each row to `chosen`, whose rows are `stride` apart.

        `following` are tokens and positions of the next step, which the tokens become. `names` [size] int64 are the
        tokens that the logits stand for; None: 0, 1, ... Return the indices of the two operations.
        """
        n_rows = len(self.x)
        best = self.floats(n_rows, self.n_threads)
        places = self.hold(torch.zeros(n_rows, self.n_threads, dtype=torch.int64))
        tokens, positions = following or (0, 0)
        search = self.add(ARGMAX, logits, best, places, size, n_rows)
        names = 0 if names is None else names
        return search, self.add(PICK, best, places, tokens, chosen, positions, stride, n_rows, names)

    def drawn(
        self,
        logits: Tensor,
        sampling: Sampling,
        numbers: Tensor,
        chosen: Tensor,
        following: tuple[Tensor, Tensor],
        names: Tensor | None = None,
    ) -> tuple[int, int]:
        """Draw a token of each row from logits [B, K] by numbers [B], and write it to `chosen` [B].

        For `following` and `names` see `likeliest`. Return the indices of two operations: one writes the probabilities
        [B, K], the other draws from them. Each call says where they stand, and how far apart their rows are: in fields
        3 and 4 of the first, 1 and 2 of the second.
        """
        n_rows, size = logits.shape
        n_bytes = warping_bytes(size)
        if self.work is None:
            self.work = self.floats(min(self.n_threads, n_rows) * n_bytes // 4)
        arguments = sampling.options, min(sampling.top_k, size), self.work, n_bytes
        warped = self.add(WARP, logits, size, 0, 0, n_rows, size, *arguments)
        drawing = numbers, numbers.stride(0), following[0], chosen, following[1], chosen.stride(0), n_rows, size
        by_noise = int(numbers.dtype == torch.int64)
        return warped, self.add(DRAW, 0, 0, *drawing, 0 if names is None else names, by_noise)

    def goes_on(self, operation: int) -> int:
        """Let threads begin the next operation, which reads nothing of this one, before all have ended it."""
        self.operations[operation][-1] = 1
        return operation

    def finish(self) -> None:
        self.table = np.array(self.operations, dtype=np.int64)
        self.state = np.zeros((len(self.table) + 1) * STATE_BYTES, dtype=np.uint8)
        n_bytes = -(-self.own_bytes // 64) * 64
        self.own = torch.empty(self.n_threads * n_bytes + 64, dtype=torch.uint8)
        addresses = [one + -one % 64 for one in (self.state.ctypes.data, self.own.data_ptr())]
        self.header = np.array(
            [len(self.table), self.table.ctypes.data, addresses[0], self.n_threads, addresses[1], n_bytes],
            dtype=np.int64,
        )
        self._run = kernels.openmp().GOMP_parallel

    def run(self) -> None:
        self.state.fill(0)
        self._run(runner(), self.header.ctypes.data, self.n_threads, 0)


class Forward(Program):
    """Forwards of B rows of n nodes of a whole decoder, against one cache. See `DraftTree` for `n_silent`.

    With n silent nodes there are no logits at all.
    """

    def __init__(
        self,
        decoder: LlamaDecoder,
        cache: KVCache,
        n_rows: int,
        n_tokens: int,
        capture_layers: Sequence[int],
        n_silent: int = 0,
    ) -> None:
        super().__init__(decoder.shape, n_rows, n_tokens)
        d, m = decoder.shape.hidden_size, len(self.x)
        self.chain = self.hold(torch.ones(1, n_tokens, n_tokens, dtype=torch.bool).tril())
        self.capture_layers, self.captures, self.attends, self.rotates = capture_layers, [], [], []
        self.final, self.n_vocabulary = self.floats(m, d), decoder.lm_head.weight.shape[0]
        self.embed(decoder.embed_tokens.weight, self.x)
        self.angles(decoder.rope)
        added = None
        for i, block in enumerate(decoder.blocks):
            self.norm(self.x, added, block.input_norm, self.normed)
            for c, layer in enumerate(capture_layers):
                if layer == i:
                    self.captures.append((self.goes_on(self.add(COPY, self.x, 0, d, m)), c))
            self.product(self.normed, block.qkv, self.qkv)
            self.rotates.append(self.rotate(block, cache.keys[i], cache.values[i]))
            self.attends.append(self.attend(cache.keys[i], cache.values[i], self.chain, n_tokens))
            self.mlp(block)
            added = self.added
        self.norm(self.x, added, decoder.norm, self.final)
        for c, layer in enumerate(capture_layers):
            if layer < 0:
                self.captures.append((self.goes_on(self.add(COPY, self.final, 0, d, m)), c))
        self.silent = slice(1, 1 + n_silent)
        parts = [slice(0, 1), slice(1 + n_silent, m)] if n_rows == 1 and n_silent else [slice(0, m)]
        if n_silent == n_tokens:
            parts = []
        here = self.final  # of the logits, whose place each call says
        self.logits_at = [(self.product(here[part], decoder.lm_head, here), part.start) for part in parts]
        if parts:
            self.argmax_at, self.best_at = self.likeliest(self.final, self.n_vocabulary, 0)
        self.seen = self.first_row = 0
        self.row_bytes = cache.keys[0][0].nbytes
        self.finish()

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        lengths: Tensor,
        ancestors: Tensor | None,
        first_row: int = 0,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor]:
        """Return logits [B, n, V], the likeliest tokens [B, n], captured [B, n, C, D] and final states [B, n, D].

        The last are overwritten by the next call. Logits and likeliest tokens are None where all nodes are silent.
        `first_row` is the place of the B rows in the cache.
        """
        table, shape = self.table, (self.n_rows, self.n)
        self.tokens.copy_(tokens)
        self.positions.copy_(positions)
        self.slots.copy_(slots)
        self.lengths.copy_(lengths)
        seen, stride = (self.chain, 0) if ancestors is None else (ancestors.contiguous(), self.n * self.n)
        if self.seen != seen.data_ptr():
            self.seen = seen.data_ptr()
            table[self.attends, 6], table[self.attends, 7] = self.seen, stride
        if self.first_row != first_row:
            moved, self.first_row = (first_row - self.first_row) * self.row_bytes, first_row
            table[self.rotates, 3:5] += moved
            table[self.attends, 2:4] += moved
        logits = best = captured = None
        if self.logits_at:
            logits = torch.empty(*shape, self.n_vocabulary, dtype=torch.float32)
            best = torch.empty(shape, dtype=torch.int64)
            if len(self.logits_at) > 1:
                logits[:, self.silent] = 0
            table[self.argmax_at, 1] = logits.data_ptr()
            for place, row in self.logits_at:
                table[place, 4] = logits.data_ptr() + 4 * row * self.n_vocabulary
            table[self.best_at, 4] = best.data_ptr()
        if self.captures:
            captured = torch.empty(len(self.capture_layers), *shape, self.x.shape[1], dtype=torch.float32)
            for place, c in self.captures:
                table[place, 2] = captured[c].data_ptr()
            captured = captured.movedim(0, 2)
        self.run()
        return logits, best, captured, self.final.view(*shape, -1)


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
