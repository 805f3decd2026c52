"""What a method drafts for texts that a test gives, and its trees as paths."""

from __future__ import annotations

import torch

from spectrain.decoding import Context, Drafter, Sampling
from spectrain.target import DraftTree, Source


def rooted(texts: list[list[int]], room: int = 100, last_logits: torch.Tensor | None = None) -> Context:
    """A context whose rows hold these texts; the last token of each is its root."""
    context = Context(Sampling(), max_rows=len(texts))
    context.append([text[:-1] for text in texts], [room + 1] * len(texts), [torch.Generator() for _ in texts])
    logits = torch.zeros(len(texts), 8) if last_logits is None else last_logits
    context.root(range(len(texts)), torch.tensor([text[-1] for text in texts]), logits)
    return context


def proposed(
    drafter: Drafter, texts: list[list[int]], room: int = 100, last_logits: torch.Tensor | None = None
) -> DraftTree:
    """The trees of a drafter that has just read these texts."""
    context = rooted(texts, room, last_logits)
    drafter.start(None, None)
    drafter.prefill(context, None, range(len(texts)))
    return drafter.propose(context)


def paths(tree: DraftTree, row: int = 0) -> dict[tuple[int, ...], Source]:
    """The source of each drafted node of one row, by its tokens from below the root."""
    spelled, found = {0: ()}, {}
    for node in tree.drafted[row].nonzero()[:, 0].tolist():
        spelled[node] = (*spelled[int(tree.parents[row, node])], int(tree.tokens[row, node]))
        found[spelled[node]] = Source(int(tree.source[row, node]))
    return found


def leaves(tree: DraftTree, row: int = 0) -> list[tuple[int, ...]]:
    """The paths of one row that no other one goes on from."""
    found = paths(tree, row)
    return [path for path in found if path not in {other[:-1] for other in found}]
