"""Properties of random trees: geometry, verification and the whole step against slow versions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain import kernels
from spectrain.decoding import Sampling, verify
from spectrain.decoding.sampling import Uniforms, row_generator
from spectrain.target import DraftTree
from spectrain.target.tree import PADDING_PARENT
from tests.conftest import tiny_model
from tests.decoding.reference import slow_ancestors, tree_of

VOCAB_SIZE = 5  # so small that siblings and whole paths repeat
PADDING = -2
MODEL = tiny_model("llama_gqa", seed=2)


@st.composite
def trees(draw, vocab_size: int = VOCAB_SIZE, max_rows: int = 3, max_nodes: int = 9) -> DraftTree:
    """Ragged random trees with probes; nothing that is drafted hangs under a probe."""
    sizes = draw(st.lists(st.integers(1, max_nodes), min_size=1, max_size=max_rows))
    width = max(sizes)
    tokens, parents, probe = [], [], []
    for size in sizes:
        token = st.integers(0, vocab_size - 1)
        tokens.append([*draw(st.lists(token, min_size=size, max_size=size)), *[0] * (width - size)])
        row_parents, row_probe = [-1], [False]
        for node in range(1, size):
            row_parents.append(draw(st.integers(0, node - 1)))
            row_probe.append(row_probe[row_parents[-1]] or draw(st.integers(0, 4)) == 0)
        parents.append([*row_parents, *[PADDING] * (width - size)])
        probe.append([*row_probe, *[False] * (width - size)])
    return tree_of(tokens, parents, probe)


@settings(max_examples=150, deadline=None)
@given(trees())
def test_geometry_equals_following_the_pointers(tree):
    for row, parents in enumerate(tree.parents.tolist()):
        size = len([p for p in parents if p != PADDING])
        expected = torch.tensor(slow_ancestors(parents[:size]))
        assert torch.equal(tree.ancestors[row, :size, :size], expected)
        assert not tree.ancestors[row, :size, size:].any()
        assert tree.depth[row, :size].tolist() == (expected.sum(-1) - 1).tolist()
        path = tree.path_to(torch.full((tree.shape[0],), size - 1))[row]
        assert path[path >= 0].tolist() == expected[size - 1].nonzero()[:, 0].tolist()
    deepest = int(tree.depth.max())
    known = DraftTree(tree.tokens, tree.parents, tree.source, probe=tree.probe, max_depth=deepest)
    assert torch.equal(known.ancestors, tree.ancestors)


def test_a_chain_knows_what_the_general_form_computes():
    chain = DraftTree.chain(torch.tensor([5, 6]), torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([3, 1]))
    general = DraftTree(chain.tokens, chain.parents, chain.source)
    assert chain.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, -2, -2]]
    assert torch.equal(chain.depth, general.depth)
    chosen, others = (tree.ancestors[tree.parents != PADDING_PARENT] for tree in (chain, general))
    assert torch.equal(chosen, others)
    for node in range(2):
        assert torch.equal(chain.path_to(torch.tensor([node] * 2)), general.path_to(torch.tensor([node] * 2)))


def slow_walk(tree: DraftTree, row: int, next_token) -> tuple[list[int], int]:
    """Tokens accepted from the root on, and the bonus; next_token(node) is what the target says there."""
    parents, tokens, probe = (values[row].tolist() for values in (tree.parents, tree.tokens, tree.probe))
    nodes, accepted, said = [0], [], next_token(0)
    while True:
        below = [i for i, p in enumerate(parents) if p in nodes and not probe[i] and tokens[i] == said]
        if not below:
            return accepted, said
        accepted.append(said)
        nodes, said = below, next_token(below[0])


def logits_of_paths(tree: DraftTree, seed: int) -> torch.Tensor:
    """[B, N, V], equal wherever the tokens from the root on are equal, as a target's are."""
    logits = torch.zeros(*tree.shape, VOCAB_SIZE)
    for row in range(tree.shape[0]):
        for node in range(tree.shape[1]):
            path = tree.tokens[row][tree.ancestors[row, node]].tolist()
            generator = torch.Generator().manual_seed(hash((seed, row, *path)) % 2**31)
            logits[row, node] = 2 * torch.randn(VOCAB_SIZE, generator=generator)
    return logits


@settings(max_examples=150, deadline=None)
@given(trees(), st.integers(0, 1000))
def test_greedy_walk_equals_the_slow_walk(tree, seed):
    logits = logits_of_paths(tree, seed)
    verified = verify(tree, logits, Sampling())
    for row in range(tree.shape[0]):
        accepted, bonus = slow_walk(tree, row, lambda node, row=row: int(logits[row, node].argmax()))
        path = verified.path[row, 1 : int(verified.accepted[row]) + 1]
        assert tree.tokens[row][path].tolist() == accepted
        assert int(verified.bonus[row]) == bonus
        assert not tree.probe[row][path].any()


SAMPLINGS = st.sampled_from(
    [
        Sampling(temperature=0.7),
        Sampling(temperature=1.0, top_k=3),
        Sampling(temperature=1.5, top_p=0.8),
        Sampling(temperature=1.0, min_p=0.2),
    ]
)


def chain_of(tree: DraftTree, generator: torch.Generator) -> DraftTree:
    """A ragged chain over the tree's tokens, drawn from some q."""
    n_rows, n_nodes = tree.shape
    lengths = torch.randint(0, n_nodes, (n_rows,), generator=generator)
    probs = torch.rand(n_rows, n_nodes, VOCAB_SIZE, generator=generator).softmax(-1)
    return DraftTree.chain(tree.tokens[:, 0], tree.tokens[:, 1:], lengths, probs)


@settings(max_examples=200, deadline=None)
@given(trees(), st.integers(0, 1000), SAMPLINGS, st.sampled_from(["drawn token", "drawn block", "deterministic"]))
def test_the_compiled_rules_are_those_of_torch(tree, seed, sampling, kind):
    """The same path, bonus and random numbers, also where a draft is rejected and the residual is drawn from."""
    logits, found = logits_of_paths(tree, seed), []
    if kind.startswith("drawn"):
        tree = chain_of(tree, torch.Generator().manual_seed(seed))
    for compiled in (True, False):
        uniforms = Uniforms([row_generator(seed, row) for row in range(tree.shape[0])])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "reads", lambda values: compiled)  # noqa: B023 read at once
            verified = verify(tree, logits, sampling, uniforms, "block" if "block" in kind else "token")
        found.append((verified.path, verified.accepted, verified.bonus, uniforms.places))
    for ours, theirs in zip(*found, strict=True):
        assert ours.tolist() == theirs.tolist()


@settings(max_examples=100, deadline=None)
@given(trees(), st.integers(0, 1000))
def test_sampled_walk_draws_one_token_a_node(tree, seed):
    logits, sampling = logits_of_paths(tree, seed), Sampling(temperature=1.0, top_k=3)
    rows = range(tree.shape[0])
    verified = verify(tree, logits, sampling, Uniforms([row_generator(seed, row) for row in rows]))
    for row in rows:
        generator = row_generator(seed, row)

        def draw(node, row=row, generator=generator) -> int:
            return int(sampling.draw(logits[row, node][None], torch.rand(1, generator=generator))[0])

        accepted, bonus = slow_walk(tree, row, draw)
        path = verified.path[row, 1 : int(verified.accepted[row]) + 1]
        assert (tree.tokens[row][path].tolist(), int(verified.bonus[row])) == (accepted, bonus)
