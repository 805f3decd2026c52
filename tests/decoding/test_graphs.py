"""Steps that are replayed on fixed addresses give what eager ones give. Replaying is played here: a CPU has no graphs.

`replayed` calls the function again on the tensors that it was recorded with, and writes the results over the first
ones, as a CUDA graph does. What only a GPU shows is in tests/gpu.
"""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch.utils import _pytree as pytree

from spectrain.decoding import generate, stream
from spectrain.errors import UserError
from spectrain.kernels.cuda.graphs import Graphs, unique
from spectrain.methods.autoregressive import Autoregressive
from spectrain.target import TargetModel
from tests.conftest import random_prompts, tiny_model
from tests.decoding.reference import ScriptedDrafter, all_greedy_by_full_forwards
from tests.decoding.test_host_reads import ONCE, SAMPLINGS
from tests.decoding.test_loop import LENGTHS, SMALL, artifacts, branching_oracle
from tests.methods.every import build

FAMILY, N_NEW = "llama_gqa", 14
OPTIONS = {"batch_size": 3, "stop_token_ids": (), "cache_block_tokens": 8}


def replayed(function):
    kept = None

    def replay():
        nonlocal kept
        outputs, shape = pytree.tree_flatten(function())
        if kept is None:
            kept = [output.clone() if isinstance(output, torch.Tensor) else output for output in outputs]
        for place, output in zip(kept, outputs, strict=True):
            if isinstance(output, torch.Tensor):
                place.copy_(output)
        return pytree.tree_unflatten(kept, shape)

    return replay


def target_with_graphs(record=replayed) -> TargetModel:
    target = TargetModel(tiny_model(FAMILY), artifacts(FAMILY).target.tokenizer, prefill_chunk=16)
    target.graphs = target.caches.graphs = Graphs(record)
    return target


def method_of(name: str, target: TargetModel):
    method = build(name, artifacts(FAMILY), SMALL.get(name, {}))
    model = getattr(method, "model", method)  # of a tree
    if draft_model := getattr(model, "draft_model", None):
        draft_model.graphs = draft_model.caches.graphs = Graphs(replayed)
    if getattr(method, "ranking", None) is not None:
        method.ranking.end = lambda emitted, reads: None  # so that the second generation drafts what the first one did
    return method


@pytest.mark.parametrize(("name", "how"), [one for one in ONCE if one.values[0] != "auto"])  # by the clock
def test_text_is_that_of_eager_steps(name, how):
    """Twice, since the second generation replays what the first one recorded, in the same caches."""
    eager = TargetModel(tiny_model(FAMILY), artifacts(FAMILY).target.tokenizer, prefill_chunk=16)
    sampling, prompts, target = SAMPLINGS[how], random_prompts(LENGTHS[:4]), target_with_graphs()
    expected = generate(eager, method_of(name, eager), prompts, N_NEW, sampling, **OPTIONS)
    method = method_of(name, target)
    for _ in range(2):
        found = generate(target, method, prompts, N_NEW, sampling, **OPTIONS)
        assert [generation.tokens for generation in found] == [generation.tokens for generation in expected]
        assert [generation.accepted for generation in found] == [generation.accepted for generation in expected]
    replays = [known for known in target.graphs._recorded.values() if known is not None]
    assert replays


def test_moved_nodes_and_padded_trees():
    """Every accepted path of these trees has to be moved in the cache."""
    prompts, target = random_prompts(LENGTHS), target_with_graphs()
    texts = all_greedy_by_full_forwards(tiny_model(FAMILY), prompts, N_NEW)
    script = branching_oracle({tuple(p): t for p, t in zip(prompts, texts, strict=True)})
    for _ in range(2):
        found = generate(target, ScriptedDrafter(script), prompts, N_NEW, **OPTIONS)
        assert [generation.tokens for generation in found] == texts
    assert any(key[0][0] == "verify" and key[0][1] is not None for key in target.graphs._recorded)


def test_a_generation_records_nothing_that_an_equal_one_recorded():
    recorded = []

    def counted(function):
        recorded.append(function)
        return replayed(function)

    target, prompts = TargetModel(copy.deepcopy(tiny_model(FAMILY))), random_prompts([9, 9])
    target.graphs = target.caches.graphs = Graphs(counted)
    counts = []
    for dtype in (torch.float32, torch.float32, torch.bfloat16):
        target.model.to(dtype)  # whose weights move: a graph would read freed memory
        generate(target, Autoregressive(), prompts, 20, batch_size=2, stop_token_ids=())
        counts.append(len(recorded))
    assert 0 < counts[0] == counts[1] < counts[2]


def test_two_generations_at_once_do_not_share_a_cache():
    target, prompts = target_with_graphs(), random_prompts([7, 12])
    expected = [generate(target, Autoregressive(), [p], 20, stop_token_ids=())[0].tokens for p in prompts]
    streams = [stream(target, Autoregressive(), [p], 20, stop_token_ids=()) for p in prompts]
    found = [[], []]
    for steps in zip(*streams, strict=True):
        for text, step in zip(found, steps, strict=True):
            text += step.tokens
    assert found == expected


def test_what_cannot_be_recorded_is_run_eagerly_and_says_so_once(caplog):
    def fails(function):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graphs = Graphs(fails)
    with caplog.at_level(logging.WARNING):
        assert [graphs.run(("a", 0), torch.neg, torch.tensor([i])).item() for i in range(4)] == [0, -1, -2, -3]
    assert [r.getMessage() for r in caplog.records] == [
        "CUDA graphs are not used: operation not permitted when stream is capturing"
    ]


def test_what_cannot_be_recorded_runs_with_padded_rows():
    def fails(function):
        raise RuntimeError("operation not permitted when stream is capturing")

    prompts = random_prompts([7, 12, 5])
    target, expected = target_with_graphs(fails), TargetModel(tiny_model(FAMILY), prefill_chunk=16)
    texts = [generate(one, Autoregressive(), prompts, 12, **OPTIONS) for one in (target, expected)]
    assert [one.tokens for one in texts[0]] == [one.tokens for one in texts[1]]


def test_memory_that_a_recording_lacks_is_said_and_not_taken_for_a_defect():
    def exhausted(function):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(UserError, match="out of memory"):
        generate(target_with_graphs(exhausted), Autoregressive(), random_prompts([7, 12]), 12, **OPTIONS)


def test_batches_of_other_sizes_record_nothing_anew():
    target, method, counts = target_with_graphs(), Autoregressive(), []
    for lengths in ([7] * 8, [9], [7, 8, 9], [11] * 8, [60] * 2):
        generate(target, method, random_prompts(lengths), 20, batch_size=8, stop_token_ids=())
        counts.append(Graphs.n_prepared)
    assert counts == counts[:1] * 5


def test_graphs_of_memory_that_is_gone_are_forgotten_and_rehearsed_again():
    graphs, storage = Graphs(replayed), unique()
    graphs.rehearsed.add("all")
    for key in (("a", storage), ("b", None, storage), ("c", 256, 1)):
        graphs.run(key, torch.neg, torch.zeros(1))
    graphs.forget(storage)
    assert [key[0][0] for key in graphs._recorded] == ["c"]
    assert not graphs.rehearsed
