"""Pruned initialisation of EAGLE-3 drafters: the target's last block, with what it reads fitted as SPIRe's input is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from spectrain.models.drafter_model import plain_shape
from spectrain.models.eagle3 import Eagle3Drafter
from spectrain.models.pruned_init import InputFit
from spectrain.target.hidden_states import Features
from spectrain.target.lean import block_state, shape_of
from spectrain.target.sharded import whole

NEW_SHARE = 0.1  # by which the outputs of random weights are scaled


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
