"""The lookup proposer, with a record of what it was asked and what it answered. It runs in the engine's own Python."""

from __future__ import annotations

from spectrain.exports.vllm_proposer import LookupProposer

CALLS: list[dict] = []


class Recording(LookupProposer):
    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None):
        drafts = super().propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings)
        n_tokens = num_tokens_no_spec[: len(drafts)].tolist()
        texts = [token_ids_cpu[row, :length].tolist() for row, length in enumerate(n_tokens)]
        sampled = [list(map(int, tokens)) for tokens in sampled_token_ids]
        CALLS.append({"texts": texts, "sampled": sampled, "drafts": drafts})
        return drafts
