"""Run operations on the threads of torch's own OpenMP, since two pools of threads would wait for each other."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from llvmlite import binding as llvm
from torch import Tensor

from spectrain.kernels import reference
from spectrain.kernels.cpu import products, tiles
from spectrain.kernels.cpu.accept import judge
from spectrain.kernels.cpu.attention import move as move_nodes
from spectrain.kernels.cpu.operations import LINE_BYTES, MOST_PIECES, PIECES, PRODUCT, STATE_BYTES, compiled, kind_of
from spectrain.kernels.cpu.processor import mkl_is_narrow, width
from spectrain.kernels.cpu.warping import N_OPTIONS, warping_bytes
from spectrain.kernels.cpu.warping import draw as draw_rows
from spectrain.kernels.cpu.warping import warp as warp_rows

log = logging.getLogger(__name__)
PIECE_BYTES = 1 << 18  # of a matrix: what a thread reads in some ten microseconds


@cache
def openmp() -> ctypes.CDLL:
    """Load the OpenMP library that torch runs on. Raises OSError where it is none of GNU's interface."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    loaded = sorted(
        {line.split()[-1] for line in maps if Path(line.split()[-1]).name.startswith(("libgomp", "libiomp5"))}
    )
    folder = str(Path(torch.__file__).parent)  # other packages bring one of their own, with other threads
    own = [path for path in loaded if path.startswith((f"{folder}/", f"{folder}.libs/"))]
    library = ctypes.CDLL([*own, *loaded, "libgomp.so.1"][0])
    library.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    library.GOMP_parallel.restype = None
    return library


@cache
def runner() -> int | None:
    """Return the address of the function that runs operations; None where it cannot be compiled."""
    try:
        for name, library in (("omp_get_thread_num", openmp()), ("sched_yield", ctypes.CDLL(None))):
            llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
        return compiled().address
    except (OSError, AttributeError, RuntimeError) as error:
        log.warning("steps take torch's own operations, which are slower (%s)", str(error).splitlines()[0])
        return None


def line_of(kind: int, *arguments: Tensor | int | None, pieces: int = 0) -> list[int]:
    """Return an operation as compiled code reads it: its kind, addresses, sizes and pieces. 0: one for each thread."""
    numbers = [one.data_ptr() if isinstance(one, Tensor) else one or 0 for one in arguments]
    return [kind, *numbers, *[0] * (PIECES - 1 - len(numbers)), pieces, 0]


