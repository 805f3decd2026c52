"""A lookup method as a proposer of vLLM (`custom_class`), from a folder of `spectrain.export method=...`.

    SPECTRAIN_LOOKUP=exported/sssd vllm serve <target> --speculative-config '{"method": "custom_class",
      "model": "spectrain.serving.vllm_proposer.LookupProposer", "num_speculative_tokens": 8}'

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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spectrain.decoding import tokenizer_fingerprint
from spectrain.decoding.loading import read_tokenizer
from spectrain.errors import UserError, check_whole
from spectrain.methods.loading import open_export
from spectrain.methods.lookup import RowState
from spectrain.methods.sssd import Sssd
from spectrain.models.artifacts import LookupFacts, check_tokenizer, read_lookup_facts

log = logging.getLogger(__name__)

VARIABLE = "SPECTRAIN_LOOKUP"  # environment variable that names the folder
KEY = "spectrain_lookup"  # likewise, in vLLM's --additional-config
WARM_TOKENS = 32
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

    Of vLLM's config it reads `speculative_config.num_speculative_tokens`, `model_config.max_model_len`, `.tokenizer`
    and `additional_config`. Raises UserError where no folder is named, or it holds no lookup method for the target's
    tokenizer.
    """

    def __init__(self, vllm_config: Any) -> None:
        model = vllm_config.model_config
        self.draft_tokens = vllm_config.speculative_config.num_speculative_tokens
        check_whole("num_speculative_tokens", self.draft_tokens, 1)
        self.max_model_len = model.max_model_len
        folder = folder_of(vllm_config)
        facts = read_lookup_facts(folder)
        check_model(folder, facts, model)
        self.vocab_size = facts.vocab_size
        self.drafter = open_export(folder, target=None)
        self.read_tokens = self.drafter.options.datastore_prefix if isinstance(self.drafter, Sssd) else 1  # T
        self._requests: list[Request] = []
        self._calls = 0
        self._warm_up()
        log.info("drafting by %s, up to %d tokens, from %s", facts.method, self.draft_tokens, folder)

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
            slot_mappings: ignored.

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

    def load_model(self, *args: object, **kwargs: object) -> None:
        """Do nothing: vLLM calls this on every proposer, but there are no weights."""

    def _read(self, rows: dict[int, np.ndarray], n_new: Sequence[int]) -> list[Request]:
        """Find the requests of these rows, by their last row, else by the text before its new tokens, and read on.

        Rows with a token that is not in the vocabulary are left out: compiled lookups do not check tokens, and vLLM has
        placeholders, for example for images.
        """
        self._calls += 1
        by_row = {request.row: request for request in self._requests}
        by_end: dict[tuple, list[Request]] = {}
        for request in self._requests:
            by_end.setdefault(_end(request.text), []).append(request)
        found = []
        for row, text in rows.items():
            known = (by_row.get(row), *by_end.get(_end(text[: max(0, len(text) - n_new[row])]), ()))
            request = next((r for r in known if r and r.seen < self._calls and _begins(text, r.text)), None)
            unread = text[len(request.text) :] if request else text
            if len(unread) and not 0 <= unread.min() <= unread.max() < self.vocab_size:
                continue
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
        tails = np.zeros((len(requests), self.read_tokens), dtype=np.int64)
        lengths = [min(self.read_tokens, len(request.text)) for request in requests]
        for tail, request, length in zip(tails, requests, lengths, strict=True):
            tail[:length] = request.text[len(request.text) - length :]
        rooms = [min(self.draft_tokens, self.max_model_len - len(request.text)) for request in requests]
        self.drafter.rows = [request.state for request in requests]
        tree = self.drafter.propose(Batch(torch.from_numpy(tails), lengths, [room + 1 for room in rooms]))
        return [likeliest_branch(*row) for row in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)]

    def _warm_up(self) -> None:
        """Compile everything before the first request waits for it."""
        texts = np.tile(np.arange(WARM_TOKENS, dtype=np.int32) % min(4, self.vocab_size), (2, 1))
        longest, self.max_model_len = self.max_model_len, WARM_TOKENS + self.draft_tokens
        for n_tokens in (WARM_TOKENS - 1, WARM_TOKENS):  # read, then extended
            self.propose([[0], [0]], np.full(2, n_tokens, dtype=np.int32), texts)
        self.max_model_len, self._requests = longest, []


@dataclass(frozen=True)
class Batch:
    """The rows of a step in place of a `Context`, as lookup methods read it: the ends of the texts."""

    tokens: Tensor  # [n, T] int64
    n_tokens: list[int]  # of each row, up to T
    room: list[int]  # tokens that each row may still emit: the drafted ones, and one
    device = torch.device("cpu")

    @property
    def n_rows(self) -> int:
        return len(self.n_tokens)


def likeliest_branch(tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Follow the first child of each node in one row's tree: methods add their best guesses first."""
    branch, node = [], 0
    for child in range(1, len(tokens)):
        if parents[child] == node:
            branch.append(tokens[child])
            node = child
    return branch


def folder_of(vllm_config: Any) -> Path:
    """Return the exported folder that the user named. Raise UserError if none is named."""
    more = getattr(vllm_config, "additional_config", None)
    named = (more.get(KEY) if isinstance(more, dict) else None) or os.environ.get(VARIABLE)
    if not named:
        raise UserError(
            f"no lookup method is named; give its folder (of python -m spectrain.export method=...) as {VARIABLE}="
            f'<folder>, or as --additional-config \'{{"{KEY}": "<folder>"}}\''
        )
    return Path(named)


def check_model(folder: Path, facts: LookupFacts, model: Any) -> None:
    """Raise UserError if the served model has other tokens than the export. Without a datastore only sizes count."""
    size = model.get_vocab_size() if hasattr(model, "get_vocab_size") else None
    if size is not None and size < facts.vocab_size:
        raise UserError(
            f"{folder} has tokens up to {facts.vocab_size}, but the served model has a vocabulary of {size}; export "
            "one for it with python -m spectrain.export method=... target=..."
        )
    name = getattr(model, "tokenizer", None)
    if not facts.datastore or name is None:
        return
    try:
        tokenizer = read_tokenizer(name)
    except Exception as error:  # transformers, tokenizers and the hub each raise their own types here
        log.warning("the tokenizer %s cannot be compared with that of %s (%s)", name, folder, type(error).__name__)
        return
    check_tokenizer(folder, facts, tokenizer_fingerprint(tokenizer), str(name))


def _begins(text: np.ndarray, beginning: np.ndarray) -> bool:
    return len(beginning) <= len(text) and np.array_equal(text[: len(beginning)], beginning)


def _end(text: np.ndarray) -> tuple[int, bytes]:
    """A key that differs for nearly all texts."""
    return len(text), text[-KEY_TOKENS:].tobytes()
