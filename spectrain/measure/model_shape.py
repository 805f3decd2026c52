"""Shapes of models for the throughput model, from configs or numbers: no weights are read or made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from spectrain.decoding.errors import UserError
from spectrain.decoding.target import find_blocks, unsupported_layer_type
from spectrain.measure.cost import Shape
from spectrain.methods.registry import names
from spectrain.models.spire import LlamaShape, SpireConfig
from spectrain.stores.folder import read_json
from spectrain.stores.locations import bundled_folder

BUNDLED = "pystdlib-8l"
BY_NUMBERS = "given by numbers"
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads")  # without them transformers takes its own defaults
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
DIMENSIONS = ("n_layer", "hidden_size", "n_head", "n_kv_head", "head_dim", "intermediate_size", "vocab_size")


@dataclass(frozen=True)
class Shapes:
    """The shapes of the models, and where each is from."""

    target: Shape
    vanilla: Shape
    spire: Shape
    sources: dict[str, str]  # target, vanilla, spire -> a few words
    exported: SpireConfig | None  # the SPIRe drafter that was given as a folder


def read_shapes(options: Mapping) -> Shapes:
    """Read the shapes of target and drafters from folders and numbers, or take those that the paper would.

    Raises:
        UserError: a folder or number is wrong, a model is given twice, or the SPIRe drafter is of another target.
    """
    numbers, path = options["numbers"], options["target"]["path"]
    found, exported = {}, None  # model -> shape and source
    if path is not None and numbers["target"] is not None:
        raise UserError(f"target={path} and numbers.target are both given; give numbers.target=null")
    if numbers["target"] is None:
        found["target"] = shape_of_model(str(path or BUNDLED), "target"), str(path or BUNDLED)
    target = found["target"][0] if found else shape_of_numbers("numbers.target", numbers["target"])
    for name, base in (("target", None), ("vanilla", None), ("spire", target)):
        if numbers[name] is not None:
            found[name] = shape_of_numbers(f"numbers.{name}", numbers[name], base), BY_NUMBERS
    for path in names(options["drafter"]):
        kind = "spire" if is_spire(Path(path)) else "vanilla"
        if kind in found:
            also = f"numbers.{kind}" if found[kind][1] == BY_NUMBERS else "another drafter"
            raise UserError(f"drafter={path} is a {kind} drafter, and so is {also}; give one of them")
        if kind == "spire":
            exported = exported_config(Path(path))
            shape = Shape(exported.n_layer, **{name: getattr(exported.shape, name) for name in DIMENSIONS[1:]})
        else:
            shape = shape_of_model(path, "drafter")
        found[kind] = shape, path
    # As `+exp=vanilla` makes it: half the width in as many heads, so 1/8 of the body.
    halves = {name: max(1, getattr(target, name) // 2) for name in (*DIMENSIONS[:2], "head_dim", "intermediate_size")}
    n_layer = max(1, target.n_layer // 4)
    counted = dataclasses.replace(target, body_parameters=None)
    found.setdefault("vanilla", (dataclasses.replace(counted, **halves), "half the target's layers and width"))
    found.setdefault("spire", (dataclasses.replace(counted, n_layer=n_layer), f"{n_layer} of the target's blocks"))
    spire = found["spire"][0]
    if spire.hidden_size != target.hidden_size:
        raise UserError(
            f"the SPIRe drafter is {spire.hidden_size} wide and the target {target.hidden_size}, but it consists of "
            "the target's blocks; give a drafter of this target"
        )
    sources = {name: found[name][1] for name in ("target", "vanilla", "spire")}
    return Shapes(target, found["vanilla"][0], spire, sources, exported)


def shape_of_model(name: str, option: str) -> Shape:
    """Read the shape of a Hugging Face causal LM from its config alone.

    Parameters are counted in an empty model (torch's `meta` device), so biases, norms of heads and MLPs without a gate
    count as they are.

    Args:
        name: bundled checkpoint, folder or hub id.
        option: by which the user gave it.

    Raises:
        UserError: there is no such config, it lacks a dimension, or the model does not cost what the formulas say.
    """
    path = str(bundled_folder(name) or name)
    config = _read_config(path, option)
    text = config.get_text_config()
    try:
        with torch.device("meta"):
            body = sum(p.numel() for p in find_blocks(AutoModelForCausalLM.from_config(config)).parameters())
    except UserError:
        raise
    except Exception as error:  # whatever an architecture raises where its own fields do not fit together
        raise UserError(
            f"{option}={path} describes no model that transformers can build ({error}); correct its config.json"
        ) from error
    n_head, hidden = text.num_attention_heads, text.hidden_size
    return Shape(
        n_layer=text.num_hidden_layers,
        hidden_size=hidden,
        n_head=n_head,
        n_kv_head=getattr(text, "num_key_value_heads", None) or n_head,
        head_dim=getattr(text, "head_dim", None) or hidden // n_head,
        intermediate_size=getattr(text, "intermediate_size", None) or getattr(text, "ffn_dim", None) or 4 * hidden,
        vocab_size=text.vocab_size,
        body_parameters=body,
    )


def _read_config(path: str, option: str) -> PretrainedConfig:
    """Read a config that is complete, and of a model whose cost the formulas give."""
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
    text = config.get_text_config()
    # transformers would fill in a missing dimension with that of some 7B model.
    inner = next((given[key] for key in ("text_config", "llm_config") if isinstance(given.get(key), Mapping)), given)
    known_as = getattr(text, "attribute_map", {})
    for name in NEEDED:
        if name not in inner and known_as.get(name, name) not in inner:
            raise UserError(f"{option}={path}: config.json has no {name}; complete it, or give the shape by numbers")
    kind = unsupported_layer_type(config)
    experts = next((name for name in EXPERTS if (getattr(text, name, None) or 1) > 1), None)
    if kind is not None or experts is not None:
        what = f"layers of type {kind}" if kind is not None else f"{experts}={getattr(text, experts)}"
        raise UserError(
            f"{option}={path} has {what}, whose cost is not modelled; choose a dense model with full attention, or "
            "give its numbers"
        )
    return config


def is_spire(folder: Path) -> bool:
    """Whether a folder is an exported SPIRe drafter, by its `spectrain.json`."""
    try:
        return read_json(folder / "spectrain.json").get("kind") == "spire"
    except (OSError, ValueError, AttributeError):
        return False


def exported_config(folder: Path) -> SpireConfig:
    """Read the config of an exported SPIRe drafter.

    Raises:
        UserError: `config.json` is missing, damaged or lacks a field.
    """
    try:
        values = read_json(folder / "config.json")
        return SpireConfig(**values | {"shape": LlamaShape(**values["shape"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"drafter={folder}: config.json is damaged ({type(error).__name__}: {error}); export the drafter again"
        ) from error


def shape_of_numbers(option: str, given: Mapping, base: Shape | None = None) -> Shape:
    """Make a shape from the fields that the user gave by `option`; `base` provides the others.

    Raises:
        UserError: a field is unknown, missing, or does not fit the others.
    """
    fields = (*DIMENSIONS, "body_parameters")
    if not isinstance(given, Mapping):
        raise UserError(
            f"{option}={given} must be several numbers, as '{option}={{n_layer: 8, hidden_size: 512, ...}}'"
        )
    values = {} if base is None else dataclasses.asdict(base) | {"body_parameters": None}
    values |= {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in fields:
            raise UserError(f"{option}.{name} is unknown; a shape has {', '.join(fields)}")
    for name in DIMENSIONS[:-1]:
        if name not in values:
            raise UserError(f"{option} has no {name}; a shape by numbers needs {', '.join(DIMENSIONS[:-1])}")
    try:
        return Shape(**values)
    except UserError as error:
        raise UserError(f"{option}: {error}") from error
