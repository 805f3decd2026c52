"""A target on the modules of transformers, as they are: for architectures that the lean decoder does not know.

Targets can be decoders that take position ids. Their layers have full attention or a window. A window is a mask: the
cache keeps all tokens, because a rejected draft must not have pushed any out.

A model is plain where it computes what its class and config say, and nothing else. The lean decoder reads shapes from
the config and numbers from the weights. So it can stand for a model only while the modules are those that the config
builds: no hooks, adapters, parametrizations, replaced layers or methods.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers import PretrainedConfig, PreTrainedModel

from spectrain.errors import UserError
from spectrain.target.kv_cache import KVCache
from spectrain.target.llama import additive
from spectrain.target.masks import last_seen

RECORDERS = "transformers.utils.output_capturing"  # its hooks stay on a model and only copy what passes
FACTS = bool, int, float, str  # attributes of a module that say what it computes
IGNORED = "training", "gradient_checkpointing", "name_or_path"  # as all that begin with _, while texts are written
KNOWN_LAYERS = ("full_attention", "global", "sliding_attention")


class TransformersEngine:
    """Runs a decoder of transformers. Hooks exist during a call only, so the model stays unchanged."""

    name = "transformers"
    fused = None  # see `LeanEngine`

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._blocks, self._window = find_blocks(model), window_of(model.config)
        self._has_types = bool(getattr(model.config.get_text_config(), "layer_types", None))
        takes_cache = "cache" in inspect.signature(model.forward).parameters  # its name in newer versions
        self._cache_name = "cache" if takes_cache else "past_key_values"

    @property
    def device(self) -> torch.device:
        """Where tokens go in."""
        return next(self.model.get_input_embeddings().parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    text_dtype = dtype

    @property
    def unembedding(self) -> Tensor:
        return self.model.get_output_embeddings().weight

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
        """See `LlamaDecoder.run`. The final states are returned only if `keeps_final` or `kept` is given."""
        inputs = {"position_ids": positions, "attention_mask": self._masks(mask), self._cache_name: cache}
        inputs["use_cache"] = cache is not None
        if keeps_final and kept is None and not capture_layers and self._has_products:
            # Without a hook, which would cost a draft step a few per cent.
            final = self.model.base_model(input_ids=tokens, **inputs).last_hidden_state
            return self.logits_of(final), [], final
        inside: dict[int, Tensor] = {}
        finals: list[Tensor] = []

        def at_unembedding(module: nn.Module, args: tuple) -> tuple:
            finals.append(args[0])
            return (args[0] if kept is None else kept(args[0]), *args[1:])

        with ExitStack() as hooks:
            for layer in (layer for layer in capture_layers if layer >= 0):
                hook = partial(_capture, inside, layer)
                hooks.enter_context(self._blocks[layer].register_forward_pre_hook(hook, with_kwargs=True))
            if keeps_final or kept is not None or min(capture_layers, default=0) < 0:
                hooks.enter_context(self.model.get_output_embeddings().register_forward_pre_hook(at_unembedding))
            logits = self.model(input_ids=tokens, **inputs).logits
        captured = [(inside[layer] if layer >= 0 else finals[0]).to(tokens.device) for layer in capture_layers]
        return logits, captured, finals[0] if finals else None

    def _masks(self, mask: Tensor | None) -> Tensor | dict[str, Tensor] | None:
        """Return a mask as the model takes it. Without one, transformers makes its own, with windows."""
        if mask is None:
            return None
        near = mask if self._window is None else last_seen(mask, self._window)
        if self.model.config._attn_implementation == "eager":  # which would add a bool as 0 or 1
            mask, near = additive(mask, self.dtype), additive(near, self.dtype)
        is_mixed = self._window is not None and self._has_types
        return {"full_attention": mask, "sliding_attention": near} if is_mixed else near

    def begin(self) -> tuple[int, ...]:
        """See `LeanEngine.begin`. Modules are read at each call."""
        return addresses(self.model)

    reads_prompts = False  # `run` does

    def forward_of(self, *_: object) -> None:
        """No model runs as a program here; see `LeanEngine.forward_of`."""

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of final hidden states [..., D], as a forward computes them.

        Where these are more than products and a soft-cap, a forward over one token computes them: its own final state
        is replaced in front of the unembedding, so whatever the model does behind it is done to the logits.
        """
        if self._has_products:
            return self._products(hidden)
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        hook = self.model.get_output_embeddings().register_forward_pre_hook(lambda module, args: (hidden, *args[1:]))
        with hook:
            return self.model(input_ids=token, use_cache=False).logits

    def _products(self, hidden: Tensor) -> Tensor:
        logits = self.model.get_output_embeddings()(hidden)
        soft_cap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)

    @property
    def _has_products(self) -> bool:
        return self._is_body_and_unembedding and not alterations(self.model)

    @cached_property
    def _is_body_and_unembedding(self) -> bool:
        """Test once whether the logits are `_products` of the body's last state, as in nearly every model."""
        if not isinstance(self.model.get_output_embeddings(), nn.Linear):
            return False
        # Several tokens, because the embedding of one that pads is 0, and so are its logits.
        tokens = torch.arange(4, device=self.device)[None]
        with torch.inference_mode():
            states = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
            if states.shape[-1] != self.model.get_output_embeddings().weight.shape[-1]:
                return False
            logits = self.model(input_ids=tokens, use_cache=False).logits
            return torch.allclose(self._products(states), logits, rtol=1e-3, atol=1e-3 * float(logits.abs().max()))


