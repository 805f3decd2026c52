"""An exported lookup method as serving engines use it: they hand over texts, and it answers with draft trees."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from spectrain.drafting.lookup import RowState
from spectrain.errors import UserError
from spectrain.methods.registry import open_export
from spectrain.methods.sssd import Sssd
from spectrain.models.artifacts import LookupFacts, check_tokenizer, read_lookup_facts
from spectrain.target import DraftTree, tokenizer_fingerprint
from spectrain.target.loading import read_tokenizer

log = logging.getLogger(__name__)

VARIABLE = "SPECTRAIN_LOOKUP"  # environment variable that names the folder
KEY = "spectrain_lookup"  # likewise, in vLLM's --additional-config


class ExportedLookup:
    """A lookup method of `spectrain.export` for a served model, whose tokenizer may be a name; None: unknown.

    `options` replace those that were exported. Raises UserError where folder and model do not fit.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        tokenizer: PreTrainedTokenizerBase | str | None,
        options: Mapping = MappingProxyType({}),
    ) -> None:
        facts = read_lookup_facts(folder)
        if vocab_size < facts.vocab_size:
            raise UserError(
                f"{folder} has tokens up to {facts.vocab_size}, but the served model has a vocabulary of {vocab_size}; "
                "export one for it with python -m spectrain.export method=... target=..."
            )
        if facts.datastore and tokenizer is not None:
            check_served(folder, facts, tokenizer)
        self.vocab_size = facts.vocab_size
        self.drafter = open_export(folder, None, options)
        self.read_tokens = self.drafter.options.datastore_prefix if isinstance(self.drafter, Sssd) else 1  # T
        tokens = [i % min(4, self.vocab_size) for i in range(32)]
        states = [self.drafter.new_row(tokens[:-1]) for _ in range(2)]
        for state in states:  # compile everything before the first request waits for it
            state.extend(tokens[-1:])
        self.trees(states, [np.array(tokens)] * 2, [8, 8])
        log.info("drafting by %s, from %s", facts.method, folder)

    def knows(self, tokens: np.ndarray) -> bool:
        """Whether all are tokens: compiled lookups do not check them, and engines have placeholders, as for images."""
        return not len(tokens) or 0 <= tokens.min() <= tokens.max() < self.vocab_size

    def trees(self, states: Sequence[RowState], texts: Sequence[np.ndarray], rooms: Sequence[int]) -> DraftTree:
        """The trees of rows whose states have read their texts, up to `rooms` tokens deep. Only ends of texts count."""
        lengths = [min(self.read_tokens, len(text)) for text in texts]
        tails = np.zeros((len(texts), self.read_tokens), dtype=np.int64)
        for tail, text, length in zip(tails, texts, lengths, strict=True):
            tail[:length] = text[len(text) - length :]
        self.drafter.rows = list(states)
        # In place of a `Context` what lookup methods read of one; a row may emit the drafted tokens, and one more.
        step = {"tokens": torch.from_numpy(tails), "n_tokens": lengths, "room": [room + 1 for room in rooms]}
        return self.drafter.propose(SimpleNamespace(**step, n_rows=len(texts), device=torch.device("cpu")))


def likeliest_branch(tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
    """Follow the first child of each node in one row's tree: methods add their best guesses first."""
    branch, node = [], 0
    for child in range(1, len(tokens)):
        if parents[child] == node:
            branch.append(tokens[child])
            node = child
    return branch


def folder_of(named: str | None = None) -> Path:
    """The exported folder that an engine's config names, else the variable. Raise UserError if neither does."""
    named = named or os.environ.get(VARIABLE)
    if not named:
        raise UserError(f"no lookup method is named; give its folder (of spectrain.export) as the variable {VARIABLE}")
    return Path(named)


def check_served(folder: Path, facts: LookupFacts, tokenizer: PreTrainedTokenizerBase | str) -> None:
    """Raise UserError if the served model has another tokenizer than the export."""
    name = getattr(tokenizer, "name_or_path", tokenizer)
    try:
        found = tokenizer_fingerprint(read_tokenizer(name) if isinstance(tokenizer, str) else tokenizer)
    except Exception as error:  # transformers, tokenizers and the hub each raise their own types here
        log.warning("the tokenizer %s cannot be compared with that of %s (%s)", name, folder, type(error).__name__)
        return
    check_tokenizer(folder, facts, found, str(name))
