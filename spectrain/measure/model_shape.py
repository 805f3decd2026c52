"""Shapes of models for the throughput model, from configs or numbers: no weights are read or made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from spectrain.decoding.loading import first_line, read_config
from spectrain.decoding.modules import find_blocks
from spectrain.decoding.supported import unsupported_layer_type
from spectrain.errors import UserError
from spectrain.measure.cost import Shape
from spectrain.methods.registry import names
from spectrain.models.packages import target_path
from spectrain.models.spire import SpireConfig
from spectrain.stores.folder import read_json, read_object
from spectrain.stores.locations import BUNDLED

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
    if path is not None and numbers["target"] is not None:
        raise UserError(f"target={path} and numbers.target are both given; give numbers.target=null")
    sources = {name: BY_NUMBERS for name, given in numbers.items() if given is not None}
    sources.setdefault("target", str(path or BUNDLED))
    if numbers["target"] is None:
        target = shape_of_model(sources["target"], "target")
    else:
        target = shape_of_numbers("numbers.target", numbers["target"])
    # As `+exp=vanilla` makes it: half the width in as many heads, so 1/8 of the body.
    halved = ("n_layer", "hidden_size", "head_dim", "intermediate_size")
    halves = {name: max(1, getattr(target, name) // 2) for name in halved}
    vanilla = dataclasses.replace(target, body_parameters=None, **halves)
    if numbers["vanilla"] is not None:
        vanilla = shape_of_numbers("numbers.vanilla", numbers["vanilla"])
    quarter = {"n_layer": max(1, target.n_layer // 4)}
    spire = shape_of_numbers("numbers.spire", quarter if numbers["spire"] is None else numbers["spire"], target)
    exported = None
    for path in names(options["drafter"]):
        config = spire_config(Path(path))
        kind = "vanilla" if config is None else "spire"
        if kind in sources:
            also = f"numbers.{kind}" if sources[kind] == BY_NUMBERS else "another drafter"
            raise UserError(f"drafter={path} is a {kind} drafter, and so is {also}; give one of them")
        sources[kind] = path
        if config is None:
            vanilla = shape_of_model(path, "drafter")
        else:
            exported = config
            spire = Shape(config.n_layer, **{name: getattr(config.shape, name) for name in DIMENSIONS[1:]})
    sources.setdefault("vanilla", "half the target's layers and width")
    sources.setdefault("spire", f"{spire.n_layer} of the target's blocks")
    if spire.hidden_size != target.hidden_size:
        raise UserError(
            f"the SPIRe drafter is {spire.hidden_size} wide and the target {target.hidden_size}, but it consists of "
            "the target's blocks; give a drafter of this target"
        )
    return Shapes(target, vanilla, spire, sources, exported)


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
    path = target_path(name)
    given = f"{option}={path}"
    config = _read_config(path, given)
    text = config.get_text_config()
    try:
        with torch.device("meta"):
            body = sum(
                p.numel()
                for p in find_blocks(AutoModelForCausalLM.from_config(config, trust_remote_code=False)).parameters()
            )
    except UserError:
        raise
    except Exception as error:  # whatever an architecture raises where its own fields do not fit together
        raise UserError(f"{given} describes no model that transformers can build ({error})") from error
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


def _read_config(path: str, given: str) -> PretrainedConfig:
    """Read a config that is complete, and of a model whose cost the formulas give."""
    if path.startswith(("/", ".", "~")) and not Path(path).expanduser().is_dir():
        raise UserError(f"{given} does not exist; give a folder or hub id of a causal LM, or its numbers")
    try:
        config = read_config(path)
        content, _ = PretrainedConfig.get_config_dict(path)
    except Exception as error:  # transformers and the hub each raise their own types here
        why = first_line(error)[:160]
        raise UserError(f"{given} has no config that transformers can read ({why}); give its numbers") from error
    text = config.get_text_config()
    # transformers would fill in a missing dimension with that of some 7B model.
    nested = [content[key] for key in ("text_config", "llm_config") if isinstance(content.get(key), Mapping)]
    known_as = getattr(text, "attribute_map", {})
    for name in NEEDED:
        if not {name, known_as.get(name, name)} & set(nested[0] if nested else content):
            raise UserError(f"{given}: config.json has no {name}; complete it, or give the shape by numbers")
    kind = unsupported_layer_type(config)
    experts = [f"{name}={getattr(text, name)}" for name in EXPERTS if (getattr(text, name, None) or 1) > 1]
    if kind is not None or experts:
        what = experts[0] if kind is None else f"layers of type {kind}"
        raise UserError(f"{given} has {what}, whose cost is not modelled; choose a dense model with full attention")
    return config


def spire_config(folder: Path) -> SpireConfig | None:
    """Read the config of an exported SPIRe drafter; None if the folder holds something else.

    Raises:
        UserError: `config.json` is missing, damaged or lacks a field.
    """
    try:
        if read_json(folder / "spectrain.json").get("kind") != "spire":
            return None
    except (OSError, ValueError, AttributeError):
        return None
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"drafter={folder} has no config.json; export the drafter again")
    return read_object(file, SpireConfig, "export the drafter again")


def shape_of_numbers(option: str, given: Mapping, base: Shape | None = None) -> Shape:
    """Make a shape from the fields that the user gave by `option`; `base` provides the others.

    Raises:
        UserError: a field is unknown, missing, or does not fit the others.
    """
    if not isinstance(given, Mapping):
        raise UserError(
            f"{option}={given} must be several numbers, as '{option}={{n_layer: 8, hidden_size: 512, ...}}'"
        )
    values = {} if base is None else dataclasses.asdict(base) | {"body_parameters": None}
    values |= {name: value for name, value in given.items() if value is not None}
    fields = (*DIMENSIONS, "body_parameters")
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
