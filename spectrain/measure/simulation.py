"""Decoding of known texts without a target: what a lookup method would have accepted while they were written.

A target writes the same text whatever is drafted: in greedy decoding its only one, and where tokens are drawn, too, as
lookup methods draw none. So once the texts are there, a method's options can be compared without running the target
again. Only for methods that need nothing of the target's outputs (no last logits, no probes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from spectrain.decoding import Context, Drafter, DraftTree, KVCache, Sampling, Verified


@dataclass(frozen=True)
class Text:
    """A prompt and what the target answered, as token ids."""

    prompt: list[int]
    response: list[int]


def simulate(drafter: Drafter, text: Text, budgets: Sequence[int]) -> list[np.ndarray]:
    """Decode a text with a lookup method, once for each budget of nodes.

    The trees of a budget are the first nodes of the method's own trees, which are in the order in which they were
    chosen. So all budgets take one pass over the text.

    Returns:
        For each budget the steps, [steps, 2] int64: tokens that a step emits (accepted ones and the bonus; what is cut
        at the end does not count) and nodes that it scores, the root included.
    """
    context, response = Context(Sampling(), "cpu"), text.response
    none = torch.zeros(1, 0)
    context.append([text.prompt], len(response), [torch.Generator()])
    context.root(range(1), torch.tensor(response[:1]), none)
    drafter.start(None, KVCache(1))
    drafter.prefill(context, None, range(1))
    done, now = [1] * len(budgets), 1  # tokens of each budget, and of the drafter
    steps: list[list[tuple[int, int]]] = [[] for _ in budgets]
    while now < len(response):
        tree = drafter.propose(context)
        path = follow(tree, 0, response[now:])
        for i, n_nodes in enumerate(budgets):
            if done[i] == now:
                n_emitted = 1 + sum(node < n_nodes for node in path)
                steps[i].append((n_emitted, min(n_nodes, tree.shape[1])))
                done[i] += n_emitted
        emitted = response[now : min(done)]
        nowhere, accepted = torch.zeros(1, 1, dtype=torch.int64), torch.tensor([len(emitted) - 1])
        verified = Verified(nowhere, accepted, torch.tensor(emitted[-1:]))
        drafter.follow(context, tree, None, verified, none, [emitted])
        now += len(emitted)
    drafter.free(0)
    return [np.array(one, dtype=np.int64).reshape(-1, 2) for one in steps]


def follow(tree: DraftTree, row: int, coming: list[int]) -> list[int]:
    """Return the accepted nodes in a step of a known text: the path of the row's tree that spells what is coming.

    The tree has no probes. The last token that is `coming` behind the row's root can only be a bonus.
    """
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    children = {edge: i for i, edge in enumerate(zip(parents, tokens, strict=True)) if edge[0] >= 0}
    node, path = 0, []
    for token in coming[:-1]:
        node = children.get((node, token))
        if node is None:
            break
        path.append(node)
    return path
