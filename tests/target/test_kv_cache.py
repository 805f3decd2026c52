"""The cache holds, row by row, what a fresh prefill of the committed tokens would hold."""

import pytest
import torch

from spectrain.decoding import generate
from spectrain.decoding.engine import MOST_NODES
from spectrain.measure.benchmark import resident_bytes
from spectrain.methods.speculative import Speculative
from spectrain.target import DraftTree, KVCache, TargetModel
from tests.conftest import random_prompts
from tests.decoding.reference import cached_states, random_parents, tree_of


def prefilled(target: TargetModel, prompts: list[list[int]], block_tokens: int = 8, max_rows: int = 4) -> KVCache:
    cache = KVCache(max_rows, block_tokens)
    width = max(map(len, prompts))
    tokens = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])
    target.prefill(tokens, [len(prompt) for prompt in prompts], cache, range(cache.n_rows, cache.n_rows + len(prompts)))
    return cache


def assert_row_holds(target: TargetModel, cache: KVCache, row: int, tokens: list[int]) -> None:
    assert cache.lengths[row] == len(tokens)
    fresh = prefilled(target, [tokens])
    for got, expected in zip(cached_states(cache, row), cached_states(fresh, 0), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def commit(cache: KVCache, path: torch.Tensor | None, counts: list[int]) -> None:
    """Device and host, one after the other, as the loop does."""
    cache.commit(path, torch.tensor(counts) - 1)
    cache.extend(counts)
    assert cache.lengths_on(torch.device("cpu")).tolist() == cache.lengths


def test_many_random_commits_across_growth_equal_fresh_prefill(llama_target):
    generator = torch.Generator().manual_seed(3)
    texts = random_prompts([3, 6])
    cache = prefilled(llama_target, texts, block_tokens=4)
    for _ in range(8):
        parents = [random_parents(6, generator) for _ in texts]
        tokens = torch.randint(4, 60, (2, 6), generator=generator).tolist()
        tree = tree_of(tokens, parents)
        llama_target.score(tree, cache)
        path = tree.path_to(torch.randint(6, (2,), generator=generator))
        counts = (path >= 0).sum(-1).tolist()
        commit(cache, path, counts)
        for row, count in enumerate(counts):
            texts[row] = texts[row] + [tokens[row][node] for node in path[row, :count].tolist()]
    assert cache.capacity >= 20
    for row, text in enumerate(texts):
        assert_row_holds(llama_target, cache, row, text)


def test_fill_makes_a_cache_as_if_it_had_read_the_tokens(llama_target):
    prompts = random_prompts([9, 6])
    source, cache = prefilled(llama_target, prompts), KVCache(3, block_tokens=10)
    prefilled_before = random_prompts([4, 4, 4], seed=1)  # other rows, other lengths: replaced
    llama_target.prefill(torch.tensor(prefilled_before), [4, 4, 4], cache, range(3))
    for layer_idx in range(3):
        cache.fill(layer_idx, *source.read(layer_idx, torch.arange(9).expand(2, -1)))
    cache.hold([9, 6])
    assert (cache.n_rows, cache.capacity) == (2, 10)
    for row, prompt in enumerate(prompts):
        assert_row_holds(llama_target, cache, row, prompt)
    tokens = torch.tensor([7, 8])
    expected, got = (llama_target.score(DraftTree.root_only(tokens), c).logits for c in (source, cache))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_batch_allocates_its_caches_once(llama_target):
    seen = []  # of each batch, of each of its steps; the second begins when both rows of the first end at once

    class Watching(Speculative):
        def observe(self, context, tree, output, verified):
            super().observe(context, tree, output, verified)
            seen[-1].append(
                [(one.storage, one.keys[0].data_ptr(), one.capacity) for one in (self.target_cache, self.cache)]
            )

        def start(self, target, cache):
            super().start(target, cache)
            self.target_cache = cache
            seen.append([])

    method = Watching(llama_target, gamma=3)
    generate(
        llama_target, method, random_prompts([30, 5, 9]), 60, batch_size=2, stop_token_ids=(), cache_block_tokens=8
    )
    assert sum(map(len, seen)) > 10
    assert all(step == steps[0] for steps in seen for step in steps)
    assert len({steps[0][0] for steps in seen}) == 1  # the target's, of all of them
    assert seen[0][0][0][2] < 30 + 60 + MOST_NODES + 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_take_no_memory_before_they_are_written(dtype):
    cache, before, states = KVCache(16, 256, 8192), resident_bytes(), torch.ones(16, 3, 1, 64, dtype=dtype)
    cache.begin(range(16), range(16), 1)  # one token of each row, at its own slot
    cache.update(states, states, 0)
    assert cache.bytes == 2 * 16 * 3 * 8192 * 64 * dtype.itemsize
    assert resident_bytes() - before < cache.bytes / 20
    assert cache.keys[0].sum() == 16 * 3 * 64
