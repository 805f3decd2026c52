"""Exported lookups in a running vLLM: the text is the target's, drafts are our loop's likeliest branches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spectrain import load_method
from spectrain.decoding import generate
from spectrain.methods.autoregressive import Autoregressive
from spectrain.target import TargetModel
from tests.conftest import random_prompts, tiny_model
from tests.engines.engine import Engine, saved
from tests.exports.test_vllm_proposer import branch_of_our_loop
from tests.methods.lookup_export import OPTIONS, export_lookup
from tests.models.test_artifacts import tiny_tokenizer

pytestmark = pytest.mark.slow
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


@pytest.fixture(scope="module")
def engine(start, target, exported, tmp_path_factory) -> Engine:
    engine = start(SPECTRAIN_LOOKUP=str(exported["pld"]))
    engine.load(saved(target, tmp_path_factory.mktemp("engine")), SPECULATIVE, **SIZES)
    return engine


@pytest.mark.parametrize("method", OPTIONS)
@pytest.mark.parametrize("together", [False, True], ids=["alone", "in a batch"])
def test_served_text_is_the_targets_own_and_drafts_are_those_of_our_loop(
    method, together, engine, target, prompts, own, exported
):
    """A random model seldom repeats itself, so without a datastore few drafts are accepted."""
    engine.ask("lookup", folder=str(exported[method]))
    served = engine.generate(prompts, [len(text) for text in own], together, ignore_eos=True)
    assert served.tokens == own
    assert served.accepted / served.drafts > (0.1 if (exported[method] / "datastore").is_dir() else 0.0)
    drafter, compared = load_method(exported[method], target), 0
    for call in engine.ask("proposed"):
        for text, sampled, drafts in zip(call["texts"], call["sampled"], call["drafts"], strict=True):
            expected = branch_of_our_loop(drafter, target, text, 5) if sampled else []
            assert drafts == expected
            compared += len(expected) > 0
    assert compared > 20


def test_a_server_answers_with_the_targets_own_text_and_counts_what_it_accepted(serve, target, prompts, own, exported):
    config = {**SPECULATIVE, "model": "spectrain.exports.vllm_proposer.LookupProposer"}
    server = serve(saved(target, exported["sssd"].parent), config, SIZES, SPECTRAIN_LOOKUP=str(exported["sssd"]))
    lines = server.said().splitlines()
    (warning,) = (i for i, line in enumerate(lines) if "sampled text is wrong with any speculative method" in line)
    assert warning < next(i for i, line in enumerate(lines) if "Application startup complete" in line)
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(server.complete, prompts, map(len, own))) == own
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
