"""Folders of EAGLE-3 drafters as vLLM and SGLang load them: config.json and the tensors of `LlamaForCausalLMEagle3`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrain.errors import UserError
from spectrain.models.artifacts import WEIGHTS, damage_of
from spectrain.stores.files import read_object, write_json, write_whole
from spectrain.target.lean import MATRICES, NORMS, block_state
from spectrain.target.llama import LlamaShape

KEPT = "kept.npy"  # the tokens that it can draft in our own order, the most frequent first; engines pass over it
BLOCK = "midlayer."
NAMES = {"states_norm.": "input_norm.", "state_norms.": "fc_norm."}  # ours -> theirs
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
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


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
        is_kept[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": is_kept}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    write_json(folder / "config.json", _config_json(config, dtype, ends))


def _config_json(config: Mapping, dtype: torch.dtype, ends: Mapping) -> dict:
    shape, layers, rope = config["shape"], config["target_layers"], dict(config["shape"].rope_parameters)
    theta = rope.pop("rope_theta")
    is_windowed = config["window_tokens"] < shape.max_positions
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{theirs: getattr(shape, ours) for theirs, ours in SIZES.items()},
        "attention_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        "rope_theta": theta,
        **({} if rope.get("rope_type", "default") == "default" else {"rope_scaling": rope}),
        "num_hidden_layers": 1,
        "draft_vocab_size": config["draft_vocab"] or shape.vocab_size,
        "target_hidden_size": shape.hidden_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **ends,
        **{flag: True for flag in FLAGS if config[flag]},
        **({} if len(layers) == 3 else {"num_aux_hidden_states": len(layers)}),
        # The inputs of these blocks, as vLLM counts, and the same states as outputs of blocks, as SGLang does.
        "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers],
            "use_aux_hidden_state": True,
        },
        "k": config["k"],
        "window_tokens": config["window_tokens"] if is_windowed else None,
        "unembedding": config["unembedding"],
    }


def read(folder: Path, given: str) -> tuple[dict, dict[str, Tensor]]:
    """Return the fields of `Eagle3Config`, and the drafter's state, of a folder. `given`: it, as messages name it."""
    facts = read_object(folder / "config.json", dict, "export it again")
    with damage_of(given):
        tensors = load_file(folder / WEIGHTS)
    shape = _shape(facts, tensors)
    config = {"shape": shape, "target_layers": tuple(facts["eagle_aux_hidden_state_layer_ids"])}
    config |= {"k": facts["k"], "window_tokens": facts["window_tokens"], "unembedding": facts["unembedding"]}
    config |= {flag: facts.get(flag, False) for flag in FLAGS}
    state = _our_names(tensors)
    offsets, head = state.pop("d2t", None), state.get("lm_head.weight")
    state.pop("t2d", None)
    if offsets is not None:
        ids = torch.arange(len(offsets)) + offsets
        kept = ids
        if (folder / KEPT).is_file():
            with damage_of(given, f"{KEPT}: "):
                kept = torch.from_numpy(np.load(folder / KEPT))
            if not torch.equal(kept.sort().values, ids):
                raise UserError(f"{given} has other tokens in {KEPT} than in d2t; export it again")
        state |= {"kept": kept, "lm_head.weight": head[torch.searchsorted(ids, kept)]}
    if config["unembedding"] == "target":
        state.pop("lm_head.weight", None)
    config |= {"draft_vocab": None if offsets is None else len(offsets)}
    return config | {"own_embedding": "embed_tokens.weight" in state}, state


def _shape(facts: Mapping, tensors: Mapping[str, Tensor]) -> LlamaShape:
    theta, scaling = facts["rope_theta"], facts.get("rope_scaling") or {"rope_type": "default"}
    return LlamaShape(
        **{ours: facts[theirs] for theirs, ours in SIZES.items()},
        rope_parameters={"rope_theta": theta, **scaling},
        qkv_bias=f"{BLOCK}self_attn.q_proj.bias" in tensors,
        output_bias=f"{BLOCK}self_attn.o_proj.bias" in tensors,
        mlp_bias=f"{BLOCK}mlp.gate_proj.bias" in tensors,
        qk_norm=f"{BLOCK}self_attn.q_norm.weight" in tensors,
        tie_embeddings=False,
    )


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
