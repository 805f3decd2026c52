"""The kernels that SGLang runs with on a CPU, by hand-made drafts and by attention over the whole text."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.scripts import load_script

# A draft of two levels with topk 2. Candidates are numbered level by level: 0 and 1 follow the root, 2 and 3 follow
# candidate 0, 4 and 5 candidate 1. Chosen were 0, 1, 3 and 4, which become the nodes 1 to 4.
PARENTS, CHOSEN = [[-1, 0, 1]], [[0, 1, 3, 4]]
SEEN = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
FIRST_CHILD, SIBLING = [[1, 3, 4, -1, -1]], [[-1, 2, -1, -1, -1]]


@pytest.fixture(scope="module")
def kernels():
    return load_script("sglang_cpu/sgl_kernel")


def links() -> list[torch.Tensor]:
    return [torch.full((1, 5), -1) for _ in range(3)]


def test_a_draft_is_linked(kernels):
    mask, positions, (index, child, sibling) = torch.ones(25, dtype=torch.bool), torch.empty(5).long(), links()
    given = torch.tensor(PARENTS), torch.tensor(CHOSEN), torch.tensor([7]), mask, positions, index, child, sibling
    kernels.build_tree_kernel_efficient_cpu(*given, 2, 2, 5, kernels.QLEN_ONLY)
    assert mask.view(5, 5).long().tolist() == SEEN
    assert positions.tolist() == [7, 8, 8, 9, 9]
    assert (index.tolist(), child.tolist(), sibling.tolist()) == ([[0, 1, 2, 3, 4]], FIRST_CHILD, SIBLING)
    again, positions_again = links(), torch.empty(5).long()
    kernels.reconstruct_indices_from_tree_mask(mask, torch.tensor([7]), positions_again, *again, 1, 5)
    assert positions_again.tolist() == positions.tolist()
    assert [one.tolist() for one in again] == [index.tolist(), FIRST_CHILD, SIBLING]


@pytest.mark.parametrize(
    ("best", "accepted", "path"),
    [
        ([21, 0, 30, 0, 40], 2, [0, 2, 4]),  # the root's second child and its child
        ([20, 9, 0, 0, 0], 1, [0, 1, -1]),
        ([9, 0, 0, 0, 0], 0, [0, -1, -1]),
    ],
)
def test_the_target_is_followed(kernels, best, accepted, path):
    predicts, indices, counts = torch.full((5,), -1), torch.full((1, 3), -1), torch.zeros(1).long()
    tokens = torch.tensor([[5, 20, 21, 29, 30]])
    given = tokens, torch.arange(5)[None], torch.tensor(FIRST_CHILD), torch.tensor(SIBLING), torch.tensor([best])
    kernels.verify_tree_greedy_cpu(predicts, indices, counts, *given)
    assert (counts.tolist(), indices.tolist()) == ([accepted], [path])
    nodes = [node for node in path if node >= 0]
    assert predicts[nodes].tolist() == [best[node] for node in nodes]


@pytest.mark.parametrize("window", [0, 3])
def test_attention_is_that_over_the_whole_text(kernels, window):
    torch.manual_seed(0)
    n, new, places = 9, 2, torch.randperm(20)[:9]
    q, k, v = torch.randn(n, 4, 8), torch.randn(n, 2, 8), torch.randn(n, 2, 8)
    at = torch.arange(n)
    seen = (at <= at[:, None]) & ((at > at[:, None] - window) if window else True)
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    whole = F.scaled_dot_product_attention(*heads, seen, scale=0.3, enable_gqa=True)[0].transpose(0, 1)
    keys, values, table = torch.zeros(20, 2, 8), torch.zeros(20, 2, 8), torch.zeros(3, 12, dtype=torch.int32)
    keys[places], values[places], table[1, :n] = k, v, places.int()
    one, lens = torch.tensor([1]), torch.tensor([n])
    out, starts = torch.empty(new, 4, 8), torch.tensor([0])
    rest = table, one, lens, torch.tensor([new]), starts, new, 0.3, 0.0, False, window, None, None, None, True
    kernels.extend_attention_cpu(q[-new:], None, None, out, keys, values, 1.0, 1.0, *rest)
    torch.testing.assert_close(out, whole[-new:])
    keys[places[-1]] = 0
    rest = places[-1:], None, table, one, lens, 0.3, 0.0, False, window, None, None
    kernels.decode_attention_cpu(q[-1:], keys, values, 1.0, 1.0, out[:1], k[-1:], v[-1:], *rest)
    torch.testing.assert_close(out[:1], whole[-1:])


def test_rows_of_a_cache_are_copied_by_address(kernels):
    cache = torch.arange(12.0).view(6, 2)
    address, n_bytes = torch.tensor([cache.data_ptr()]), torch.tensor([8])
    kernels.copy_all_layer_kv_cache_cpu(address, n_bytes, torch.tensor([0, 1]), torch.tensor([1, 4]))
    assert cache.tolist() == [[2, 3], [8, 9], [4, 5], [6, 7], [8, 9], [10, 11]]
