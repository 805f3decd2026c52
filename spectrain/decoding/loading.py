"""Load a target from a folder or the Hugging Face hub; what goes wrong becomes one sentence for the user."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from spectrain.decoding.errors import UserError
from spectrain.decoding.target import TargetModel, unsupported_layer_type

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PARALLEL = {"none": {}, "device_map": {"device_map": "auto"}, "tp": {"tp_plan": "auto"}}


def load_target(
    path_or_id: str | Path,
    dtype: str = "float32",
    device: str = "auto",
    parallel: str = "none",
    capture_layers: Sequence[int] = (),
) -> TargetModel:
    """Load model and tokenizer, ready to decode.

    Args:
        path_or_id: a Hugging Face folder, or an id on the hub.
        dtype: float32, bfloat16 or float16.
        device: "auto" takes a GPU where there is one; ignored unless parallel is "none".
        parallel: "device_map" spreads the layers over the visible devices, "tp" the weights over torchrun's ranks.
        capture_layers: see `TargetModel`.

    Raises:
        UserError: the target is missing, damaged or unsupported.
    """
    name = str(path_or_id)
    if dtype not in DTYPES:
        raise UserError(f"target.dtype={dtype} must be one of {', '.join(DTYPES)}")
    if parallel not in PARALLEL:
        raise UserError(f"target.parallel={parallel} must be one of {', '.join(PARALLEL)}")
    config = _load_config(name)
    layer_type = unsupported_layer_type(config)
    if layer_type is not None:
        raise UserError(
            f"target {name} ({config.model_type}) has layers of type {layer_type}; "
            "only full_attention is supported, choose another target"
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=DTYPES[dtype], attn_implementation="sdpa", **PARALLEL[parallel]
        )
    except Exception as error:  # safetensors, torch and transformers each raise their own types here
        raise UserError(_why_no_model(name, config, error)) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise UserError(f"target {name} has no tokenizer that transformers can read ({_first_line(error)})") from error
    if parallel == "none":
        try:
            model = model.to(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        except (RuntimeError, AssertionError) as error:
            raise UserError(
                f"target.device={device} cannot be used ({_first_line(error)}); give target.device=cpu"
            ) from error
    target = TargetModel(model.eval().requires_grad_(False), tokenizer, capture_layers)
    if not _is_causal(target):
        raise UserError(
            f"target {name} ({config.model_type}) is no causal language model: what follows a token changes its "
            "logits; choose a decoder-only model"
        )
    return target


@torch.inference_mode()
def _is_causal(target: TargetModel) -> bool:
    """Whether a token's logits ignore what follows it. Encoders such as BERT load as causal models, too."""
    texts = (torch.tensor([[0, last]], device=target.device) for last in (1, 2))
    before, after = (target.forward(tokens).logits[0, 0] for tokens in texts)
    return torch.allclose(before.float(), after.float(), atol=1e-3, rtol=1e-3)


def _load_config(name: str) -> PretrainedConfig:
    folder = Path(name)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(f"target folder {name} has no config.json; give the folder that save_pretrained wrote")
    if not folder.is_dir() and looks_local:
        raise UserError(f"target folder {name} does not exist; give an existing folder or a Hugging Face id")
    try:
        return AutoConfig.from_pretrained(name)
    except Exception as error:
        if folder.is_dir():
            raise UserError(
                f"target folder {name} has a config.json that transformers cannot read ({_first_line(error)})"
            ) from error
        raise UserError(
            f"target {name} is no folder here, and as a Hugging Face id it could not be fetched (no network, or "
            "no such model); give an existing folder, or an id while online"
        ) from error


def _why_no_model(name: str, config: PretrainedConfig, error: Exception) -> str:
    line = _first_line(error)
    if "Unrecognized configuration class" in line or "for this kind of AutoModel" in line:
        return f"target {name} ({config.model_type}) is no causal language model; choose a decoder-only model"
    if "SafetensorError" in type(error).__name__ or "safetensors" in str(error).lower() or "deserializ" in str(error):
        return f"target {name} has a missing or corrupt weight file ({line}); fetch or export it again"
    return f"target {name} could not be loaded ({line}); check the folder, its dtype and its files"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
