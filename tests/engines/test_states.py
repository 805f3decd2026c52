"""Hidden states that a real vLLM computes for a training are the target's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from spectrain.target import TargetModel
from spectrain.target.loading import open_tables
from spectrain.training.served_vllm import VllmStates
from tests.conftest import VOCAB_SIZE, tiny_model
from tests.engines.engine import Engine
from tests.models.test_artifacts import tiny_tokenizer
from tests.training.test_served_vllm import StandIn, serving

pytestmark = pytest.mark.slow
LAYERS, ROW_TOKENS = (1, 2), 200


@dataclass
class Bridge(StandIn):
    """A real engine behind the HTTP server of the stand-in."""

    engine: Engine | None = None

    def complete(self, tokens: list[int]) -> dict:
        with self.lock:
            return {"kv_transfer_params": self.engine.ask("states", prompt=tokens)}


def test_states_are_the_targets_own(start, tmp_path):
    target, folder = TargetModel(tiny_model("llama", hidden_size=128), tiny_tokenizer()), tmp_path / "target"
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    ids = {"eagle_aux_hidden_state_layer_ids": [0, *LAYERS, 3]}
    method = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": {"hf_config": ids}}
    connector = {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": "cpu_states"}
    connector |= {
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "states")},
    }
    engine = start()
    limits = {"max_model_len": ROW_TOKENS + 1, "max_num_batched_tokens": 64}  # long prompts are read in chunks
    engine.load(folder, method, kv_transfer_config=connector, **limits)
    tokens = torch.randint(4, VOCAB_SIZE, (3, ROW_TOKENS), generator=torch.Generator().manual_seed(5))
    tokens[2, :150] = tokens[0, :150]  # vLLM has the first 128 of them in its prefix cache
    starts = torch.zeros_like(tokens)
    starts[0, 130:], starts[1, 1:] = 130, 1
    with serving(Bridge(target.model, Path(), room=ROW_TOKENS + 1, engine=engine)) as address:
        server = VllmStates(address, 60, open_tables(folder, "float32", "cpu"), str(folder), LAYERS, ROW_TOKENS)
        assert (server.slots, server.dtype) == ([1, 2, 3], "float32")
        for given in (None, starts):
            found = server.features(tokens, given, LAYERS)
            with torch.no_grad():
                wanted = target.with_capture(LAYERS).features(tokens, given)
            for one, other in ((found.captured, wanted.captured), (found.final_hidden, wanted.final_hidden)):
                torch.testing.assert_close(one, other.bfloat16(), rtol=2**-7, atol=1e-3)
    assert not any((tmp_path / "states").iterdir())
