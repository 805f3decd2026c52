"""Options as fields of dataclasses: type, default, range and meaning, and how composed values become objects.

This package imports no torch, so that `--help` and a misspelled option answer at once.
"""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import ConfigTypeError, ValidationError

from spectrain import errors
from spectrain.errors import UserError, nearest

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", type(None): "null"}
Options = TypeVar("Options")


def option(default: object, help: str, **limits: object) -> Any:
    """Make a field.

    Args:
        default: a list is copied for each object.
        help: what it is, with its unit.
        **limits: `least`, `most`, `above`, `below` of a number (of each one in a list), `one_of` for texts, `path` for
            paths, which are taken as typed, `several` for a name or a list of names, and `example`, as it is typed.
    """
    metadata = {"help": help, **limits}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def group(kind: type) -> Any:
    """Make a field that holds a group of options."""
    return field(default_factory=kind)


def always(value: object) -> Any:
    """Make a field whose default is a copy of a value."""
    return field(default_factory=lambda: copy.deepcopy(value))


def plain(options: object) -> dict[str, Any]:
    """Return options as plain values, which name a run and stand in its folder; plain ones as they are."""
    return options if isinstance(options, dict) else dataclasses.asdict(options, dict_factory=_flat)


def _flat(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Put the options of an experiment (`own`), and those of Lightning (`more`), beside those that all share."""
    values = dict(pairs)
    inner = values.pop("own", {}) | values.pop("more", {})
    return values | {name: value for name, value in inner.items() if name not in values}


def _fields(kind: type) -> dict[str, tuple[dataclasses.Field, Any]]:
    """The fields of a class with their types, by name."""
    types = typing.get_type_hints(kind)
    return {one.name: (one, types[one.name]) for one in dataclasses.fields(kind)}


def typed(values: Mapping, kind: type[Options], prefix: str = "") -> Options:
    """Turn plain values into an object of a class of options, whose names begin with `prefix` in messages.

    Raises:
        UserError: a value has another type, or is out of range; or an option is unknown.
    """
    unknown = [name for name in values if name not in names_of(kind)]
    if unknown:
        near = nearest(unknown[0], names_of(kind)) or "; --help lists all options"
        raise UserError(f"unknown option: {prefix}{unknown[0]}{near}")
    try:
        options = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), _literal(values)))
    except (ValidationError, ConfigTypeError) as error:
        name = (error.full_key or "").partition("[")[0] or next(key for key in values if not _merges(kind, values, key))
        value = shown(at(values, name))
        raise UserError(f"{prefix}{name}={value} must be {words(*_field_at(kind, name))}") from error
    for name, one, hint, value in _walk(options):
        if value is not None and not fits(value, one.metadata):
            near = nearest(value, one.metadata.get("one_of", ()))
            raise UserError(f"{prefix}{name}={shown(value)} must be {words(one, hint)}{near}")
    return options


def read(values: Mapping, kind: type[Options], prefix: str = "") -> Options:
    """Turn plain values that were checked when they were written into an object, as `typed`.

    Options that the class has no more are left out, and those that came later have their defaults.
    """
    fields = {name: hint for name, (_, hint) in _fields(kind).items() if name in values}
    groups = {name: inner for name, hint in fields.items() if (inner := _group_of(hint)) and values[name] is not None}
    return kind(**{name: read(values[name], groups[name]) if name in groups else values[name] for name in fields})


def _group_of(hint: Any) -> type | None:
    """Return the class of a group of options; None where a field holds a plain value."""
    return next((each for each in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(each)), None)


def names_of(kind: type) -> list[str]:
    """Return the names of a class's options."""
    return [one.name for one in dataclasses.fields(kind)]


class Described(NamedTuple):
    """An option as `--help` shows it."""

    name: str  # dotted
    default: str
    help: str


def described(kind: type) -> Iterator[Described]:
    """Yield each option of a class, with those of its groups."""
    for name, (one, hint) in _fields(kind).items():
        inner = _group_of(hint)
        if inner is not None:
            yield from (Described(f"{name}.{each.name}", *each[1:]) for each in described(inner))
        elif "help" in one.metadata:
            default = one.default_factory() if one.default is dataclasses.MISSING else one.default
            others = {bool: ["true", "false"], int: ["a number"], float: ["a number"]}
            choices = [*chain.from_iterable(others.get(of, []) for of in typing.get_args(hint))]
            choices += one.metadata.get("one_of", ())
            meaning = f"{' | '.join(choices)}: " if "one_of" in one.metadata else ""
            meaning += one.metadata["help"]
            meaning += f" ({one.metadata['example']})" if "example" in one.metadata else ""
            yield Described(name, "..." if default == MISSING else shown(default), meaning)


def groups_of(kind: type) -> dict[str, type]:
    """Return the classes of a class's groups of options, by name."""
    return {name: inner for name, (_, hint) in _fields(kind).items() if (inner := _group_of(hint))}


def path_options(kind: type, prefix: str = "") -> set[str]:
    """Return the dotted names of the options that are paths."""
    found = set()
    for name, (one, hint) in _fields(kind).items():
        inner = _group_of(hint)
        found |= path_options(inner, f"{prefix}{name}.") if inner else set()
        found |= {f"{prefix}{name}"} if one.metadata.get("path") else set()
    return found


def _merges(kind: type, values: Mapping, name: str) -> bool:
    """Whether the value of one option alone is of its type, where an error does not say which one was wrong."""
    try:
        OmegaConf.merge(OmegaConf.structured(kind), {name: _literal(values[name])})
    except (ValidationError, ConfigTypeError):
        return False
    return True


def _literal(value: object) -> object:
    """Escape what looks like an interpolation: values are resolved already, and a text may hold any characters."""
    if isinstance(value, Mapping):
        return {name: _literal(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_literal(one) for one in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _walk(options: object, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, Any, object]]:
    """Yield dotted name, field, type and value of each option."""
    for name, (one, hint) in _fields(type(options)).items():
        value = getattr(options, name)
        if dataclasses.is_dataclass(value):
            yield from _walk(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", one, hint, value


def _field_at(kind: type, name: str) -> tuple[dataclasses.Field, Any]:
    first, _, rest = name.partition(".")
    one, hint = _fields(kind)[first]
    inner = _group_of(hint)
    return _field_at(inner, rest) if rest and inner else (one, hint)


def at(values: object, name: str) -> object:
    """Return the value of a dotted name."""
    for part in filter(None, name.split(".")):
        values = values.get(part) if isinstance(values, Mapping) else values
    return values


def flat(values: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield all values by dotted name."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def fits(value: object, limits: Mapping[str, object]) -> bool:
    """Whether a value of the right type is within its limits, see `option`."""
    if limits.get("several"):
        names = value if isinstance(value, list) else [value]
        return all(isinstance(name, str) and name for name in names)
    if isinstance(value, list):
        return all(not isinstance(one, list) and fits(one, limits) for one in value)  # OmegaConf lets [[1]] pass
    if isinstance(value, bool):
        return True
    if isinstance(value, str):
        return value in limits.get("one_of", (value,)) and not (limits.get("path") and not value)
    if not isinstance(value, int | float):
        return True
    return limits.get("least", value) <= value <= limits.get("most", value) and limits.get(
        "above", float("-inf")
    ) < value < limits.get("below", float("inf"))


def words(one: dataclasses.Field, hint: Any) -> str:
    """Say what a value of an option may be."""
    limits, kinds = one.metadata, typing.get_args(hint) or (hint,)
    if limits.get("several"):
        return "a name or a list of names"
    start, lists = "", [kind for kind in (hint, *kinds) if typing.get_origin(kind) is list]
    if lists:
        start, kinds = "a list, with each value ", typing.get_args(lists[0])
    if any(dataclasses.is_dataclass(kind) or typing.get_origin(kind) is dict for kind in (hint, *kinds)):
        return "a group of options"
    said = []
    for kind in kinds:
        if kind is str and "one_of" in limits:
            said.append(f"one of {', '.join(limits['one_of'])}" if len(kinds) == 1 else " or ".join(limits["one_of"]))
        elif kind in (int, float):
            said.append(WORDS[kind] + _range(limits))
        else:
            said.append("a path" if kind is str and limits.get("path") else WORDS.get(kind, "a value"))
    return start + ", or ".join(said)


def _range(limits: Mapping[str, object]) -> str:
    said = {"least": "of at least {}", "above": "above {}", "most": "at most {}", "below": "below {}"}
    parts = [text.format(limits[name]) for name, text in said.items() if name in limits]
    return f" {' and '.join(parts)}" if parts else ""


def shown(value: object) -> str:
    """Write a value as it would be typed, shortened."""
    text = errors.shown(value)
    return {"None": "null", "True": "true", "False": "false"}.get(text, text)
