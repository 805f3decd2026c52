"""Warp, draw and accept on a CPU by compiled operations: torch would make thirty calls, and sort the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from spectrain.kernels.cpu.layout import BUCKETS, DRAW, JUDGE, N_OPTIONS, WARP
from spectrain.kernels.cpu.running import Table, runner


def reads(values: Tensor) -> bool:
    """Whether compiled operations can read this tensor."""
    readable = values.device.type == "cpu" and values.dtype == torch.float32 and values.numel() > 0
    return readable and not values.requires_grad and runner() is not None


def warping_bytes(size: int) -> int:
    """Return the bytes that a thread needs to warp a row of `size` logits, and to judge by it.

    They hold BUCKETS sums, then the weights that may be kept, and at the end the probabilities that `judge` compares;
    behind these it has 8 bytes more for each node.
    """
    return 8 * BUCKETS + 2 * 64 * -(-4 * size // 64)


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
        tokens: [B, N] int64.
        parents: [B, N] int64.
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
    line = (
        *(JUDGE, size, n_nodes, n_rows, options, _stride(options), work, work.shape[1], logits),
        *(numbers, numbers.stride(0), tokens, parents, probe, q, path, ends, int(numbers.dtype == torch.int64), p),
    )
    Table([*lines, _numbers(line)], n_threads).run()
    return path, *ends.unbind()


def _threads(n_rows: int) -> int:
    return min(n_rows, torch.get_num_threads())


def _stride(options: Tensor) -> int:
    assert options.dtype == torch.float64, options.dtype
    return 0 if len(options) == 1 else N_OPTIONS


def _numbers(line: tuple) -> list[int]:
    return [one.data_ptr() if isinstance(one, Tensor) else one or 0 for one in line]


def _warping(logits: Tensor, options: Tensor) -> tuple[Tensor, list[list[int]], Tensor]:
    """Return where probabilities are written, the operation that does so, and memory that must live until then."""
    size, probs = logits.shape[-1], torch.empty_like(logits)
    n_rows = logits.numel() // size
    work = torch.empty(_threads(n_rows), warping_bytes(size), dtype=torch.uint8)
    rows = logits, size, probs, size, n_rows, size
    line = WARP, *rows, options, _stride(options), work, work.shape[1], n_rows // len(logits)
    return probs, [_numbers(line)], work


def _drawing(weights: Tensor, numbers: Tensor, tokens: Tensor) -> list[int]:
    assert numbers.dtype in (torch.float32, torch.int64)  # compiled code reads what it is told
    by_noise, shape = int(numbers.dtype == torch.int64), weights.shape
    return _numbers((DRAW, weights, shape[1], numbers, numbers.stride(0), 0, tokens, 0, 1, *shape, 0, by_noise))
