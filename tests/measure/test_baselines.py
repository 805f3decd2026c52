"""Our loop and Hugging Face's own generation are called alike, with equal greedy texts."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import CompileConfig

from spectrain.decoding import Generation, Sampling, generate
from spectrain.measure.baselines import (
    BASELINES,
    COMPILED,
    EAGER,
    build_baseline,
    fastest_of,
    generate_with_transformers,
    own_model,
)
from spectrain.measure.benchmark import preparations
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.pld import PromptLookup
from spectrain.methods.speculative import Speculative
from spectrain.target import TargetModel
from tests.conftest import noisy_copy, random_prompts, tiny_model


@pytest.fixture(scope="module")
def target() -> TargetModel:
    model = tiny_model("llama")
    model.generation_config.repetition_penalty = 1.5  # must not reach the comparison
    return TargetModel(model)


def baseline(name: str, target: TargetModel):
    speculative = Speculative(TargetModel(noisy_copy(target.model)), gamma=3)
    return build_baseline(name, target, PromptLookup(draft_tokens=5), speculative)


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_write_the_greedy_text_of_our_loop(target, name):
    prompts = random_prompts([9, 30])
    ours = generate(target, Autoregressive(), prompts, 20)
    theirs = baseline(name, target)(prompts, 20)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.tokens, a.finish_reason) == (b.tokens, b.finish_reason)
        assert b.prefill_s == b.elapsed_s > 0
        assert 0 < b.target_forwards <= a.target_forwards
    if name == "hf_generate":
        assert [g.target_forwards for g in theirs] == [g.target_forwards for g in ours]
    assert target.model.generation_config.repetition_penalty == 1.5


def test_the_draft_length_reaches_the_assistant(target):
    speculative = Speculative(TargetModel(copy.deepcopy(target.model)), gamma=3)
    (generation,) = build_baseline("hf_assisted", target, None, speculative)(random_prompts([9]), 20)
    # Every draft is right: a forward gives three tokens and one more, the one that reads the prompt too.
    assert generation.target_forwards == -(-len(generation.tokens) // 4)
    assert (len(generation.tokens) - 1) / generation.target_forwards <= 4


def test_the_options_of_our_lookup_reach_prompt_lookup(target):
    for lookup, longest in ((PromptLookup(draft_tokens=5), 5), (PromptLookup(draft_tokens=5, max_nodes=3), 2)):
        decode = build_baseline("hf_prompt_lookup", target, lookup)
        assert decode.keywords["options"] == {"prompt_lookup_num_tokens": longest, "max_matching_ngram_size": 3}


def test_baselines_sample_reproducibly_and_leave_the_global_generator_alone(target):
    sampling = Sampling(temperature=1.0, top_k=20)
    before, prompts = torch.get_rng_state(), random_prompts([9])
    decode = baseline("hf_generate", target)
    texts = [decode(prompts, 20, sampling, prompt_numbers=[n])[0].tokens for n in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(before, torch.get_rng_state())


def test_with_a_static_cache_one_forward_is_compiled_for_all_prompts(target):
    """As on a GPU, with another backend; a hook that counts forwards would be compiled apart."""
    compiling = CompileConfig(backend="eager", mode=None)
    compiling._compile_all_devices = True
    options = {"cache_implementation": "static", "compile_config": compiling}
    prompts, before = random_prompts([30, 9, 17]), preparations()
    model = own_model(target)
    for prompt in prompts:
        (found,) = generate_with_transformers(target, model, [prompt], 20, options=options)
        assert found.tokens == generate(target, Autoregressive(), [prompt], 20)[0].tokens
        assert (found.drafted, found.target_forwards) == ([], len(found.tokens) - 1)
        assert preparations() == before + 1


def test_on_a_gpu_the_faster_way_counts_and_is_named_and_one_that_fails_is_left_out(target):
    def way(*seconds: float):
        return lambda prompts, n: [Generation(tokens=[1] * n, target_forwards=n - 1, elapsed_s=s) for s in seconds]

    def broken(prompts, n):
        raise RuntimeError("no compiler")

    on_gpu = SimpleNamespace(device=torch.device("cuda"), model=target.model, _engine=target._engine)
    (ways,) = build_baseline("hf_generate", on_gpu).args
    assert [one.keywords["options"] for one in ways.values()] == [{}, {"cache_implementation": "static"}]
    ways = dict(zip([*ways, "broken"], (way(1.0, 2.0), way(3.0, 0.5), broken), strict=True))
    for _ in range(2):
        found = fastest_of(ways, [[1], [2]], 4)
        chosen = [(g.elapsed_s, g.choices[0].method, g.choices[0].steps) for g in found]
        assert chosen == [(1.0, EAGER, 3), (0.5, COMPILED, 3)]
        assert list(ways) == [EAGER, COMPILED]
    with pytest.raises(RuntimeError, match="no compiler"):
        fastest_of({"broken": broken}, [[1]], 4)
