"""Folders of EAGLE-3 drafters: ours, which vLLM and SGLang load as they are, and those that other trainers write.

Ours have config.json and tensors of `LlamaForCausalLMEagle3`, as SafeAILab and SpecForge name them. Automodel and
speculators have other names and defaults for the same, and some folders do not say all that it takes to compute as they
were trained: each is read as its writer meant it, and what had to be guessed is logged in one line.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from spectrain.errors import UserError, shown
from spectrain.models.artifacts import MANIFEST, WEIGHTS, damage_of
from spectrain.stores.files import load_json, write_json, write_whole
from spectrain.target.lean import LLAMA_LIKE, MATRICES, NORMS, ROPE_TYPES, block_state
from spectrain.target.llama import LlamaShape
from spectrain.target.target import TargetModel

log = logging.getLogger(__name__)

KEPT = "kept.npy"  # the tokens that it can draft in our own order, the most frequent first; engines pass over it
PICKLED = "pytorch_model.bin"
ARCHITECTURE = "LlamaForCausalLMEagle3"
BLOCK = "midlayer."
NAMES = {"states_norm.": "input_norm.", "state_norms.": "fc_norm."}  # ours -> theirs
OTHER_NAMES = {  # of the same tensors in the folders of others
    r"^model\.": "",
    r"^layers\.0\.": BLOCK,
    "^aux_norm_low": "fc_norm.0",  # of an earlier SGLang
    "^aux_norm_mid": "fc_norm.1",
    "^aux_norm_high": "fc_norm.2",
}
NOT_READ = r"^verifier_|rotary_emb\."  # of the target, for training; or computed
SIZES = {  # config.json -> fields of `LlamaShape`
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "n_head",
    "num_key_value_heads": "n_kv_head",
    "head_dim": "head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "hidden_act": "hidden_act",
    "max_position_embeddings": "max_positions",
}
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LAYERS = "eagle_aux_hidden_state_layer_ids"
SIGNS = ("speculators_model_type", "draft_vocab_size", "eagle_config", "dflash_config", "medusa_num_heads")
OTHERS = {  # what a folder may hold instead, by words in its architectures, types, some keys, and names of tensors
    "P-EAGLE": r"peagle|mask_hidden|pard_token|parallel_drafting",
    "EAGLE-4": r"eagle-?4|efficient_lm_head",
    "DSpark": r"dspark|markov_|confidence_head",
    "DFlash": r"dflash",
    "Medusa": r"medusa|^\d+\.\d+\.(linear|weight)",
    "MTP": r"mtp|\beh_proj|\bnextn",
}
KEYS_OF_OTHERS = ("pard_token", "ptd_token_id", "dflash_config", "medusa_num_heads")


def recognises(facts: Mapping) -> bool:
    """Return whether a config.json is of a drafter that stands on its target's states, of this kind or of `OTHERS`."""
    return bool(SIGNS & facts.keys() or re.search("eagle|dflash|dspark|medusa|mtp", _types(facts)))


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
    state, shape = dict(state), config["shape"]
    kept = state.pop("kept", None)
    if kept is not None:
        ids, order = kept.sort()
        state["lm_head.weight"] = state["lm_head.weight"][order]
        write_whole(folder / KEPT, lambda out: np.save(out, kept.cpu().numpy()))
    tensors = {name: tensor.to(dtype) for name, tensor in _their_names(state, shape).items()}
    if kept is not None:
        is_kept = torch.zeros(shape.vocab_size, dtype=torch.bool)
        is_kept[ids.cpu()] = True
        tensors |= {"d2t": ids.cpu() - torch.arange(len(ids)), "t2d": is_kept}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    write_json(folder / "config.json", _config_json(config, dtype, ends, "lm_head.weight" in tensors))


def block_json(shape: LlamaShape) -> dict:
    """Return the part of config.json that describes the block, as a Llama of one layer."""
    rope = dict(shape.rope_parameters)
    theta = rope.pop("rope_theta")
    return {
        "model_type": "llama",
        **{theirs: getattr(shape, ours) for theirs, ours in SIZES.items()},
        "attention_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        "rope_theta": theta,
        **({} if rope.get("rope_type", "default") == "default" else {"rope_scaling": rope}),
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }


