"""The Triton kernels in Triton's interpreter, on tensors of the CPU. `test_triton.py` runs this in another process.

The interpreter multiplies no bfloat16, so the kernels with products run in float32 and float16 here.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.decoding import generate
from spectrain.drafting import runtime
from spectrain.kernels.cuda import triton_kernels
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.eagle3 import Eagle3
from spectrain.methods.spire import Spire
from spectrain.target import DraftTree, KVCache, TargetModel
from spectrain.target.llama import LlamaBlock, LlamaShape, Rope
from tests.conftest import random_prompts, tiny_model
from tests.decoding.reference import random_parents, tree_of
from tests.models.test_spire import ENGINE, make
from tests.models.tiny_eagle3 import new_eagle3

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero", "ignore:overflow")
EPS = 1e-5
ROUNDING = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def close(found: Tensor, expected: Tensor, dtype: torch.dtype, times: float = 1.0) -> None:
    rounding = times * ROUNDING[dtype]
    torch.testing.assert_close(found.float(), expected.float(), atol=rounding, rtol=rounding)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, weight.float(), EPS)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_sums_norms_and_gates(dtype):
    x, added, weight = torch.randn(3, 44).to(dtype), torch.randn(3, 44).to(dtype), torch.randn(44).to(dtype)
    summed, found = triton_kernels.add_norm(x, added, weight, EPS)
    close(summed, x + added, dtype)
    close(found, normed(summed, weight), dtype)
    close(triton_kernels.add_norm(x, None, weight, EPS)[1], normed(x, weight), dtype)
    gate, up = x.float().chunk(2, -1)
    close(triton_kernels.gate(x, "silu"), F.silu(gate) * up, dtype)
    close(triton_kernels.gate(x, "gelu_pytorch_tanh"), F.gelu(gate, approximate="tanh") * up, dtype)


@pytest.mark.parametrize("m", [1, 5, 17], ids=lambda m: f"{m} tokens")  # 17 go through torch's product
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_products_with_what_stands_around_them(dtype, biased, m):
    """More inputs than a tile has, and outputs that fill none."""
    x, added, weight = (0.1 * torch.randn(m, 300)).to(dtype), (0.1 * torch.randn(m, 300)).to(dtype), torch.randn(300)
    matrix, bias = (0.1 * torch.randn(38, 300)).to(dtype), torch.randn(38).to(dtype) if biased else None
    summed, found = triton_kernels.norm_linear(x, added, (weight, EPS), matrix, bias)
    assert torch.equal(summed, x + added)
    expected = F.linear(normed(summed, weight), matrix.float(), None if bias is None else bias.float())
    close(found, expected, dtype, 4)
    gate, up = expected.chunk(2, -1)
    close(triton_kernels.norm_linear(x, added, (weight, EPS), matrix, bias, "silu")[1], F.silu(gate) * up, dtype, 4)
    parts = triton_kernels.linear_add(x, matrix, bias, residual := torch.randn(m, 38).to(dtype))
    whole = parts[0] if parts[1] is None else parts[0] + parts[1]
    close(whole, F.linear(x, matrix, bias).float() + residual.float(), dtype, 4)
    close(triton_kernels.linear(x, matrix, bias), F.linear(x, matrix, bias), dtype, 4)


@pytest.mark.parametrize("tile", triton_kernels.TILES, ids=str)
def test_every_tile_computes_the_same(tile, monkeypatch):
    monkeypatch.setattr(triton_kernels, "TILES", [tile])
    x, matrix = torch.randn(2, 300), torch.randn(70, 300)
    close(triton_kernels.linear(x, matrix), x @ matrix.T, torch.float32, 10)


def test_the_norm_of_inputs_that_float16_cannot_hold_unscaled():
    x, matrix = torch.full((1, 32), 300.0).half(), torch.randn(16, 32).half()
    weight = torch.full((32,), 300.0).half()
    found = triton_kernels.norm_linear(x, None, (weight, EPS), matrix, None)[1]
    close(found, normed(x, weight) @ matrix.float().T, torch.float16, 100)


def block_of(n_head: int, n_kv_head: int, head_dim: int, **options: object) -> LlamaBlock:
    shape = LlamaShape(61, 36, 48, n_head, n_kv_head, head_dim, EPS, "silu", {"rope_theta": 1e4}, 512, **options)
    block = LlamaBlock(shape).requires_grad_(False)
    for parameter in block.parameters():
        parameter.normal_(std=0.3)
    return block


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n_head", "n_kv_head", "head_dim"), [(4, 2, 8), (3, 1, 20), (2, 2, 16)])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_rotated_keys_and_values_are_in_their_slots(qk_norm, n_head, n_kv_head, head_dim, dtype):
    block = block_of(n_head, n_kv_head, head_dim, qk_norm=qk_norm).to(dtype)
    block.qkv.weight.normal_()
    rope, positions, slots = Rope(block.shape), torch.tensor([[7, 300], [0, 2]]), torch.tensor([[3, 1], [0, 4]])
    x = torch.randn(2, 2, 36).to(dtype)
    queries, own = block.queries_keys_values(x, rope(positions))
    keys, values = (torch.zeros(3, n_kv_head, 5, head_dim, dtype=dtype) for _ in range(2))
    norms = (block.query_norm.weight, block.key_norm.weight) if qk_norm else None
    joined = block.qkv(block.input_norm(x)).flatten(0, 1)
    where = (rope.inv_freq, rope.scaling), positions, slots, keys, values
    found = triton_kernels.rotate(joined, norms, EPS, *where)
    close(found.view(2, 2, n_head, head_dim).transpose(1, 2), queries, dtype, 4)
    for buffer, expected in ((keys, own.keys), (values, own.values)):
        for row in range(2):
            close(buffer[row, :, slots[row]], expected[row], dtype, 4)
            assert not buffer[row, :, [s for s in range(5) if s not in slots[row]]].any()
    assert not keys[2].any()
    triton_kernels.rotate(joined[:, n_head * head_dim :].contiguous(), norms, EPS, *where)  # memories have no queries
    close(keys[1, :, slots[1]], own.keys[1], dtype, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("n_nodes", "n_head", "n_kv_head", "width", "lengths", "capacity"),
    [
        (1, 4, 4, 8, [5], 16),  # one program for each head
        (5, 6, 2, 12, [126, 3, 0], 200),  # some queries see nothing of some splits
        (9, 4, 2, 16, [200, 7], 300),  # several blocks of queries
        (3, 4, 1, 20, [4100, 64], 4300),  # as many splits as a row of this length asks for
    ],
)
def test_a_row_attends_to_its_own_slots_alone(n_nodes, n_head, n_kv_head, width, lengths, capacity, dtype):
    """What stands behind a row's last node is NaN."""
    n_rows = len(lengths)
    queries = torch.randn(n_rows * n_nodes, n_head, width).to(dtype)
    keys, values = (torch.randn(n_rows + 1, n_kv_head, capacity, width).to(dtype) for _ in range(2))
    seen = (torch.rand(n_rows, n_nodes, n_nodes) < 0.3).tril() | torch.eye(n_nodes, dtype=torch.bool)
    mask = torch.zeros(n_rows, n_nodes, capacity, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, :, :length], mask[row, :, length : length + n_nodes] = True, seen[row]
    asked = queries.view(n_rows, n_nodes, n_head, width).transpose(1, 2).float()
    whole = keys[:n_rows].float(), values[:n_rows].float()
    expected = F.scaled_dot_product_attention(asked, *whole, mask[:, None], enable_gqa=n_head > n_kv_head)
    for row, length in enumerate(lengths):
        keys[row, :, length + n_nodes :] = values[row, :, length + n_nodes :] = torch.nan
    found = triton_kernels.attend(queries, keys, values, torch.tensor(lengths), seen)
    close(found, expected.transpose(1, 2).reshape(n_rows * n_nodes, -1), dtype)


