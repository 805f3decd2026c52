"""A target on the lean decoder: which models it knows, how it shares their memory, and its forwards.

Letters: B rows, n tokens of a call, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spectrain.decoding.errors import UserError
from spectrain.decoding.kv_cache import KVCache
from spectrain.decoding.llama import LlamaDecoder, LlamaShape, Rope

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")  # others scale, soft-cap or norm in ways the block does not have
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # of others the frequencies change with the length of the text
FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
}
RENAMED = {  # Hugging Face's names -> ours
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.o_proj": "output",
    "self_attn.q_norm": "query_norm",
    "self_attn.k_norm": "key_norm",
    "mlp.down_proj": "down",
}


def shape_of(model: PreTrainedModel) -> LlamaShape:
    """Return the dimensions of a Llama-like model. Raise UserError for another one."""
    config = model.config
    if (family := config.model_type) not in LLAMA_LIKE:
        known = ", ".join(LLAMA_LIKE)
        raise UserError(f"target of type {family} is not computed like Llama; give one of {known}, or +exp=vanilla")
    if (rope := config.rope_parameters.get("rope_type", "default")) not in ROPE_TYPES:
        raise UserError(f"the target's RoPE is of type {rope}; SPIRe supports {', '.join(ROPE_TYPES)}")
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    return LlamaShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        n_head=config.num_attention_heads,
        n_kv_head=config.num_key_value_heads,
        head_dim=attention.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        hidden_act=config.hidden_act,
        rope_parameters=dict(config.rope_parameters),
        max_positions=config.max_position_embeddings,
        qkv_bias=attention.q_proj.bias is not None,
        output_bias=attention.o_proj.bias is not None,
        mlp_bias=mlp.gate_proj.bias is not None,
        qk_norm=hasattr(attention, "q_norm"),
        tie_embeddings=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
    )


def why_not_lean(model: PreTrainedModel) -> str | None:
    """Return why the lean decoder cannot run a model, or None where it can."""
    try:
        shape_of(model)
    except UserError as error:
        return str(error).split(";")[0]
    weights = list(model.parameters())
    if len({weight.device for weight in weights}) > 1:
        return "its layers are spread over several devices"
    if any(type(weight) is not nn.Parameter or not weight.is_floating_point() for weight in weights):
        return "its weights are quantized, or divided among ranks"
    return None


def block_state(layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the state of a Hugging Face block to that of a `LlamaBlock`. Loading fails if a tensor is left over."""
    state = dict(layer)
    for fused, parts in FUSED.items():
        for kind in ("weight", "bias"):
            found = [state.pop(f"{part}.{kind}") for part in parts if f"{part}.{kind}" in state]
            if found:
                state[f"{fused}.{kind}"] = torch.cat(found)
    renamed = {}
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        renamed[f"{RENAMED.get(module, module)}.{kind}"] = tensor
    return renamed


def lean_decoder(model: PreTrainedModel) -> LlamaDecoder:
    """Return the lean decoder of a Hugging Face model, over the same memory. Raise UserError if it is not Llama-like.

    Matrices that the decoder joins become views of the joined one in the Hugging Face model, which goes on to work.
    """
    shape = shape_of(model)
    with torch.device("meta"):
        decoder = LlamaDecoder(shape, model.config.num_hidden_layers)
    decoder.rope = Rope(shape)
    body = model.model
    for block, layer in zip(decoder.blocks, body.layers, strict=True):
        parameters = dict(layer.named_parameters())
        state = block_state({name: parameter.data for name, parameter in parameters.items()})
        block.load_state_dict(state, assign=True)
        for fused, parts in FUSED.items():
            for kind in ("weight", "bias"):
                own = [parameters[name] for part in parts if (name := f"{part}.{kind}") in parameters]
                pieces = state[f"{fused}.{kind}"].split([len(one) for one in own]) if own else ()
                for parameter, piece in zip(own, pieces, strict=True):
                    parameter.data = piece
    decoder.embed_tokens.weight = body.embed_tokens.weight
    decoder.norm.weight = body.norm.weight
    decoder.lm_head.weight = model.get_output_embeddings().weight
    return decoder.eval()


class LeanEngine:
    """Runs a Hugging Face model on the lean decoder, over the model's own memory."""

    name = "lean"

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self._decoder = model, lean_decoder(model)

    @property
    def decoder(self) -> LlamaDecoder:
        """The decoder; made again where the model has been moved to another device or dtype since."""
        joined, own = self._decoder.blocks[0].qkv.weight, self.model.model.layers[0].self_attn.q_proj.weight
        if joined.data_ptr() != own.data_ptr():
            self._decoder = lean_decoder(self.model)
        return self._decoder

    def run(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        capture_layers: Sequence[int] = (),
        kept: Callable[[Tensor], Tensor] | None = None,
        keeps_final: bool = False,
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Return logits [B, n, V], the inputs [B, n, D] of the blocks `capture_layers`, and the final states [B, n, D].

        Args:
            tokens: [B, n] int64.
            positions: [B or 1, n] int64; None: 0 .. n - 1.
            cache: see `LlamaDecoder.forward`, as for `mask`.
            capture_layers: indices of blocks.
            kept: maps the final states to those that logits are computed of; None: all.
            keeps_final: whether the caller reads the final states, which cost nothing here.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        final, inputs = self.decoder(tokens, positions, cache, mask, capture_layers)
        return self.logits_of(final if kept is None else kept(final)), inputs, final if keeps_final or kept else None

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of final states [..., D]."""
        return self.decoder.lm_head(hidden)