def _config_json(config: Mapping, dtype: torch.dtype, ends: Mapping, has_head: bool) -> dict:
    shape, layers = config["shape"], config["target_layers"]
    return {
        "architectures": [ARCHITECTURE],
        **block_json(shape),
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
    with damage_of(given, "config.json: "):
        facts = dict(load_json(folder / "config.json"))
    tensors = {name: one for name, one in _tensors(folder, given).items() if not re.search(NOT_READ, name)}
    for theirs, ours in OTHER_NAMES.items():
        tensors = {re.sub(theirs, ours, name): one for name, one in tensors.items()}
    check_kind(facts, tensors, given)
    guesses: list[str] = []
    try:
        found = _read(folder, given, facts, tensors, target, guesses)
    except UserError:
        raise
    except Exception as error:  # a value of another type, for which each library has its own
        what = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{given} has a config.json that cannot be read ({shown(what)}); fetch it again") from error
    if guesses and not (folder / MANIFEST).is_file():
        log.warning("%s does not say all, and is read so: %s", given, "; ".join(guesses))
    return found


def _read(
    folder: Path, given: str, facts: dict, tensors: dict[str, Tensor], target: TargetModel, guesses: list[str]
) -> tuple[dict, dict[str, Tensor]]:
    is_own, layer = (folder / MANIFEST).is_file(), facts.get("transformer_layer_config", facts)
    shape = _shape(layer, tensors, target, given, guesses, is_own)
    embedding = target.model.get_input_embeddings().weight
    if (shape.vocab_size, shape.hidden_size) != tuple(embedding.shape):
        (n_tokens, width), of_drafter = embedding.shape, f"{shape.vocab_size} tokens and states of {shape.hidden_size}"
        raise UserError(
            f"{given} is for a target of {of_drafter}, not of {n_tokens} and {width}; give one made for this target"
        )
    config = {"shape": shape, "target_layers": _layers(facts, target.n_layer, given, guesses)}
    config |= _flags(facts, tensors, guesses) | _drafting(facts, layer)
    head, embedded = tensors.get("lm_head.weight"), tensors.get("embed_tokens.weight")
    if embedded is not None and not is_own and torch.equal(embedded.to(embedding), embedding):
        del tensors["embed_tokens.weight"]  # the target's own, which is read instead
    if layer.get("tie_word_embeddings") and not is_own and head is not None:
        guesses.append("lm_head is read although tie_word_embeddings is true, for which SGLang reads the embedding")
    elif layer.get("tie_word_embeddings") and head is None and embedded is not None:
        tensors["lm_head.weight"] = embedded
    kept = _kept(facts, tensors, shape.vocab_size, given, guesses)
    state = _our_names({name: one for name, one in tensors.items() if name not in ("d2t", "t2d")})
    if kept is not None:
        state["kept"], head = kept, state.get("lm_head.weight")
        if (folder / KEPT).is_file():
            with damage_of(given, f"{KEPT}: "):
                state["kept"] = torch.from_numpy(np.load(folder / KEPT))
            if not torch.equal(state["kept"].sort().values, kept):
                raise UserError(f"{given} has other tokens in {KEPT} than in d2t; export it again")
            if head is not None:
                state["lm_head.weight"] = head[torch.searchsorted(kept, state["kept"])]
    if facts.get("unembedding") == "target":
        state.pop("lm_head.weight", None)
    config["unembedding"] = "trained" if "lm_head.weight" in state else "target"
    if config["unembedding"] == "target":
        guesses.append("it has no lm_head, so the target's is read")
    config |= {"draft_vocab": None if kept is None else len(kept), "own_embedding": "embed_tokens.weight" in state}
    return config, state


def check_kind(facts: Mapping, tensors: Iterable[str], given: str) -> None:
    """Raise UserError where a folder holds a drafter of another kind, which is named, or one that is not computed."""
    names = list(tensors)
    said = [_types(facts), *(key for key in KEYS_OF_OTHERS if key in facts), *names]
    said += ["parallel_drafting"] * bool(facts.get("parallel_drafting"))
    found = next((kind for kind, words in OTHERS.items() if any(re.search(words, one.lower()) for one in said)), None)
    is_eagle3, has_fc = f"{BLOCK}hidden_norm.weight" in names, "fc.weight" in names
    if any("kv_a_proj" in name or "kv_b_proj" in name for name in names):
        raise UserError(f"{given} is an EAGLE-3 drafter with latent attention (MLA); give one with a Llama block")
    if found is None and has_fc and not is_eagle3:
        found = "EAGLE-1 or EAGLE-2"
    if found is not None:
        raise UserError(f"{given} is a drafter of {found}, which is not read; give one of EAGLE-3")
    if not (is_eagle3 and has_fc):
        raise UserError(f"{given} holds no EAGLE-3 drafter: it has no fc and {BLOCK}hidden_norm; give another folder")
    if more := sorted({name.split(".")[1] for name in names if name.startswith("layers.")}):
        raise UserError(f"{given} has {1 + len(more)} layers; only drafters of one layer are read")
    if (facts.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise UserError(f"{given} reads no states of layers (use_aux_hidden_state is false); give one that does")
    if facts.get("logit_scale", 1) != 1:
        raise UserError(f"{given} scales its logits by {facts['logit_scale']}, which is not read; give another one")


def _types(facts: Mapping) -> str:
    """Return what a config.json calls itself, in small letters."""
    architectures = facts.get("architectures")
    said = [*(architectures if isinstance(architectures, list) else []), facts.get("model_type")]
    return " ".join(str(one) for one in [facts.get("speculators_model_type", ""), *said]).lower()


def _tensors(folder: Path, given: str) -> dict[str, Tensor]:
    """Return the tensors of one file, of several with an index, or of a pickled one, from which nothing is run."""
    index, found = folder / f"{WEIGHTS}.index.json", {}
    if (folder / WEIGHTS).is_file() or index.is_file() or not (folder / PICKLED).is_file():
        with damage_of(given):
            names = [WEIGHTS] if (folder / WEIGHTS).is_file() else {*load_json(index)["weight_map"].values()}
            for name in sorted(names):
                found |= load_file(folder / name)
        return found
    try:
        found = torch.load(folder / PICKLED, map_location="cpu", weights_only=True)
        if all(isinstance(one, Tensor) for one in found.values()):
            return found
        why = "not a mapping of tensors"
    except Exception as error:
        why = type(error).__name__
    raise UserError(f"{given} has a {PICKLED} that holds more than tensors ({why}); give one with {WEIGHTS}")


def _shape(
    layer: Mapping, tensors: Mapping, target: TargetModel, given: str, guesses: list[str], is_own: bool
) -> LlamaShape:
    family = layer.get("model_type")
    known = {key: layer[key] for key in (*SIZES, *ROPE) if layer.get(key) is not None}
    block = AutoConfig.for_model(family if family in LLAMA_LIKE else "llama", **known)
    rope, longest = dict(block.rope_parameters), target.max_positions
    if (kind := rope.get("rope_type", "default")) not in ROPE_TYPES:
        raise UserError(f"{given} has a RoPE of type {shown(kind)}; drafters support {', '.join(ROPE_TYPES)}")
    of_target = (getattr(target.model.config.get_text_config(), "rope_parameters", None) or {}).get("rope_theta")
    is_said = "rope_theta" in known or "rope_theta" in known.get("rope_parameters", {})
    if not is_said and of_target != rope["rope_theta"]:  # trainers that do not write it take the default
        guesses.append(f"it has no rope_theta, so {rope['rope_theta']:g} is read; the target has {of_target}")
    sizes = {ours: getattr(block, theirs) for theirs, ours in SIZES.items()}
    sizes["head_dim"] = sizes["head_dim"] or sizes["hidden_size"] // sizes["n_head"]
    if not is_own:  # engines serve it up to the length of the target
        sizes["max_positions"] = max(sizes["max_positions"], longest)
    return LlamaShape(
        **sizes,
        rope_parameters=rope,
        qkv_bias=f"{BLOCK}self_attn.q_proj.bias" in tensors,
        output_bias=f"{BLOCK}self_attn.o_proj.bias" in tensors,
        mlp_bias=f"{BLOCK}mlp.gate_proj.bias" in tensors,
        qk_norm=f"{BLOCK}self_attn.q_norm.weight" in tensors,
        tie_embeddings=False,
    )


def _layers(facts: Mapping, n_layer: int, given: str, guesses: list[str]) -> tuple[int, ...]:
    """Return the blocks whose inputs it reads. vLLM's key names these, and that in `eagle_config` the outputs."""
    inputs, outputs = facts.get(LAYERS), (facts.get("eagle_config") or {}).get(LAYERS)
    found = inputs or [layer + 1 for layer in outputs or ()]
    if not found:
        found = default_layers(n_layer)
        guesses.append(f"it names no layers, so it reads the inputs of blocks {_listed(found)}")
    elif inputs and outputs and sorted(inputs) != sorted(layer + 1 for layer in outputs):
        guesses.append(f"{LAYERS} are {_listed(inputs)}, as inputs of blocks, not {_listed(outputs)} of eagle_config")
    if wrong := [layer for layer in found if not 0 <= layer < n_layer]:
        raise UserError(
            f"{given} reads the input of block {wrong[0]} (the output of block {wrong[0] - 1}), but only those of "
            f"blocks 0 to {n_layer - 1} of this target can be read; give one made for this target"
        )
    return tuple(sorted(set(found)))  # as vLLM does


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


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


def _drafting(facts: Mapping, layer: Mapping) -> dict:
    """Return the draft length and the window that a folder names, where it does."""
    found = {name: facts[name] for name in ("k", "window_tokens") if name in facts}
    methods = (facts.get("speculators_config") or {}).get("proposal_methods")
    if methods:  # its trainer masks by a window, too; in the layout of SafeAILab no engine does
        found["k"] = methods[0]["speculative_tokens"]
    if "speculators_model_type" in facts and "sliding_attention" in (layer.get("layer_types") or []):
        found["window_tokens"] = layer["sliding_window"]
    return found


def _kept(
    facts: Mapping, tensors: Mapping[str, Tensor], vocab_size: int, given: str, guesses: list[str]
) -> Tensor | None:
    """Return the tokens [K] int64 that it can draft, in the order of its lm_head; None: all.

    `d2t` holds what is added to a row's number. Where that leaves the vocabulary, or marks others than `t2d`, they may
    be the tokens themselves.
    """
    map_, marks, head = tensors.get("d2t"), tensors.get("t2d"), tensors.get("lm_head.weight")
    lengths = (len(one) for one in (map_, head) if one is not None)
    n_kept = facts.get("draft_vocab_size") or next(lengths, vocab_size)
    if n_kept == vocab_size:
        return None
    marked = None if marks is None else marks.nonzero()[:, 0]
    if map_ is None:
        if marked is None or len(marked) != n_kept:
            raise UserError(f"{given} drafts {n_kept} of {vocab_size} tokens, and has no d2t that says which")
        guesses.append("it has no d2t, so its tokens are those of t2d")
        return marked
    readings = {"offsets": map_.long() + torch.arange(len(map_)), "tokens": map_.long()}
    readings = {name: ids for name, ids in readings.items() if _is_map(ids, n_kept, vocab_size)}
    agrees = {name: marked is not None and torch.equal(ids.sort().values, marked) for name, ids in readings.items()}
    if not readings:
        raise UserError(f"{given} has a d2t that is no map of {n_kept} rows to {vocab_size} tokens; fetch it again")
    name = next((name for name in readings if agrees[name]), next(iter(readings)))
    if name == "tokens":
        guesses.append("d2t holds the tokens themselves, not offsets, which engines would add")
    if marked is not None and not agrees[name]:
        guesses.append("t2d marks other tokens than d2t, which is read")
    return readings[name]


def _is_map(ids: Tensor, n_kept: int, vocab_size: int) -> bool:
    is_inside = ids.dim() == 1 and len(ids) == n_kept and int(ids.min()) >= 0 and int(ids.max()) < vocab_size
    return is_inside and len(ids.unique()) == n_kept


def _their_names(state: Mapping[str, Tensor], shape: LlamaShape) -> dict[str, Tensor]:
    """Return a drafter's state under the names of the layout, whose projections are apart."""
    heads, tensors = [shape.n_head, shape.n_kv_head, shape.n_kv_head], {}
    parts = {"qkv": [n * shape.head_dim for n in heads], "gate_up": 2 * [shape.intermediate_size]}
    for name, tensor in state.items():
        within, kind = name.removeprefix("blocks.0.").rsplit(".", 1)
        if not name.startswith("blocks.0."):
            tensors[_renamed(name, NAMES)] = tensor
        elif within in MATRICES:
            split = zip(MATRICES[within], tensor.split(parts.get(within, len(tensor))), strict=True)
            tensors |= {f"{BLOCK}{theirs}.{kind}": part for theirs, part in split}
        else:
            tensors[f"{BLOCK}{NORMS.get(within, within)}.{kind}"] = tensor
    return tensors


def _our_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the layout under the names of a drafter, whose projections are joined."""
    block = {name.removeprefix(BLOCK): one for name, one in tensors.items() if name.startswith(BLOCK)}
    state = {f"blocks.0.{name}": one for name, one in block_state(block).items()}
    names = {theirs: ours for ours, theirs in NAMES.items()}
    return state | {_renamed(name, names): one for name, one in tensors.items() if not name.startswith(BLOCK)}


def _renamed(name: str, names: Mapping[str, str]) -> str:
    first = next((one for one in names if name.startswith(one)), "")
    return names.get(first, "") + name.removeprefix(first)
