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
        UserError: a folder or number is wrong, or a model is given twice.
    """
    numbers, path, sources = options["numbers"], options["target"]["path"], {}
    if path is not None and numbers["target"] is not None:
        raise UserError(f"target={path} and numbers.target are both given; give numbers.target=null")
    if numbers["target"] is not None:
        target, sources["target"] = shape_of_numbers("numbers.target", numbers["target"]), "given by numbers"
    else:
        sources["target"] = str(path or BUNDLED)
        target = shape_of_model(sources["target"], "target")
    vanilla, exported = None, None
    for path in names(options["drafter"]):
        kind = "spire" if is_spire(Path(path)) else "vanilla"
        if kind in sources or numbers[kind] is not None:
            also = "another drafter" if kind in sources else f"numbers.{kind}"
            raise UserError(f"drafter={path} is a {kind} drafter, and so is {also}; give one of them")
        sources[kind] = path
        if kind == "spire":
            exported = exported_config(Path(path))
        else:
            vanilla = shape_of_model(path, "drafter")
    if vanilla is None and numbers["vanilla"] is not None:
        vanilla, sources["vanilla"] = shape_of_numbers("numbers.vanilla", numbers["vanilla"]), "given by numbers"
    elif vanilla is None:  # as `+exp=vanilla` makes it: half the width in as many heads, so 1/8 of the body
        halved = ("n_layer", "hidden_size", "head_dim", "intermediate_size")
        halves = {name: max(1, getattr(target, name) // 2) for name in halved}
        vanilla = dataclasses.replace(target, body_parameters=None, **halves)
        sources["vanilla"] = "half the target's layers and width"
    if exported is not None:
        dimensions = {name: getattr(exported.shape, name) for name in DIMENSIONS[1:]}
        return Shapes(target, vanilla, Shape(n_layer=exported.n_layer, **dimensions), sources, exported)
    n_layer = max(1, target.n_layer // 4)
    given = numbers["spire"] if numbers["spire"] is not None else {"n_layer": n_layer}
    sources["spire"] = "given by numbers" if numbers["spire"] is not None else f"{n_layer} of the target's blocks"
    return Shapes(target, vanilla, shape_of_numbers("numbers.spire", given, target), sources, None)


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
            f"{option}={path} has {what}, whose cost is not modelled; choose a dense model with full attention, or "
            "give its numbers"
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


def _check_complete(path: str, option: str, given: Mapping, config: PretrainedConfig) -> None:
    """Raise UserError where the file lacks a dimension: transformers would fill in that of some 7B model."""
    inner = next((given[key] for key in ("text_config", "llm_config") if isinstance(given.get(key), Mapping)), given)
    known_as = getattr(config.get_text_config(), "attribute_map", {})
    missing = [name for name in NEEDED if name not in inner and known_as.get(name, name) not in inner]
    if missing:
        raise UserError(f"{option}={path}: config.json has no {missing[0]}; complete it, or give the shape by numbers")


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
    needed = DIMENSIONS[:-1]
    missing = [name for name in needed if name not in values]
    if missing:
        raise UserError(f"{option} has no {missing[0]}; a shape by numbers needs {', '.join(needed)}")
    try:
        return Shape(**values)
    except UserError as error:
        raise UserError(f"{option}: {error}") from error
