"""An exported lookup in vLLM's own server: in a file of its own, because its start takes longest of all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engines.engine import saved
from tests.engines.lookups import SIZES, SPECULATIVE

pytestmark = pytest.mark.slow


def test_a_server_answers_with_the_targets_own_text_and_counts_what_it_accepted(serve, target, prompts, own, exported):
    config = {**SPECULATIVE, "model": "spectrain.exports.vllm_proposer.LookupProposer"}
    server = serve(saved(target, exported["sssd"].parent), config, SIZES, SPECTRAIN_LOOKUP=str(exported["sssd"]))
    lines = server.said().splitlines()
    (warning,) = (i for i, line in enumerate(lines) if "sampled text is wrong with any speculative method" in line)
    assert warning < next(i for i, line in enumerate(lines) if "Application startup complete" in line)
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(server.complete, prompts, map(len, own))) == own
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
