"""vLLM's connector of hidden states for a build without CUDA, where there is no pinned memory as its own asks for.

Runs in the engine's own Python. What is written, when, and under which lock is vLLM's.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as example


class CpuHiddenStatesConnector(example.ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending: example.PendingSave) -> None:
        slots = torch.tensor(pending.block_ids)[:, None] * self._block_size + torch.arange(self._block_size)
        states = example.extract_from_kv_cache(self._kv_cache, slots.flatten(), len(pending.token_ids))
        save_file({"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}, pending.filename)
        os.close(self._lock_fds.pop(pending.req_id))
        self._req_copy_events[pending.req_id] = SimpleNamespace(query=lambda: True)
