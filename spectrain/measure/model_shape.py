"""The shape of a model from its config alone, for the throughput model: no weights are read or made."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from spectrain.decoding.errors import UserError
from spectrain.decoding.target import find_blocks, unsupported_layer_type
from spectrain.measure.cost import Shape

NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads")  # without them transformers takes its own defaults
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
OPTIONAL = ("vocab_size", "body_parameters")  # of a shape given by numbers


@dataclasses.dataclass(frozen=True)
class SpireShape:
    """What an exported SPIRe drafter's `config.json` says about its cost."""

    shape: Shape
    k: int
    window_tokens: int
    sink_tokens: int
    feedback: bool


def shape_of_model(path: str, option: str) -> Shape:
    """The shape of a Hugging Face causal LM.

    Parameters are counted in an empty model (torch's `meta` device), so biases, norms of heads and MLPs without a gate
    count as they are.

    Args:
        path: folder or hub id; only its config is read.
        option: by which the user gave it.

    Raises:
        UserError: there is no such config, it lacks a dimension, or the model does not cost what the formulas say.
    """
    if path.startswith(("/", ".", "~")) and not Path(path).expanduser().is_dir():
        raise UserError(f"{option}={path} does not exist; give a folder or hub id of a causal LM, or its numbers")
    try:
        given, _ = PretrainedConfig.get_config_dict(path)
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{option}={path} has no config that transformers can read ({reason}); give a folder or hub id of a causal "
            "LM, or its numbers"
        ) from error
    _check_complete(path, option, given, config)
    text = config.get_text_config()
    kind = unsupported_layer_type(config)
    experts = next((name for name in EXPERTS if (getattr(text, name, None) or 1) > 1), None)
    if kind is not None or experts is not None:
        what = f"layers of type {kind}" if kind is not None else f"{experts}={getattr(text, experts)}"
        raise UserError(
            f"{option}={path} has {what}, whose cost the model does not know; choose a dense model with full "
            "attention, or give its numbers"
        )
    try:
        with torch.device("meta"):
            body = sum(p.numel() for p in find_blocks(AutoModelForCausalLM.from_config(config)).parameters())
    except UserError:
        raise
    except Exception as error:  # whatever an architecture raises where its own fields do not fit together
        raise UserError(
            f"{option}={path} describes no model that transformers can build ({error}); correct its config.json"
        ) from error
    n_head = text.num_attention_heads
    hidden = text.hidden_size
    wide = getattr(text, "intermediate_size", None) or getattr(text, "ffn_dim", None) or 4 * hidden
    return Shape(
        n_layer=text.num_hidden_layers,
        hidden_size=hidden,
        n_head=n_head,
        n_kv_head=getattr(text, "num_key_value_heads", None) or n_head,
        head_dim=getattr(text, "head_dim", None) or hidden // n_head,
        intermediate_size=wide,
        vocab_size=text.vocab_size,
        body_parameters=body,
    )


def _check_complete(path: str, option: str, given: Mapping, config: PretrainedConfig) -> None:
    """Raises UserError where the file lacks a dimension: transformers would fill in that of some 7B model."""
    inner = next((given[key] for key in ("text_config", "llm_config") if isinstance(given.get(key), Mapping)), given)
    names = getattr(config.get_text_config(), "attribute_map", {})
    missing = [name for name in NEEDED if name not in inner and names.get(name, name) not in inner]
    if missing:
        raise UserError(f"{option}={path}: config.json has no {missing[0]}; complete it, or give the shape by numbers")


def is_spire(folder: Path) -> bool:
    """Whether a folder is an exported SPIRe drafter, by its `spectrain.json`."""
    file = folder / "spectrain.json"
    try:
        return file.is_file() and json.loads(file.read_text()).get("kind") == "spire"
    except (ValueError, AttributeError):
        return False


def spire_shape(folder: Path) -> SpireShape:
    """The shape of an exported SPIRe drafter.

    Raises:
        UserError: `config.json` is missing, damaged or lacks a field.
    """
    try:
        values = json.loads((folder / "config.json").read_text())
        given, n_layer = values["shape"], len(values["target_layers"])
        shape = Shape(
            n_layer=n_layer,
            hidden_size=given["hidden_size"],
            n_head=given["n_head"],
            n_kv_head=given["n_kv_head"],
            head_dim=given["head_dim"],
            intermediate_size=given["intermediate_size"],
            vocab_size=given["vocab_size"],
        )
        return SpireShape(shape, values["k"], values["window_tokens"], values["sink_tokens"], values["feedback"])
    except KeyError as error:
        raise UserError(f"drafter={folder}: config.json has no {error.args[0]}; export the drafter again") from error
    except (OSError, ValueError, TypeError) as error:
        if isinstance(error, UserError):
            raise UserError(f"drafter={folder}: {error}; export the drafter again") from error
        raise UserError(
            f"drafter={folder}: config.json cannot be read ({type(error).__name__}); export the drafter again"
        ) from error


def shape_of_numbers(option: str, given: Mapping, base: Shape | None = None) -> Shape:
    """A shape that a user gave by numbers.

    Args:
        option: under which they stand.
        given: fields of `Shape`.
        base: what is not given is taken from; a body count of its own is not.

    Raises:
        UserError: a field is unknown, missing, or does not fit the others.
    """
    fields = [field.name for field in dataclasses.fields(Shape)]
    if not isinstance(given, Mapping):
        raise UserError(
            f"{option}={given} must be several numbers, as '{option}={{n_layer: 8, hidden_size: 512, ...}}'"
        )
    for name in given:
        if name not in fields:
            raise UserError(f"{option}.{name} is unknown; a shape has {', '.join(fields)}")
    values = {} if base is None else dataclasses.asdict(base) | {"body_parameters": None}
    values |= {name: value for name, value in given.items() if value is not None}
    missing = [name for name in fields if name not in values and name not in OPTIONAL]
    if missing:
        raise UserError(f"{option} has no {missing[0]}; a shape by numbers needs {', '.join(fields[:6])}")
    try:
        return Shape(**values)
    except UserError as error:
        raise UserError(f"{option}: {error}") from error
