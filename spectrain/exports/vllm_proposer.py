"""A lookup method as a proposer of vLLM 0.22 and later, from a folder of `spectrain.export method=...`.

    SPECTRAIN_LOOKUP=exported/sssd vllm serve <target> --speculative-config '{"method": "custom_class",
      "model": "spectrain.exports.vllm_proposer.LookupProposer", "num_speculative_tokens": 8}'

vLLM constructs it with its VllmConfig and calls `propose` after each step of the target. vLLM itself is not imported.
It does not name its requests, and moves them between rows as others join and leave. So a method's state of a request is
found by the request's text, or made anew. Drafts are chains: the likeliest branch of the tree that the method proposes
in our own loop. vLLM's target verifies them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from spectrain.drafting.lookup import RowState
from spectrain.errors import UserError, check_whole
from spectrain.exports.vllm_versions import warn_if_samples_are_wrong
from spectrain.methods.registry import open_export
from spectrain.methods.sssd import Sssd
from spectrain.models.artifacts import LookupFacts, check_tokenizer, read_lookup_facts
from spectrain.target import DraftTree, tokenizer_fingerprint
from spectrain.target.loading import read_tokenizer

log = logging.getLogger("vllm.spectrain")  # below vLLM's own, so that it is shown

VARIABLE = "SPECTRAIN_LOOKUP"  # environment variable that names the folder
KEY = "spectrain_lookup"  # likewise, in vLLM's --additional-config
KEPT_CALLS = 8  # calls for which a request outside the batch is kept: it may have been preempted
KEY_TOKENS = 8  # last tokens by which a moved request is looked up, before its whole text is compared


@dataclass
class Request:
    """A method's state of one request. It depends on the text alone, so it serves any row whose text begins so."""

    state: RowState
    text: np.ndarray  # [n_tokens] int32: the tokens that the state has read
    row: int  # of the last call that included it
    seen: int  # number of that call


