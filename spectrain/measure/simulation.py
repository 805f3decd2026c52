"""Decoding of known texts without a target: what a lookup method would have accepted in greedy decoding of them.

Greedy decoding writes the text that the target writes, whatever is drafted; so once the texts are there, a method's
options can be compared without running the target again. Only for methods that need nothing of the target's outputs
(no last logits, no probes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spectrain.decoding import Context, Drafter, DraftTree, KVCache, Sampling, Verified


@dataclass(frozen=True)
class Text:
    """A prompt and what the target answered, as token ids."""

    prompt: list[int]
    response: list[int]


def simulate(drafter: Drafter, texts: Sequence[Text]) -> list[list[int]]:
    """Decodes each text by itself.

    Args:
        drafter: a lookup method.
        texts: each response has at least one token; the last one ends it.

    Returns:
        Tokens emitted by each step of each text: accepted ones and the bonus; what is cut at the end does not count.
    """
    return [_decode(drafter, text) for text in texts]


def _decode(drafter: Drafter, text: Text) -> list[int]:
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
        verified = Verified(
            torch.zeros(1, 1, dtype=torch.int64), torch.tensor([len(emitted) - 1]), torch.tensor([emitted[-1]])
        )
        context.advance([emitted], verified.bonus, none)
        drafter.observe(context, tree, None, verified)
        steps.append(len(emitted))
        done += len(emitted)
    drafter.free(0)
    return steps


def follow(tree: DraftTree, row: int, coming: list[int]) -> list[int]:
    """The tokens that greedy decoding of a known text emits in a step.

    Args:
        tree: of the step, without probes.
        row: of the batch.
        coming: the text behind the row's root.

    Returns:
        The path of the row's tree that spells what comes, and the token behind it.
    """
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    children = {edge: i for i, edge in enumerate(zip(parents, tokens, strict=True)) if edge[0] >= 0}
    node, n = 0, 0
    while n < len(coming) - 1 and (node, coming[n]) in children:
        node, n = children[node, coming[n]], n + 1
    return coming[: n + 1]