class Table:
    """Operations as compiled code reads them, with the memory that it needs.

    Args:
        lines: each as `line_of` returns it.
        n_threads: that run them.
        own_bytes: memory of each thread.
    """

    def __init__(self, lines: Sequence[Sequence[int]], n_threads: int, own_bytes: int = 0) -> None:
        self.lines, self.n_threads = np.array(lines, dtype=np.int64), n_threads
        for line in self.lines:
            line[PIECES] = line[PIECES] or n_threads
        own_bytes = -(-own_bytes // LINE_BYTES) * LINE_BYTES
        self._states, states = _aligned(len(lines) * STATE_BYTES)
        self._own, own = _aligned(n_threads * own_bytes)
        self._header = np.array([len(lines), self.lines.ctypes.data, states, own, own_bytes])
        self._arguments = runner(), self._header.ctypes.data, n_threads, 0
        self._parallel = openmp().GOMP_parallel

    def run(self) -> None:
        self._states.fill(0)
        self._parallel(*self._arguments)


def _aligned(n_bytes: int) -> tuple[np.ndarray, int]:
    """Return memory, and the address of its first whole line: threads that write to one line wait for each other."""
    memory = np.empty(n_bytes + LINE_BYTES, dtype=np.uint8)
    return memory, memory.ctypes.data + -memory.ctypes.data % LINE_BYTES


def product_lines(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    y: Tensor,
    n_threads: int,
    packed: Tensor | None = None,
    splitting: Tensor | None = None,
) -> tuple[list[list[int]], int]:
    """Return the operations of y = x @ weight.T, and the bytes of its own that each thread needs; see `products.py`.

    Where `tiles.takes` them, packed is memory of `tiles.packed_size`, and splitting are the arguments of `tiles.split`.
    """
    (n_out, n_in), n_rows, lines = weight.shape, len(x), []
    if packed is None:
        address, unit = products.kernel(weight.dtype, n_rows)
    else:
        address, unit = tiles.kernels()["multiply"], tiles.SIZE
        lines, x = [line_of(kind_of(tiles.split), tiles.kernels()["split"], splitting)], packed
    least = max(unit, products.LEAST_OUTPUTS)
    pieces = min(MOST_PIECES, n_out // least, max(2 * n_threads, weight.nbytes // PIECE_BYTES))
    pieces -= pieces % n_threads if pieces > n_threads else 0  # else some threads wait for the others' last piece
    own_bytes = LINE_BYTES + 4 * n_rows * (n_out // pieces + 2 * least)
    sizes = n_out, n_in, n_rows, unit, weight.element_size()
    return [*lines, line_of(PRODUCT, address, x, weight, y, scale, *sizes, pieces=pieces)], own_bytes


def product(x: Tensor, weight: Tensor, scale: Tensor | None = None, least_tiled: int = tiles.LEAST_ROWS) -> Tensor:
    """Return x @ weight.T, float32 [M, N].

    With weights of 8 bits each row of x is rounded to 16 bits of its largest number, or to fewer where more than 8,192
    products are added up; a row that is not finite gives NaN.

    Args:
        x: [M, K] float32, contiguous; K as `fits` says.
        weight: [N, K] contiguous, of a dtype in BITS; N is at least LEAST_OUTPUTS.
        scale: [N] float32 that multiplies the outputs, for weights of 8 bits.
        least_tiled: rows from which on the processor's tiles are used, where it has some; they round otherwise.
    """
    y, n_threads = x.new_empty(len(x), len(weight)), torch.get_num_threads()
    by_tiles = tiles.takes(x, weight, least_tiled)
    size = tiles.MOST_ROWS if by_tiles else max(len(x), 1)
    for rows, outputs in zip(x.split(size), y.split(size), strict=True):
        packed = torch.empty(tiles.packed_size(*rows.shape), dtype=torch.int32) if by_tiles else None
        splitting = tiles.splitting(rows, packed) if by_tiles else None
        lines, own_bytes = product_lines(rows, weight, scale, outputs, n_threads, packed, splitting)
        Table(lines, n_threads, own_bytes).run()
    return y


def fits(weight: Tensor) -> bool:
    """Whether `product` takes a matrix [N, K]."""
    return weight.device.type == "cpu" and products.takes(weight) and works(weight.dtype)


def outruns_torch(dtype: torch.dtype) -> bool:
    """Whether `product` in float32 is faster than torch for any number of rows and weights of this dtype."""
    return mkl_is_narrow() or (dtype == torch.bfloat16 and tiles.available())


@cache
def works(dtype: torch.dtype) -> bool:
    """Whether kernels for weights of this dtype can be compiled here, and compute what torch does."""
    draws = torch.Generator().manual_seed(0)
    exact = {"generator": draws, "dtype": torch.float32, "device": "cpu"}
    if runner() is None:
        return False
    try:
        for n_rows in range(1, 2 * products.MOST_T + 2):
            x = torch.randn(n_rows, 6 * width(), **exact)
            weight = torch.randn(37, x.shape[1], **exact)
            weight = (20 * weight).round().to(dtype) if dtype == torch.int8 else weight.to(dtype)
            scale = torch.rand(37, **exact) if dtype == torch.int8 else None
            with torch.autocast("cpu", enabled=False):
                expected = x @ weight.float().T * (1 if scale is None else scale)
                size = x.norm(dim=1)[:, None] * weight.float().norm(dim=1)  # what rounding is compared with
            if ((product(x, weight, scale) - expected).abs() > 1e-4 * size).any():
                raise ValueError(f"{n_rows} rows are multiplied wrongly")
    except (OSError, AttributeError, RuntimeError, ValueError) as error:
        why = f"no kernels for weights of {dtype} on this machine ({str(error).splitlines()[0]})"
        log.warning("%s: decoding takes torch's own, which are slower", why)
        return False
    return True


def move(buffers: Sequence[Tensor], path: Tensor, starts: Tensor) -> None:
    """See `reference.move`. On a CPU one compiled call moves the nodes of all buffers, which are alike there."""
    first = buffers[0]
    n_bytes = first.shape[3] * first.element_size()
    kind = first.shape, first.dtype, torch.device("cpu")
    if n_bytes % 4 or any((one.shape, one.dtype, one.device) != kind for one in buffers):
        reference.move(buffers, path, starts)
        return
    addresses = np.array([states.data_ptr() for states in buffers])
    move_nodes(addresses, first.shape[1], first.shape[2], n_bytes // 4, path.numpy(), starts.numpy())


def reads(values: Tensor) -> bool:
    """Whether compiled operations can read this tensor."""
    readable = values.device.type == "cpu" and values.dtype == torch.float32 and values.numel() > 0
    return readable and not values.requires_grad and runner() is not None


def warp(logits: Tensor, options: Tensor) -> Tensor:
    """Return the probabilities of logits [B, .., V]. For options see `warp_and_draw`."""
    logits = logits.contiguous()
    probs, lines, _work = _warping(logits, options)
    Table(lines, _threads(logits.numel() // logits.shape[-1])).run()
    return probs


def warp_and_draw(logits: Tensor, options: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from logits [B, V] by numbers [B]. Return tokens [B] int64, and what they were drawn from, [B, V].

    Args:
        logits: float32.
        options: [B or 1, 4] float64 on the CPU: temperature, top_p, min_p, top_k of each row.
        numbers: float32 in [0, 1), or int64 keys of shared noise.
    """
    logits = logits.contiguous()
    probs, lines, _work = _warping(logits, options)
    tokens = torch.empty(len(logits), dtype=torch.int64)
    Table([*lines, _drawing(probs, numbers, tokens)], _threads(len(logits))).run()
    return tokens, probs


def draw(weights: Tensor, numbers: Tensor) -> Tensor:
    """Draw from rows of weights [B, V] that need not sum to one. Return tokens [B] int64."""
    weights = weights.contiguous()
    tokens = torch.empty(len(weights), dtype=torch.int64)
    Table([_drawing(weights, numbers, tokens)], _threads(len(weights))).run()
    return tokens


def accept(
    tokens: Tensor,
    parents: Tensor,
    logits: Tensor,
    options: Tensor,
    numbers: Tensor,
    q: Tensor | None,
    probe: Tensor | None,
    by_block: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Judge the trees of B rows. Return path [B, N], accepted, bonus, and how many numbers were read, [B] each; int64.

    Args:
        tokens, parents: [B, N] int64.
        logits: [B, N, V] float32 of the target.
        options: see `warp_and_draw`.
        numbers: [B, n] of each row, as many as it may read.
        q: [B, N, V] float32 that chains were drawn from; None: drafts are deterministic.
        probe: [B, N] bool: nodes that are never accepted.
        by_block: whether chains are judged as a block, else token by token.
    """
    (n_rows, n_nodes), size = tokens.shape, logits.shape[-1]
    tokens, parents, logits = tokens.contiguous(), parents.contiguous(), logits.contiguous()
    q, probe = (None if one is None else one.contiguous() for one in (q, probe))
    assert logits.shape[:2] == tokens.shape  # compiled code reads what it is told
    assert q is None or (q.shape == logits.shape and q.dtype == torch.float32 and probe is None)
    path, ends = torch.empty_like(tokens), torch.empty(3, n_rows, dtype=torch.int64)
    lines, p, n_threads = [], None, _threads(n_rows)
    if q is not None and by_block:
        n_threads = _threads(n_rows * n_nodes)
        p, lines, _work = _warping(logits, options)
    work = torch.empty(n_threads, warping_bytes(size) + 8 * n_nodes, dtype=torch.uint8)
    judging = line_of(
        *(kind_of(judge), size, n_nodes, n_rows, options, _stride(options), work, work.shape[1], logits),
        *(numbers, numbers.stride(0), tokens, parents, probe, q, path, ends, int(numbers.dtype == torch.int64), p),
    )
    Table([*lines, judging], n_threads).run()
    return path, *ends.unbind()


def _threads(n_rows: int) -> int:
    return min(n_rows, torch.get_num_threads())


def _stride(options: Tensor) -> int:
    assert options.dtype == torch.float64, options.dtype
    return 0 if len(options) == 1 else N_OPTIONS


def _warping(logits: Tensor, options: Tensor) -> tuple[Tensor, list[list[int]], Tensor]:
    """Return where probabilities are written, the operation that does so, and memory that must live until then."""
    size, probs = logits.shape[-1], torch.empty_like(logits)
    n_rows = logits.numel() // size
    work = torch.empty(_threads(n_rows), warping_bytes(size), dtype=torch.uint8)
    rows = logits, size, probs, size, n_rows, size
    given = options, _stride(options), work, work.shape[1], n_rows // len(logits)
    return probs, [line_of(kind_of(warp_rows), *rows, *given)], work


def _drawing(weights: Tensor, numbers: Tensor, tokens: Tensor) -> list[int]:
    assert numbers.dtype in (torch.float32, torch.int64)  # compiled code reads what it is told
    by_noise, shape = int(numbers.dtype == torch.int64), weights.shape
    drawing = weights, shape[1], numbers, numbers.stride(0), 0, tokens, 0, 1, *shape, 0, by_noise
    return line_of(kind_of(draw_rows), *drawing)
