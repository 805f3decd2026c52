"""JSON values as dataclasses, with the type of each field checked in one place."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import cache
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")  # a dataclass, a TypedDict or a mapping of typed values


def from_json(kind: type[T], values: object) -> T:
    """Make a dataclass, and those in its fields, of what a JSON file held.

    Mappings of another `kind` are checked and returned as they are.

    Raises:
        ValueError: it is no object, or a field is missing, unknown or of another type.
    """
    if not isinstance(values, Mapping):
        raise ValueError("it holds no names with values")
    if dataclasses.is_dataclass(kind):
        unknown = sorted(values.keys() - {field.name for field in dataclasses.fields(kind)})
        if unknown:
            raise ValueError(f"{unknown[0]} is unknown")
    try:
        made = _adapter(kind).validate_json(json.dumps(values), strict=True)
        return made if dataclasses.is_dataclass(kind) else values
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)
