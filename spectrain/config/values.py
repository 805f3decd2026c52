"""What the options of commands and methods may be: types of their annotations, which pydantic checks.

Limits are those of annotated_types, and `Literal` lists the texts that are allowed. This module imports no torch.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BeforeValidator, ConfigDict, Strict, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from spectrain import errors
from spectrain.errors import UserError, nearest

CONFIG = ConfigDict(allow_inf_nan=False, coerce_numbers_to_str=True)
WORDS = {  # in place of pydantic's, by the beginning of an error's type
    "bool": "true or false",
    "dataclass": "a group of options",
    "dict": "a group of options",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "string": "a text that is not empty",
}


def _no_bool(value: object) -> object:
    """Refuse true and false as numbers, which pydantic takes for 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("no_number", "a number")
    return value


Int = Annotated[int, BeforeValidator(_no_bool)]
Seed = Annotated[Int, Ge(0), Lt(2**32)]
Count = Annotated[Int, Ge(0), Lt(2**31)]
Whole = Annotated[Int, Ge(1), Lt(2**31)]
Several = Annotated[Int, Ge(2), Lt(2**31)]
Number = Annotated[float, BeforeValidator(_no_bool)]
Positive = Annotated[Number, Gt(0)]
NonNegative = Annotated[Number, Ge(0)]
Share = Annotated[Number, Ge(0), Lt(1)]
Part = Annotated[Number, Ge(0), Le(1)]
Probability = Annotated[Number, Gt(0), Lt(1)]
Name = Annotated[str, Strict(), MinLen(1)]
Names = Name | list[Name]
PATH = object()  # marks paths, which are taken as typed
FilePath = Annotated[Name, PATH]
FilePaths = FilePath | list[FilePath]
Nodes = Several | Literal["auto", "paper"]  # that a step scores: root, guesses and probes
Dtype = Literal["auto", "float32", "bfloat16", "int8"]  # of a drafter


def checked(name: str, value: object, kind: Any, strict: bool | None = None) -> Any:
    """Return the value of an option as its type has it. Raise UserError where it is of another type or out of range.

    A `strict` check takes no `yes` for true and no number for a text.
    """
    try:
        return TypeAdapter(kind, config=CONFIG).validate_python(value, strict=strict)
    except ValidationError as error:
        wanted = ", or ".join(dict.fromkeys(map(_wanted, error.errors())))
        raise UserError(f"{name}={shown(value)} must be {wanted}{nearest(value, texts_of(kind))}") from error


def _wanted(error: Mapping) -> str:
    """Say what a value, or each one in a list, may be."""
    words = WORDS.get(error["type"].partition("_")[0]) or re.sub("Input should be |'", "", error["msg"])
    return f"{words} in each value" if isinstance((None, *error["loc"])[-1], int) else words


def parts_of(kind: Any) -> Iterator[Any]:
    """Yield a type and what it is made of: members, items, limits, texts."""
    yield kind
    for one in typing.get_args(kind):
        yield from parts_of(one)


def texts_of(kind: Any) -> list[str]:
    """Return the texts that an option may be, if it may be one of some texts only."""
    return [one for one in parts_of(kind) if isinstance(one, str)]


def shown(value: object) -> str:
    """Write a value as it would be typed, shortened."""
    text = errors.shown(value)
    return {"None": "null", "True": "true", "False": "false"}.get(text, text)
