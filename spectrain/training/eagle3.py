"""Trains EAGLE-3 drafters by the training-time test (EAGLE-3, Li et al. 2025, section 3.2).

With init=pruned one begins as the target's last block, with what it reads fitted as SPIRe's input is.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from spectrain.errors import UserError
from spectrain.methods.eagle3 import Eagle3
from spectrain.models.drafter_model import FusingDrafter, plain_shape
from spectrain.models.eagle3 import Eagle3Config, Eagle3Drafter, default_layers, unrolled
from spectrain.models.pruned_init import NEW, InputFit
from spectrain.target.hidden_states import Features
from spectrain.target.lean import block_state, shape_of
from spectrain.target.sharded import whole
from spectrain.training.data import RowBatch, Rows
from spectrain.training.fusing import FusingExperiment, FusingTraining

NEW_SHARE = 0.1  # by which the outputs of random weights are scaled


class Eagle3Training(FusingTraining):
    """Trains an EAGLE-3 drafter: a token is learned at each depth at which a draft reaches it."""

    def input_fit(self) -> InputFit:
        return FusionFit(self.drafter, self.target.n_layer - 1)

    def states(self, batch: RowBatch, captured: Tensor, first_root: int) -> Tensor:
        """Return the inputs of the unembedding [B, R, k, D] of each draft."""
        k = self.drafter.config.k
        drafts = unrolled(self.drafter, batch.tokens, captured, k, self.roots_every, first_root, batch.starts)
        return torch.stack(drafts, dim=2)


class Eagle3Experiment(FusingExperiment):
    """An EAGLE-3 drafter. Its block is a Llama's, whatever the target's are."""

    exports, drafter_type, method = "eagle3", Eagle3Drafter, Eagle3
    of_config = ("unembedding", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")

    def training(self, drafter: Eagle3Drafter, is_new: bool) -> Eagle3Training:
        own = self.own
        if own.roots_every > own.ttt_steps:
            raise UserError(f"roots_every={own.roots_every} is more than ttt_steps={own.ttt_steps}; lower it")
        return Eagle3Training(*self.of_training(drafter), own.roots_every, own.decay, own.init == "pruned")

    def new(self, rows: Rows) -> FusingDrafter:
        drafter = super().new(rows)
        if self.own.init == "pruned":
            copy_last_block(drafter, self.target.model)
        return drafter

    def shape(self, kept: Tensor | None = None) -> Eagle3Config:
        """The config of the drafter for this target, which can draft the tokens `kept` [K]; None: all."""
        own, n_layer = self.own, self.target.n_layer
        of_run = {"k": own.ttt_steps, "draft_vocab": None if kept is None else len(kept)}
        if own.init not in NEW:
            before = self.before.config
            return replace(before, window_tokens=own.window_tokens or before.window_tokens, **of_run)
        options = {name: getattr(own, name) for name in ("window_tokens", *self.of_config)}
        return Eagle3Config(self.block_shape(), self.layers_or(default_layers(n_layer)), **options, **of_run)


class FusionFit(InputFit):
    """Fits what a new EAGLE-3 drafter's block begins with to the input of the target's last block, which it copies.

    The states of `target_layers` one position earlier and the token's normed embedding say the input of that block:

        y_t ~ A c_(t-1) + B norm(e_t)

    A becomes `fc`. In the block tokens reach the residual stream by values alone. So the heads that share the first
    keys and values attend to their own token, and its values and outputs become B, cut to their width.
    """

    SCORE = 12.0  # of a token's own key, of which softmax makes nearly 1

    def __init__(self, drafter: Eagle3Drafter, layer: int) -> None:
        super().__init__(drafter, layer)
        self.layers = (*drafter.config.target_layers, layer)

    def states(self, said: Features) -> Tensor:
        return said.captured[:, :, :-1].flatten(2)

    def of_tokens(self, tokens: Tensor) -> Tensor:
        e = super().of_tokens(tokens).double()
        return F.rms_norm(e, e.shape[-1:], eps=self.drafter.config.shape.rms_norm_eps)

    @torch.no_grad()
    def finish(self) -> None:
        shape, block = self.drafter.config.shape, self.drafter.blocks[0]
        d, e, n_sharing = shape.hidden_size, shape.head_dim, shape.n_head // shape.n_kv_head
        of_token, of_states = self.found().split([d, self.gram.shape[0] - d], dim=1)  # B, A
        self.drafter.fc.weight.copy_(of_states)
        values, vectors = torch.linalg.eigh(self.gram[:d, :d])
        root = vectors * values.clamp_min(values.max() * 1e-9).sqrt()  # B is cut where the text's tokens notice least
        u, s, v = torch.linalg.svd(of_token @ root, full_matrices=False)
        into, out = torch.linalg.lstsq(root.T, v[:e].T).solution.T, u[:, :e] * s[:e]  # B ~ out @ into
        scale = (out.norm() / into.norm()).sqrt()
        drawn = torch.randn(d, e, dtype=root.dtype, generator=torch.Generator().manual_seed(0))  # alike on all ranks
        alike = torch.linalg.qr(drawn.to(root.device))[0].T
        alike *= (self.SCORE * e**0.5 / e) ** 0.5
        qkv = block.qkv.weight
        first_key, first_value = shape.n_head * e, (shape.n_head + shape.n_kv_head) * e
        for row in (*range(0, n_sharing * e, e), first_key, first_value):
            qkv[row : row + e] = 0
            qkv[row : row + e, :d] = into * scale if row == first_value else alike
        block.output.weight[:, : n_sharing * e] = (out / scale / n_sharing).repeat(1, n_sharing)


def copy_last_block(drafter: Eagle3Drafter, target: PreTrainedModel) -> None:
    """Copy what an EAGLE-3 drafter's block has in common with the target's last one; what is new adds little at first.

    That is attention over states where the target's is a plain Llama's, and as much of a plain MLP as both have.
    """
    block, d, of_target = drafter.blocks[0], drafter.config.shape.hidden_size, shape_of(target)
    state = block_state({name: whole(one) for name, one in target.model.layers[-1].state_dict().items()})
    is_plain, n = plain_shape(of_target) == of_target, 0
    with torch.no_grad():
        if is_plain:
            block.qkv.weight[:, d:] = state["qkv.weight"]
            block.hidden_norm.weight.copy_(state["input_norm.weight"])
            block.output.weight.copy_(state["output.weight"])
        else:
            block.output.weight *= NEW_SHARE
        if of_target.hidden_act == "silu" and not of_target.mlp_bias:
            n = min(of_target.intermediate_size, drafter.config.shape.intermediate_size)
            block.mlp_norm.weight.copy_(state["mlp_norm.weight"])
            for own, its in zip(block.gate_up.weight.chunk(2), state["gate_up.weight"].chunk(2), strict=True):
                own[:n] = its[:n]
            block.down.weight[:, :n] = state["down.weight"][:, :n]
        block.down.weight[:, n:] *= NEW_SHARE
