"""A GGUF file as a target: an ordinary Hugging Face folder with its weights, tokenizer and chat template.

Weights, config and tokenizer are read by transformers, with the packages gguf and accelerate (`pip install
'spectrain[gguf]'`). What its reader passes over is read here: scaled RoPE, biases of a Llama, and the size of its
heads. A model is refused unless each of its weights came from the file, and each weight of the file is in the model.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spectrain.decoding.loading import (
    DTYPES,
    check_complete,
    check_dimensions,
    first_line,
    load_target,
    quiet_transformers,
)
from spectrain.errors import UserError
from spectrain.stores.folder import write_manifest
from spectrain.stores.typed import Count, FileFacts

if TYPE_CHECKING:
    from gguf import GGUFReader

PACKAGES = ("gguf", "accelerate")
MAGIC = b"GGUF"
TEXTS = ("general.architecture", "general.name", "general.license", "tokenizer.ggml.model")  # that are read here
UNQUANTIZED = {"F32", "F16"}  # which lose something in bfloat16
ROPE_TENSORS = ("rope_freqs", "rope_factors")  # divisors of frequencies, no weights
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # as in every Llama 3.1 to 3.3
ROPE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Origin:
    """Where a GGUF file comes from."""

    called: str  # in messages
    source: str  # in the model card
    sha256: str  # of the source
    name: str | None = None  # of the model; None: as the file says
    licence: str | None = None  # None: as the file says


@dataclass(frozen=True)
class TargetManifest:
    """What the manifest of a target says that was made of a GGUF file."""

    name: str
    source: str
    sha256: str
    licence: str
    architecture: str
    quantization: str  # types of its matrices
    dtype: str
    weights: Count
    context_tokens: Count
    vocab_size: Count
    chat: bool  # has a chat template
    files: dict[str, FileFacts] = field(default_factory=dict)
    kind: str = "target"
    version: int = 1


def check_packages() -> None:
    """Raise UserError unless the packages are there that transformers reads GGUF files with."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # accelerate imports deepspeed, which would warn
    for name in PACKAGES:
        try:
            import_module(name)
        except ImportError as error:
            why = f"GGUF files are read with packages that are not installed ({error})"
            raise UserError(f"{why}; run pip install {' '.join(PACKAGES)}") from None


def write_target(folder: Path, file: Path, dtype: str | None, origin: Origin) -> TargetManifest:
    """Fill a folder with the target that a GGUF file holds, and return its manifest.

    Args:
        folder: empty; the caller renames it.
        dtype: of the weights: bfloat16 or float32; None: bfloat16, unless the file is not quantized.

    Raises:
        UserError: a package is missing, the file is damaged, transformers does not know its architecture or types, or
            the model cannot be a target.
    """
    check_packages()
    reader = open_gguf(file, origin.called)
    types = [tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1]
    dtype = dtype or ("float32" if set(types) <= UNQUANTIZED else "bfloat16")
    model, tokenizer = read_model(reader, file, dtype, origin.called)
    with quiet_libraries():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):  # safetensors makes files that nobody but their owner may read
        shutil.copymode(folder / "config.json", weights)
    try:
        target = load_target(folder, dtype, device="cpu")
    except UserError as error:
        raise UserError(f"{origin.called} holds no target: {str(error).replace(str(folder), 'it')}") from error
    manifest = TargetManifest(
        name=origin.name or _text(reader, "general.name") or file.stem,
        source=origin.source,
        sha256=origin.sha256,
        licence=origin.licence or _text(reader, "general.license") or "not stated in the file",
        architecture=model.config.model_type,
        quantization=", ".join(name for name, _ in Counter(types).most_common()),
        dtype=dtype,
        weights=sum(parameter.numel() for parameter in model.parameters()),
        context_tokens=target.max_positions,
        vocab_size=target.vocab_size,
        chat=tokenizer.chat_template is not None,
    )
    (folder / "README.md").write_text(card(manifest))
    write_manifest(folder, manifest)
    return manifest


def open_gguf(file: Path, called: str) -> GGUFReader:
    """Map a GGUF file. Raise UserError where it is none, damaged, or has tensors of types that gguf does not know."""
    gguf = import_module("gguf")
    with file.open("rb") as content:
        if content.read(len(MAGIC)) != MAGIC:
            raise UserError(f"{called} is no GGUF file; give a file of type .gguf")
    other = "give a file of another quantization, such as Q8_0 or Q4_K"
    try:
        reader = gguf.GGUFReader(file)
        architecture, *_ = [_text(reader, key) for key in TEXTS]
    except OSError:
        raise
    except Exception as error:  # of numpy and gguf, each of its own type
        if "GGMLQuantizationType" in str(error):
            raise UserError(f"{called} has tensors of a type that gguf does not know ({error}); {other}") from error
        raise UserError(f"{called} is truncated or damaged ({first_line(error)}); fetch it again") from error
    for kind in {tensor.tensor_type for tensor in reader.tensors}:
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            raise UserError(f"{called} has tensors of the type {kind.name}, which gguf cannot read; {other}") from None
    if not architecture or not reader.tensors:
        raise UserError(f"{called} names no architecture, or holds no weights; give a file that holds a whole model")
    return reader


