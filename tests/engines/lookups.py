"""What the tests of lookups in vLLM and in its server share: a target, prompts, its texts, and exported methods."""

from __future__ import annotations

from pathlib import Path

import pytest

from spectrain.decoding import generate
from spectrain.methods.autoregressive import Autoregressive
from spectrain.target import TargetModel
from tests.conftest import random_prompts, tiny_model
from tests.methods.lookup_export import OPTIONS, export_lookup
from tests.models.test_artifacts import tiny_tokenizer

SPECULATIVE = {"method": "custom_class", "model": "recording.Recording", "num_speculative_tokens": 5}
LENGTHS, NEW = [3, 20, 9, 17, 8, 30, 5], [30, 12, 40, 25, 6, 33, 20]
# Rows move as requests end, prompts are read in pieces, and the sixth request ends near the longest text.
SIZES = {"max_model_len": 65, "max_num_seqs": 3, "max_num_batched_tokens": 24}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(tiny_model("llama", hidden_size=128, eos_token_id=None), tiny_tokenizer())


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    found = random_prompts(LENGTHS)
    found[4] = found[2][:8]  # one begins as another does
    return [*found, list(found[1])]  # and two are equal


@pytest.fixture(scope="module")
def own(target, prompts) -> list[list[int]]:
    found = generate(target, Autoregressive(), prompts, max(NEW))
    return [one.tokens[:n] for one, n in zip(found, [*NEW, NEW[1]], strict=True)]


@pytest.fixture(scope="module")
def exported(target, prompts, own, tmp_path_factory) -> dict[str, Path]:
    """A folder of each method; their datastores hold half of the answers."""
    folder = tmp_path_factory.mktemp("exported")
    documents = [prompt + text for prompt, text in zip(prompts, own, strict=True)][::2]
    documents += random_prompts([20] * 10, seed=5)
    return {method: export_lookup(folder / method, target, method, documents) for method in OPTIONS}
