"""Slow, independent versions of what the loop computes, and drafters that say what a test wants them to say."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from spectrain.decoding import Context, Drafter
from spectrain.target import DraftTree, Source


def greedy_by_full_forwards(
    model: PreTrainedModel, prompt: list[int], n_new: int, stop: tuple[int, ...] = ()
) -> list[int]:
    """Calls the plain model on the whole sequence for every token: no cache, no tree, no loop of ours."""
    tokens: list[int] = []
    while len(tokens) < n_new and not (tokens and tokens[-1] in stop):
        tokens.append(int(model(torch.tensor([prompt + tokens])).logits[0, -1].argmax()))
    return tokens


def all_greedy_by_full_forwards(model: PreTrainedModel, prompts: list[list[int]], n_new: int) -> list[list[int]]:
    """The same of several prompts in one batch, padded behind the last token, where no causal model looks."""
    texts = [list(prompt) for prompt in prompts]
    for _ in range(n_new):
        longest = max(map(len, texts))
        logits = model(torch.tensor([text + [0] * (longest - len(text)) for text in texts])).logits
        for row, text in enumerate(texts):
            text.append(int(logits[row, len(text) - 1].argmax()))
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def greedy_by_hugging_face(model: PreTrainedModel, prompt: list[int], n_new: int) -> list[int]:
    config = GenerationConfig(do_sample=False, max_new_tokens=n_new)
    tokens = torch.tensor([prompt])
    output = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config)
    return output[0, len(prompt) :].tolist()


def slow_ancestors(parents: list[int]) -> list[list[bool]]:
    """Which nodes lie on the path to each node, itself included, by following the pointers."""
    table = []
    for node in range(len(parents)):
        row = [False] * len(parents)
        while node >= 0:
            row[node] = True
            node = parents[node]
        table.append(row)
    return table


def random_parents(n_nodes: int, generator: torch.Generator) -> list[int]:
    """A random tree: each node hangs under any earlier one."""
    return [-1] + [int(torch.randint(node, (1,), generator=generator)) for node in range(1, n_nodes)]


def tree_of(tokens: list[list[int]], parents: list[list[int]], probe: list[list[bool]] | None = None) -> DraftTree:
    """A tree a row from lists of equal length."""
    tokens_BN = torch.tensor(tokens)
    source = torch.full_like(tokens_BN, int(Source.INPUT))
    source[:, 0] = Source.ROOT
    return DraftTree(tokens_BN, torch.tensor(parents), source, probe=None if probe is None else torch.tensor(probe))


def follow(drafter: Drafter, context: Context, tree, output, verified, last_logits, emitted) -> None:
    """Take a step whose outcome is known, as the loop would: context and drafter learn what was emitted."""
    context.advance(verified, last_logits)
    asked = drafter.observe(context, tree, output, verified)
    context.extend(emitted)
    drafter.extend(context, emitted, [[]] * context.n_rows if asked is None else asked.tolist())


class ScriptedDrafter(Drafter):
    """Proposes `script(context, row)`: a list of (token, parent) below the root, the same shape of call for every row.

    It ignores the room left, on purpose.
    """

    def __init__(self, script: Callable[[Context, int], list[tuple[int, int]]]):
        self.script = script

    def propose(self, context: Context) -> DraftTree:
        rows = [self.script(context, row) for row in range(context.n_rows)]
        width = 1 + max(map(len, rows))
        tokens, parents = [], []
        for root, nodes in zip(context.roots.tolist(), rows, strict=True):
            padding = width - 1 - len(nodes)
            tokens.append([root, *(token for token, _ in nodes), *[0] * padding])
            parents.append([-1, *(parent for _, parent in nodes), *[-2] * padding])
        return tree_of(tokens, parents)


def oracle_script(continuations: dict[tuple[int, ...], list[int]], gamma: int):
    """Drafts the next gamma tokens of each prompt's known continuation, as a chain."""

    def script(context: Context, row: int) -> list[tuple[int, int]]:
        text = context.tokens[row, : context.n_tokens[row]].tolist()
        for prompt, continuation in continuations.items():
            if tuple(text[: len(prompt)]) == prompt:
                done = len(text) - len(prompt)
                return [(token, i) for i, token in enumerate(continuation[done : done + gamma])]
        return []

    return script


def cached_states(cache, row: int) -> list[Tensor]:
    """The committed keys and values of a row, layer by layer."""
    length = cache.lengths[row]
    return [states[row, :, :length].clone() for pair in zip(cache.keys, cache.values, strict=True) for states in pair]
