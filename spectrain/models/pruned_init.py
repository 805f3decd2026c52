"""Pruned initialisation: a SPIRe drafter from the target's own modules (SPIRe, section 3.2).

The last `n_layer` blocks and the final norm are copied, as are embedding and unembedding where the drafter has its own.

An input other than `tied` is what the first draft block reads of a token. It is fitted by ridge regression, because the
block was copied from a late block of the target, whose input has passed all blocks before it. W e(token), with the
target's embedding e, comes as near to that input as a linear map of the token alone can:

    W = argmin sum_t |W e_t - y_t|^2 + ridge,    y_t: the target's own input of that block at token t.

With `previous_state`, W2 of the target's final state one token earlier is fitted with it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from spectrain.errors import UserError
from spectrain.models.drafter_model import DrafterModel
from spectrain.models.spire import SpireConfig, SpireDrafter
from spectrain.target.hidden_states import Features
from spectrain.target.lean import block_state, shape_of
from spectrain.target.sharded import whole
from spectrain.target.target import TargetModel

NEW = ("pruned", "random")  # what a new drafter starts from
FIT_TOKENS, FIT_TOKENS_AT_ONCE = 24_000, 4096
RIDGE = 1e-2  # penalty of a weight, as a share of its input's sum of squares


def last_layers(target: PreTrainedModel, n_layer: int | str) -> tuple[int, ...]:
    """Return the indices of the target's last `n_layer` blocks, or "quarter". Raise UserError if it has fewer."""
    n_target = target.config.num_hidden_layers
    n_layer = max(1, n_target // 4) if n_layer == "quarter" else n_layer
    if not 1 <= n_layer <= n_target:
        raise UserError(f"n_layer={n_layer} must be 1..{n_target}, the number of the target's blocks")
    return tuple(range(n_target - n_layer, n_target))


def new_drafter(target: TargetModel, config: SpireConfig, init: str, kept: Tensor | None = None) -> SpireDrafter:
    """Return a new drafter to train, in float32, whose config was made with `shape_of(target.model)`.

    `kept` [K] int64 are the tokens that it can draft, where the config has a `draft_vocab` K; None: the first ones.
    `init` is "pruned", which copies the target's modules, or "random", see `draw_weights`.
    """
    drafter, model = SpireDrafter(config, target), target.model
    if kept is not None:
        drafter.kept.copy_(kept)
    if init == "random":
        drafter.apply(draw_weights)
        return drafter
    if config.input != "projected":
        drafter.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    for block, layer in zip(drafter.blocks, last_layers(model, config.n_layer), strict=True):
        state = {name: whole(one) for name, one in model.model.layers[layer].state_dict().items()}
        block.load_state_dict(block_state(state))
        if config.shape.layer_types:  # scores are divided by another number than the root of the width of a head
            block.query_norm.weight.data *= model.model.layers[layer].self_attn.scaling * config.shape.head_dim**0.5
    copy_ends(drafter, model)
    return drafter


def copy_ends(drafter: DrafterModel, target: PreTrainedModel) -> None:
    """Begin with the target's last norm and, where the drafter has its own, with its unembedding."""
    drafter.norm.load_state_dict(target.model.norm.state_dict())
    if shape_of(target).layer_types:
        drafter.norm.weight.data += 1  # which Gemma's norms add themselves
    if drafter.config.unembedding == "trained":
        drafter.lm_head.load_state_dict(drafter.tables.unembedding_layer(drafter.kept).state_dict())


def draw_weights(module: nn.Module) -> None:
    """Draw the weights of a layer or table anew, from a normal distribution of std 1 / sqrt(columns of the weight).

    The usual std of 0.02 is far too small for narrow models: in the few steps that a drafter is trained for, they spend
    many on growing.
    """
    if isinstance(module, nn.Linear | nn.Embedding):
        torch.nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
        if getattr(module, "bias", None) is not None:
            torch.nn.init.zeros_(module.bias)


class InputFit:
    """Fits the input of a drafter whose config has another one than `tied`, over batches that are added up.

    Args:
        drafter: whose weights `finish` writes.
        layer: the block of the target that its first block was copied from.
    """

    def __init__(self, drafter: SpireDrafter, layer: int) -> None:
        self.drafter, self.embedding = drafter, drafter.tables.embedding  # [V, D]
        self.layers = (layer,)  # whose inputs `add` needs, this one last
        self.gram = self.cross = 0.0  # float64 [inputs, inputs] and [inputs, D], once something has been added

    def states(self, said: Features) -> Tensor:
        """Return what is read of the target one position earlier, [B, L, .]."""
        return said.final_hidden if self.drafter.config.previous_state else said.final_hidden[..., :0]

    def of_tokens(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding)

    def add(self, tokens: Tensor, said: Features, starts: Tensor | None = None) -> None:
        """Add rows of tokens [B, L] int64 with the target's features of them, of `layers`.

        `starts` [B, L] int64 say where the document of each token begins; None: each row is one. The first position of
        each document is left out: there many targets have activations that are thousands of times as large, and no
        draft begins there.
        """
        starts = torch.zeros_like(tokens) if starts is None else starts
        inside = starts[:, 1:] == starts[:, :-1]
        rows = (tokens[:, 1:], self.states(said)[:, :-1], said.captured[:, 1:, -1])
        for ids, states, wanted in zip(*(one[inside].split(FIT_TOKENS_AT_ONCE) for one in rows), strict=True):
            inputs = torch.cat([self.of_tokens(ids).double(), states.double()], dim=-1)
            self.gram = self.gram + inputs.T @ inputs
            self.cross = self.cross + inputs.T @ wanted.double()

    def found(self) -> Tensor:
        """Return the weights [D, inputs] that were fitted."""
        penalty = (RIDGE * self.gram.diagonal()).clamp_min(torch.finfo(torch.float64).eps)  # of inputs that are all 0
        return torch.linalg.solve(self.gram + penalty.diag(), self.cross).T

    @torch.no_grad()
    def finish(self) -> None:
        """Write what was fitted into the drafter."""
        found = self.found()
        if self.drafter.config.previous_state:
            found, of_previous = found.chunk(2, dim=1)
            self.drafter.previous.weight.copy_(of_previous)
        if self.drafter.config.input == "projected":
            self.drafter.input.weight.copy_(found)
        else:
            self.drafter.embed_tokens.weight.copy_(F.linear(self.embedding, found.to(self.embedding.dtype)))
