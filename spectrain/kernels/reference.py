"""What the kernels compute, in torch: it runs where they do not, and tests compare them with it."""

from __future__ import annotations

import torch
from torch import Tensor

# Of splitmix64 (Steele et al. 2014), as signed numbers: torch has no others of 64 bits.
GAMMA, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def warp(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Turn logits [.., V] into the probabilities [.., V] float32 that tokens are drawn from.

    Tokens that tie with the last one kept are kept too, whatever their order. Temperature 0 gives a one-hot row.
    """
    logits = logits.float()
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / temperature
    top_k = min(top_k, logits.shape[-1])
    if top_k:
        kept = logits.topk(top_k).values  # [.., top_k], descending
        logits = logits.masked_fill(logits < kept[..., -1:], -torch.inf)
    probs = logits.softmax(-1)
    if top_p < 1:
        ordered = probs.topk(top_k).values if top_k else probs.sort(descending=True).values
        before = ordered.cumsum(-1) - ordered  # mass of the likelier tokens
        last_kept = (before < top_p).sum(-1, keepdim=True).clamp_min(1) - 1
        probs = _renormalised(probs, probs >= ordered.gather(-1, last_kept))
    if min_p:
        probs = _renormalised(probs, probs >= min_p * probs.amax(-1, keepdim=True))
    return probs


def _renormalised(probs: Tensor, keep: Tensor) -> Tensor:
    probs = probs * keep
    return probs / probs.sum(-1, keepdim=True)


def draw(weights: Tensor, numbers: Tensor) -> Tensor:
    """Draw from rows of weights [B, V] float32 that need not sum to one. Return tokens [B] int64.

    Numbers [B] are float32 in [0, 1), or keys of shared noise, int64. A token of weight 0 is never drawn: the first
    index whose cumulative sum is *above* the threshold has weight, and the threshold stays below the total, since
    float32 numbers end at 1 - 2^-24.
    """
    if numbers.dtype == torch.int64:
        return draw_by_noise(weights, numbers)
    cumulative = weights.double().cumsum(-1)  # a parallel float32 scan is not monotonic, and would draw zero weights
    threshold = numbers.double()[:, None] * cumulative[:, -1:]
    # Of weights that are NaN no draw comes: any token does, since verification rejects it where it was drafted.
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp_max(weights.shape[-1] - 1)


def _shifted(x: Tensor, n: int) -> Tensor:
    return (x >> n) & ((1 << (64 - n)) - 1)


def mixed(x: Tensor) -> Tensor:
    """Splitmix64's finaliser of int64 numbers, a bijection."""
    x = (x ^ _shifted(x, 30)) * FIRST
    x = (x ^ _shifted(x, 27)) * SECOND
    return x ^ _shifted(x, 31)


def exponentials(keys: Tensor, tokens: Tensor) -> Tensor:
    """Exponential numbers float64 of tokens int64 at places with keys int64, of shapes that fit together."""
    uniform = (_shifted(mixed(keys + (tokens + 1) * GAMMA), 11).double() + 0.5) * 2.0**-53
    return -uniform.log()


def draw_by_noise(probs: Tensor, keys: Tensor) -> Tensor:
    """Draw from rows of probabilities [B, V] with the noise of keys [B] int64. Return [B] int64."""
    tokens = torch.arange(probs.shape[-1], device=probs.device)
    late = exponentials(keys[:, None], tokens) / probs.double()
    return late.nan_to_num(torch.inf).argmin(-1)


def top_tokens(logits: Tensor, sharpness: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Find the likeliest tokens of softmax(sharpness x logits), in order, and their probabilities.

    Args:
        logits: [n, m, K].
        sharpness: [n] float32.
        count: B.

    Returns:
        [n, m, B] int64, and [n, m, B] float64.
    """
    found = (logits.float() * sharpness[:, None, None]).softmax(-1).topk(count)
    return found.indices, found.values.double()


def first_by_noise(probs: Tensor, keys: Tensor, names: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """Find the tokens with the smallest E / q, in order, and these numbers: draws without replacement.

    Args:
        probs: [n, m, K] float32, q.
        keys: [n] int64 of shared noise.
        names: [K] int64 tokens that q is of; None: 0, 1, ...
        count: B.

    Returns:
        [n, m, B] int64, and [n, m, B] float64.
    """
    names = torch.arange(probs.shape[-1], device=probs.device) if names is None else names
    late = exponentials(keys[:, None, None], names) / probs.double()
    found = late.topk(count, largest=False)
    return names[found.indices], found.values


def move(buffers: list[Tensor], path: Tensor, starts: Tensor) -> None:
    """Move node path[b, j] of each row to place j of buffers [.., rows, H, S, E]. Its first node is at slot starts[b].

    path: [B, A] int64 nodes in order, then -1.
    """
    n_rows, width = path.shape
    write = starts[:, None] + torch.arange(width, device=path.device)
    read = torch.where(path >= 0, starts[:, None] + path, write)  # past the end a node is written onto itself
    for states in buffers:
        *before, _, n_heads, _, size = states.shape
        shape = (*before, n_rows, n_heads, width, size)
        moved = states.gather(-2, read.to(states.device)[:, None, :, None].expand(shape))
        states.scatter_(-2, write.to(states.device)[:, None, :, None].expand(shape), moved)