class LookupProposer:
    """The object that vLLM asks for drafts.

    Of vLLM's config it reads `speculative_config.num_speculative_tokens`, `model_config.max_model_len`, `.tokenizer`,
    `.get_vocab_size()` and `additional_config`. Raises UserError where no folder is named, or it holds no lookup method
    for the target's tokenizer.
    """

    def __init__(self, vllm_config: Any) -> None:
        model, more = vllm_config.model_config, vllm_config.additional_config
        self.draft_tokens = vllm_config.speculative_config.num_speculative_tokens
        check_whole("num_speculative_tokens", self.draft_tokens, 1)
        self.max_model_len = model.max_model_len
        named = more.get(KEY) if isinstance(more, dict) else None
        try:
            self._open(named or os.environ.get(VARIABLE), model)
        except UserError as error:
            log.error("lookup drafter refused: %s", error)  # vLLM's own error speaks of the constructor
            raise
        self._requests: list[Request] = []
        self._calls = 0
        warn_if_samples_are_wrong()

    def _open(self, named: str | None, model: Any) -> None:
        """Open the lookup method for the served model, and compile it before the first request waits for it."""
        if not named:
            raise UserError(
                f"no lookup method is named; give its folder (of spectrain export) as the variable {VARIABLE}"
            )
        facts = read_lookup_facts(folder := Path(named))
        if (vocab_size := model.get_vocab_size()) < facts.vocab_size:
            raise UserError(
                f"{folder} has tokens up to {facts.vocab_size}, but the served model has a vocabulary of {vocab_size}; "
                "export one for it with spectrain export method=... target=..."
            )
        if facts.datastore and model.tokenizer is not None:
            check_served(folder, facts, model.tokenizer)
        self.vocab_size, self.drafter = facts.vocab_size, open_export(folder, None)
        self.read_tokens = self.drafter.options.datastore_prefix if isinstance(self.drafter, Sssd) else 1  # T
        tokens = [i % min(4, self.vocab_size) for i in range(32)]
        states = [self.drafter.new_row(tokens[:-1]) for _ in range(2)]
        for state in states:
            state.extend(tokens[-1:])
        self._trees(states, [np.array(tokens)] * 2, [8, 8])
        log.info("drafting by %s, from %s", facts.method, folder)

    def load_model(self, target_model: object) -> None:
        """Load nothing: lookups have no weights. vLLM's runner for CPUs calls it without asking."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Drafts for each row.

        Args:
            sampled_token_ids: of each row the tokens of this step; none while its prompt is being read.
            num_tokens_no_spec: [R] int32, tokens of each row, including those of this step.
            token_ids_cpu: [R, L] int32, the texts; entries past a row's tokens are meaningless.

        Returns:
            One list per row, of at most num_speculative_tokens tokens; empty if no continuation is known.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        rows = {}  # texts by row
        for row, sampled in enumerate(sampled_token_ids):
            if len(sampled) and num_tokens_no_spec[row] < self.max_model_len:  # no draft past the longest text
                rows[row] = token_ids_cpu[row, : num_tokens_no_spec[row]].astype(np.int32)
        requests = self._read(rows, [len(sampled) for sampled in sampled_token_ids])
        if requests:
            for request, draft in zip(requests, self._draft(requests), strict=True):
                drafts[request.row] = draft
        return drafts

    def _read(self, rows: dict[int, np.ndarray], n_new: Sequence[int]) -> list[Request]:
        """Find the requests of these rows, by their last row, else by the text before its new tokens, and read on.

        Rows with a token that is not in the vocabulary are left out.
        """
        self._calls += 1
        by_row = {request.row: request for request in self._requests}
        by_end: dict[tuple, list[Request]] = {}
        for request in self._requests:
            by_end.setdefault(_end(request.text), []).append(request)
        found = []
        for row, text in rows.items():
            known = (by_row.get(row), *by_end.get(_end(text[: max(0, len(text) - n_new[row])]), ()))
            known = (one for one in known if one and one.seen < self._calls)
            request = next((one for one in known if np.array_equal(text[: len(one.text)], one.text)), None)
            unread = text[len(request.text) :] if request else text
            if len(unread) and not 0 <= unread.min() <= unread.max() < self.vocab_size:
                continue  # compiled lookups do not check tokens, and engines have placeholders, as for images
            if request is None:
                request = Request(self.drafter.new_row(unread.tolist()), text, row, self._calls)
                self._requests.append(request)
            else:
                request.state.extend(unread.tolist())
                request.text, request.row, request.seen = text, row, self._calls
            found.append(request)
        self._requests = [request for request in self._requests if self._calls - request.seen < KEPT_CALLS]
        return found

    def _draft(self, requests: Sequence[Request]) -> list[list[int]]:
        rooms = [min(self.draft_tokens, self.max_model_len - len(request.text)) for request in requests]
        tree = self._trees([request.state for request in requests], [request.text for request in requests], rooms)
        return [likeliest_branch(*row) for row in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)]

    def _trees(self, states: Sequence[RowState], texts: Sequence[np.ndarray], rooms: Sequence[int]) -> DraftTree:
        """The trees of rows whose states have read their texts, up to `rooms` tokens deep. Only ends of texts count."""
        lengths = [min(self.read_tokens, len(text)) for text in texts]
        tails = np.zeros((len(texts), self.read_tokens), dtype=np.int64)
        for tail, text, length in zip(tails, texts, lengths, strict=True):
            tail[:length] = text[len(text) - length :]
        self.drafter.rows = list(states)
        # In place of a `Context` what lookup methods read of one; a row may emit the drafted tokens, and one more.
        step = {"tokens": torch.from_numpy(tails), "n_tokens": lengths, "room": [room + 1 for room in rooms]}
        return self.drafter.propose(SimpleNamespace(**step, n_rows=len(texts), device=torch.device("cpu")))


def _end(text: np.ndarray) -> tuple[int, bytes]:
    """A key that differs for nearly all texts."""
    return len(text), text[-KEY_TOKENS:].tobytes()


def likeliest_branch(tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Follow the first child of each node in one row's tree: methods add their best guesses first."""
    branch, node = [], 0
    for child in range(1, len(tokens)):
        if parents[child] == node:
            branch.append(tokens[child])
            node = child
    return branch


def check_served(folder: Path, facts: LookupFacts, tokenizer: PreTrainedTokenizerBase | str) -> None:
    """Raise UserError if the served model has another tokenizer than the export."""
    name = getattr(tokenizer, "name_or_path", tokenizer)
    try:
        found = tokenizer_fingerprint(read_tokenizer(name) if isinstance(tokenizer, str) else tokenizer)
    except Exception as error:  # transformers, tokenizers and the hub each raise their own types here
        log.warning("the tokenizer %s cannot be compared with that of %s (%s)", name, folder, type(error).__name__)
        return
    check_tokenizer(folder, facts, found, str(name))
