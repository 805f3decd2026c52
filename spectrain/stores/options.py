"""The kind and range of every option, as conf/schema/options.yaml states them.

    check_options({"limit": 0}, "bench")     # UserError: limit=0 must be a whole number of at least 1, or null
    check_method_options({"gamma": 0})       # the options of a method, as load_method takes them

Commands check their whole config before they do anything else; what depends on a model or on another option is
checked where it is used.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from spectrain.errors import UserError, is_in
from spectrain.stores.locations import conf_dir
from spectrain.stores.yaml_files import read_yaml

KIND_WORDS = {
    "flag": "true or false",
    "whole": "a whole number",
    "number": "a number",
    "text": "a text",
    "words": "a text that is not empty",
    "path": "a path",
    "names": "a name or a list of names",
    "group": "a group of options",
    "empty": "an empty list",
}
LIMITS = ("max_document_bytes", "max_files", "max_prompt_bytes")
SHOWN_CHARACTERS = 80  # of a refused value
MOST_WHOLE = 2**53  # up to which float64 and JSON are exact
PATH_BYTES, PATH_PART_BYTES = 4095, 255  # what Linux allows


@dataclass(frozen=True)
class Kind:
    """One kind of value, for instance `list of whole 1`."""

    name: str  # a key of KIND_WORDS, or the words that are allowed, with commas between them
    range: str  # "1" or "0..4" of whole numbers, "[0, 1)" of numbers
    holder: str = ""  # "list" or "group": of at least one such value
    length: int | None = None  # of a list; None: any

    @classmethod
    def read(cls, text: str) -> Kind:
        holder, of, one = text.rpartition(" of ")
        name, _, numbers = (one if of else text).partition(" ")
        length = int(name) if name.isdigit() else None
        if length is not None:
            name, _, numbers = numbers.partition(" ")
        return cls(name, numbers, holder, length)

    def fits(self, value: object) -> bool:
        if self.holder == "list":
            is_long_enough = isinstance(value, list) and len(value) == (self.length or max(1, len(value)))
            return is_long_enough and all(map(self.fits_one, value))
        if self.holder == "group":
            return isinstance(value, Mapping) and bool(value) and all(map(self.fits_one, value.values()))
        return self.fits_one(value)

    def fits_one(self, value: object) -> bool:
        match self.name:
            case "flag":
                return isinstance(value, bool)
            case "whole":
                least, _, most = self.range.partition("..")
                is_whole = isinstance(value, int) and not isinstance(value, bool)
                return is_whole and int(least) <= value <= (int(most) if most else math.inf)
            case "number":
                return is_in(value, self.range)
            case "text":
                return isinstance(value, str)
            case "words":
                return isinstance(value, str) and bool(value)
            case "path":
                return isinstance(value, str) and is_path(value)
            case "names":
                several = value if isinstance(value, list) else [value]
                return bool(several) and all(isinstance(each, str) and each for each in several)
            case "group":
                return isinstance(value, Mapping)
            case "empty":
                return value == []
            case "null":
                return value is None
        return value in self.name.split(",")

    def __str__(self) -> str:
        words = KIND_WORDS.get(self.name, self.name)
        if self.range:
            words += (
                f" in {self.range}" if self.name == "number" or ".." in self.range else f" of at least {self.range}"
            )
        of = f" of {self.length}" if self.length else ""
        return f"a {self.holder}{of}, with each value {words}" if self.holder else words


def without_limits(config: Mapping) -> dict:
    """Return a config without the options that only refuse inputs: no result depends on them, so no name does."""
    kept = {key: value for key, value in config.items() if key not in LIMITS}
    return {key: without_limits(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def is_path(value: str) -> bool:
    """Whether the text can be the path of a file on Linux."""
    encoded = value.encode(errors="surrogateescape")
    return 0 < len(encoded) <= PATH_BYTES and all(
        len(p) <= PATH_PART_BYTES and b"\0" not in p for p in encoded.split(b"/")
    )


@cache
def schema(command: str) -> dict[str, tuple[Kind, ...]]:
    """Read the kinds of a command's options, by dotted name."""
    tables = read_yaml(conf_dir() / "schema" / "options.yaml")
    rows = tables["every"] | tables.get(command, {})
    return {name: tuple(Kind.read(one) for one in str(text).split(" | ")) for name, text in rows.items()}


def check_options(config: Mapping, command: str, unknown: str = "refused") -> None:
    """Compare plain values with the kinds of their options.

    Args:
        config: composed by Hydra; texts with an interpolation (`${...}`) and missing values (`???`) are passed over.
        command: the name of its yaml in conf/.
        unknown: options are "refused", or "passed" over, which an older version wrote.

    Raises:
        UserError: a value is of another kind or out of range.
    """
    _check(config, schema(command), "", unknown)


def check_method_options(options: Mapping, prefix: str = "") -> None:
    """Compare the options of a method with their kinds. Names that the schema does not know are passed over.

    Raises:
        UserError: a value is of another kind or out of range.
    """
    rows = schema("generate")
    for name, value in options.items():
        _check_one(f"{prefix}{name}", value, rows.get(f"method.{name}"))


def _check(node: Mapping, rows: Mapping[str, Sequence[Kind]], prefix: str, unknown: str) -> None:
    for key, value in node.items():
        name = f"{prefix}{key}"
        _check_one(name, value, rows.get(name))
        if isinstance(value, Mapping) and name == "variants":
            for variant, options in value.items():
                if not isinstance(options, Mapping) or not isinstance(options.get("method"), str):
                    raise UserError(f"variants.{variant} must name its method; write variants.{variant}.method=<name>")
                check_method_options(options, f"variants.{variant}.")
        elif isinstance(value, Mapping):
            _check(value, rows, f"{name}.", unknown)
        elif name not in rows and any(row.startswith(f"{name}.") for row in rows):
            raise UserError(f"{name}={shown(value)} must stay a group of options; give one of them: {name}.<option>=")
        elif unknown == "refused" and not _is_known(name, rows):
            raise UserError(f"unknown option: {name}; --cfg job prints all options")


def _is_known(name: str, rows: Mapping[str, Sequence[Kind]]) -> bool:
    """Whether an option, or a group that it is in, has a kind. Of Lightning's Trainer not every option is listed."""
    above = name.split(".")
    if above[0] == "trainer" and "trainer.devices" in rows:
        return True
    return any(".".join(above[: n + 1]) in rows for n in range(len(above)))


def _check_one(name: str, value: object, kinds: Sequence[Kind] | None) -> None:
    if kinds is None or (isinstance(value, str) and ("${" in value or value == "???")):
        return
    if type(value) is int and abs(value) > MOST_WHOLE:
        raise UserError(f"{name}={shown(value)} is too large; give a whole number below 2^53")
    if any(kind.fits(value) for kind in kinds):
        return
    of_list = [kind for kind in kinds if kind.holder == "list"]
    if of_list and isinstance(value, list) and value:  # name the value that is wrong
        wrong = [each for each in value if not any(kind.fits_one(each) for kind in of_list)]
        if wrong:
            value, kinds = wrong[0], [dataclasses.replace(kind, holder="") for kind in of_list]
    if all(kind.name not in KIND_WORDS for kind in kinds):
        words = ", ".join(kind.name.replace(",", ", ") for kind in kinds)
        raise UserError(f"{name}={shown(value)} must be one of {words}")
    raise UserError(f"{name}={shown(value)} must be {', or '.join(map(str, kinds))}")


def shown(value: object) -> str:
    """Write a value as it would be typed, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
