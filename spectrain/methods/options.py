"""The options of a method: names, types and ranges, as the signature of what builds it states them.

An annotation is one of int, float, bool, str, None, a `Literal`, or a union of these; `Annotated[int, 1]` is a whole
number of at least 1, and `Annotated[float, "(0, 1)"]` a number in that interval. A builder that passes options on to a
class says so by `**options: TheClass`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

import hydra
from omegaconf import ListConfig, OmegaConf

from spectrain.config.fields import WORDS, shown
from spectrain.errors import UserError, is_in, is_whole, nearest

MOST = 2**31  # of whole numbers
Whole = Annotated[int, 1]
Share = Annotated[float, "(0, 1)"]
Nodes = Annotated[int, 2] | Literal["auto", "paper"]  # a step's: root, guesses and probes
Dtype = Literal["auto", "float32", "bfloat16", "int8"]


def build_function(method: Mapping) -> Callable:
    """The class or function that a yaml's `_target_` names."""
    try:
        return hydra.utils.get_object(method["_target_"])
    except ImportError as error:
        if isinstance(error.__cause__, UserError):  # a `Drafter` that is refused
            raise error.__cause__ from None
        raise


def module_of(method: Mapping) -> ModuleType:
    return sys.modules[build_function(method).__module__]


def plain_options(method: Mapping) -> dict:
    """The options in a yaml: all but what builds the method."""
    values = OmegaConf.to_container(OmegaConf.create(dict(method)))
    return {key: value for key, value in values.items() if not key.startswith("_")}


def names(value: str | float | ListConfig | Sequence[str | float] | None) -> list:
    """The values of an option that takes one name or number, or a list of them."""
    return [value] if isinstance(value, str | float | int) else list(value or [])


def option_types(build: Callable) -> dict[str, object]:
    """Return the annotation of each option of a builder, by name."""
    function = build.__init__ if inspect.isclass(build) else build
    hints, found = get_type_hints(function, include_extras=True), {}
    for name, parameter in inspect.signature(build).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            found = (option_types(hints[name]) if name in hints else {}) | found
        elif name != "target":
            found[name] = hints.get(name, object)
    return found


def check_options(build: Callable, options: Mapping, method: str, where: str = "") -> None:
    """Raise UserError where a method has no such option, or a value is of another type or out of range.

    Args:
        build: builds the method.
        options: values by name.
        method: its name.
        where: what stands before an option that the user has typed.
    """
    types = option_types(build)
    for name, value in options.items():
        if name not in types:
            hint = nearest(name, types) or f"; its options are {', '.join(types) or 'none'}"
            raise UserError(f"{where}{name} is not an option of {method}{hint}")
        kinds = _members(types[name])
        if not any(_fits(value, kind) for kind in kinds):
            raise UserError(f"{where}{name}={shown(value)} must be {', or '.join(map(_words, kinds))}")


def _members(kind: object) -> Sequence[object]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _fits(value: object, kind: object) -> bool:
    if get_origin(kind) is Annotated:
        of, limit = get_args(kind)
        return is_whole(value, limit) and value < MOST if of is int else is_in(value, limit)
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if kind is float:
        return type(value) in (int, float)
    if kind in WORDS:
        return type(value) is kind
    return True  # checked where it is used


def _words(kind: object) -> str:
    if get_origin(kind) is Annotated:
        of, limit = get_args(kind)
        return f"{WORDS[of]} {f'of at least {limit}' if of is int else f'in {limit}'}"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}" if len(get_args(kind)) > 1 else get_args(kind)[0]
    return WORDS.get(kind, "a value")
