"""Forwards as programs give what torch's own operations give, for every shape of model, rows and trees."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch

from spectrain.decoding import generate, stream
from spectrain.kernels.cpu.attention import CHUNK
from spectrain.methods.autoregressive import Autoregressive
from spectrain.target import DraftTree, KVCache, TargetModel, cache_pool
from spectrain.target import forward as module
from spectrain.target.tree import PADDING_PARENT
from tests.conftest import VOCAB_SIZE, random_prompts, tiny_model
from tests.decoding.reference import greedy_by_full_forwards, random_parents, tree_of

SIZES = {  # heads whose width the kernels of attention take, and others; one key/value head; queries without groups
    "wide heads": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    "wide, one for all": {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128},
    "narrow heads": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8},
}
CASES = [*(("llama_gqa", options) for options in SIZES.values()), ("qwen3", {"head_dim": 64})]


def target_of(family: str, options: dict, engine: str = "lean") -> TargetModel:
    return TargetModel(tiny_model(family, **options), capture_layers=[1], engine=engine, keeps_hidden=True)


def trees(n_rows: int) -> list[DraftTree]:
    generator = torch.Generator().manual_seed(0)
    chain = torch.tensor(random_prompts([5] * n_rows, seed=2))
    parents = [random_parents(11, generator) for _ in range(n_rows)]
    return [
        DraftTree.root_only(chain[:, 0]),
        DraftTree.chain(chain[:, 0], chain[:, 1:], torch.arange(n_rows) + 1),
        tree_of(random_prompts([11] * n_rows, seed=1), parents),
    ]


@torch.inference_mode()
def scored(target: TargetModel, lengths: list[int]) -> list[torch.Tensor]:
    """Logits, captured and final states of each tree's real nodes, one step after the other."""
    prompts = [prompt + [0] * (max(lengths) - len(prompt)) for prompt in random_prompts(lengths)]
    cache, found = KVCache(len(lengths), block_tokens=4), []
    target.prefill(torch.tensor(prompts), lengths, cache, range(len(lengths)))
    for tree in trees(len(lengths)):
        output = target.score(tree, cache)
        cache.keep(1)
        found += [values[tree.parents != PADDING_PARENT] for values in (output.logits, output.captured, output.hidden)]
    return found


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("lengths", [[1], [23, 5, 14], [CHUNK + 40, 2 * CHUNK, 3]], ids=str)
@pytest.mark.parametrize(("family", "options"), CASES, ids=str)
def test_outputs_are_those_of_transformers(family, options, lengths, n_threads):
    options = {"max_position_embeddings": 2048, **options}
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        found = scored(target_of(family, options), lengths)
    finally:
        torch.set_num_threads(before)
    for ours, theirs in zip(found, scored(target_of(family, options, "transformers"), lengths), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def prefilled(target: TargetModel, joining: list[list[int]]) -> tuple[list[torch.Tensor], KVCache]:
    """Logits, captured states and their positions of rows that join one after the other, and the rows' cache."""
    cache, found, first = KVCache(sum(map(len, joining)), block_tokens=4), [], 0
    for lengths in joining:
        prompts = [prompt + [0] * (max(lengths) - len(prompt)) for prompt in random_prompts(lengths)]
        rows, read = range(first, first + len(lengths)), torch.arange(max(lengths)).flip(0).expand(len(lengths), -1)
        read = read.masked_fill(read % 2 == 0, -1)
        output = target.prefill(torch.tensor(prompts), lengths, cache, rows, read if first else None)
        first, wanted = rows.stop, (output.positions >= 0) & (output.positions < torch.tensor(lengths)[:, None])
        found += [output.logits, output.captured[wanted], output.positions[wanted]]
    return found, cache


@pytest.mark.parametrize(("family", "options"), CASES, ids=str)
def test_prompts_are_read_in_pieces_where_that_is_faster(family, options, monkeypatch, use_processor):
    joining, options = [[70, 3], [150, 1, 64, 72]], {"max_position_embeddings": 151, **options}
    theirs, expected = prefilled(target_of(family, options, "transformers"), joining)
    use_processor("Zen 5")
    target = target_of(family, options)
    monkeypatch.setattr(target._engine, "run", None)
    ours, cache = prefilled(target, joining)
    assert cache.lengths == expected.lengths
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    for one, other in zip([*cache.keys, *cache.values], [*expected.keys, *expected.values], strict=True):
        for row, length in enumerate(cache.lengths):
            torch.testing.assert_close(one[row, :, :length], other[row, :, :length], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vocab_size", [16, 130])
def test_the_likeliest_token_is_found_by_any_number_of_threads(vocab_size):
    """Also by more threads than there are tokens, some of which have no share."""
    target, before = (
        TargetModel(tiny_model("llama", vocab_size=vocab_size, initializer_range=0.2)),
        torch.get_num_threads(),
    )
    expected = greedy_by_full_forwards(target.model, [1, 3, 0, 2], 30)
    try:
        for n_threads in (1, 2, 3, 19):
            torch.set_num_threads(n_threads)
            (found,) = generate(target, Autoregressive(), [[1, 3, 0, 2]], 30, stop_token_ids=())
            assert found.tokens == expected
    finally:
        torch.set_num_threads(before)


def test_steps_run_as_programs_which_live_as_long_as_their_cache(monkeypatch):
    made = []
    forward = module.Forward.__init__

    def noted(self, *arguments):
        forward(self, *arguments)
        if self.logits_at:  # not those that read prompts
            made.append(weakref.ref(self))

    monkeypatch.setattr(module.Forward, "__init__", noted)
    target = TargetModel(tiny_model("llama_gqa"))
    generate(target, Autoregressive(), random_prompts([9, 4]), 20, batch_size=2, stop_token_ids=())
    assert len(made) == 1
    gc.collect()
    assert made[0]() is None


@pytest.mark.parametrize("engine", ["lean", "transformers"])
@pytest.mark.parametrize("lengths", [[20], [20, 7]], ids=str)
@pytest.mark.parametrize("n_nodes", [11, 80])  # programs are for 64 tokens at most
@torch.inference_mode()
def test_logits_of_silent_probes_are_left_out_and_all_others_are_the_same(engine, lengths, n_nodes):
    target = target_of("llama_gqa", {}, engine)
    parents = [random_parents(n_nodes, torch.Generator().manual_seed(row)) for row in range(len(lengths))]
    loud = tree_of(random_prompts([n_nodes] * len(lengths), seed=1), parents)
    silent, found = replace(loud, n_silent=6), []
    for tree in (loud, silent):
        cache = KVCache(len(lengths), block_tokens=4)
        prompts = [prompt + [0] * (max(lengths) - len(prompt)) for prompt in random_prompts(lengths)]
        target.prefill(torch.tensor(prompts), lengths, cache, range(len(lengths)))
        found.append(target.score(tree, cache))
    read = [0, *range(7, n_nodes)]
    for a, b in zip(*((one.logits[:, read], one.captured, one.hidden) for one in found), strict=True):
        torch.testing.assert_close(a, b)
    if len(lengths) == 1 or n_nodes > 64 or engine == "transformers":
        assert found[0].logits[:, 1:7].ne(0).any()
        assert found[1].logits[:, 1:7].eq(0).all()


def test_heads_of_too_few_outputs_and_half_tables_take_torch():
    narrow = TargetModel(tiny_model("llama_gqa", num_attention_heads=8, num_key_value_heads=1, head_dim=2))
    assert not narrow._engine._fuses
    half = TargetModel(tiny_model("llama_gqa").half(), dtype=torch.float32).in_8_bits()
    assert not half._engine._fuses


def test_a_token_beyond_the_table_reads_nothing_outside_of_it():
    target, cache = TargetModel(tiny_model("llama_gqa")), KVCache(1)
    with torch.inference_mode():
        target.prefill(torch.tensor([[5, 6]]), [2], cache, range(1))
        found = [target.score(DraftTree.root_only(torch.tensor([t])), cache).logits for t in (10**6, VOCAB_SIZE - 1)]
    assert torch.equal(*found)


def test_a_cache_is_used_again_and_nothing_of_the_last_text_is_seen(monkeypatch):
    model = tiny_model(initializer_range=0.2, max_position_embeddings=1024)
    target, before = TargetModel(model), torch.get_num_threads()

    def text(length: int, n_new: int = 8) -> None:
        prompts = random_prompts([length], seed=length)
        found = generate(target, Autoregressive(), prompts, n_new, stop_token_ids=())[0].tokens
        assert found == greedy_by_full_forwards(model, prompts[0], n_new)

    try:
        for n_threads, length in ((1, 300), (2, 9), (2, 700), (1, 12)):
            torch.set_num_threads(n_threads)
            text(length)
            (kept,) = target.caches.kept
            assert [threads for _, threads in kept.programs._programs][-1] == n_threads
        steps = stream(target, Autoregressive(), random_prompts([9]), 30, stop_token_ids=())
        next(steps)
        steps.close()
        text(9)
        assert target.caches.kept == [kept], "the longest was large enough for those after it"
        assert copy.deepcopy(target).caches.kept[0].programs._programs == {}, "a copy has other addresses"
        assert target.in_8_bits().caches.kept == []
        model.lm_head.weight.data = model.lm_head.weight.data.flip(0).contiguous()
        text(9)
        assert target.caches.kept != [kept], "weights have other addresses"
        monkeypatch.setattr(cache_pool, "KEPT_BYTES", 1000)
        text(9)
        assert target.caches.kept == [], "too large"
    finally:
        torch.set_num_threads(before)
