"""A drafter's states over a whole text at once, teacher forced, equal to those of decoding it token by token.

An acceptance head reads these states, and the distributions that drafts are drawn from follow from them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from spectrain.errors import UserError
from spectrain.models.drafter_model import DrafterModel
from spectrain.target.fingerprint import fingerprint
from spectrain.target.target import TargetModel


class DraftStates(ABC):
    """A frozen drafter with a hidden state."""

    module: nn.Module  # holds the weights
    hidden_size: int  # D
    capture_layers: tuple[int, ...] = ()  # blocks of the target whose inputs it reads
    block_tokens: int | None = None  # of its rollouts over a text; None: it has none
    max_positions: int  # tokens of the longest text that it reads
    tokenizer: PreTrainedTokenizerBase | None = None  # None: the target's

    @abstractmethod
    def fingerprint(self) -> str: ...

    def to(self, device: torch.device) -> None:
        """Move the drafter in place."""
        self.module.to(device)

    @abstractmethod
    def hidden(self, tokens: Tensor, captured: Tensor | None, text: Tensor | None = None) -> Tensor:
        """Return the final states [B, T, D] after each token, the inputs of the unembedding.

        Args:
            tokens: [B, T] int64, padded on the right with any id.
            captured: [B, T, C, D_target] of the target on the text; None if `capture_layers` is empty.
            text: [B, T] int64, the target's own, where `tokens` has drafts in it; None: `tokens` is that text.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [M, V] over the target's vocabulary for states [M, D]."""

    def reads_drafts(self, n_tokens: int, device: torch.device | str = "cpu") -> Tensor:
        """[T] bool: positions whose token `hidden` reads as a draft; it reads the others as the target's own text."""
        positions = torch.arange(n_tokens, device=device)
        return positions >= 0 if self.block_tokens is None else positions % self.block_tokens != 0


class ModelStates(DraftStates):
    """An ordinary causal LM. Its state after a token does not depend on which earlier tokens were drafts."""

    def __init__(self, model: TargetModel, vocab_size: int) -> None:
        self.model, self.vocab_size = model, vocab_size
        self.hidden_size, self.max_positions = model.unembedding.shape[1], model.max_positions
        self.tokenizer = model.tokenizer

    @property
    def module(self) -> nn.Module:
        return self.model.model

    def to(self, device: torch.device) -> None:
        self.model.to(device)

    def fingerprint(self) -> str:
        return fingerprint(self.model.model, self.model.tokenizer)

    def hidden(self, tokens: Tensor, captured: Tensor | None = None, text: Tensor | None = None) -> Tensor:
        return self.model.features(known_to(self.model, tokens)).final_hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return in_vocabulary(self.model.logits_of(hidden), self.vocab_size)


class RolloutStates(DraftStates):
    """A drafter of our own blocks, which drafts from every `block_tokens`-th position of a text, its root."""

    def __init__(self, drafter: DrafterModel, block_tokens: int) -> None:
        if not 2 <= block_tokens <= (window := drafter.config.window_tokens):
            raise UserError(f"rollout_tokens={block_tokens} must be 2..{window}, the drafter's window_tokens")
        self.drafter, self.module, self.block_tokens = drafter, drafter, block_tokens
        self.hidden_size, self.max_positions = drafter.config.shape.hidden_size, drafter.config.shape.max_positions
        self.capture_layers = drafter.config.captured_layers


def in_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Cut logits to the vocabulary, or add tokens of probability 0: embeddings of one tokenizer may differ in size."""
    extra = vocab_size - logits.shape[-1]
    return logits if extra == 0 else F.pad(logits, (0, extra), value=-torch.inf)


def known_to(model: TargetModel, tokens: Tensor) -> Tensor:
    """Return tokens as a draft model reads them: its last one stands for those that its embedding lacks."""
    return tokens.clamp_max(model.vocab_size - 1)
