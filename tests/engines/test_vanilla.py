"""Vanilla drafters as vLLM's `draft_model`: lossless, accepted as in our loop, and samples of the target's law."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from spectrain import load_method
from spectrain.decoding import Generation, Sampling, generate
from spectrain.methods.autoregressive import Autoregressive
from spectrain.target import TargetModel
from tests.conftest import noisy_copy, random_prompts, tiny_model
from tests.decoding import test_law as law
from tests.engines.engine import Engine, saved
from tests.models.test_artifacts import export_vanilla, tiny_tokenizer

pytestmark = pytest.mark.slow
GAMMA, NEW = 4, 30
SIZES = {"hidden_size": 128, "eos_token_id": None}  # heads of 32
SAMPLING = Sampling(temperature=1.2)


def speculative(drafter: Path, gamma: int) -> dict:
    return {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": gamma}


def accepted_per_position(generations: list[Generation], n_new: int) -> list[int]:
    """Of the steps in which the first n_new tokens were written."""
    counts = [0] * GAMMA
    for generation in generations:
        n_tokens = 1  # the first is the prompt's
        for accepted in generation.accepted:
            if n_tokens < n_new:
                counts[:accepted] = [count + 1 for count in counts[:accepted]]
            n_tokens += accepted + 1
    return counts


def test_as_many_drafts_are_accepted_at_each_position_as_in_our_loop(engine: Engine, tmp_path):
    target = TargetModel(tiny_model("llama", **SIZES), tiny_tokenizer())
    drafter = export_vanilla(tmp_path / "vanilla", target, noisy_copy(target.model, 0.02))
    prompts = random_prompts([3, 20, 9, 70])
    own = [one.tokens for one in generate(target, Autoregressive(), prompts, NEW)]
    # Our loop shortens the last draft of a text, and vLLM does not.
    method = load_method(drafter, target, gamma=GAMMA, max_nodes=None, draft_dtype="float32")
    ours = generate(target, method, prompts, NEW + GAMMA)
    expected = accepted_per_position(ours, NEW)
    assert expected[0] > expected[-1] > 0
    engine.load(saved(target, tmp_path), speculative(drafter, GAMMA), max_num_batched_tokens=48)
    for together in (False, True):  # then all prompts are in the prefix cache, too
        served = engine.generate(prompts, NEW, together, ignore_eos=True)
        assert served.tokens == own
        assert served.accepted_per_position == expected
        assert served.drafted == GAMMA * served.drafts
    cut = engine.generate(prompts, NEW, abort={1: 3}, ignore_eos=True).tokens
    assert 3 <= len(cut[1]) < NEW
    assert [*cut[:1], *cut[2:]] == [*own[:1], *own[2:]]


def p_value(engine: Engine, model: PreTrainedModel) -> float:
    """The p-value of the engine's samples, as tests/decoding/test_law.py computes it for our loop."""
    served = engine.generate([law.PROMPT] * law.N_SAMPLES, 5, temperature=SAMPLING.temperature, ignore_eos=True)
    assert 0 < served.accepted < served.drafted
    return law.p_value_of(served.tokens, model, SAMPLING)


def test_samples_follow_the_targets_distribution(engine: Engine, tmp_path):
    """In a repaired engine. The same test finds the build that is not, of which users are warned."""
    models = [tiny_model("llama", seed, **law.TINY | SIZES) for seed in (4, 9)]
    tokenizer = tiny_tokenizer(vocab_size=law.VOCAB_SIZE)
    folders = [saved(TargetModel(model, tokenizer), tmp_path / str(i)) for i, model in enumerate(models)]
    for repaired in (True, False):
        sizes = {"max_num_seqs": 200, "kv_cache_memory_bytes": 128 << 20}
        engine.load(folders[0], speculative(folders[1], 3), repaired=repaired, **sizes)
        assert (p_value(engine, models[0]) > law.ALPHA) == engine.ask("samples_are_right")
        assert not repaired or engine.ask("samples_are_right")
