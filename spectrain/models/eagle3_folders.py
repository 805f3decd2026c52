"""Folders of EAGLE-3 drafters: ours, which vLLM and SGLang load as they are, and those that other trainers write.

Ours have config.json and tensors of `LlamaForCausalLMEagle3`, as SafeAILab and SpecForge name them. Automodel and
speculators have other names and defaults for the same, and some folders do not say all that it takes to compute as they
were trained: each is read as its writer meant it, and what had to be guessed is logged in one line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from spectrain.errors import UserError
from spectrain.models import published
from spectrain.models.drafter_model import DrafterModel
from spectrain.models.published import ROPE, SIZES, Published, Read, blocks_json, is_dflash, types_of

ARCHITECTURE = "LlamaForCausalLMEagle3"
BLOCK = "midlayer."
OTHER_NAMES = {  # of the same tensors in the folders of others
    r"^model\.": "",
    r"^layers\.0\.": BLOCK,
    "^aux_norm_low": "fc_norm.0",  # of an earlier SGLang
    "^aux_norm_mid": "fc_norm.1",
    "^aux_norm_high": "fc_norm.2",
}
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
OF_BLOCK = ("model_type", *SIZES, "attention_bias", "mlp_bias", *ROPE, "num_hidden_layers", "tie_word_embeddings")
LAYERS = "eagle_aux_hidden_state_layer_ids"
SIGNS = ("speculators_model_type", "draft_vocab_size", "eagle_config", "dflash_config", "medusa_num_heads")
OTHERS = {  # what a folder may hold instead, by words in its architectures, types, some keys, and names of tensors
    "P-EAGLE": r"peagle|mask_hidden|pard_token|ptd_token_id|parallel_drafting",
    "EAGLE-4": r"eagle-?4|efficient_lm_head",
    "DSpark": r"dspark|markov_|confidence_head",
    "DFlash": r"dflash",
    "Medusa": r"medusa|^\d+\.\d+\.(linear|weight)",
    "MTP": r"mtp|\beh_proj|\bnextn",
}
KEYS_OF_OTHERS = ("pard_token", "ptd_token_id", "parallel_drafting", "dflash_config", "medusa_num_heads")


def recognises(facts: Mapping) -> bool:
    """Return whether a config.json is of a drafter that stands on its target's states, of this kind or of `OTHERS`."""
    is_one = SIGNS & facts.keys() or re.search("eagle|dspark|medusa|mtp", types_of(facts))
    return bool(is_one) and not is_dflash(facts)


