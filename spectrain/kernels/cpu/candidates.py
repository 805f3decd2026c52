"""The first few tokens behind the nodes of a draft tree: the likeliest ones, or those that shared noise draws first."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from spectrain.compiled import compiled
from spectrain.kernels import reference
from spectrain.kernels.cpu.intrinsics import MATHS, exp
from spectrain.kernels.cpu.warping import BLOCK, largest, uniform_of


def top_tokens(logits: Tensor, sharpness: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """See `reference.top_tokens`. The result is on the host, after one transfer from a device."""
    if logits.device.type != "cpu":
        tokens, shares = reference.top_tokens(logits, sharpness, count)
        found, both = torch.stack([tokens.double(), shares]).cpu()
        return found.long(), both
    tokens, shares = _empty(logits, count)
    _top_tokens(logits.float().contiguous().numpy(), sharpness.numpy(), tokens, shares)
    return torch.from_numpy(tokens), torch.from_numpy(shares)


def first_by_noise(probs: Tensor, keys: Tensor, names: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """See `reference.first_by_noise`. Arguments are on the host."""
    tokens, late = _empty(probs, count)
    named = np.zeros(0, dtype=np.int64) if names is None else names.numpy()
    _first_by_noise(probs.contiguous().numpy(), named, keys.contiguous().numpy(), tokens, late)
    return torch.from_numpy(tokens), torch.from_numpy(late)


def _empty(values: Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    shape = (*values.shape[:2], count)
    return np.zeros(shape, dtype=np.int64), np.empty(shape)  # where too few have weight, the token is 0


@compiled(fastmath=MATHS, error_model="numpy")
def _top_tokens(logits, sharpness, tokens, shares):
    """Fill tokens and shares [n, m, B] of logits [n, m, K]."""
    size, n_best = logits.shape[2], tokens.shape[2]
    most = np.empty((size + BLOCK - 1) // BLOCK, dtype=np.float32)  # of each block
    for row in range(logits.shape[0]):
        for node in range(logits.shape[1]):
            x, chosen, best = logits[row, node], tokens[row, node], shares[row, node]
            for block in range(len(most)):
                most[block] = largest(x.ctypes.data, block * BLOCK, min((block + 1) * BLOCK, size))
            top, factor, total = np.float32(-np.inf), sharpness[row], np.float32(0.0)
            for block in range(len(most)):
                top = max(top, most[block])
            for v in range(size):
                total += exp((x[v] - top) * factor)
            best[:] = -np.inf
            for block in range(len(most)):
                if most[block] > best[n_best - 1]:
                    for v in range(block * BLOCK, min((block + 1) * BLOCK, size)):
                        if x[v] > best[n_best - 1]:
                            place = n_best - 1
                            while place > 0 and x[v] > best[place - 1]:
                                best[place], chosen[place] = best[place - 1], chosen[place - 1]
                                place -= 1
                            best[place], chosen[place] = x[v], v
            for place in range(n_best):
                best[place] = exp((np.float32(best[place]) - top) * factor) / total


@compiled
def _first_by_noise(probs, names, keys, tokens, late):
    """Fill tokens and late [n, m, B] of probs [n, m, K]. `names` is empty where tokens are 0, 1, ..."""
    n_best = tokens.shape[2]
    for row in range(probs.shape[0]):
        for node in range(probs.shape[1]):
            least, chosen = late[row, node], tokens[row, node]
            least[:] = np.inf
            for v in range(probs.shape[2]):
                q = probs[row, node, v]
                if q > 0.0:
                    name = v if len(names) == 0 else names[v]
                    uniform = uniform_of(keys[row], name)
                    if 1.0 - uniform < least[n_best - 1] * q:  # which is below -log(uniform)
                        here, place = -np.log(uniform) / q, n_best - 1
                        if here < least[place]:
                            while place > 0 and here < least[place - 1]:
                                least[place], chosen[place] = least[place - 1], chosen[place - 1]
                                place -= 1
                            least[place], chosen[place] = here, name
