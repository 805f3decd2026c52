"""A lookup method as a proposer of vLLM (`custom_class`), from a folder of `spectrain.export method=...`.

    SPECTRAIN_LOOKUP=exported/sssd vllm serve <target> --speculative-config '{"method": "custom_class",
      "model": "spectrain.serving.vllm_proposer.LookupProposer", "num_speculative_tokens": 8}'

vLLM constructs it with its VllmConfig and calls `propose` after each step of the target. vLLM itself is not imported.
It names no requests: they stand in rows, which it moves as others join and leave. So what a method keeps of a request
is found again by the request's text; one that is not found is read anew. Drafts are chains, the likeliest branch of
the tree that the method proposes in our own loop. Whatever is proposed, vLLM's target verifies it.

Letters: R rows of vLLM's arrays, L its longest text, n active rows, T tokens that a method looks at.
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
from transformers import AutoTokenizer

from spectrain.decoding import tokenizer_fingerprint
from spectrain.decoding.errors import UserError, check_whole
from spectrain.methods.loading import open_lookup
from spectrain.methods.lookup import RowState
from spectrain.methods.sssd import Sssd
from spectrain.models.artifacts import LookupFacts, check_tokenizer, read_lookup_facts
from spectrain.serving.requests import Memory

log = logging.getLogger(__name__)

VARIABLE = "SPECTRAIN_LOOKUP"  # environment variable that names the folder
KEY = "spectrain_lookup"  # likewise, in vLLM's --additional-config
WARM_TOKENS = 32


class LookupProposer:
    """What vLLM asks for drafts.

    Args:
        vllm_config: `speculative_config.num_speculative_tokens`, `model_config.max_model_len`, `.tokenizer` and
            `additional_config` are read.

    Raises:
        UserError: no folder is named, it holds no lookup method, or it is for another tokenizer than the target's.
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
        self.drafter = open_lookup(folder, facts, target=None)
        self.read_tokens = self.drafter.options.datastore_prefix if isinstance(self.drafter, Sssd) else 1  # T
        self.memory = Memory()
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
            sampled_token_ids: of each row the tokens of this step; none where the prompt is not read to its end yet.
            num_tokens_no_spec: [R] int32, tokens of each row, those of this step included.
            token_ids_cpu: [R, L] int32, the texts; what lies behind a row's tokens is rubbish.
            slot_mappings: not read.

        Returns:
            A list a row, of at most num_speculative_tokens tokens; empty where nothing is known to follow.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        rows, texts, rooms = [], [], []
        for row, sampled in enumerate(sampled_token_ids):
            n_tokens = int(num_tokens_no_spec[row])
            room = min(self.draft_tokens, self.max_model_len - n_tokens)  # no draft past the longest text
            if len(sampled) and room > 0:
                rows.append(row)
                texts.append(token_ids_cpu[row, :n_tokens])
                rooms.append(room)
        states = self.memory.states(rows, texts, [len(sampled_token_ids[row]) for row in rows], self._read)
        known = [i for i, state in enumerate(states) if state is not None]
        if known:
            chains = self._draft([states[i] for i in known], [texts[i] for i in known], [rooms[i] for i in known])
            for i, chain in zip(known, chains, strict=True):
                drafts[rows[i]] = chain
        return drafts

    def load_model(self, *args: object, **kwargs: object) -> None:
        """vLLM calls it of every proposer; there are no weights."""

    def _read(self, text: np.ndarray, state: RowState | None) -> RowState | None:
        """A state after these tokens, a new one where there was none; None where one is no token of the vocabulary.

        Compiled lookups trust the tokens that they are given. vLLM has placeholders, for images for instance.
        """
        if len(text) and not (int(text.min()) >= 0 and int(text.max()) < self.vocab_size):
            return None
        tokens = text.tolist()
        if state is None:
            return self.drafter.new_row(tokens)
        state.extend(tokens)
        return state

    def _draft(self, states: list[RowState], texts: list[np.ndarray], rooms: list[int]) -> list[list[int]]:
        tails = np.zeros((len(texts), self.read_tokens), dtype=np.int64)
        lengths = [min(self.read_tokens, len(text)) for text in texts]
        for tail, text, length in zip(tails, texts, lengths, strict=True):
            tail[:length] = text[len(text) - length :]
        self.drafter.rows = states
        tree = self.drafter.propose(Batch(torch.from_numpy(tails), lengths, [room + 1 for room in rooms]))
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        return [likeliest_branch(*row) for row in zip(tokens, parents, strict=True)]

    def _warm_up(self) -> None:
        """Has everything compiled before the first request waits for it."""
        texts = np.tile(np.arange(WARM_TOKENS, dtype=np.int32) % min(4, self.vocab_size), (2, 1))
        longest, self.max_model_len = self.max_model_len, WARM_TOKENS + self.draft_tokens
        for n_tokens in (WARM_TOKENS - 1, WARM_TOKENS):  # read, then extended
            self.propose([[0], [0]], np.full(2, n_tokens, dtype=np.int32), texts)
        self.max_model_len, self.memory = longest, Memory()


@dataclass(frozen=True)
class Batch:
    """The rows of a step as a lookup method reads them of a `Context`: by the ends of their texts."""

    tokens: Tensor  # [n, T] int64
    n_tokens: list[int]  # of each row, up to T
    room: list[int]  # tokens that each may still emit: those drafted, and one

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def n_rows(self) -> int:
        return len(self.n_tokens)


def likeliest_branch(tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Of one row's tree, root first, each node's first child: methods add their best guesses first."""
    branch, node = [], 0
    for child in range(1, len(tokens)):
        if parents[child] == node:
            branch.append(tokens[child])
            node = child
    return branch


def folder_of(vllm_config: Any) -> Path:
    """The exported folder that the user named. Raises UserError where there is none."""
    more = getattr(vllm_config, "additional_config", None)
    named = (more.get(KEY) if isinstance(more, dict) else None) or os.environ.get(VARIABLE)
    if not named:
        raise UserError(
            f"no lookup method is named; give its folder (of python -m spectrain.export method=...) as {VARIABLE}="
            f'<folder>, or as --additional-config \'{{"{KEY}": "<folder>"}}\''
        )
    return Path(named)


def check_model(folder: Path, facts: LookupFacts, model: Any) -> None:
    """Raises UserError where the served model has other tokens than the export was made of.

    A method without a datastore has none of its own.
    """
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
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers, tokenizers and the hub each raise their own types here
        log.warning("the tokenizer %s cannot be compared with that of %s (%s)", name, folder, type(error).__name__)
        return
    check_tokenizer(folder, facts, tokenizer_fingerprint(tokenizer), str(name))
