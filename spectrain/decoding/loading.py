"""Load a target from a folder or the Hugging Face hub; what goes wrong becomes one sentence for the user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.utils.logging import set_tqdm_hook

from spectrain.decoding.errors import UserError
from spectrain.decoding.target import TargetModel, check_layers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NOT_CAUSAL = "is no causal language model; choose a decoder-only model"
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
    for option, value, known in (("dtype", dtype, DTYPES), ("parallel", parallel, PARALLEL)):
        if value not in known:
            raise UserError(f"target.{option}={value} must be one of {', '.join(known)}")
    name = str(path_or_id)
    config = _load_config(name)
    target_name = f"target {name} ({config.model_type})"
    check_layers(config, target_name)
    options = {"config": config, "dtype": DTYPES[dtype], "attn_implementation": "sdpa", **PARALLEL[parallel]}
    try:
        with _no_progress_bar():
            model = AutoModelForCausalLM.from_pretrained(name, **options)
    except Exception as error:  # safetensors, torch and transformers each raise their own types here
        raise UserError(f"{target_name} {_why_no_model(error)}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise UserError(f"target {name} has no tokenizer that transformers can read ({_first_line(error)})") from error
    if parallel == "none":
        try:
            model = model.to(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        except (RuntimeError, AssertionError) as error:
            why = _first_line(error)
            raise UserError(f"target.device={device} cannot be used ({why}); give target.device=cpu") from error
    target = TargetModel(model.eval().requires_grad_(False), tokenizer, capture_layers)
    if not _is_causal(target):
        raise UserError(f"{target_name} {NOT_CAUSAL}")
    return target


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Silence the bar of transformers that counts loaded weights. Downloads keep theirs."""
    before = set_tqdm_hook(lambda bar, args, kwargs: bar(*args, **{**kwargs, "disable": True}))
    try:
        yield
    finally:
        set_tqdm_hook(before)


@torch.inference_mode()
def _is_causal(target: TargetModel) -> bool:
    """Whether a token's logits ignore what follows it. Encoders such as BERT load as causal models, too."""
    texts = (torch.tensor([[0, last]], device=target.device) for last in (1, 2))
    before, after = (target.forward(tokens).logits[0, 0] for tokens in texts)
    return torch.allclose(before.float(), after.float(), atol=1e-3, rtol=1e-3)


def _load_config(name: str) -> PretrainedConfig:
    folder = Path(name)
    is_here = folder.is_dir()
    if is_here and not (folder / "config.json").is_file():
        raise UserError(f"target folder {name} has no config.json; give the folder that save_pretrained wrote")
    if not is_here and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise UserError(f"target folder {name} does not exist; give an existing folder or a Hugging Face id")
    try:
        return AutoConfig.from_pretrained(name)
    except Exception as error:
        why = (
            f"folder {name} has a config.json that transformers cannot read ({_first_line(error)})"
            if is_here
            else f"{name} is no folder here, and as a Hugging Face id it could not be fetched (no network, or no such "
            "model); give an existing folder, or an id while online"
        )
        raise UserError(f"target {why}") from error


def _why_no_model(error: Exception) -> str:
    line = _first_line(error)
    if "Unrecognized configuration class" in line or "for this kind of AutoModel" in line:
        return NOT_CAUSAL
    if any(word in f"{line} {error}".lower() for word in ("safetensor", "deserializ")):
        return f"has a missing or corrupt weight file ({line}); fetch or export it again"
    return f"could not be loaded ({line}); check the folder, its dtype and its files"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
