"""The small kernels of a decoder step on a GPU, in Triton. Only who has asked `why_no_kernels` imports this module.

A step of a few tokens costs by its number of kernels and by the bytes of its weights. So norms, biases, residuals and
activations are computed inside the products where these are the faster ones, else each by one kernel. Attention
follows FlashDecoding (Dao et al. 2023): the slots of a row are divided among programs, whose results are then combined.

What is not specialized are numbers and addresses that differ from step to step: a recording must not compile anything.

Letters: M tokens, D width of the model, H query heads, K key/value heads, E width of a head, S slots of a cache row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import inf

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.testing import do_bench

from spectrain.kernels.cuda import ACTIVATIONS

FEW_TOKENS = 16  # what the smallest product of tensor cores takes
PROGRAMS = 264  # that keep a large GPU busy: two for each of 132 multiprocessors
SPLIT_SLOTS = 2048  # of a row that fills the cache, which one program of attention reads at most
MOST_SPLITS = 64
MOST_PARTS = 8192  # tokens times splits, each with float32 numbers for all of its heads


@dataclass(frozen=True)
class Tile:
    """The part of a weight that one program reads at a time, and how many such parts are on their way."""

    outputs: int
    inputs: int
    stages: int


TILES = (Tile(16, 256, 6), Tile(32, 256, 4), Tile(64, 128, 4))
FASTEST: dict[tuple, Tile | None] = {}  # of each kind and shape of product; None: torch's. Timed at first use


@triton.jit
def _activated(gate, ACTIVATION: tl.constexpr):
    if ACTIVATION == 1:
        return gate * tl.sigmoid(gate)
    return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))  # GELU by tanh


@triton.jit
def _add_norm(x, added, weight, summed, normed, width, eps, WIDTH: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, WIDTH)
    inside = column < width
    wide = tl.load(x + first + column, inside, other=0.0).to(tl.float32)
    if added is not None:
        wide += tl.load(added + first + column, inside, other=0.0).to(tl.float32)
        rounded = wide.to(summed.dtype.element_ty)
        tl.store(summed + first + column, rounded, inside)
        wide = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    found = wide * scale * tl.load(weight + column, inside, other=0.0).to(tl.float32)
    tl.store(normed + first + column, found.to(normed.dtype.element_ty), inside)


@triton.jit
def _gate(joined, inner, width, ACTIVATION: tl.constexpr, WIDTH: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < width
    gate = tl.load(joined + 2 * token * width + column, inside, other=0.0).to(tl.float32)
    up = tl.load(joined + (2 * token + 1) * width + column, inside, other=0.0).to(tl.float32)
    found = _activated(gate, ACTIVATION) * up
    tl.store(inner + token * width + column, found.to(inner.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["n_tokens"])
def _few(
    x, norm, weight, bias, residual, y, n_tokens, n_in, n_out, eps,
    ACTIVATION: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Read each weight once for all tokens. The scale of the norm is the same for all inputs, so it comes last."""
    token = tl.arange(0, TOKENS)[:, None]
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = output.to(tl.int64)[:, None] * n_in
    sums = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    ups = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    squares = tl.zeros([TOKENS, INPUTS], tl.float32)
    for first in range(0, n_in, INPUTS):
        k = first + tl.arange(0, INPUTS)
        inside = (output < n_out)[:, None] & (k < n_in)[None, :]
        part = tl.load(x + token * n_in + k[None, :], (token < n_tokens) & (k < n_in)[None, :], other=0.0)
        rows = tl.load(weight + row + k[None, :], inside, other=0.0)
        if norm is not None:
            wide = part.to(tl.float32)
            squares += wide * wide
            part = (wide * tl.load(norm + k, k < n_in, other=0.0).to(tl.float32)[None, :]).to(part.dtype)
        sums = tl.dot(part, tl.trans(rows), sums, input_precision="ieee")
        if ACTIVATION:
            rows = tl.load(weight + n_out.to(tl.int64) * n_in + row + k[None, :], inside, other=0.0)
            ups = tl.dot(part, tl.trans(rows), ups, input_precision="ieee")
    if norm is not None:
        scale = (1.0 / tl.sqrt(tl.sum(squares, 1) / n_in + eps))[:, None]
        sums *= scale
        ups *= scale
    if bias is not None:
        sums += tl.load(bias + output, output < n_out, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION:
        if bias is not None:
            ups += tl.load(bias + n_out + output, output < n_out, other=0.0).to(tl.float32)[None, :]
        sums = _activated(sums, ACTIVATION) * ups
    place = token * n_out + output[None, :]
    inside = (token < n_tokens) & (output < n_out)[None, :]
    if residual is not None:
        sums += tl.load(residual + place, inside, other=0.0).to(tl.float32)
    tl.store(y + place, sums.to(y.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["n_nodes"], do_not_specialize_on_alignment=["positions", "slots"])
def _rotate(
    joined, query_norm, key_norm, positions, inv_freq, slots, queries, keys, values,
    n_nodes, n_head, n_kv_head, capacity, width, scaling, eps, HALF: tl.constexpr,
):  # fmt: skip
    """One program per token and head: queries, then keys, then values."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half, e = width // 2, tl.arange(0, HALF)
    inside = e < half
    kind = joined.dtype.element_ty
    source = joined + (token * (n_head + 2 * n_kv_head) + head) * width + e
    low, high = tl.load(source, inside, other=0.0), tl.load(source + half, inside, other=0.0)
    if head < n_head + n_kv_head:
        a, b = low.to(tl.float32), high.to(tl.float32)
        if key_norm is not None:
            norm = key_norm
            if head < n_head:
                norm = query_norm
            scale = 1.0 / tl.sqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / width + eps)
            a = (a * scale * tl.load(norm + e, inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
            b = (b * scale * tl.load(norm + half + e, inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
        angle = tl.load(positions + token).to(tl.float32) * tl.load(inv_freq + e, inside, other=0.0)
        cos, sin = tl.cos(angle) * scaling, tl.sin(angle) * scaling
        low, high = (a * cos - b * sin).to(kind), (b * cos + a * sin).to(kind)
    if head < n_head:
        place = queries + (token * n_head + head) * width + e
    else:
        kv_head = (head - n_head) % n_kv_head
        first = (token // n_nodes * n_kv_head + kv_head) * capacity
        at = (first + tl.load(slots + token)) * width + e
        place = keys + at
        if head >= n_head + n_kv_head:
            place = values + at
    tl.store(place, low, inside)
    tl.store(place + half, high, inside)


@triton.jit(do_not_specialize=["n_nodes", "n_behind", "n_splits"], do_not_specialize_on_alignment=["lengths", "seen"])
def _attend(
    queries, keys, values, lengths, seen, attended, parts, weights, n_nodes, n_behind, n_kv_head, n_groups, capacity,
    width, n_splits, scale, QUERIES: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program per row and key/value head, block of its queries, and part of the row's own slots."""
    row, kv_head = (tl.program_id(0) // n_kv_head).to(tl.int64), tl.program_id(0) % n_kv_head
    length = tl.load(lengths + row).to(tl.int32)
    total = length + n_behind
    chunk = tl.cdiv(tl.cdiv(total, n_splits), SLOTS) * SLOTS
    start = tl.program_id(2) * chunk
    if start >= total:
        return
    stop = tl.minimum(start + chunk, total)
    query = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    node, head = query // n_groups, kv_head * n_groups + query % n_groups
    asked = (node < n_nodes)[:, None]
    token = row * n_nodes + node
    place = token * n_kv_head * n_groups + head
    e = tl.arange(0, WIDTH)
    inside = (e < width)[None, :]
    q = tl.load(queries + place[:, None] * width + e[None, :], asked & inside, other=0.0)
    own = (row * n_kv_head + kv_head) * capacity
    largest = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, WIDTH], tl.float32)
    for first in range(start, stop, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        known = (slot < stop)[:, None] & inside
        at = (own + slot)[:, None] * width + e[None, :]
        k, v = tl.load(keys + at, known, other=0.0), tl.load(values + at, known, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        behind = (slot - length)[None, :]
        in_tree = asked & (behind >= 0) & (behind < n_behind)
        visible = tl.load(seen + token[:, None] * n_behind + behind, in_tree, other=0) != 0
        scores = tl.where((slot < stop)[None, :] & ((behind < 0) | visible), scores, float("-inf"))
        top = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(top == float("-inf"), 0.0, top)  # of a query that sees nothing here
        p = tl.exp(scores - shift[:, None])
        shrunk = tl.exp(largest - shift)
        mass = mass * shrunk + tl.sum(p, 1)
        sums = tl.dot(p.to(v.dtype), v, sums * shrunk[:, None], input_precision="ieee")
        largest = top
    found = sums / tl.where(mass == 0, 1.0, mass)[:, None]
    if parts is not None:
        place = place * n_splits + tl.program_id(2)
        tl.store(parts + place[:, None] * width + e[None, :], found, asked & inside)
        tl.store(weights + place, largest + tl.log(mass), node < n_nodes)
    else:
        tl.store(attended + place[:, None] * width + e[None, :], found.to(attended.dtype.element_ty), asked & inside)


@triton.jit(do_not_specialize=["n_nodes", "n_behind"], do_not_specialize_on_alignment=["lengths"])
def _combine(
    parts, weights, lengths, attended, n_nodes, n_behind, n_head, width,
    SLOTS: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program per token and head. Splits behind the row's end have written nothing."""
    token = tl.program_id(0).to(tl.int64)
    total = tl.load(lengths + token // n_nodes).to(tl.int32) + n_behind
    chunk = tl.cdiv(tl.cdiv(total, SPLITS), SLOTS) * SLOTS
    split, e = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    written = split * chunk < total
    place = token * n_head + tl.program_id(1)
    weight = tl.load(weights + place * SPLITS + split, written, other=float("-inf"))
    weight = tl.exp(weight - tl.max(weight, 0))
    at = (place * SPLITS + split)[:, None] * width + e[None, :]
    found = tl.load(parts + at, written[:, None] & (e < width)[None, :], other=0.0)
    found = tl.sum(found * weight[:, None], 0) / tl.sum(weight, 0)
    tl.store(attended + place * width + e, found.to(attended.dtype.element_ty), e < width)


def add_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x [M, D] plus what is added to it, [M, D], and the RMSNorm of the sum."""
    m, width = x.shape
    normed = torch.empty_like(x)
    summed = x if added is None else torch.empty_like(x)
    options = {"WIDTH": triton.next_power_of_2(width), "num_warps": 4 if width < 4096 else 8}
    _add_norm[(m,)](x, added, weight, summed, normed, width, eps, **options)
    return summed, normed


def gate(joined: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up [M, F] of gate and up side by side, [M, 2 F]."""
    m, width = joined.shape[0], joined.shape[1] // 2
    inner = joined.new_empty(m, width)
    _gate[(m, triton.cdiv(width, 512))](joined, inner, width, ACTIVATION=ACTIVATIONS[activation], WIDTH=512)
    return inner


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product [M, O] of inputs x [M, I] with a weight [O, I], plus bias [O]."""
    return _Product(weight, bias)(x)


def norm_linear(
    x: Tensor,
    added: Tensor | None,
    norm: tuple[Tensor, float],
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x [M, D] plus what is added to it, [M, D], and the product [M, O] of the sum's RMSNorm with a weight.

    norm: weight [D] and epsilon. With an activation the outputs are gates and ups: see `gate`.
    """
    product = _Product(weight, bias, norm, activation)
    if (tile := product.fastest(x)) is None:
        summed, normed = add_norm(x, added, *norm)
        return summed, product.behind(normed)
    x = x if added is None else x + added
    return x, product.tiled(x, tile)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return two parts [M, O] of which the sum is a product plus a residual; the second may be None."""
    product = _Product(weight, bias, residual=residual)
    tile = product.fastest(x)
    return (residual, product.behind(x)) if tile is None else (product.tiled(x, tile), None)


@dataclass(frozen=True)
class _Product:
    """A product with what stands before and behind it."""

    weight: Tensor
    bias: Tensor | None
    norm: tuple[Tensor, float] | None = None
    activation: str | None = None
    residual: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.plain(x) if (tile := self.fastest(x)) is None else self.tiled(x, tile)

    def plain(self, x: Tensor) -> Tensor:
        y = self.behind(x if self.norm is None else add_norm(x, None, *self.norm)[1])
        return y if self.residual is None else self.residual + y

    def behind(self, normed: Tensor) -> Tensor:
        """By torch, without norm and residual."""
        y = F.linear(normed, self.weight, self.bias)
        return y if self.activation is None else gate(y, self.activation)

    def tiled(self, x: Tensor, tile: Tile) -> Tensor:
        (m, n_in), n_out = x.shape, len(self.weight) // (1 if self.activation is None else 2)
        y, (norm, eps) = x.new_empty(m, n_out), self.norm or (None, 0.0)
        _few[(triton.cdiv(n_out, tile.outputs),)](
            *(x, norm, self.weight, self.bias, self.residual, y, m, n_in, n_out, eps),
            **{"ACTIVATION": ACTIVATIONS.get(self.activation, 0), "TOKENS": FEW_TOKENS},
            **{"OUTPUTS": tile.outputs, "INPUTS": tile.inputs, "num_stages": tile.stages},
        )
        return y

    def fastest(self, x: Tensor) -> Tile | None:
        """Return by which tile the product is the fastest; None: by torch. Timed at first use, outside recordings.

        It is the same for 1 to 16 tokens, so that a token's states do not depend on how many are computed beside it.
        """
        # In float16, inputs that are not normed yet might not fit.
        if len(x) > FEW_TOKENS or (x.dtype == torch.float16 and self.norm is not None):
            return None
        kind = self.bias is None, self.norm is None, self.activation, self.residual is None
        key = self.weight.shape, self.weight.dtype, self.weight.device, *kind
        if key not in FASTEST:
            if x.device.type != "cuda":
                return TILES[0]  # in Triton's interpreter, where nothing is fast
            if torch.cuda.is_current_stream_capturing():
                return None
            times = {tile: self.milliseconds(tile) for tile in (None, *TILES)}
            FASTEST[key] = min(times, key=times.get)
        return FASTEST[key]

    def milliseconds(self, tile: Tile | None) -> float:
        """Time 1 and 16 tokens, with weights that no cache holds."""
        total, weight = 0.0, self.weight
        for m in (1, FEW_TOKENS):
            x = weight.new_ones(m, weight.shape[1])
            product = self if self.residual is None else replace(self, residual=x.new_zeros(m, len(weight)))
            run = partial(product.plain, x) if tile is None else partial(product.tiled, x, tile)
            try:
                total += do_bench(run, warmup=2, rep=20, return_mode="median")
            except triton.OutOfResources:  # of memory within a multiprocessor
                return inf
        return total


def rotate(
    joined: Tensor,
    norms: tuple[Tensor | None, Tensor] | None,
    eps: float,
    rope: tuple[Tensor, float],
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Rotate queries and keys; write keys and values into their slots. Return the queries [M, H, E].

    Args:
        joined: [M, (H + 2 K) E] of B rows of N tokens. H may be 0.
        norms: weights [E] of the RMSNorms of queries and of keys.
        eps: of these.
        rope: inverse frequencies [E / 2] float32, and the scale of cos and sin.
        positions: [B, N] int64.
        slots: [B, N] int64, where the tokens' keys and values go.
        keys, values: [B, K, S, E] views of the first rows of the same cache, written in place.
    """
    m, (_, n_kv_head, capacity, width) = len(joined), keys.shape
    n_head = joined.shape[1] // width - 2 * n_kv_head
    queries, (query_norm, key_norm) = joined.new_empty(m, n_head, width), norms or (None, None)
    _rotate[(m, n_head + 2 * n_kv_head)](
        *(joined, query_norm, key_norm, positions, rope[0], slots, queries, keys, values, slots.shape[1]),
        *(n_head, n_kv_head, capacity, width, rope[1], eps),
        **{"HALF": triton.next_power_of_2(width // 2), "num_warps": 1},
    )
    return queries


def attend(queries: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, seen: Tensor) -> Tensor:
    """Attend to each row's first slots, and to those behind them that a node sees. Return [B N, H E].

    Of a row no slot behind its own length + W is read.

    Args:
        queries: [B N, H, E].
        keys, values: [B or more rows, K, S, E] of the same cache.
        lengths: [B] int64, slots that all nodes of a row see.
        seen: [B, N, W] bool, which of the next W slots each node sees.
    """
    (n_rows, n_nodes, n_behind), (m, n_head, width) = seen.shape, queries.shape
    n_kv_head, capacity = keys.shape[1:3]
    n_groups = n_head // n_kv_head
    is_short = keys.element_size() == 2 and width <= 128
    n_slots, most_queries = (64, 64) if is_short else (32, 16)  # at a time
    n_queries = min(most_queries, max(16, triton.next_power_of_2(n_groups * n_nodes)))
    n_blocks = triton.cdiv(n_groups * n_nodes, n_queries)
    n_splits = max(PROGRAMS // (n_rows * n_kv_head * n_blocks), triton.cdiv(capacity, SPLIT_SLOTS), 1)
    n_splits = triton.next_power_of_2(
        max(1, min(n_splits, triton.cdiv(capacity, n_slots), MOST_SPLITS, MOST_PARTS // m))
    )
    attended, padded, parts, weights = queries.new_empty(m, n_head * width), triton.next_power_of_2(width), None, None
    if n_splits > 1:
        parts = torch.empty(m, n_head, n_splits, width, dtype=torch.float32, device=queries.device)
        weights = torch.empty(m, n_head, n_splits, dtype=torch.float32, device=queries.device)
    _attend[(n_rows * n_kv_head, n_blocks, n_splits)](
        *(queries, keys, values, lengths, seen, attended, parts, weights, n_nodes, n_behind, n_kv_head),
        *(n_groups, capacity, width, n_splits, width**-0.5),
        **{"QUERIES": n_queries, "SLOTS": n_slots, "WIDTH": max(16, padded), "num_stages": 2 if is_short else 1},
    )
    if n_splits > 1:
        sizes = {"SLOTS": n_slots, "SPLITS": n_splits, "WIDTH": padded}
        _combine[(m, n_head)](parts, weights, lengths, attended, n_nodes, n_behind, n_head, width, **sizes, num_warps=2)
    return attended