def read_model(reader: GGUFReader, file: Path, dtype: str, called: str) -> tuple[PreTrainedModel, object]:
    """Return the model of a GGUF file, fit to be saved, and its tokenizer; see `write_target`."""
    here = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name, "trust_remote_code": False}
    reported = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # refused below, by name
    part = f"architecture {_text(reader, 'general.architecture')}"
    try:
        with quiet_libraries():
            config = AutoConfig.from_pretrained(**here)
            complete_config(config, reader, called)
            check_dimensions(config.to_dict())
            check_count(config, reader, called)
            read, found = AutoModelForCausalLM.from_pretrained(**here, config=config, dtype=DTYPES[dtype], **reported)
            part = f"tokenizer ({_text(reader, 'tokenizer.ggml.model') or 'none'})"
            tokenizer = AutoTokenizer.from_pretrained(**here)
    except UserError:
        raise
    except Exception as error:  # transformers and tokenizers each raise their own types here
        why = f"{called} has an {part}" if part.startswith("a") else f"{called} has a {part}"
        raise UserError(f"{why} that transformers cannot read ({first_line(error)}); give another file") from error
    check_complete(called, found)
    return unquantized(read), tokenizer


def check_count(config: PretrainedConfig, reader: GGUFReader, called: str) -> None:
    """Raise UserError unless a model of this config has as many weights as the file, of which none is allocated."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    n_here = sum(int(one.n_elements) for one in reader.tensors if not one.name.startswith(ROPE_TENSORS))
    n_there = sum(parameter.numel() for parameter in model.parameters())
    if n_here != n_there:
        why = f"{called} holds {n_here:,} weights, but the {type(model).__name__} of transformers has {n_there:,}"
        raise UserError(f"{why}; give a file of another architecture, such as llama")


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence reports and bars of transformers, also those that it draws past its own options."""
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        yield


def unquantized(read: PreTrainedModel) -> PreTrainedModel:
    """Move the weights into a model of their own: transformers refuses to save what was read from a GGUF file."""
    config = copy.deepcopy(read.config)
    for name in ("quantization_config", "_model_name_or_path"):
        vars(config).pop(name, None)
    with torch.device("meta"):
        model = type(read)(config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    return model


def complete_config(config: PretrainedConfig, reader: GGUFReader, called: str) -> None:
    """Set what transformers does not read of the metadata: the size of heads, biases of a Llama, scaled RoPE.

    Raises:
        UserError: RoPE is scaled in a way that this does not know.
    """
    architecture, tensors = _text(reader, "general.architecture"), {one.name: one.data for one in reader.tensors}
    if hasattr(config, "head_dim") and (head_dim := _value(reader, f"{architecture}.attention.key_length")):
        config.head_dim = head_dim
    if config.model_type == "llama":
        config.attention_bias = "blk.0.attn_q.bias" in tensors
        config.mlp_bias = "blk.0.ffn_up.bias" in tensors
    scaling, factor, length = (
        _value(reader, f"{architecture}.rope.scaling.{name}") for name in ("type", "factor", "original_context_length")
    )
    known = True
    if scaling in ("linear", "yarn"):
        more = {} if length is None else {"original_max_position_embeddings": length}
        config.rope_parameters |= {"rope_type": scaling, "factor": factor, **(more if scaling == "yarn" else {})}
    elif "rope_freqs.weight" in tensors:
        known = _set_divisors(config, np.asarray(tensors["rope_freqs.weight"], dtype=np.float64))
    if not known or scaling not in (None, "none", "linear", "yarn") or any("rope_factors" in name for name in tensors):
        raise UserError(f"{called} scales its RoPE in a way that is not known here; give a file of another model")


def _set_divisors(config: PretrainedConfig, divisors: np.ndarray) -> bool:
    """Set the RoPE whose frequencies are divided so: [head_dim / 2]. Return whether it is one that transformers has.

    GGUF files of Llama 3.1 to 3.3 hold these divisors in place of the four numbers that they were computed from.
    """
    exponents = np.arange(len(divisors)) / len(divisors)
    unscaled = config.rope_parameters["rope_theta"] ** -exponents
    factor = float(divisors.max())
    if np.allclose(divisors, factor):
        config.rope_parameters |= {} if factor == 1 else {"rope_type": "linear", "factor": factor}
        return True
    # The inverse of transformers' smoothing: 1 / divisor = (1 - share) / factor + share.
    share = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    lengths = 2 * math.pi / unscaled * (low + (high - low) * share)  # exact where 0 < share < 1, at most this where 0
    smoothed = (share > ROPE_TOLERANCE) & (share < 1 - ROPE_TOLERANCE)
    length = round(np.median(lengths[smoothed])) if smoothed.any() else int(lengths[share <= ROPE_TOLERANCE].min())
    config.rope_parameters |= {**LLAMA3, "factor": factor, "original_max_position_embeddings": length}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return np.allclose(unscaled / scaled.numpy(), divisors, rtol=ROPE_TOLERANCE)


def card(manifest: TargetManifest) -> str:
    """Return the model card of a target."""
    licence = manifest.licence.lower()
    chat = "has one" if manifest.chat else "has none"
    return f"""---
license: {licence if licence == "apache-2.0" else "other"}
library_name: transformers
pipeline_tag: text-generation
---

# {manifest.name}

A language model that `python -m data_prep.target` of spectrain made of a GGUF file.

| | |
|---|---|
| source | {manifest.source} |
| sha256 of the source | `{manifest.sha256}` |
| licence | {manifest.licence} |
| architecture | {manifest.architecture}, {manifest.weights:,} weights |
| weights | {manifest.quantization} in the file, here in {manifest.dtype} |
| context | {manifest.context_tokens:,} tokens |
| vocabulary | {manifest.vocab_size:,} tokens |
| chat template | {chat} |

The values of the file are the model: what is measured on it holds for these values, not for the model that they were
quantized from.
"""


def _text(reader: GGUFReader, key: str) -> str:
    """Return a text of the metadata; an empty one where there is none."""
    value = _value(reader, key)
    return value if isinstance(value, str) else ""


def _value(reader: GGUFReader, key: str) -> object:
    """Return a value of the metadata, or None where there is none."""
    entry = reader.get_field(key)
    return None if entry is None else entry.contents()
