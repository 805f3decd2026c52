"""The folder `vllm/` of a SPIRe export: what vLLM reads as an EAGLE-3 head. See `vllm_spire.py`, which runs it."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save_file

from spectrain.errors import UserError
from spectrain.exports.cards import json_argument
from spectrain.exports.vllm_versions import ARCHITECTURE, FORMAT
from spectrain.models.artifacts import WEIGHTS, read_manifest
from spectrain.models.published import SIZES
from spectrain.models.spire import SpireConfig
from spectrain.stores.files import read_object, write_json
from spectrain.target.target import FINAL, TargetModel

log = logging.getLogger(__name__)

FOLDER = "vllm"
TARGET = "target.safetensors"  # of the target: its last norm, and some rows of its embedding, by which it is known
ROWS = 64


def why_not_vllm(config: SpireConfig) -> str | None:
    """Return why vLLM cannot run a drafter, as half a sentence; None: it can."""
    shape = config.shape
    if not config.target_activations:
        return "it was trained with target_activations=false, and vLLM gives a drafter the target's states alone"
    if shape.layer_types:
        return "vLLM's class of the target, Gemma 3, gives the states of its blocks to no drafter"
    if shape.hidden_act != "silu":
        return f"vLLM runs no target of its kind with the activation {shape.hidden_act}"
    if config.window_tokens < 2:
        return "vLLM has no window of window_tokens=1, in which a token sees no other"
    return None


def write_for_engine(
    folder: Path, name: str, target_name: str, target: TargetModel, attention: str | None = None
) -> str:
    """Write what vLLM needs beside a SPIRe drafter, where it can run it, and return what the export's card says of it.

    See `exporting.write_for_engine`; for `attention`, `write_vllm_folder`. Raise UserError where that was asked for,
    and vLLM cannot run the drafter.
    """
    config, artifact = read_object(folder / "config.json", SpireConfig, "export it again"), read_manifest(folder)
    if (why := why_not_vllm(config)) is not None:
        if attention is not None:
            raise UserError(f"attention={attention} is for vLLM, which cannot run this drafter: {why}; remove it")
        log.info("no folder for vLLM: %s", why)
        return f"No other engine runs this drafter: {why}."
    write_vllm_folder(folder, config, target, target_name, artifact.target_fingerprint, attention or "stock")
    n_tokens = artifact.trained.get("fastest_gamma") or config.k
    eager = " --enforce-eager" * (attention == "exact")  # never recorded as a CUDA graph
    speculative = json_argument(method="eagle3", model=f"{name}/{FOLDER}", num_speculative_tokens=n_tokens)
    return (
        "In vLLM 0.32, with spectrain in its environment (docs/export.md says how):\n\n"
        f"```bash\nvllm serve {shlex.quote(target_name)}{eager} --speculative-config {speculative}\n```"
    )


def write_vllm_folder(
    folder: Path, config: SpireConfig, target: TargetModel, name: str, fingerprint: str, attention: str = "stock"
) -> None:
    """Fill `vllm/` in the folder of an export, which holds the weights of a drafter that vLLM can run.

    Of the target its tables are enough; `name` is what messages call it. `attention` is `stock`, vLLM's own, or
    `exact`, as trained where the CPU or FlashAttention runs it.
    """
    out = folder / FOLDER
    out.mkdir()
    try:
        os.link(folder / WEIGHTS, out / WEIGHTS)
    except OSError:  # a file system without links
        shutil.copyfile(folder / WEIGHTS, out / WEIGHTS)
    norm, rows = target.model.model.norm.weight, target.model.get_input_embeddings().weight[:ROWS]
    tensors = {"target.norm": norm, "target.embedding": rows}
    save_file({key: one.detach().float().cpu().contiguous() for key, one in tensors.items()}, out / TARGET)
    shape, n_blocks = config.shape, target.model.config.num_hidden_layers
    ids = {n_blocks if layer == FINAL else layer for layer in config.captured_layers}  # vLLM gives each of them once
    sizes = {"vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size, "n_blocks": n_blocks}
    facts = {  # sizes under the names that vLLM reads, and all that its class needs
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **{theirs: getattr(shape, ours) for theirs, ours in SIZES.items()},
        "hidden_size": len(config.captured_layers) * shape.hidden_size,  # of what the proposer hands on
        "num_hidden_layers": config.n_layer,
        "rope_parameters": shape.rope_parameters,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": sorted(ids),
        "version": FORMAT,
        "attention": attention,
        "target": {"name": name, "fingerprint": fingerprint, "rows": len(rows), **sizes},
        "spire": asdict(config),
    }
    write_json(out / "config.json", facts)