def outputs(target: TargetModel, trees: Sequence[DraftTree], lengths: Sequence[int]) -> list[Tensor]:
    """What a target says of trees, each of which is scored behind the same prompts."""
    prompts, found = [p + [0] * (max(lengths) - len(p)) for p in random_prompts(lengths)], []
    cache = KVCache(len(lengths), block_tokens=4)
    target.prefill(torch.tensor(prompts), lengths, cache, range(len(lengths)))
    for tree in trees:
        output = target.score(tree, cache)
        found += [output.logits, output.captured, output.hidden, output.positions]
    return found


@pytest.mark.parametrize(("family", "biases"), [("llama", False), ("llama_gqa", True), ("qwen3", False)])
def test_a_step_is_that_of_the_torch_decoder(family, biases):
    """A root, and trees with silent nodes that together have more tokens than the smallest product takes."""
    model = tiny_model(family, num_hidden_layers=2, attention_bias=biases, mlp_bias=biases)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
    generator, lengths, compared = torch.Generator().manual_seed(0), [11, 3, 6], []
    tree = tree_of(random_prompts([6] * 3, seed=1), [random_parents(6, generator) for _ in lengths])
    silent = DraftTree(tree.tokens, torch.tensor([[-1, 0, 0, 0, 3, 4]] * 3), tree.source, n_silent=2)
    for compile in ("triton", "none"):
        target = TargetModel(model, capture_layers=[1, -1], keeps_hidden=True, compile=compile)
        assert target.fuses == (compile == "triton")
        trees = [tree, silent, DraftTree.root_only(tree.tokens[:, 0])]
        compared.append(outputs(target, trees[:1] if family == "llama" else trees, lengths))
    for found, expected in zip(*compared, strict=True):
        close(found, expected, torch.float32, 10)


