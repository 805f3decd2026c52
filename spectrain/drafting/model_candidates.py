"""Candidates of a draft model's trees: the likeliest tokens behind a node, their kinds, and which nodes are read.

A candidate's kind is its rank among its siblings and its probability q under the draft model or, where target and
drafter share their noise, the lead of its E / q. One that a lookup has found as well has a kind by how sure the lookup
is of it (`merge_lookup`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from spectrain.compiled import compiled, n_below, order_by
from spectrain.decoding import Context
from spectrain.drafting.ranking import KINDS, LIKELIEST, PARENTS, TOKENS
from spectrain.kernels import TEMPERATURE, first_by_noise, top_tokens
from spectrain.target.device import to_device

SHARES = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97])  # of q, where a new kind begins
LEADS = np.array([0.1, 0.2, 0.35, 0.5, 0.7, 0.85])  # of E / q of the better one of two over the other's, likewise
RANKS = 4  # that are told apart
OF_SHARE = (0.01, 0.03, 0.06, 0.12, 0.22, 0.35, 0.5, 0.65, 0.78, 0.88, 0.95)
OF_LEAD = ((0.9, 0.85, 0.75, 0.65, 0.6, 0.5, 0.45), (0.02, 0.05, 0.08, 0.12, 0.18, 0.22, 0.25))
N_SHARES = len(OF_SHARE)
N_KINDS = RANKS * N_SHARES
SURENESS = np.array([0.2, 0.45, 0.75])  # of a lookup's chance, where a new kind of what both know begins
OF_SURENESS = (0.1, 0.32, 0.6, 0.85)
PRIOR = 0.35  # the chance of a candidate of which nothing is known
UNPROPOSED_FACTOR = 0.4  # of the chance of a lookup's candidate that the model could have named, and did not


def model_priors(shares_noise: bool) -> list[float]:
    """Return the chance of each kind: of the model's candidates, then of those that a lookup has found as well.

    The kinds are told apart by q or, where noise is shared, by E / q, which say different things.
    """
    if shares_noise:
        of_lead = [OF_LEAD[min(rank, 1)] + (0.1,) * (N_SHARES - len(OF_LEAD[0])) for rank in range(RANKS)]
        alone = [chance / max(1, rank) for rank, chances in enumerate(of_lead) for chance in chances]
        return [*alone, *both_known(of_lead[0])]
    alone = [chance * (1.0 if rank == 0 else 0.8) for rank in range(RANKS) for chance in OF_SHARE]
    return [*alone, *both_known(OF_SHARE)]


def both_known(of_model: Sequence[float]) -> list[float]:
    """Chances of candidates that a model and a lookup know, from those that the model's kinds of rank 0 have alone.

    Two opinions that are independent of each other multiply the odds.
    """
    odds = [[chance / (1 - chance) for chance in opinion] for opinion in (OF_SURENESS, of_model)]
    joint = [one * other * (1 - PRIOR) / PRIOR for one in odds[0] for other in odds[1]]
    return [min(LIKELIEST, ratio / (1 + ratio)) for ratio in joint]


@compiled
def next_read(likely, others, drafts, new, stops, n_scored, chosen):
    """Choose the nodes of the newest level, `new`, that are read next.

    A node is read if it is among the n_scored likeliest ones so far: nodes behind it are no likelier than it is. Behind
    an end of the text nothing is drafted.

    Args:
        likely: [n, N] of `chances`.
        others: [n, M] the same of another draft's candidates, some of which may be in this one.
        drafts: [n, 4, N] int64.
        new: the first node of the level, and the end.
        stops: [E] int64 tokens that end a text.
        chosen: [n, B] int64, filled with the likeliest ones in their order.

    Returns:
        How many nodes of each row are read, as many as of the row that reads most, and the sum of their chances.
    """
    n_rows, most = chosen.shape
    n_known, n_read, reached = new[1] - 1 + others.shape[1], 0, 0.0
    known, places = np.empty(n_known + 1), np.empty(n_known, dtype=np.int64)
    for row in range(n_rows):
        for i in range(n_known):
            known[i] = likely[row, 1 + i] if i < new[1] - 1 else others[row, i - new[1] + 1]
            places[i] = i
        order_by(known, places)
        least = known[places[min(n_scored, n_known) - 1]]
        level = places[: new[1] - new[0]]
        for i in range(len(level)):
            level[i] = new[0] + i
            known[level[i]] = likely[row, level[i]]
            for stop in stops:
                if drafts[row, TOKENS, level[i]] == stop:
                    known[level[i]] = -1.0
        order_by(known, level)
        worth = 0
        for place, node in enumerate(level[:most]):
            chosen[row, place] = node
            if known[node] >= least and known[node] > 0.0:
                worth += 1
                reached += known[node]
        n_read = max(n_read, worth)
    for i in range(n_known + 1):
        known[i] = -i
    for row in range(n_rows):
        order_by(known, chosen[row, :n_read])
    return n_read, reached


@compiled
def merge_lookup(draft, size, found, found_size, likely, kinds):
    """Add the nodes that a lookup has found behind the same root to a model's draft [4, N].

    A node of both gets a kind by its probability under the model and the chance that the lookup gives it. A node that
    the model does not name, though it has read the parent, gets the kind that stands n_found behind its own.

    Args:
        draft: see above.
        size: its nodes.
        found: [4, M] int64.
        found_size: its nodes.
        likely: [M] the chance that each node of `found` is accepted.
        kinds: n_found, how many a lookup has; and which of all is the model's first one.

    Returns:
        How many nodes the draft has then.
    """
    n_found, first = kinds
    places = np.zeros(found_size, dtype=np.int64)
    for i in range(1, found_size):
        above = found[PARENTS, i]
        parent, at, was_read = places[above], -1, False
        for node in range(parent + 1, size):
            if draft[PARENTS, node] == parent:
                was_read = was_read or draft[KINDS, node] >= first
                if draft[TOKENS, node] == found[TOKENS, i]:
                    at = node
                    break
        if at < 0:
            at = size
            size += 1
            for column in range(len(draft)):
                draft[column, at] = found[column, i]
            draft[PARENTS, at] = parent
            if was_read:
                draft[KINDS, at] += n_found
        elif first <= draft[KINDS, at] < first + N_KINDS:
            sure = n_below(SURENESS, likely[i] / max(likely[above], 1e-9))
            draft[KINDS, at] = first + N_KINDS + sure * N_SHARES + (draft[KINDS, at] - first) % N_SHARES
        places[i] = at
    return size


def children(
    context: Context, logits: Tensor, branches: int, keys: Tensor | None, names: Tensor | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the B likeliest tokens behind nodes with these logits [n, m, K], and their kinds, [n, m, B] each.

    With keys [n] int64 of `SharedNoise` the likeliest are those that it draws first. `names` [K] int64, on the host,
    are the tokens that logits stand for; None: 0, 1, ...
    """
    temperatures = context.sampling.options[:, TEMPERATURE].expand(context.n_rows)
    sharpness = to_device(torch.where(temperatures > 0, 1 / temperatures, 1.0).float(), logits.device)
    if keys is not None:
        probs = (logits.float() * sharpness[:, None, None]).softmax(-1).cpu()
        tokens, late = first_by_noise(probs, keys, names, branches)
        late = late.numpy()
        other = late.copy()
        other[..., 0], other[..., 1:] = late[..., 1 % branches], late[..., :1]
        buckets = np.searchsorted(LEADS, np.minimum(late, other) / np.maximum(late, other))
    else:
        tokens, shares = top_tokens(logits, sharpness, branches)
        tokens = tokens if names is None else names[tokens]
        buckets = np.searchsorted(SHARES, shares.numpy())
    ranks = np.minimum(np.arange(branches), RANKS - 1)
    return tokens.numpy(), ranks * N_SHARES + buckets
