"""What every drafter that is made of our own blocks has: tables that may be the target's, and a draft vocabulary."""

from __future__ import annotations

import copy
import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spectrain.target.llama import KeysValues, LlamaShape, Rope, grouped
from spectrain.target.target import TargetModel

TABLE_TOKENS = 8192  # tokens whose inputs are computed at a time


@dataclass(frozen=True)
class TargetTables:
    """The target's embedding and unembedding, where a drafter has none of its own. They are never copied with it."""

    target: TargetModel

    @property
    def embedding(self) -> Tensor:
        """[V, D], in the dtype that the target keeps it in."""
        return self.target.model.get_input_embeddings().weight

    @property
    def unembedding(self) -> Tensor:
        """[V, D], in the dtype that the target computes in."""
        return self.target.unembedding

    def unembedding_layer(self, kept: Tensor | None) -> nn.Linear:
        """Return the unembedding as a layer, in the dtype that the target keeps it in.

        It is over the same memory, but for the rows `kept` [K] int64 alone, where these are given.
        """
        weight = self.target.model.get_output_embeddings().weight
        weight = weight if kept is None else weight[kept.to(weight.device)]
        layer = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
        layer.weight = nn.Parameter(weight.detach(), requires_grad=False)  # of its own: to move it moves no target
        return layer

    def __deepcopy__(self, memo: dict) -> TargetTables:
        return self