def test_greedy_text_is_that_of_torch():
    prompts, texts = random_prompts([7, 3]), []
    for compile in ("auto", "none"):
        target = TargetModel(tiny_model("llama_gqa", num_hidden_layers=2), compile=compile)
        found = generate(target, Autoregressive(), prompts, 5, batch_size=2, stop_token_ids=())
        texts.append([generation.tokens for generation in found])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("spire", {"draft_vocab": 30, "input": "trained"}),
        ("spire", {"family": "qwen3", "feedback": False}),
        ("spire", ENGINE),
        ("eagle3", {"draft_vocab": 30}),
        ("eagle3", {"norm_output": True, "norm_before_residual": True, "window_tokens": 8}),
    ],
    ids=str,
)
def test_a_drafter_reads_chains_and_trees_as_torch_does(kind, options, monkeypatch):
    """Each step reads what the one before it has stored; then a root is read, and two tokens below it at once."""
    monkeypatch.setattr(runtime, "can_fuse", lambda *_: False)
    if kind == "spire":
        (target, drafter), method_of = make(**options), Spire
    else:
        target, method_of = TargetModel(tiny_model("llama_gqa"), compile="triton"), Eagle3
        drafter = new_eagle3(target, **options)
    compared = []
    positions, tokens = torch.tensor([[3, 4, 5], [0, 1, -1]]), torch.tensor([[7, 8, 9], [5, 6, 7]])
    past = torch.randn(2, 3, len(drafter.config.captured_layers), 32)
    tree = DraftTree(tokens, torch.tensor([[-1, 0, 0]] * 2), tokens)
    for by_kernels in (True, False):
        method = method_of(drafter, tree_nodes=3)
        method.start(target, KVCache(2))
        assert method.runtime.kernels is not None
        method.runtime.kernels = method.runtime.kernels if by_kernels else None
        method.runtime.remember(past, positions, slice(0, 2), tokens)
        found, state = [], method.finals[:2]
        for i in range(2):
            logits, state = method.runtime.one(tokens[:, i], torch.tensor([6, 2]) + i, state)
            found += [logits, state]
        context = SimpleNamespace(lengths=torch.tensor([9, 5]))
        method.state = state[:, None]
        levels = [method.read_nodes(context, DraftTree.root_only(tokens[:, 0]), 1), method.read_nodes(context, tree, 2)]
        compared.append([*found, *levels, method.state])
        compared[-1] += [part[:, :, :-1] for kv in method.keys.stores for part in (kv.keys, kv.values)]
    for found, expected in zip(*compared, strict=True):
        close(found, expected, torch.float32, 10)
