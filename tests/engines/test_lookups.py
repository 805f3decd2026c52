"""Exported lookups in a running vLLM: the text is the target's, drafts are our loop's likeliest branches."""

from __future__ import annotations

import pytest

from spectrain import load_method
from tests.engines.engine import Engine, saved
from tests.engines.lookups import SIZES, SPECULATIVE
from tests.exports.test_vllm_proposer import branch_of_our_loop
from tests.methods.lookup_export import OPTIONS

pytestmark = pytest.mark.slow


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
