"""On a GPU: the Triton kernels at the sizes of a real model, and the steps of a target through them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.decoding import generate
from spectrain.methods.autoregressive import Autoregressive
from spectrain.target import DraftTree, TargetModel
from tests.conftest import random_prompts, tiny_model
from tests.decoding.reference import random_parents, tree_of

pytestmark = pytest.mark.gpu
CARD = torch.device("cuda")
D, F_MLP, H, K, E, EPS = 2048, 8192, 32, 8, 64, 1e-5  # of Llama 3.2 1B
ROUNDING = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def close(found: Tensor, expected: Tensor) -> None:
    rounding = ROUNDING[found.dtype]
    torch.testing.assert_close(found.float(), expected.float(), atol=rounding, rtol=rounding)


@pytest.mark.parametrize("m", [1, 5, 16, 32, 2048])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_products_norms_and_gates(dtype, m):
    from spectrain.kernels.cuda import triton_kernels

    x, added, weight = (torch.randn(*shape, device=CARD).to(dtype) for shape in ((m, D), (m, D), (D,)))
    gate_up, down = (torch.randn(*s, device=CARD).to(dtype) * s[1] ** -0.5 for s in ((2 * F_MLP, D), (D, F_MLP)))
    summed, inner = triton_kernels.norm_linear(x, added, (weight, EPS), gate_up, None, "silu")
    close(summed, x + added)
    gate, up = F.linear(F.rms_norm(summed.float(), [D], weight.float(), EPS), gate_up.float()).chunk(2, -1)
    close(inner, F.silu(gate) * up)
    part, rest = triton_kernels.linear_add(inner, down, None, summed)
    close(part if rest is None else part + rest, F.linear(inner.float(), down.float()) + summed.float())


@pytest.mark.parametrize("tile", range(3))
def test_every_tile_computes_the_same(tile):
    from spectrain.kernels.cuda import triton_kernels

    x, weight, norm = (torch.randn(*shape, device=CARD).bfloat16() for shape in ((16, D), (3 * D, D), (D,)))
    for product in (
        triton_kernels._Product(weight, None, (norm, EPS)),
        triton_kernels._Product(weight, None, None, "silu"),
    ):
        found, expected = product.tiled(x, triton_kernels.TILES[tile]), product.plain(x)
        torch.testing.assert_close(found, expected, atol=0.05 * float(expected.abs().max()), rtol=0.05)


@pytest.mark.parametrize("lengths", [[300], [17, 4000, 256, 0], [16_000, *[256] * 15]], ids=str)
@pytest.mark.parametrize("n_nodes", [1, 5, 64])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_a_row_attends_to_its_own_slots_alone(dtype, n_nodes, lengths):
    from spectrain.kernels.cuda import triton_kernels

    capacity, n_rows = max(lengths) + n_nodes + 40, len(lengths)
    queries = torch.randn(n_rows * n_nodes, H, E, device=CARD).to(dtype)
    keys, values = (torch.randn(n_rows, K, capacity, E, device=CARD).to(dtype) for _ in range(2))
    seen = torch.rand(n_rows, n_nodes, n_nodes, device=CARD) < 0.3
    seen |= torch.eye(n_nodes, dtype=torch.bool, device=CARD)
    expected = []
    for row, length in enumerate(lengths):
        mask = torch.ones(n_nodes, length + n_nodes, dtype=torch.bool, device=CARD)
        mask[:, length:] = seen[row]
        asked = queries.view(n_rows, n_nodes, H, E)[row].transpose(0, 1).float()
        own = keys[row, :, : length + n_nodes].float(), values[row, :, : length + n_nodes].float()
        found = F.scaled_dot_product_attention(asked[None], *(part[None] for part in own), mask, enable_gqa=True)
        expected.append(found[0].transpose(0, 1).flatten(1))
        keys[row, :, length + n_nodes :] = values[row, :, length + n_nodes :] = torch.nan
    close(triton_kernels.attend(queries, keys, values, torch.tensor(lengths, device=CARD), seen), torch.cat(expected))


@pytest.mark.parametrize("graphs", ["auto", "none"])
@pytest.mark.parametrize("family", ["llama_gqa", "qwen3"])
def test_a_step_is_that_of_the_torch_decoder(family, graphs):
    """Each tree is scored thrice: the first call sets libraries up, the second one records, the third one replays."""
    model, generator, lengths, compared = tiny_model(family).to(CARD), torch.Generator().manual_seed(0), [40, 3, 21], []
    prompts = torch.tensor([prompt + [0] * (max(lengths) - len(prompt)) for prompt in random_prompts(lengths)])
    trees = [tree_of(random_prompts([n] * 3, seed=n), [random_parents(n, generator) for _ in lengths]) for n in (5, 9)]
    trees = [DraftTree(*(part.to(CARD) for part in (tree.tokens, tree.parents, tree.source))) for tree in trees]
    for compile in ("triton", "none"):
        target = TargetModel(model, capture_layers=[1, -1], keeps_hidden=True, graphs=graphs, compile=compile)
        cache, found = target.caches.new(3, 64, 64), []
        target.prefill(prompts.to(CARD), lengths, cache, range(3))
        for tree in (*trees, *[DraftTree.root_only(tree.tokens[:, 0]) for tree in trees]):
            for _ in range(3):
                output = target.score(tree, cache)
            found += [part.clone() for part in (output.logits, output.captured, output.hidden)]
        compared.append(found)
    for found, expected in zip(*compared, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_a_text_that_grows_needs_no_further_graphs():
    target = TargetModel(tiny_model("llama_gqa", max_position_embeddings=2048).to(CARD), compile="triton")
    generate(target, Autoregressive(), random_prompts([9]), 700, stop_token_ids=(), cache_block_tokens=1024)
    assert len([key for key in target.graphs._recorded if key[0][0] == "score"]) == 1