def _capture(inside: dict[int, Tensor], layer: int, module: nn.Module, args: tuple, kwargs: dict) -> None:
    inside[layer] = args[0] if args else kwargs["hidden_states"]


def find_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of decoder blocks, whatever the architecture calls it (`layers`, `h`, ...)."""
    n_layer = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == n_layer]
    if not lists:
        raise UserError(f"{type(model).__name__} has no list of {n_layer} decoder blocks; choose a decoder-only model")
    return lists[0]


def check_supported(model: PreTrainedModel) -> None:
    """Raise UserError unless the model is a decoder with attention in all layers that takes position ids."""
    config, name = model.config, type(model).__name__
    if getattr(config, "is_encoder_decoder", False) or model.get_output_embeddings() is None:
        raise UserError(f"{name} is no causal language model; choose a decoder-only target")
    check_layers(config, name, is_stateful=getattr(model, "_is_stateful", False))
    if window_of(config) is not None and not hasattr(type(config.get_text_config()), "sliding_window"):
        raise UserError(f"{name} has no windows, which its caches would have all the same; unset config.sliding_window")
    known = "sdpa" if model._supports_sdpa else "eager"  # torch's has neither soft-capping nor sinks
    if config._attn_implementation != known:
        raise UserError(
            f'{name} has {config._attn_implementation} attention; load it with attn_implementation="{known}"'
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise UserError(f"{name} takes no position_ids, which trees need; choose a target with RoPE")


def check_layers(config: PretrainedConfig, name: str, is_stateful: bool = False) -> None:
    """Raise UserError if a Hugging Face config names layers that no draft can be verified with. `name`: the model's."""
    layer_type = unsupported_layer_type(config) or ("state space" if is_stateful else None)
    if layer_type is not None:
        why = "no draft tree can be masked" if "chunked" in layer_type else "no rejected draft can be taken back"
        raise UserError(
            f"{name} has layers of type {layer_type}, in which {why}; choose a target whose layers have "
            "full_attention or sliding_attention"
        )


def unsupported_layer_type(config: PretrainedConfig) -> str | None:
    """Return the first layer type that a Hugging Face config names and that is not known here, or None."""
    config = config.get_text_config()
    types = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or ()
    return next((layer_type for layer_type in types if layer_type not in KNOWN_LAYERS), None)


def window_of(config: PretrainedConfig) -> int | None:
    """Return how many tokens, itself included, a token sees in the layers that have a window; None if none has.

    A window that is no shorter than the context is none.
    """
    config = config.get_text_config()
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    has_window = "sliding_attention" in types if types else getattr(config, "use_sliding_window", True)
    is_shorter = window and window < (getattr(config, "max_position_embeddings", None) or window + 1)
    return window if has_window and is_shorter else None


def alterations(module: nn.Module) -> list:
    """Return the hooks, and the `forward` of its own, that change what a module computes."""
    own = [vars(module)["forward"]] if "forward" in vars(module) else []
    hooks = *module._forward_pre_hooks.values(), *module._forward_hooks.values(), *own
    return [hook for hook in hooks if getattr(hook, "__module__", "") != RECORDERS]


def describe(model: PreTrainedModel) -> dict[str, object]:
    """Return what each module is, by its name: two models with equal descriptions and weights compute alike."""
    described = {"hooks of all modules": _has_any_global_hook()}
    for name, module in _modules(model):
        own = [(key, one) for key, one in vars(module).items() if key[0] != "_" and type(one) in FACTS]
        facts = [one for one in own if one[0] not in IGNORED]
        shapes = [(key, one.shape) for key, one in module._parameters.items() if one is not None]
        described[name] = type(module), type(module).forward, alterations(module), shapes, facts
    return described


def addresses(model: PreTrainedModel) -> tuple[int, ...]:
    """Return where the weights and buffers of a model are in memory."""
    tensors = (one for _, part in _modules(model) for one in (*part._parameters.values(), *part._buffers.values()))
    return tuple(one.data_ptr() for one in tensors if one is not None)


def _modules(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Return all modules by their names: `named_modules` takes a millisecond, which would be paid by each answer."""
    found = [("", model)]
    for name, module in found:  # which grows meanwhile
        found += [(f"{name}.{key}".strip("."), one) for key, one in module._modules.items() if one is not None]
    return found


def why_not_plain(model: PreTrainedModel) -> str | None:
    """Return what is unusual about a model, or None if its modules are those that its class and config build."""
    with torch.device("meta"):
        built = describe(type(model)(copy.deepcopy(model.config)))
    found, kinds = describe(model), {type(module) for module in model.modules()}
    foreign = [kind for kind in kinds if not kind.forward.__module__.startswith(("torch.nn.", "transformers."))]
    if foreign or _has_any_global_hook():
        return f"a forward or a hook of {foreign or 'all modules'} is none of transformers"
    name = next((name for name in (*found, *built) if found.get(name) != built.get(name)), None)
    return None if name is None else f"its {name or 'body'} has hooks, or is not the module that its config describes"
