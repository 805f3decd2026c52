"""Tree geometry against pointers followed one by one."""

import torch

from spectrain.decoding import DraftTree, Source
from tests.decoding.reference import random_parents, slow_ancestors, tree_of


def test_random_trees_equal_the_slow_version():
    generator = torch.Generator().manual_seed(0)
    for n_nodes in (1, 2, 3, 7, 16, 33):
        parents = [random_parents(n_nodes, generator) for _ in range(4)]
        tree = tree_of([[0] * n_nodes] * 4, parents)
        expected = torch.tensor([slow_ancestors(row) for row in parents])
        assert torch.equal(tree.ancestors, expected)
        assert torch.equal(tree.depth, expected.sum(-1) - 1)


def test_longest_possible_chain_in_general_form():
    tree = tree_of([[0] * 17], [list(range(-1, 16))])
    assert tree.depth[0].tolist() == list(range(17))


def test_chain_knows_what_the_general_form_computes():
    chain = DraftTree.chain(torch.tensor([5, 6]), torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([3, 1]))
    general = DraftTree(chain.tokens, chain.parents, chain.source)
    assert chain.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, -2, -2]]
    assert torch.equal(chain.depth, general.depth)
    assert torch.equal(chain.ancestors[chain.valid], general.ancestors[general.valid])
    for node in range(2):
        assert torch.equal(chain.path_to(torch.tensor([node] * 2)), general.path_to(torch.tensor([node] * 2)))
    assert chain.source.tolist() == [[Source.ROOT] + [Source.DRAFT] * 3] * 2


def test_nobody_sees_padding_and_padding_is_no_draft():
    tree = tree_of([[9, 1, 2, 0, 0]], [[-1, 0, 0, -2, -2]])
    assert not tree.ancestors[0, :3, 3:].any()
    assert tree.drafted.tolist() == [[False, True, True, False, False]]
    assert tree.depth[0].tolist() == [0, 1, 1, 0, 0]


def test_probes_are_no_draft():
    tree = tree_of([[9, 1, 2]], [[-1, 0, 0]], probe=[[False, False, True]])
    assert tree.drafted.tolist() == [[False, True, False]]


def test_path_runs_from_the_root():
    #     0
    #    / \
    #   1   2
    #      / \
    #     3   4 - 5
    tree = tree_of([[0] * 6] * 3, [[-1, 0, 0, 2, 2, 4]] * 3)
    assert tree.path_to(torch.tensor([0, 1, 5])).tolist() == [
        [0, -1, -1, -1, -1, -1],
        [0, 1, -1, -1, -1, -1],
        [0, 2, 4, 5, -1, -1],
    ]


def test_root_only_is_a_chain_of_one():
    tree = DraftTree.root_only(torch.tensor([4, 7]))
    assert tree.shape == (2, 1)
    assert tree.depth.tolist() == [[0], [0]]
    assert not tree.drafted.any()
