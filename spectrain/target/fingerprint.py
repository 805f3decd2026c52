"""Short names for a target and its tokenizer, by which a drafter or a store made for another one is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spectrain.target.sharded import is_shard, whole

SAMPLES = 256  # values read of each parameter
SHAPE_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings"),
    *("rms_norm_eps", "layer_norm_eps", "rope_parameters", "hidden_act"),
)
_of_sharded: WeakKeyDictionary[PreTrainedModel, hashlib._Hash] = WeakKeyDictionary()  # models that ranks share
_vocabularies: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, bytes]] = WeakKeyDictionary()  # half a second each
SMALLEST = 2.0**-14  # below it float16 has fewer bits than bfloat16


def fingerprint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """16 hex digits over architecture, parameter shapes, a sample of the weights, and the tokenizer's vocabulary.

    Weights are compared as bfloat16 and tiny ones as 0, so a bfloat16 file has one fingerprint whether it was loaded as
    float32, bfloat16 or float16 (unless it holds values beyond 65504). It is equal on every machine; device and
    attention implementation do not count. Where ranks share the model, all of them make the first call.
    """
    config = model.config.get_text_config()
    if (digest := _of_sharded.get(model)) is None:
        digest = _digest([config.model_type, {key: getattr(config, key, None) for key in SHAPE_KEYS}], model)
        if any(is_shard(one) for one in model.parameters()):
            _of_sharded[model] = digest
    digest = digest.copy()
    if tokenizer is not None:
        digest.update(_vocabulary(tokenizer))
    return digest.hexdigest()[:16]


def module_fingerprint(module: nn.Module, description: Mapping) -> str:
    """16 hex digits over what fixes a module's computation, and over its weights, as in `fingerprint`."""
    return _digest(description, module).hexdigest()[:16]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hex digits over the vocabulary and the merges; normalisers and splitting rules do not count."""
    return hashlib.sha256(_vocabulary(tokenizer)).hexdigest()[:16]


def _digest(description: object, module: nn.Module) -> hashlib._Hash:
    """Hash a description, and the names, shapes and sampled values of the module's parameters."""
    digest = hashlib.sha256(_canonical(description))
    for name, parameter in sorted(module.named_parameters()):
        flat = whole(parameter.detach()).reshape(-1)
        values = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].to("cpu", torch.bfloat16)
        values = torch.where(values.abs() < SMALLEST, 0.0, values).to(torch.bfloat16) + 0.0  # and -0 as 0
        digest.update(_canonical([name, list(parameter.shape)]))
        digest.update(values.view(torch.int16).numpy().astype("<i2").tobytes())
    return digest


def _vocabulary(tokenizer: PreTrainedTokenizerBase) -> bytes:
    """Tokens by id, and the merge rules of a BPE tokenizer as "left right": file formats write the pair differently."""
    if (kept := _vocabularies.get(tokenizer)) is None or kept[0] != len(tokenizer):  # tokens may have been added
        kept = _vocabularies[tokenizer] = len(tokenizer), _written(tokenizer)
    return kept[1]


def _written(tokenizer: PreTrainedTokenizerBase) -> bytes:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    merges = json.loads(backend.to_str())["model"].get("merges", []) if backend is not None else []
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    return _canonical([sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]), merges])


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()
