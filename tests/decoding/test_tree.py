"""Tree geometry against pointers followed one by one."""

import torch

from spectrain.decoding import DraftTree, Source
from tests.decoding.reference import tree_of


def test_chain_knows_what_the_general_form_computes():
    chain = DraftTree.chain(torch.tensor([5, 6]), torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([3, 1]))
    general = DraftTree(chain.tokens, chain.parents, chain.source)
    assert chain.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, -2, -2]]
    assert torch.equal(chain.depth, general.depth)
    assert torch.equal(chain.ancestors[chain.valid], general.ancestors[general.valid])
    for node in range(2):
        assert torch.equal(chain.path_to(torch.tensor([node] * 2)), general.path_to(torch.tensor([node] * 2)))
    assert chain.source.tolist() == [[Source.ROOT] + [Source.DRAFT] * 3] * 2


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
