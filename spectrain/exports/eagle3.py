"""How engines serve an EAGLE-3 export, and its copy in the format of speculators.

vLLM and SGLang load it as it is, llama.cpp and OpenVINO convert it.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from spectrain.exports.cards import json_argument
from spectrain.models.artifacts import WEIGHTS, fastest_gamma
from spectrain.models.eagle3 import BLOCK, FLAGS, LAYERS, OF_BLOCK, sglang_window
from spectrain.stores.files import load_json, write_json
from spectrain.target.target import TargetModel

log = logging.getLogger(__name__)

FOLDER = "speculators"
VERSION = "0.9.0"  # of speculators, which the format was compared with
ALIKE = ("draft_vocab_size", "target_hidden_size", "torch_dtype", LAYERS)  # keys of both


def write_for_engine(
    folder: Path, name: str, target_name: str, target: TargetModel, speculators: bool | None = None
) -> str:
    """Return what the export's card says of engines, and log what one of them does not compute as we do.

    See `exporting.write_for_engine`. `speculators`: whether the folder gets a copy in the format of speculators.
    """
    facts, tensors = load_json(folder / "config.json"), load_file(folder / WEIGHTS)
    if speculators:
        (folder / FOLDER).mkdir()
        write_speculators(folder / FOLDER, facts, tensors, target_name, target)
    n_tokens, quoted = fastest_gamma(folder) or facts["k"], shlex.quote(target_name)
    drafting = json_argument(method="eagle3", model=name, num_speculative_tokens=n_tokens)
    window = facts["window_tokens"]
    window = f" --speculative-draft-window-size {sglang_window(window)}" if window else ""
    said = [
        "In vLLM and SGLang, which load this folder as it is:\n",
        f"```bash\nvllm serve {quoted} --speculative-config {drafting}\n"
        f"python -m sglang.launch_server --model-path {quoted} --speculative-algorithm EAGLE3 \\\n"
        f"  --speculative-draft-model-path {shlex.quote(name)} --speculative-num-steps {n_tokens} \\\n"
        f"  --speculative-eagle-topk 1 --speculative-num-draft-tokens {n_tokens + 1}{window}\n```",
        "\nIn llama.cpp, where `target.gguf` is the target, converted likewise:\n",
        f"```bash\npython convert_hf_to_gguf.py {shlex.quote(name)} --target-model-dir {quoted} "
        "--outfile drafter.gguf\n"
        f"llama-server -m target.gguf --spec-type draft-eagle3 -md drafter.gguf --spec-draft-n-max {n_tokens}\n```",
    ]
    for difference in differences(facts, tensors):
        log.warning("%s: %s", name, difference)
        said.append(f"\n{difference[0].upper()}{difference[1:]}.")
    if speculators:
        said.append(f"\n`{FOLDER}/` is the same drafter as speculators reads it: `vllm serve {name}/{FOLDER}`.")
    return "\n".join(said)


def differences(facts: Mapping, names: Collection[str]) -> list[str]:
    """Return in which engine a drafter with tensors of these names drafts otherwise than here, as sentences."""
    has_head, has_embedding = "lm_head.weight" in names, "embed_tokens.weight" in names
    others = sorted(name for name in names if name.endswith("bias") or "q_norm" in name or "k_norm" in name)
    known = {
        "SGLang ignores norm_before_residual, so it accepts few of its drafts": facts.get("norm_before_residual"),
        "SGLang reads the target's embedding in place of its own, so it accepts few of its drafts": has_embedding,
        "vLLM has no window for it, so it sees the whole text there, not the last {window_tokens} tokens as in "
        "training": facts["window_tokens"],
        "llama.cpp and OpenVINO ignore norm_output, so they accept few of its drafts": facts.get("norm_output"),
        "OpenVINO ignores its norms of states, so it accepts few of its drafts": any(map(facts.get, FLAGS[:3])),
        "llama.cpp does not convert fc_norm": facts.get("fc_norm"),
        "llama.cpp and OpenVINO load drafters of three states only": len(facts[LAYERS]) != 3,
        "llama.cpp and OpenVINO do not convert a drafter that reads the target's whole unembedding": not has_head,
        f"vLLM and SGLang have no place for some of its weights ({', '.join(others)})": others,
    }
    return [said.format(**facts) for said, is_so in known.items() if is_so]


def write_speculators(
    out: Path, facts: Mapping, tensors: Mapping[str, Tensor], target_name: str, target: TargetModel
) -> None:
    """Fill an empty folder with config.json and weights of an export, as speculators writes them."""
    renamed = {re.sub(f"^{re.escape(BLOCK)}", "layers.0.", name): tensor for name, tensor in tensors.items()}
    save_file(renamed, out / WEIGHTS, {"format": "pt"})
    architectures = getattr(target.model.config, "architectures", None) or [type(target.model).__name__]
    proposal, window = {"proposal_type": "greedy", "speculative_tokens": facts["k"]}, facts["window_tokens"]
    windowed = {"layer_types": ["sliding_attention"], "sliding_window": window} if window else {}
    said = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "draft_vocab_size": facts["vocab_size"],
        **{key: facts[key] for key in ALIKE if facts.get(key) is not None},
        **{flag: facts.get(flag, False) for flag in FLAGS},
        "embed_requires_grad": "embed_tokens.weight" in tensors,
        "transformer_layer_config": {key: facts[key] for key in OF_BLOCK if key in facts} | windowed,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target_name, "architectures": architectures},
        },
    }
    write_json(out / "config.json", said)
