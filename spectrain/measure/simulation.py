"""Decoding of known texts without a target: what a lookup method would have accepted in greedy decoding of them.

Greedy decoding writes the text that the target writes, whatever is drafted; so once the texts are there, a method's
options can be compared without running the target again. Only for methods that need nothing of the target's outputs
(no last logits, no probes).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spectrain.decoding import Context, Drafter, DraftTree, KVCache, Sampling, Verified


@dataclass(frozen=True)
class Text:
    """A prompt and what the target answered, as token ids."""

    prompt: list[int]
    response: list[int]


def simulate(drafter: Drafter, text: Text) -> list[int]:
    """Decode a text with a lookup method.

    Returns the tokens that each step emits: accepted ones and the bonus. What is cut at the end does not count.
    """
    context, response = Context(Sampling(), "cpu"), text.response
    none = torch.zeros(1, 0)
    context.append([text.prompt], len(response), [torch.Generator()])
    context.root(range(1), torch.tensor(response[:1]), none)
    drafter.start(None, KVCache(1))
    drafter.prefill(context, None, range(1))
    steps, done = [], 1
    while done < len(response):
        tree = drafter.propose(context)
        emitted = follow(tree, 0, response[done:])
        path, accepted, bonus = torch.zeros(1, 1, dtype=torch.int64), [len(emitted) - 1], emitted[-1:]
        verified = Verified(path, torch.tensor(accepted), torch.tensor(bonus))
        drafter.follow(context, tree, None, verified, none, [emitted])
        steps.append(len(emitted))
        done += len(emitted)
    drafter.free(0)
    return steps


def follow(tree: DraftTree, row: int, coming: list[int]) -> list[int]:
    """Return the tokens that greedy decoding of a known text emits in a step.

    They are the path of the row's tree, which has no probes, that spells what is `coming` behind the row's root, and
    the token behind that path.
    """
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    children = {edge: i for i, edge in enumerate(zip(parents, tokens, strict=True)) if edge[0] >= 0}
    node, n = 0, 0
    while n < len(coming) - 1 and (node, coming[n]) in children:
        node, n = children[node, coming[n]], n + 1
    return coming[: n + 1]
