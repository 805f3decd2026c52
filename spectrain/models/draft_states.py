"""What a drafter computes over a whole text at once, teacher forced, as decoding would compute it token by token: the
states that an acceptance head reads and the distributions that drafts are drawn from.

Letters: B rows, T tokens, D hidden size of the drafter, C captured layers of the target, V the target's vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.decoding.errors import UserError, check_whole
from spectrain.decoding.fingerprint import fingerprint, module_fingerprint
from spectrain.decoding.target import TargetModel
from spectrain.models.rollout import rollout
from spectrain.models.spire import SpireDrafter


class DraftStates(ABC):
    """A frozen drafter with a hidden state."""

    kind: str  # of its export: vanilla | spire
    hidden_size: int  # D
    capture_layers: tuple[int, ...] = ()  # blocks of the target whose inputs it reads
    block_tokens: int | None = None  # of its rollouts over a text; None: it has none

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """What has the weights."""

    @abstractmethod
    def fingerprint(self) -> str:
        """16 hex digits that tell this drafter from others."""

    @abstractmethod
    def hidden(self, tokens: Tensor, captured: Tensor | None) -> Tensor:
        """Final states [B, T, D] after each token, what the unembedding takes.

        Args:
            tokens: [B, T] int64, padded on the right with any id.
            captured: [B, T, C, D_target] of the target on the text itself, where `capture_layers` are any.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [M, V] over the target's vocabulary, of states [M, D]."""

    def reads_drafts(self, n_tokens: int, device: torch.device | str = "cpu") -> Tensor:
        """Positions [T] bool whose token `hidden` reads as a draft; the others it reads as the target's own text."""
        return torch.ones(n_tokens, dtype=torch.bool, device=device)


class ModelStates(DraftStates):
    """An ordinary causal LM. Its state of a token does not depend on which tokens before it were drafts."""

    kind = "vanilla"

    def __init__(self, model: TargetModel, vocab_size: int) -> None:
        self.model, self.vocab_size = model, vocab_size
        self.hidden_size = model.model.get_output_embeddings().weight.shape[1]

    @property
    def module(self) -> nn.Module:
        return self.model.model

    def fingerprint(self) -> str:
        return fingerprint(self.model.model, self.model.tokenizer)

    def hidden(self, tokens: Tensor, captured: Tensor | None = None) -> Tensor:
        return self.model.features(tokens).final_hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return in_vocabulary(self.model.logits_of(hidden), self.vocab_size)


class SpireStates(DraftStates):
    """A SPIRe drafter, rolled out from every `block_tokens`-th position: a block's first token is a root.

    Args:
        drafter: the model.
        block_tokens: tokens of a block, the root included; a head is trained on drafts of depth 1 .. block_tokens - 1.

    Raises:
        UserError: a block is longer than the drafter's window, or too short to hold a draft.
    """

    kind = "spire"

    def __init__(self, drafter: SpireDrafter, block_tokens: int) -> None:
        check_whole("rollout_tokens", block_tokens, 2)
        if block_tokens > drafter.config.window_tokens:
            raise UserError(
                f"rollout_tokens={block_tokens} must not exceed the SPIRe drafter's window_tokens="
                f"{drafter.config.window_tokens}; lower rollout_tokens"
            )
        self.drafter, self.block_tokens = drafter, block_tokens
        self.hidden_size = drafter.config.shape.hidden_size
        self.capture_layers = drafter.config.target_layers if drafter.config.target_activations else ()

    @property
    def module(self) -> nn.Module:
        return self.drafter

    def fingerprint(self) -> str:
        return module_fingerprint(self.drafter, self.drafter.config)

    def hidden(self, tokens: Tensor, captured: Tensor | None) -> Tensor:
        return rollout(self.drafter, tokens, captured, self.block_tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.drafter.lm_head(hidden)

    def reads_drafts(self, n_tokens: int, device: torch.device | str = "cpu") -> Tensor:
        return torch.arange(n_tokens, device=device) % self.block_tokens != 0


def in_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Equal tokenizers may come with embeddings padded to other sizes: cuts, or adds tokens of probability 0."""
    extra = vocab_size - logits.shape[-1]
    return logits if extra == 0 else F.pad(logits, (0, extra), value=-torch.inf)