class DrafterModel(nn.Module):
    """A stack of the target's kind of blocks between an input and an unembedding.

    It is made of its config and the target, whose embedding and unembedding it reads where it has none of its own. A
    kind fills `blocks`, `norm`, `rope`, and where they are its own `embed_tokens` and `lm_head`. Its `config` has at
    least `shape`, `draft_vocab`, `previous_state`, `feedback`, and what a token sees (`drafting.window_keys.Window`).
    """

    blocks: nn.ModuleList  # of `LlamaBlock`
    norm: nn.RMSNorm
    rope: Rope
    tables: TargetTables | None  # None: it has tables of its own, or is not run
    kept: Tensor | None  # [K] int64, the tokens that it can draft, the most frequent ones first; None: all
    recomputes = False  # training: a block's activations are computed again for the backward pass, not kept
    # Whether a token is read beside the state of the position before it, by whose position it then counts (EAGLE-3).
    # What is kept of a text needs the token behind each state, and blocks say how programs compute their inputs.
    pairs = False
    in_programs = True  # whether a CPU runs it by programs: token by token, with memories that the blocks norm
    normed_states = True  # whether final states, which the next token may read, are normed already

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """Return what a token adds to the input x^0 of the first block, [.., D] for tokens [..] int64."""

    @abstractmethod
    def joined(self, x: Tensor, previous: Tensor | None) -> Tensor:
        """Return the inputs x^0 [.., D] of the first block, given those of `embed` and final states before them."""

    @abstractmethod
    def memories(self, states: list[Tensor]) -> list[Tensor]:
        """Return what later tokens attend to of each block's tokens, given x^0 .. x^n_layer of them, [R, n, D] each.

        Only where the config has `feedback`; else it is the input of the block.
        """

    def step(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        past: Sequence[KeysValues],
        mask: Tensor,
        last: bool = False,
        drafted: list[KeysValues] | None = None,
    ) -> tuple[Tensor, list[KeysValues]]:
        """Run all blocks over tokens that do not see one another, given their inputs x [R, n, D].

        For `rope`, `mask`, `past` and what is `drafted` since, of each block, see `LlamaBlock.forward`. If `last`, no
        later token will see these tokens, so their memories are not computed. Returns the final states [R, n, D], and
        for each block the K/V of the tokens' memories.
        """
        states, owns, mask = [x], [], grouped(mask, self.config.shape)
        for block, keys_values, since in zip(self.blocks, past, drafted or [None] * len(past), strict=True):
            x, own = self.run(block, x, rope, keys_values, mask, since)
            states.append(x)
            owns.append(own)
        if self.config.feedback and not last:
            owns = self.run(self.of_memories, states, rope)
        return self.state_of(x), owns

    def of_memories(self, states: list[Tensor], rope: tuple[Tensor, Tensor]) -> list[KeysValues]:
        """Return for each block K/V of the memories of tokens with these states; see `memories`."""
        return [block.keys_values(m, rope) for block, m in zip(self.blocks, self.memories(states), strict=True)]

    def read_target(self, captured: Tensor, following: Tensor | None) -> tuple[list[Tensor], Tensor]:
        """Return the memories of context, [.., D] for each block, and what the next token reads as the state before it.

        Args:
            captured: [.., C, D] of the target, the `captured_layers` of the config.
            following: [..] int64, the tokens behind these states, where it `pairs`; else None.
        """
        return [captured[..., i, :] for i in range(len(self.blocks))], captured[..., -1, :]

    def add_output(self, config: Any, target: TargetModel | None) -> None:
        """Keep config and tables, and add what follows the blocks: norm, `lm_head` if it has its own, `kept`, rope."""
        shape, draft_vocab = config.shape, config.draft_vocab
        self.config, self.tables = config, TargetTables(target) if target else None
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        if config.unembedding == "trained":
            self.lm_head = nn.Linear(shape.hidden_size, draft_vocab or shape.vocab_size, bias=False)
        self.register_buffer("kept", torch.arange(draft_vocab) if draft_vocab else None)
        self.rope = Rope(shape)

    def state_of(self, x: Tensor) -> Tensor:
        """Return the final states [.., D] of the outputs of the last block."""
        return self.norm(x) if self.normed_states else x

    def unembedded(self, states: Tensor) -> Tensor:
        """Return what the unembedding takes of final states [.., D]."""
        return states if self.normed_states else self.norm(states)

    @property
    def is_ranked(self) -> bool:
        """Whether the order of `kept` says which tokens are frequent. Other projects' are in the order of their ids."""
        return self.kept is not None and (self.kept.is_meta or bool((self.kept.diff() < 0).any()))

    @property
    def unembedding(self) -> Tensor:
        """[V, D], or the K rows of the tokens `kept`."""
        if hasattr(self, "lm_head"):
            return self.lm_head.weight
        whole = self.tables.unembedding
        return whole if self.kept is None else whole[self.kept.to(whole.device)]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [.., V] of final hidden states [.., D], -inf for tokens that it cannot draft."""
        return self.spread(self.kept_logits(hidden))

    def kept_logits(self, hidden: Tensor) -> Tensor:
        """The same of the tokens `kept` alone, [.., K]."""
        hidden = self.unembedded(hidden)
        if hasattr(self, "lm_head"):
            return self.lm_head(hidden)
        return F.linear(hidden, self.unembedding.to(hidden.dtype))

    def spread(self, logits: Tensor, others: float = -torch.inf) -> Tensor:
        """Put logits [.., K] of the tokens `kept` at their places among all, [.., V], where the others have a value."""
        if self.kept is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.config.shape.vocab_size), others)
        return whole.index_copy_(-1, self.kept, logits)

    def run(self, function: Callable, *inputs: object) -> object:
        """Call `function(*inputs)`. If the drafter `recomputes`, only the inputs are kept for the backward pass."""
        if self.recomputes and torch.is_grad_enabled():
            return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)  # nothing is drawn
        return function(*inputs)

    def input_table(self, dtype: torch.dtype) -> Tensor:
        """[V, D]: the inputs of all tokens, as `embed` computes them."""
        tokens = torch.arange(self.config.shape.vocab_size, device=self.norm.weight.device)
        return torch.cat([self.embed(part) for part in tokens.split(TABLE_TOKENS)]).to(dtype)

    def with_modules(self, modules: Mapping[str, nn.Module]) -> Self:
        """Return the drafter with other modules of these names; all else is shared."""
        other = copy.copy(self)
        other._modules = {**self._modules, **modules}
        return other

    def held_to(self, n_tokens: int | None) -> Self:
        """Return the drafter as one that drafts the first n of its tokens alone (None: all), which it has by number.

        The order decides which token a random number draws, so it must be the one of the whole vocabulary. All but a
        trained unembedding is shared.
        """
        kept, rows = self.kept[:n_tokens].sort()
        return self._with_tokens(kept, rows)

    def cut_to(self, n_tokens: int) -> Self:
        """Return the drafter with the first n of its tokens alone, in their order, to be trained further."""
        return self._with_tokens(self.kept[:n_tokens], torch.arange(n_tokens, device=self.kept.device))

    def _with_tokens(self, kept: Tensor, rows: Tensor) -> Self:
        """Return the drafter with the tokens `kept` [K], whose rows its own unembedding has; see `held_to`."""
        other = self.with_modules({})
        other.config = dataclasses.replace(self.config, draft_vocab=len(kept))
        other._buffers = {**self._buffers, "kept": kept}
        if hasattr(self, "lm_head"):
            head = nn.Linear(self.lm_head.in_features, len(kept), bias=False, device="meta")
            head.weight = nn.Parameter(self.lm_head.weight.detach()[rows], self.lm_head.weight.requires_grad)
            other._modules["lm_head"] = head
        return other


@dataclass(frozen=True)
class FusingConfig:
    """The config of a drafter that reads states of several layers of the target together."""

    shape: LlamaShape  # of its blocks; width and vocabulary are the target's
    target_layers: tuple[int, ...]  # blocks of the target whose inputs it reads, ascending

    # What `drafting` asks of every drafter.
    sink_tokens, own_key, previous_state, feedback = 0, True, False, False

    def __post_init__(self) -> None:
        shape = dataclasses.replace(self.shape, tie_embeddings=False)  # its tables are never one
        object.__setattr__(self, "shape", shape)

    @property
    def block_layers(self) -> tuple[int, ...]:
        """Blocks of the target whose inputs the drafter reads."""
        return self.target_layers

    captured_layers = block_layers

    def sees_itself(self, others: Tensor) -> Tensor:
        return torch.ones_like(others[..., 0])


class FusingDrafter(DrafterModel):
    """A drafter that reads the target's embedding as it is, and states of several of its layers together."""

    config_type: type[FusingConfig]

    def embed(self, tokens: Tensor) -> Tensor:
        table = self.embed_tokens.weight if hasattr(self, "embed_tokens") else self.tables.embedding
        return F.embedding(tokens, table).to(self.norm.weight.dtype)

    def input_table(self, dtype: torch.dtype) -> Tensor:
        """The target's embedding itself, whatever its dtype is: `embed` converts what it reads of it."""
        return self.tables.embedding


def plain_shape(shape: LlamaShape, qk_norm: bool = False) -> LlamaShape:
    """Return the dimensions of a target's blocks without what they have beyond a Llama's, as engines load drafters."""
    plain = {"qkv_bias": False, "output_bias": False, "mlp_bias": False, "qk_norm": qk_norm, "layer_types": ()}
    rope = shape.rope_parameters.get("full_attention", shape.rope_parameters)  # of Gemma 3, which has several
    return dataclasses.replace(shape, rope_parameters=rope, hidden_act="silu", **plain)
