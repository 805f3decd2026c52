from __future__ import annotations

import pytest

from spectrain.decoding import TargetModel, generate
from spectrain.methods.autoregressive import Autoregressive
from tests.conftest import random_prompts, tiny_model
from tests.models.test_artifacts import tiny_tokenizer

pytestmark = pytest.mark.slow
LENGTHS, NEW = [3, 20, 9], 24


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(tiny_model("llama", hidden_size=128), tiny_tokenizer())


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


def test_the_engine_writes_what_our_loop_does(engine, target, folder):
    assert engine.load(folder) == "0.32.0"
    prompts = random_prompts(LENGTHS)
    own = [found.tokens for found in generate(target, Autoregressive(), prompts, NEW)]
    for together in (True, False):
        assert engine.generate(prompts, NEW, together).tokens == own
    cut = engine.generate(prompts, NEW, abort={1: 3})
    assert [len(tokens) for tokens in cut.tokens] == [len(own[0]), 3, len(own[2])]

    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    engine.load(folder, config)
    served = engine.generate(prompts, NEW)
    assert served.tokens == own
    assert served.accepted == sum(served.accepted_per_position)