def default_layers(n_layer: int) -> tuple[int, ...]:
    """Return the blocks whose inputs the field reads of a target of so many blocks, where nothing else is said."""
    return tuple(sorted({2, n_layer // 2, n_layer - 3}))


def write(folder: Path, drafter: DrafterModel, dtype: torch.dtype) -> None:
    """Fill an existing folder, see `published.write`."""
    config = drafter.config
    layers = list(config.target_layers)
    own = {
        "target_hidden_size": config.shape.hidden_size,
        **{flag: True for flag in FLAGS if getattr(config, flag)},
        **({} if len(layers) == 3 else {"num_aux_hidden_states": len(layers)}),
        # The inputs of these blocks, as vLLM counts, and the same states as outputs of blocks, as SGLang does.
        LAYERS: layers,
        "eagle_config": {LAYERS: [layer - 1 for layer in layers], "use_aux_hidden_state": True},
        "k": config.k,
        "window_tokens": config.window_tokens if config.is_windowed else None,
    }
    published.write(folder, drafter, dtype, BLOCK, blocks_json(ARCHITECTURE, config.shape, "llama", 1), own)


def read(found: Published) -> Read:
    """Return the fields of `Eagle3Config`, and the drafter's state."""
    facts, tensors, guesses = found.facts, found.tensors, found.guesses
    for theirs, ours in OTHER_NAMES.items():
        tensors = {re.sub(theirs, ours, name): one for name, one in tensors.items()}
    if (why := _why_not(facts, [*tensors])) is not None:
        raise UserError(f"{found.given} {why}")
    found, layer = replace(found, tensors=tensors), found.layer
    fields = {"shape": (shape := found.shape(BLOCK)), "target_layers": _layers(found)}
    fields |= _flags(facts, tensors, guesses)
    fields |= {name: facts[name] for name in ("k", "window_tokens") if name in facts}
    if methods := (facts.get("speculators_config") or {}).get("proposal_methods"):
        fields["k"] = methods[0]["speculative_tokens"]
    # speculators masks by a window, and vLLM's class for Qwen3; of the other folders nobody reads it.
    has_window = "speculators_model_type" in facts or "eagle3qwen3" in types_of(facts)
    if has_window and "sliding_attention" in (layer.get("layer_types") or ()):
        fields["window_tokens"] = layer["sliding_window"]
    found = found if found.is_own else found.without_embedding()
    tensors = found.tensors
    head, embedded = tensors.get("lm_head.weight"), tensors.get("embed_tokens.weight")
    if layer.get("tie_word_embeddings") and not found.is_own and head is not None:
        guesses.append("lm_head is read although tie_word_embeddings is true, for which SGLang reads the embedding")
    elif layer.get("tie_word_embeddings") and head is None and embedded is not None:
        tensors["lm_head.weight"] = embedded
    vocabulary, state = found.state(BLOCK, shape.vocab_size)
    if vocabulary["unembedding"] == "target":
        guesses.append("it has no lm_head, so the target's is read")
    return fields | vocabulary | {"own_embedding": "embed_tokens.weight" in state}, state


def _why_not(facts: Mapping, names: list[str]) -> str | None:
    """Return why a folder with tensors of these names is not read: it holds another kind, or is computed otherwise."""
    keys = [key for key in KEYS_OF_OTHERS if facts.get(key) not in (None, False)]
    said = [one.lower() for one in (types_of(facts), *keys, *names)]
    found = next((kind for kind, words in OTHERS.items() if any(re.search(words, one) for one in said)), None)
    has_fc, has_norm = "fc.weight" in names, f"{BLOCK}hidden_norm.weight" in names
    found = "EAGLE-1 or EAGLE-2" if found is None and has_fc and not has_norm else found
    layers = {name.split(".")[1] for name in names if name.startswith("layers.")}
    reads_states = (facts.get("eagle_config") or {}).get("use_aux_hidden_state", True)
    reasons = {
        "is an EAGLE-3 drafter with latent attention (MLA); give one with a Llama block": re.search(
            "kv_[ab]_proj", " ".join(names)
        ),
        f"is a drafter of {found}, which is not read; give one of EAGLE-3": found,
        f"holds no EAGLE-3 drafter: it has no fc and {BLOCK}hidden_norm; give another folder": not (
            has_fc and has_norm
        ),
        f"has {1 + len(layers)} layers; only drafters of one layer are read": layers,
        "reads no states of layers (use_aux_hidden_state is false); give one that does": not reads_states,
        f"scales its logits by {(scale := facts.get('logit_scale', 1))}, which is not read; give another": scale != 1,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def _layers(found: Published) -> tuple[int, ...]:
    """Return the blocks whose inputs it reads. vLLM's key names these, and that in `eagle_config` the outputs."""
    inputs, outputs = found.facts.get(LAYERS), (found.facts.get("eagle_config") or {}).get(LAYERS) or ()
    of_outputs = [layer + 1 for layer in outputs]
    if inputs and outputs and sorted(inputs) != sorted(of_outputs):
        found.guesses.append(f"{LAYERS} are {inputs}, as inputs of blocks, not {outputs} of eagle_config")
    return found.layers(inputs or of_outputs, default_layers(found.target.n_layer))


def _flags(facts: Mapping, tensors: Mapping[str, Tensor], guesses: list[str]) -> dict[str, bool]:
    inside, is_speculators = facts.get("eagle_config") or {}, "speculators_model_type" in facts
    flags = {flag: bool(inside.get(flag, facts.get(flag, False))) for flag in FLAGS}
    flags["fc_norm"] |= bool(facts.get("use_aux_norm"))
    for flag, name in {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}.items():
        if name in tensors and not flags[flag]:
            flags[flag] = True
            guesses.append(f"{flag} is true, because it has {name}")
    if is_speculators and "norm_before_residual" not in facts:
        guesses.append("norm_before_residual is false, as where speculators reads it, and true in vLLM")
    if flags["norm_output"] and not is_speculators:
        guesses.append("norm_output feeds back the normed state, as engines do; SpecForge trains without")
    return flags
