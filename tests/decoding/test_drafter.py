"""The context: what drafters read of the active rows."""

import torch

from spectrain.decoding import Context, Sampling, Verified
from spectrain.decoding.sampling import row_generator

PROMPTS = [[5, 6], [7, 8, 9], [4]]


def rooted_context(sampling: Sampling | None = None) -> Context:
    context = Context(sampling or Sampling(), max_rows=3)
    context.append(PROMPTS, 10, [row_generator(0, i) for i in range(3)])
    context.root(range(3), torch.tensor([20, 21, 22]), torch.eye(3))
    return context


def texts(context: Context) -> list[list[int]]:
    return [context.tokens[row, :n].tolist() for row, n in enumerate(context.n_tokens)]


def test_advance_appends_and_counts():
    context = rooted_context()
    context.advance(Verified(None, torch.tensor([1, 0, 2]), torch.tensor([31, 32, 35])), torch.eye(3))
    context.extend([[30, 31], [32], [33, 34, 35]])
    assert texts(context) == [[5, 6, 20, 30, 31], [7, 8, 9, 21, 32], [4, 22, 33, 34, 35]]
    assert context.lengths.tolist() == [5, 5, 5]
    assert context.room == [7, 8, 6]
    assert context.roots.tolist() == [31, 32, 35]


def test_free_moves_the_last_row_and_a_new_one_joins_behind():
    context = rooted_context()
    context.free(0)
    assert texts(context) == [[4, 22], [7, 8, 9, 21]]
    assert context.roots.tolist() == [22, 21]
    assert context.last_logits.tolist() == torch.eye(3)[[2, 1]].tolist()
    context.append([[50] * 9], 3, [row_generator(0, 3)])
    context.root(range(2, 3), torch.tensor([51]), torch.zeros(1, 3))
    assert texts(context) == [[4, 22], [7, 8, 9, 21], [50] * 9 + [51]]
    assert context.room == [9, 9, 2]
    assert context.roots.tolist() == [22, 21, 51]
    context.free(2)
    assert texts(context) == [[4, 22], [7, 8, 9, 21]]
    context.free(1)
    context.free(0)
    assert context.n_rows == 0


def test_draw_warps_and_leaves_inactive_rows_their_randomness():
    sampling = Sampling(temperature=0.5, top_k=2)
    context = rooted_context(sampling)
    logits = torch.randn(3, 7)
    _, q = context.draw(logits, active=torch.tensor([True, False, True]))
    torch.testing.assert_close(q, sampling.warp(logits))
    following = context.uniforms.take(1)
    for row, n_drawn in enumerate([1, 0, 1]):
        assert following[row].item() == torch.rand(n_drawn + 1, generator=row_generator(0, row))[-1].item()


def test_tail_is_the_end_of_each_row_and_all_of_a_short_one():
    context = Context(Sampling(), max_rows=2)
    context.append([[5, 6, 7], [8]], 9, [torch.Generator(), torch.Generator()])
    context.root(range(2), torch.tensor([1, 2]), torch.zeros(2, 61))
    assert context.tail(3) == [[6, 7, 1], [8, 2]]
    assert context.tail(1) == [[1], [2]]
