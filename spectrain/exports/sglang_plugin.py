"""A lookup method as a speculative algorithm of SGLang, from a folder of `spectrain.export method=...`.

    SPECTRAIN_LOOKUP=exported/sssd python -m sglang.launch_server --model-path <target> \
      --speculative-algorithm SPECTRAIN --speculative-num-draft-tokens 16

SGLang calls `register` by the entry point `sglang.srt.plugins`. The worker is that of SGLang's own NGRAM, which
verifies trees of N nodes and asks an object for them: here a `LookupCorpus`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # each process of SGLang imports this module, whatever it serves
    from spectrain.drafting.lookup import RowState
    from spectrain.exports.lookups import ExportedLookup

NAME = "SPECTRAIN"
NODES, REQUESTS, BREADTH = 12, 48, 10  # the defaults of SGLang's NGRAM; a breadth above 1 stands for trees


def register() -> None:
    """Make the algorithm known to SGLang."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class LookupAlgorithm(CustomSpecAlgo):
        """Scheduled as NGRAM is. What SGLang's base class of plugins lacks comes from its enum."""

        create_future_map = SpeculativeAlgorithm.create_future_map

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        need_topk = carries_draft_hidden_states = has_draft_kv

        def handle_server_args(self, server_args: Any) -> None:
            from spectrain.exports.lookups import folder_of

            folder_of()
            if (server_args.page_size or 1) > 1 and server_args.attention_backend != "flashinfer":
                raise ValueError(f"{NAME} drafts trees, which need --page-size 1 or --attention-backend flashinfer")
            if server_args.attn_dp_size > 1:
                raise ValueError(f"{NAME} does not work with dp attention; leave --enable-dp-attention out")
            nodes = server_args.speculative_num_draft_tokens or NODES
            server_args.max_running_requests = server_args.max_running_requests or REQUESTS
            server_args.enable_mixed_chunk = False
            server_args.speculative_num_draft_tokens, server_args.speculative_eagle_topk = nodes, BREADTH
            server_args.speculative_num_steps = max(1, nodes // BREADTH)
            if server_args.device == "cpu":
                server_args.disable_overlap_schedule = True

    @SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=LookupAlgorithm)
    def worker_class(server_args: Any) -> type:
        from sglang.srt.speculative.ngram_worker import NGRAMWorker

        from spectrain.exports.lookups import ExportedLookup, folder_of

        class LookupWorker(NGRAMWorker):
            def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
                super().__init__(server_args, gpu_id, nccl_port, target_worker)
                vocab_size, n_nodes = target_worker.model_runner.model_config.vocab_size, self.draft_token_num
                lookup = ExportedLookup(folder_of(), vocab_size, target_worker.tokenizer, {"max_nodes": n_nodes})
                self.ngram_corpus = LookupCorpus(lookup, n_nodes)
                self.max_trie_depth = max(n_nodes, lookup.read_tokens)  # tokens of each text that a step hands over

            def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
                if batch.forward_mode.is_decode():
                    self.ngram_corpus.read(batch.reqs)
                return super().forward_batch_generation(batch, *args, **kwargs)

        return LookupWorker


class LookupCorpus:
    """What SGLang's NGRAM worker asks for drafts, in place of its own corpus: a method that drafts N nodes."""

    def __init__(self, lookup: ExportedLookup, n_nodes: int) -> None:
        self.lookup, self.n_nodes = lookup, n_nodes
        self.states: dict[str, RowState | None] = {}  # by request; None: it has a placeholder that is no token
        self.n_read: dict[str, int] = {}  # tokens

    def read(self, requests: Iterable[Any]) -> None:
        """Read the whole texts of SGLang's requests that are new."""
        for one in requests:
            if one.rid not in self.states:
                text = np.array([*one.origin_input_ids_unpadded, *one.output_ids], dtype=np.int64)
                self.n_read[one.rid] = len(text)
                self.states[one.rid] = self.lookup.drafter.new_row(text.tolist()) if self.lookup.knows(text) else None

    def batch_get(
        self, req_ids: Sequence[str], batch_tokens: Sequence[Sequence[int]], total_lens: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The draft trees of a step: tokens [B * N] int64, roots first, and which nodes a node sees, [B * N * N] bool.

        `batch_tokens` are the ends of texts of `total_lens` tokens, with all that is new since the last step. Nodes
        that no guess fills hang from the root.
        """
        n_rows, n_nodes = len(req_ids), self.n_nodes
        texts = [np.array(tokens, dtype=np.int64) for tokens in batch_tokens]
        for name, text, n_tokens in zip(req_ids, texts, total_lens, strict=True):
            n_new, self.n_read[name] = n_tokens - self.n_read[name], n_tokens
            unread = text[len(text) - n_new :]
            if not 0 <= n_new <= len(text) or not self.lookup.knows(unread):
                self.states[name] = None
            elif self.states[name] is not None and n_new:
                self.states[name].extend(unread.tolist())
        tokens, parents = np.zeros((2, n_rows, n_nodes), dtype=np.int64)
        tokens[:, 0] = [text[-1] for text in texts]
        rows = [row for row, name in enumerate(req_ids) if self.states[name] is not None]
        if rows:
            states = [self.states[req_ids[row]] for row in rows]
            tree = self.lookup.trees(states, [texts[row] for row in rows], [n_nodes - 1] * len(rows))
            for row, guesses, above in zip(rows, tree.tokens.numpy(), tree.parents.numpy(), strict=True):
                size = 1 + int((above >= 0).sum())  # of the tree; padding has other parents
                tokens[row, 1:size], parents[row, 1:size] = guesses[1:size], above[1:size]
        mask = np.tile(np.eye(n_nodes, dtype=bool), (n_rows, 1, 1))
        for node in range(1, n_nodes):  # parents stand before their children
            mask[:, node] |= mask[np.arange(n_rows), parents[:, node]]
        return tokens.ravel(), mask.ravel()

    def erase_match_state(self, req_ids: Iterable[str]) -> None:
        """Forget requests that have left the batch."""
        for name in req_ids:
            self.states.pop(name, None)
            self.n_read.pop(name, None)

    def reset(self) -> None:
        """Forget all requests."""
        self.erase_match_state(list(self.states))

    def synchronize(self, *texts: object) -> None:
        """Do nothing: a lookup reads its own request and its datastore, and no other request's text."""

    batch_put = synchronize
