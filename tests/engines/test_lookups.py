"""Exported lookups in a running vLLM: the text is the target's, drafts are our loop's likeliest branches."""

from __future__ import annotations

from pathlib import Path

import pytest

from spectrain import load_method
from spectrain.decoding import TargetModel, generate
from spectrain.methods.autoregressive import Autoregressive
from tests.conftest import random_prompts, tiny_model
from tests.engines.engine import Engine
from tests.methods.lookup_export import OPTIONS, export_lookup
from tests.models.test_artifacts import tiny_tokenizer
from tests.serving.test_vllm_proposer import branch_of_our_loop

pytestmark = pytest.mark.slow
SPECULATIVE = {"method": "custom_class", "model": "recording.Recording", "num_speculative_tokens": 5}
LENGTHS, NEW = [3, 20, 9, 17, 8, 30, 5], [30, 12, 40, 25, 6, 33, 20]
MAX_MODEL_LEN = 65  # the sixth request ends at 63: its last tokens are decoded with little room for drafts
# Rows move as requests end, and prompts are read in pieces.
SIZES = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 3, "max_num_batched_tokens": 24}


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


@pytest.fixture(scope="module")
def engine(start, target, exported, tmp_path_factory) -> Engine:
    folder = tmp_path_factory.mktemp("target")
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    engine = start(SPECTRAIN_LOOKUP=str(exported["pld"]))
    engine.load(folder, SPECULATIVE, **SIZES)
    return engine


@pytest.mark.parametrize("method", OPTIONS)
@pytest.mark.parametrize("together", [False, True], ids=["alone", "in a batch"])
def test_served_text_is_the_targets_own_and_drafts_are_those_of_our_loop(
    method, together, engine, target, prompts, own, exported
):
    """A random model seldom repeats itself, so without a datastore few drafts are accepted."""
    engine.ask("lookup", folder=str(exported[method]))
    served = engine.generate(prompts, [len(text) for text in own], together)
    assert served.tokens == own
    assert served.accepted / served.drafts > (0.1 if (exported[method] / "datastore").is_dir() else 0.0)
    drafter, compared, cut = load_method(exported[method], target), 0, 0
    for call in engine.ask("proposed"):
        for text, sampled, drafts in zip(call["texts"], call["sampled"], call["drafts"], strict=True):
            room = min(5, MAX_MODEL_LEN - len(text))
            expected = branch_of_our_loop(drafter, target, text, room) if sampled and room > 0 else []
            assert drafts == expected
            compared += len(expected) > 0
            cut += room < 5
    assert compared > 20
    assert cut > 0
