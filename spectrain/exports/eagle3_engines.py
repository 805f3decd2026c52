"""How vLLM and SGLang serve an EAGLE-3 export, which they load as it is, and its copy in the format of speculators."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from spectrain.exports.cards import json_argument
from spectrain.models.artifacts import WEIGHTS, read_manifest
from spectrain.models.eagle3_folders import BLOCK, FLAGS, LAYERS
from spectrain.stores.files import load_json, write_json
from spectrain.target.target import TargetModel

log = logging.getLogger(__name__)

FOLDER = "speculators"
VERSION = "0.9.0"  # of speculators, which the format was compared with
OF_TRAINING = ("draft_vocab_size", "target_hidden_size", LAYERS)  # keys that mean the same in both formats
OF_BLOCK = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act")
OF_BLOCK += ("model_type", "rms_norm_eps", "max_position_embeddings", "vocab_size", "attention_bias", "mlp_bias")
OF_BLOCK += ("rope_theta", "rope_scaling", "num_hidden_layers", "tie_word_embeddings")


def write_for_engine(
    folder: Path, name: str, target_name: str, target: TargetModel, speculators: bool | None = None
) -> str:
    """Return what the export's card says of engines, and log what one of them does not compute as we do.

    Args:
        folder: of the export.
        name: the export in command lines.
        target_name: the target, likewise.
        target: it drafts for.
        speculators: whether the folder gets a copy in the format of speculators.
    """
    config = load_json(folder / "config.json")
    if speculators:
        (folder / FOLDER).mkdir()
        write_speculators(folder, config, target_name, target)
    n_tokens, quoted = read_manifest(folder).trained.get("fastest_gamma") or config["k"], shlex.quote(target_name)
    drafting = json_argument(method="eagle3", model=name, num_speculative_tokens=n_tokens)
    window = f" --speculative-draft-window-size {config['window_tokens']}" if config["window_tokens"] else ""
    said = [
        "In vLLM and SGLang, which load this folder as it is:\n",
        f"```bash\nvllm serve {quoted} --speculative-config {drafting}\n"
        f"python -m sglang.launch_server --model-path {quoted} --speculative-algorithm EAGLE3 \\\n"
        f"  --speculative-draft-model-path {shlex.quote(name)} --speculative-num-steps {n_tokens} \\\n"
        f"  --speculative-eagle-topk 1 --speculative-num-draft-tokens {n_tokens + 1}{window}\n```",
    ]
    for difference in differences(config, folder):
        log.warning("%s: %s", name, difference)
        said.append(f"\n{difference[0].upper()}{difference[1:]}.")
    if speculators:
        said.append(f"\n`{FOLDER}/` is the same drafter as speculators reads it: `vllm serve {name}/{FOLDER}`.")
    return "\n".join(said)


def differences(config: Mapping, folder: Path) -> list[str]:
    """Return in which engine an export drafts otherwise than it was trained, or not at all, as sentences."""
    with safe_open(folder / WEIGHTS, "pt") as tensors:
        names = set(tensors.keys())
    biased = any(name.startswith(f"{BLOCK}self_attn.") and name.endswith("bias") for name in names)
    known = {
        "SGLang ignores norm_before_residual, so it accepts little of this drafter": config.get("norm_before_residual"),
        "vLLM has no window for this drafter, which sees the last {window_tokens} tokens in training, and the whole "
        "text there": config["window_tokens"],
        "SGLang has no place for the biases of queries, keys and values": biased,
        "vLLM and SGLang have no place for its norms of queries and keys": f"{BLOCK}self_attn.q_norm.weight" in names,
        f"layer 0 in {LAYERS} is the embedding, which was tried in no engine": 0 in config[LAYERS],
    }
    return [said.format(**config) for said, is_so in known.items() if is_so]


def write_speculators(folder: Path, config: Mapping, target_name: str, target: TargetModel) -> None:
    """Fill the folder `speculators/` in an export."""
    out, tensors = folder / FOLDER, load_file(folder / WEIGHTS)
    renamed = {re.sub(f"^{re.escape(BLOCK)}", "layers.0.", name): tensor for name, tensor in tensors.items()}
    save_file(renamed, out / WEIGHTS, {"format": "pt"})
    architectures = getattr(target.model.config, "architectures", None) or [type(target.model).__name__]
    proposal = {"proposal_type": "greedy", "speculative_tokens": config["k"]}
    window = config["window_tokens"]
    windowed = {"layer_types": ["sliding_attention"], "sliding_window": window} if window else {}
    facts = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "draft_vocab_size": config["vocab_size"],
        **{key: config[key] for key in OF_TRAINING if key in config},
        **{flag: config.get(flag, False) for flag in FLAGS},
        "embed_requires_grad": "embed_tokens.weight" in tensors,
        "torch_dtype": config["torch_dtype"],
        "transformer_layer_config": {key: config[key] for key in OF_BLOCK if key in config} | windowed,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target_name, "architectures": architectures},
        },
    }
    write_json(out / "config.json", facts)
