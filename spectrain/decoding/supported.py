"""Which models of transformers can be targets: decoders with full attention that take position ids."""

from __future__ import annotations

import inspect

from transformers import PretrainedConfig, PreTrainedModel

from spectrain.errors import UserError


def check_supported(model: PreTrainedModel) -> None:
    """Raise UserError unless the model is a decoder with full attention that takes position ids."""
    config, name = model.config, type(model).__name__
    if getattr(config, "is_encoder_decoder", False) or model.get_output_embeddings() is None:
        raise UserError(f"{name} is no causal language model; choose a decoder-only target")
    check_layers(config, name, is_stateful=getattr(model, "_is_stateful", False))
    if config._attn_implementation != "sdpa":
        raise UserError(f'{name} has {config._attn_implementation} attention; load it with attn_implementation="sdpa"')
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UserError(f"{name} takes no position_ids, which trees need; choose a target with RoPE")


def check_layers(config: PretrainedConfig, name: str, is_stateful: bool = False) -> None:
    """Raise UserError if a Hugging Face config names layers other than full attention. `name` is the model's."""
    layer_type = unsupported_layer_type(config) or ("linear_attention" if is_stateful else None)
    if layer_type is not None:
        raise UserError(f"{name} has layers of type {layer_type}; choose a target with full_attention only")


def unsupported_layer_type(config: PretrainedConfig) -> str | None:
    """Return the first layer type other than full attention that a Hugging Face config names, or None."""
    config = config.get_text_config()
    types = getattr(config, "layer_types", None)
    for layer_type in types or getattr(config, "attention_layers", None) or ():
        if layer_type not in ("full_attention", "global"):
            return layer_type
    window = getattr(config, "sliding_window", None)
    if window and not types and getattr(config, "use_sliding_window", True):
        return f"sliding_attention (sliding_window={window})"
    return None
