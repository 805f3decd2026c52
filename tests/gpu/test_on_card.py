"""On a GPU: every method writes what plain decoding writes on the CPU, and lean logits equal those of transformers."""

from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf

from spectrain.decoding import Drafter, Sampling, generate
from spectrain.methods.registry import build_method, method_config, method_names, with_papers_nodes
from spectrain.target import DraftTree, TargetModel
from tests.conftest import VOCAB_SIZE, random_prompts, tiny_model
from tests.decoding.reference import all_greedy_by_full_forwards, random_parents, tree_of
from tests.decoding.test_loop import LENGTHS, N_NEW, SMALL, artifacts
from tests.target.test_lean import MODELS
from tests.training.test_compiled import check

pytestmark = pytest.mark.gpu
CARD = torch.device("cuda")
FAMILY = "llama_gqa"
OPTIONS = {"batch_size": 3, "stop_token_ids": (), "cache_block_tokens": 8}
ENDS = {"stop_token_ids": range(1, VOCAB_SIZE, 12)}


def on_card(dtype: torch.dtype, graphs: str = "auto") -> TargetModel:
    model = tiny_model(FAMILY).to(CARD, dtype)
    return TargetModel(model, artifacts(FAMILY).target.tokenizer, prefill_chunk=16, graphs=graphs)


def method_of(name: str, target: TargetModel) -> Drafter:
    """With the drafters of test_loop.py, which agree with the target often, but not always."""
    return build_method(
        OmegaConf.merge(with_papers_nodes(method_config(name)), SMALL.get(name, {})), target, artifacts(FAMILY)
    )


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Greedy float32 texts, by plain forwards on the CPU."""
    return all_greedy_by_full_forwards(tiny_model(FAMILY), random_prompts(LENGTHS), N_NEW)


@pytest.mark.parametrize("name", method_names())
def test_greedy_text_is_that_of_plain_decoding_on_the_cpu(name, texts):
    target = on_card(torch.float32)
    found = generate(target, method_of(name, target), random_prompts(LENGTHS), N_NEW, **OPTIONS)
    assert [generation.tokens for generation in found] == texts


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", method_names())
def test_text_by_graphs_is_that_of_eager_steps(name, sampling, caplog):
    """Twice: the second generation replays what the first one recorded."""
    texts = []
    for graphs in ("none", "auto"):
        target = on_card(torch.float32, graphs)
        method = method_of(name, target)
        for _ in range(2):
            found = generate(target, method, random_prompts(LENGTHS), N_NEW, sampling, **OPTIONS | ENDS)
            texts.append([generation.tokens for generation in found])
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert not caplog.records  # that graphs cannot be used


@pytest.mark.parametrize("name", method_names())
def test_samples_in_bfloat16_have_every_token(name):
    """Greedy texts in bfloat16 are decoded by scripts/check_gpu.py."""
    target, sampling = on_card(torch.bfloat16), Sampling(temperature=0.8, top_k=20)
    found = generate(target, method_of(name, target), random_prompts(LENGTHS), N_NEW, sampling, **OPTIONS)
    assert [len(generation.tokens) for generation in found] == [N_NEW] * len(LENGTHS)


@pytest.mark.parametrize("architecture", MODELS)
def test_lean_logits_and_states_are_those_of_transformers(architecture):
    model, generator, outputs = MODELS[architecture]().to(CARD), torch.Generator().manual_seed(0), []
    lengths = [23, 5, 14]
    prompts = torch.tensor([prompt + [0] * (max(lengths) - len(prompt)) for prompt in random_prompts(lengths)])
    tree = tree_of(random_prompts([9] * 3, seed=1), [random_parents(9, generator) for _ in lengths])
    tree = DraftTree(tree.tokens.to(CARD), tree.parents.to(CARD), tree.source.to(CARD))
    for engine in ("lean", "transformers"):
        target = TargetModel(model, capture_layers=[1], prefill_chunk=8, engine=engine)
        cache = target.caches.new(len(lengths), 4, 4)
        first = target.prefill(prompts.to(CARD), lengths, cache, range(len(lengths)))
        scored = target.score(tree, cache)
        outputs.append([first.logits, scored.logits, scored.captured])
    for lean, modules in zip(*outputs, strict=True):
        torch.testing.assert_close(lean, modules, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["spire", "vanilla"])
def test_a_compiled_step_of_training_has_the_plain_one_s_gradients(kind):
    check(kind, "inductor", 9, "cuda")
