"""Folders of EAGLE-3 drafters: ours, which vLLM and SGLang load as they are, and those that other trainers write.

Ours have config.json and tensors of `LlamaForCausalLMEagle3`, as SafeAILab and SpecForge name them. Automodel and
speculators have other names and defaults for the same, and some folders do not say all that it takes to compute as they
were trained: each is read as its writer meant it, and what had to be guessed is logged in one line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from spectrain.errors import UserError
from spectrain.models.artifacts import MANIFEST
from spectrain.models.published import (
    ROPE,
    SIZES,
    blocks_json,
    check_layers,
    in_our_words,
    is_dflash,
    read_by,
    shape_of_blocks,
    types_of,
    without_embedding,
    write_weights,
)
from spectrain.stores.files import write_json
from spectrain.target.target import TargetModel

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


def write(folder: Path, config: Mapping, state: Mapping[str, Tensor], dtype: torch.dtype, ends: Mapping) -> None:
    """Fill an existing folder with config.json, the weights, and our order of the tokens that it can draft.

    Args:
        folder: to be filled.
        config: fields of `Eagle3Config`.
        state: of the drafter, with `lm_head.weight` where `draft_vocab` is given.
        dtype: of the weights.
        ends: `bos_token_id` and `eos_token_id` of the target.
    """
    has_head = write_weights(folder, state, config["shape"], dtype, BLOCK)
    write_json(folder / "config.json", _config_json(config, dtype, ends, has_head))


def _config_json(config: Mapping, dtype: torch.dtype, ends: Mapping, has_head: bool) -> dict:
    shape, layers = config["shape"], config["target_layers"]
    return {
        "architectures": [ARCHITECTURE],
        **blocks_json(shape, "llama", 1),
        **({"draft_vocab_size": config["draft_vocab"] or shape.vocab_size} if has_head else {}),
        "target_hidden_size": shape.hidden_size,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **ends,
        **{flag: True for flag in FLAGS if config[flag]},
        **({} if len(layers) == 3 else {"num_aux_hidden_states": len(layers)}),
        # The inputs of these blocks, as vLLM counts, and the same states as outputs of blocks, as SGLang does.
        LAYERS: layers,
        "eagle_config": {LAYERS: [layer - 1 for layer in layers], "use_aux_hidden_state": True},
        "k": config["k"],
        "window_tokens": config["window_tokens"] if config["window_tokens"] < shape.max_positions else None,
        "unembedding": config["unembedding"],
    }


def read(folder: Path, given: str, target: TargetModel) -> tuple[dict, dict[str, Tensor]]:
    """Return the fields of `Eagle3Config`, and the drafter's state, of a folder of ours or of another project.

    Args:
        folder: with config.json and weights.
        given: it, as messages name it.
        target: it drafts for.

    Raises:
        UserError: it holds something else, or does not fit the target, or is damaged.
    """
    return read_by(_read, folder, given, target)


def _read(
    folder: Path, given: str, facts: dict, tensors: dict[str, Tensor], target: TargetModel, guesses: list[str]
) -> tuple[dict, dict[str, Tensor]]:
    for theirs, ours in OTHER_NAMES.items():
        tensors = {re.sub(theirs, ours, name): one for name, one in tensors.items()}
    if (why := _why_not(facts, [*tensors])) is not None:
        raise UserError(f"{given} {why}")
    is_own, layer = (folder / MANIFEST).is_file(), facts.get("transformer_layer_config", facts)
    shape = shape_of_blocks(layer, tensors, target, given, guesses, is_own, BLOCK)
    config = {"shape": shape, "target_layers": _layers(facts, target.n_layer, given, guesses)}
    config |= _flags(facts, tensors, guesses)
    config |= {name: facts[name] for name in ("k", "window_tokens") if name in facts}
    if methods := (facts.get("speculators_config") or {}).get("proposal_methods"):
        config["k"] = methods[0]["speculative_tokens"]
    # speculators masks by a window, and vLLM's class for Qwen3; of the other folders nobody reads it.
    has_window = "speculators_model_type" in facts or "eagle3qwen3" in types_of(facts)
    if has_window and "sliding_attention" in (layer.get("layer_types") or ()):
        config["window_tokens"] = layer["sliding_window"]
    if not is_own:
        tensors = without_embedding(tensors, target)
    head, embedded = tensors.get("lm_head.weight"), tensors.get("embed_tokens.weight")
    if layer.get("tie_word_embeddings") and not is_own and head is not None:
        guesses.append("lm_head is read although tie_word_embeddings is true, for which SGLang reads the embedding")
    elif layer.get("tie_word_embeddings") and head is None and embedded is not None:
        tensors["lm_head.weight"] = embedded
    state = in_our_words(folder, given, facts, tensors, shape.vocab_size, guesses, BLOCK)
    kept = state.get("kept")
    config["unembedding"] = "trained" if "lm_head.weight" in state else "target"
    if config["unembedding"] == "target":
        guesses.append("it has no lm_head, so the target's is read")
    config |= {"draft_vocab": None if kept is None else len(kept), "own_embedding": "embed_tokens.weight" in state}
    return config, state


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


def _layers(facts: Mapping, n_layer: int, given: str, guesses: list[str]) -> tuple[int, ...]:
    """Return the blocks whose inputs it reads. vLLM's key names these, and that in `eagle_config` the outputs."""
    inputs, outputs = facts.get(LAYERS), (facts.get("eagle_config") or {}).get(LAYERS)
    found = inputs or [layer + 1 for layer in outputs or ()]
    if not found:
        found = default_layers(n_layer)
        guesses.append(f"it names no layers, so it reads the inputs of blocks {found}")
    elif inputs and outputs and sorted(inputs) != sorted(layer + 1 for layer in outputs):
        guesses.append(f"{LAYERS} are {inputs}, as inputs of blocks, not {outputs} of eagle_config")
    return check_layers(found, n_layer, given)


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
