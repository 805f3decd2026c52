"""A lookup method as a proposer of vLLM (`custom_class`), from a folder of `spectrain.export method=...`.

    SPECTRAIN_LOOKUP=exported/sssd vllm serve <target> --speculative-config '{"method": "custom_class",
      "model": "spectrain.serving.vllm_proposer.LookupProposer", "num_speculative_tokens": 8}'

vLLM constructs it with its VllmConfig and calls `propose` after each step of the target. vLLM itself is not imported.
It does not name its requests, and moves them between rows as others join and leave. So a method's state of a request is
found by the request's text, or made anew. Drafts are chains: the likeliest branch of the tree that the method proposes
in our own loop. vLLM's target verifies them.

Letters: R rows of vLLM's arrays, L its longest text, n active rows, T tokens that a method looks at.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
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

log = logging.getLogger(__name__)

VARIABLE = "SPECTRAIN_LOOKUP"  # environment variable that names the folder
KEY = "spectrain_lookup"  # likewise, in vLLM's --additional-config
WARM_TOKENS = 32
KEPT_CALLS = 8  # calls for which a request outside the batch is kept: it may have been preempted
KEY_TOKENS = 8  # last tokens by which a moved request is looked up, before its whole text is compared

Read = Callable[[np.ndarray, RowState | None], RowState | None]


class LookupProposer:
    """The object that vLLM asks for drafts.

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
            sampled_token_ids: of each row the tokens of this step; none while its prompt is being read.
            num_tokens_no_spec: [R] int32, tokens of each row, including those of this step.
            token_ids_cpu: [R, L] int32, the texts; entries past a row's tokens are meaningless.
            slot_mappings: ignored.

        Returns:
            One list per row, of at most num_speculative_tokens tokens; empty if no continuation is known.
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
        """Do nothing: vLLM calls this on every proposer, but there are no weights."""

    def _read(self, text: np.ndarray, state: RowState | None) -> RowState | None:
        """Return the state after these tokens, a new one if there was none; None if a token is not in the vocabulary.

        Compiled lookups do not check tokens, and vLLM has placeholders, for example for images.
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
        """Compile everything before the first request waits for it."""
        texts = np.tile(np.arange(WARM_TOKENS, dtype=np.int32) % min(4, self.vocab_size), (2, 1))
        longest, self.max_model_len = self.max_model_len, WARM_TOKENS + self.draft_tokens
        for n_tokens in (WARM_TOKENS - 1, WARM_TOKENS):  # read, then extended
            self.propose([[0], [0]], np.full(2, n_tokens, dtype=np.int32), texts)
        self.max_model_len, self.memory = longest, Memory()


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
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers, tokenizers and the hub each raise their own types here
        log.warning("the tokenizer %s cannot be compared with that of %s (%s)", name, folder, type(error).__name__)
        return
    check_tokenizer(folder, facts, tokenizer_fingerprint(tokenizer), str(name))


@dataclass
class Request:
    """A method's state of one request."""

    state: RowState
    text: np.ndarray  # [capacity] int32: the tokens that the state has read, then free entries
    n_tokens: int
    row: int  # of the last call that included it
    seen: int  # number of that call

    def begins(self, text: np.ndarray) -> bool:
        """Whether `text` begins with the tokens that were read."""
        n_tokens = self.n_tokens
        return n_tokens <= len(text) and np.array_equal(self.text[:n_tokens], text[:n_tokens])

    def keep(self, text: np.ndarray) -> None:
        """Record that the state has read all of `text`."""
        if len(text) > len(self.text):
            longer = np.empty(2 * len(text), dtype=np.int32)
            longer[: self.n_tokens] = self.text[: self.n_tokens]
            self.text = longer
        self.text[self.n_tokens : len(text)] = text[self.n_tokens :]
        self.n_tokens = len(text)


class Memory:
    """The states of requests, found by their last row, else by their text.

    A state depends on the text alone, so any state that has read the beginning of a row's text serves that row.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._calls = 0

    def states(
        self, rows: Sequence[int], texts: Sequence[np.ndarray], new: Sequence[int], read: Read
    ) -> list[RowState | None]:
        """Return the state of each row after all of its text; None where the text cannot be read.

        Args:
            rows: numbers of the rows in the engine's arrays.
            texts: of each row, int32.
            new: number of tokens that this step added to each row.
            read: (tokens, state or None) -> the state after them, or None if they cannot be read.
        """
        self._calls += 1
        by_row = {request.row: request for request in self._requests}
        by_end: dict[tuple, list[Request]] = {}
        for request in self._requests:
            by_end.setdefault(_end(request.text, request.n_tokens), []).append(request)
        taken: set[int] = set()
        states = []
        for row, text, n_new in zip(rows, texts, new, strict=True):
            found = None
            for request in (by_row.get(row), *by_end.get(_end(text, len(text) - n_new), ())):
                if request is not None and id(request) not in taken and request.begins(text):
                    found = request
                    break
            if found is None:
                state = read(text, None)
                if state is not None:
                    found = Request(state, text.astype(np.int32), len(text), row, self._calls)
                    self._requests.append(found)
            else:
                state = read(text[found.n_tokens :], found.state)
                found.keep(text)
            if found is not None:
                taken.add(id(found))
                found.row, found.seen = row, self._calls if state is not None else -KEPT_CALLS
            states.append(state)
        self._requests = [request for request in self._requests if self._calls - request.seen < KEPT_CALLS]
        return states


def _end(text: np.ndarray, n_tokens: int) -> tuple[int, bytes]:
    """A key of the text's first n_tokens that differs for nearly all texts."""
    return n_tokens, text[max(0, n_tokens - KEY_TOKENS) : max(0, n_tokens)].astype(np.int32).tobytes()
