"""The baseline emits one token a forward."""

from spectrain.decoding import Source, generate
from spectrain.methods.autoregressive import Autoregressive
from tests.conftest import random_prompts


def test_one_forward_a_token(llama_target):
    (generation,) = generate(llama_target, Autoregressive(), random_prompts([5]), 12, stop_token_ids=())
    assert generation.target_forwards == 11
    assert generation.accepted == generation.drafted == [0] * 11
    assert generation.sources == [Source.ROOT] * 12
