"""Options as fields of dataclasses: type, range, default and meaning, and how composed values become objects.

The annotation of an option says all that it may be (`values.py`). This package imports no torch, so that `--help` and a
misspelled option answer at once.
"""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any, NamedTuple, TypeVar

from omegaconf import MISSING

from spectrain.config.values import checked, parts_of, shown, texts_of
from spectrain.errors import UserError, nearest

Options = TypeVar("Options")


def option(default: object, help: str) -> Any:
    """Make a field of a default, of which a list is copied for each object, and its meaning with the unit."""
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"help": help})
    return field(default=default, metadata={"help": help})


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


def typed(values: Mapping, kind: type[Options], prefix: str = "", checks: bool = True) -> Options:
    """Turn plain values into an object of a class of options, whose names begin with `prefix` in messages.

    Without `checks`, the values were checked when they were written: options that the class has no more are left out.

    Raises:
        UserError: a value has another type, or is out of range; or an option is unknown.
    """
    types, made = types_of(kind), {}
    for name, value in values.items():
        if name not in types:
            if checks:
                near = nearest(name, types) or "; --help lists all options"
                raise UserError(f"unknown option: {prefix}{name}{near}")
            continue
        inner = group_of(types[name])
        if inner and isinstance(value, Mapping):
            made[name] = typed(value, inner, f"{prefix}{name}.", checks)
        else:
            of = dict if inner is types[name] else types[name]  # a group is no plain value
            made[name] = checked(f"{prefix}{name}", value, of) if checks else value
    return kind(**made)


def types_of(kind: type) -> dict[str, Any]:
    """Return the types of a class's options, by name."""
    types = typing.get_type_hints(kind, include_extras=True)
    return {one.name: types[one.name] for one in dataclasses.fields(kind)}


def group_of(kind: Any) -> type | None:
    """Return the class of a group of options; None where a field holds a plain value."""
    return next((one for one in parts_of(kind) if isinstance(one, type) and dataclasses.is_dataclass(one)), None)


class Described(NamedTuple):
    """An option as `--help` shows it."""

    name: str  # dotted
    default: str
    help: str


def described(kind: type, defaults: object = None) -> Iterator[Described]:
    """Yield each option of a class, with those of its groups. `defaults` is an object of it; None: a new one."""
    types, defaults = types_of(kind), kind() if defaults is None else defaults
    for one in dataclasses.fields(kind):
        of, default = types[one.name], getattr(defaults, one.name)
        if inner := group_of(of):
            yield from (Described(f"{one.name}.{each.name}", *each[1:]) for each in described(inner, default))
        elif "help" in one.metadata:
            choices = ["true | false" if part is bool else "a number" for part in parts_of(of) if part in (bool, int)]
            meaning = f"{' | '.join([*choices, *texts_of(of)])}: " if texts_of(of) else ""
            yield Described(one.name, "..." if default == MISSING else shown(default), meaning + one.metadata["help"])


def types_by_name(kind: type, prefix: str = "") -> dict[str, Any]:
    """Return the types of a class's options, and of those of its groups, by dotted name."""
    found = {}
    for name, of in types_of(kind).items():
        inner = group_of(of)
        found |= types_by_name(inner, f"{prefix}{name}.") if inner else {f"{prefix}{name}": of}
    return found


def flat(values: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield all values by dotted name."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
