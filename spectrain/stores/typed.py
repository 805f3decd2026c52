"""JSON values as dataclasses, with the type of each field checked in one place."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import cache
from typing import Annotated, NotRequired, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

T = TypeVar("T")  # a dataclass, a TypedDict or a mapping of typed values
MORE = ConfigDict(extra="allow")  # of a TypedDict: further names are kept, with values of any type
Count = Annotated[int, Field(ge=0, lt=2**63)]


class FileFacts(TypedDict):
    """A file as a manifest lists it."""

    bytes: Count
    sha256: str


class Location(TypedDict):
    """A node of a config that names a folder, a file or an id."""

    __pydantic_config__ = MORE
    path: NotRequired[str | None]


class MadeBy(TypedDict):
    """The resolved config by which a store was made."""

    __pydantic_config__ = MORE
    target: NotRequired[Location]
    corpus: NotRequired[Location]


class SamplingFacts(TypedDict):
    """How distributions were warped; fields of Sampling."""

    __pydantic_config__ = MORE
    temperature: float
    top_k: Count
    top_p: float
    min_p: float


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
        raise ValueError(": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))) from error


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)
